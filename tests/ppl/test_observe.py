"""Bad input of `ppl.observe` is rejected; its value is tested in tests/laws/test_pyro_laws.py."""

import gpytorch
import pyro
import pytest
import torch
from pyro import poutine

from gpext import likelihoods, ppl

F = torch.zeros(2, 3, 5)


def test_something_else_than_a_likelihood_is_refused():
    with pytest.raises(TypeError, match="expected a likelihood of gpext or gpytorch; got Normal"):
        ppl.observe("y", torch.distributions.Normal(0.0, 1.0), F, F)


@pytest.mark.parametrize(
    ("likelihood", "f", "targets"),
    [
        (likelihoods.LaplaceLikelihood(), F, (4,)),
        (likelihoods.LaplaceLikelihood(), F, (1,)),
        (likelihoods.LaplaceLikelihood(), F[0, 0], (3, 5)),
        (likelihoods.LaplaceLikelihood(), F, ()),
        (gpytorch.likelihoods.GaussianLikelihood(), F, (4,)),
        (gpytorch.likelihoods.GaussianLikelihood(), F[0, 0], (3, 5)),
        (likelihoods.StickBreakingLikelihood(4), F, (3,)),
        (likelihoods.MultinomialLogitLikelihood(3, 2), F, (5,)),
    ],
)
def test_targets_of_another_shape_are_refused(likelihood, f, targets):
    with pytest.raises(ValueError, match=r"targets must have the shape of the data of f; got targets of shape \("):
        ppl.observe("y", likelihood, f, torch.zeros(targets))


def test_another_number_of_latents_is_refused():
    with pytest.raises(ValueError, match=r"needs 4 latent functions: f of shape \(..., 4, N\)"):
        ppl.observe("y", likelihoods.MultinomialLogitLikelihood(4), F, torch.zeros(5))


def test_targets_outside_the_support_are_refused():
    with pytest.raises(ValueError, match="targets must be in"):
        ppl.observe("y", likelihoods.BernoulliLogitLikelihood(), F[0, 0], torch.full((5,), -1.0))


def test_counts_of_any_totals_are_observed():
    likelihood = likelihoods.MultinomialLogitLikelihood(3, None)
    counts = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 1.0]])
    trace = poutine.trace(ppl.observe).get_trace("y", likelihood, F[0, :, :2], counts)
    torch.testing.assert_close(trace.log_prob_sum(), torch.tensor(3.0).log() - 4 * torch.tensor(3.0).log())


def test_a_plate_that_would_repeat_the_factor_is_refused():
    likelihood, f = likelihoods.LaplaceLikelihood(), torch.linspace(0, 1, 5)

    def program(size):
        with pyro.plate("data", size):
            ppl.observe("y", likelihood, f, torch.zeros(5))

    with pytest.raises(ValueError, match="a plate around it would count it 5 times: call it outside of plates"):
        program(5)
    expected = likelihood.log_prob(torch.zeros(5), f).sum()
    torch.testing.assert_close(poutine.trace(program).get_trace(1).log_prob_sum(), expected)


def test_a_plate_over_a_batch_of_latents_takes_one_factor_of_each():
    likelihood = likelihoods.LaplaceLikelihood()

    def program():
        with pyro.plate("functions", 3):
            ppl.observe("y", likelihood, F[0], torch.zeros(5))

    expected = likelihood.log_prob(torch.zeros(5), F[0]).sum()
    torch.testing.assert_close(poutine.trace(program).get_trace().log_prob_sum(), expected)
