"""Closed-form derivatives of log p(y | f) are those of autograd, and are left where a subclass has its own density."""

import pytest
import torch

from gpext import likelihoods
from gpext.bounds.contracts import HasLogProbSlopes
from gpext.likelihoods.curvature import log_prob_derivatives
from tests.members import F64, MEMBERS


class AlmostPoisson(likelihoods.PoissonLikelihood):
    """Another density, with the slopes of a Poisson's."""

    def unchecked_log_prob(self, targets, f):
        return super().unchecked_log_prob(targets, f) - 0.5 * f.square()


def counts(*shape):
    return torch.randint(0, 7, shape, generator=torch.Generator().manual_seed(0)).to(F64)


CASES = {name: (member.make, member.targets) for name, member in MEMBERS.items()}
CASES["poisson"] = (likelihoods.PoissonLikelihood, counts)
CLOSED = [name for name, (make, _) in CASES.items() if isinstance(make(), HasLogProbSlopes)]


def by_autograd(likelihood, y, f):
    f = f.clone().requires_grad_()
    value = likelihood.log_prob(y, f)
    (slope,) = torch.autograd.grad(value.sum(), f, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), f, create_graph=True)
    return value, slope, bend, f


def test_some_likelihoods_have_them():
    assert set(CLOSED) == {"student_t", "bernoulli_logit", "negative_binomial_log", "poisson"}


@pytest.mark.parametrize("name", CLOSED)
def test_closed_forms_are_the_derivatives_and_lie_in_the_graph_of_parameters_and_latents(name):
    make, targets = CASES[name]
    likelihood, y = make(), targets(3, 40)
    f = 3 * torch.randn(3, 40, generator=torch.Generator().manual_seed(1), dtype=F64)
    expected = by_autograd(likelihood, y, f)
    at = f.clone().requires_grad_()
    found = log_prob_derivatives(likelihood, y, at)
    weights = torch.randn(3, 40, generator=torch.Generator().manual_seed(2), dtype=F64)
    for ours, theirs in zip(found, expected, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
        leaves = (*likelihood.parameters(), at), (*likelihood.parameters(), expected[-1])
        ours, theirs = (
            torch.autograd.grad((weights * value).sum(), those, retain_graph=True)
            for value, those in zip((ours, theirs), leaves, strict=True)
        )
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    with torch.no_grad():
        again = log_prob_derivatives(likelihood, y, f)
    assert not any(value.requires_grad for value in again)
    assert all(torch.equal(one, other) for one, other in zip(again, found, strict=True))


@pytest.mark.parametrize("name", CLOSED)
def test_closed_forms_are_finite_far_out_and_keep_the_dtype_of_the_latents(name):
    make, targets = CASES[name]
    f = torch.tensor([-600.0, -40.0, 0.0, 40.0, 600.0], dtype=F64)
    y = targets(5)
    slope, bend = make().log_prob_slopes(y, f)
    assert bool(slope.isfinite().all() and bend.isfinite().all())
    if name != "student_t":  # log-concave
        assert bool((bend <= 0).all())
    assert all(value.dtype == torch.float32 for value in make().log_prob_slopes(y, f.clamp(-40, 40).float()))


def test_an_outlier_whose_square_overflows_has_no_weight():
    slope, bend = CASES["student_t"][0]().log_prob_slopes(torch.tensor([1e200], dtype=F64), torch.zeros(1, dtype=F64))
    assert slope == 0
    assert bend == 0


def test_a_subclass_with_another_density_is_differentiated_by_autograd():
    y, f = counts(8), torch.linspace(-2, 2, 8, dtype=F64)
    _, slope, bend = log_prob_derivatives(AlmostPoisson(), y, f)
    torch.testing.assert_close(slope, y - f.exp() - f)
    torch.testing.assert_close(bend, -f.exp() - 1)


@pytest.mark.parametrize("dispersion", [0.0, 1e-12])
def test_slopes_of_enormous_counts_are_those_of_the_log_density_as_it_is_rounded(dispersion):
    """Near log y, log p is y times a function of f - log y: what rounding makes of that is a shift, of both alike."""
    likelihood = likelihoods.PoissonLikelihood()
    if dispersion:
        likelihood = likelihoods.NegativeBinomialLogLikelihood().double()
        likelihood.dispersion = dispersion
    y = torch.full((7,), 3e12, dtype=F64)
    f = y.log() + 1e-7 * torch.linspace(-3, 3, 7, dtype=F64)
    _, slope, bend, _ = by_autograd(likelihood, y, f)
    at = f.clone().requires_grad_()
    found = likelihood.log_prob_slopes(y, at)
    torch.testing.assert_close(found[0], slope, rtol=5e-9, atol=0)  # y - e^f is not zero at log y
    torch.testing.assert_close(found[1], bend, rtol=1e-9, atol=0)
    (of_slope,) = torch.autograd.grad(found[0].sum(), at)
    torch.testing.assert_close(of_slope, bend.detach(), rtol=1e-9, atol=0)
