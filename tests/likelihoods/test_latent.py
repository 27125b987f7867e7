"""Likelihoods of full-data inference: gpytorch's methods by Monte Carlo, shapes, dtypes, copies, clear errors."""

import copy
import math
import pickle
import re
import unittest
from collections.abc import Callable
from dataclasses import dataclass

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.test.base_likelihood_test_case import BaseLikelihoodTestCase
from linear_operator.operators import DiagLinearOperator
from torch.distributions import Categorical

from gpext import likelihoods
from gpext.bounds import Quadrature
from gpext.likelihoods.latent import LatentLikelihood
from tests.members import F64, tensor

CUTPOINTS = (-1.3, 0.2, 0.9)


def ordinal(kind):
    likelihood = kind(4).double()
    likelihood.cutpoints = tensor(*CUTPOINTS)
    return likelihood


def ordinal_logit():
    return ordinal(likelihoods.OrdinalLogitLikelihood)


def ordinal_probit():
    return ordinal(likelihoods.OrdinalProbitLikelihood)


def multinomial():
    return likelihoods.MultinomialLogitLikelihood(3)


def multinomial_counts():
    return likelihoods.MultinomialLogitLikelihood(3, total_count=None)


def stick_breaking():
    return likelihoods.StickBreakingLikelihood(4)


@dataclass(frozen=True)
class Latent:
    make: Callable
    num_classes: int = 0  # 0 for counts
    num_latents: int | None = None

    def targets(self, *shape, seed=0):
        generator = torch.Generator().manual_seed(seed)
        if self.make is multinomial_counts:
            return torch.randint(0, 4, (*shape, 3), generator=generator).to(F64)
        return torch.randint(0, self.num_classes or 7, shape, generator=generator).to(F64)

    def latent_shape(self, *shape):
        return shape if self.num_latents is None else (*shape[:-1], self.num_latents, shape[-1])

    def marginals(self, *shape, seed=1):
        generator = torch.Generator().manual_seed(seed)
        shape = self.latent_shape(*shape)
        mean = torch.randn(shape, generator=generator, dtype=F64)
        return mean, 0.1 + 2 * torch.rand(shape, generator=generator, dtype=F64)


LATENTS = {
    "poisson": Latent(likelihoods.PoissonLikelihood),
    "ordinal_logit": Latent(ordinal_logit, 4),
    "ordinal_probit": Latent(ordinal_probit, 4),
    "multinomial": Latent(multinomial, 3, 3),
    "multinomial_counts": Latent(multinomial_counts, 0, 3),
    "stick_breaking": Latent(stick_breaking, 4, 3),
}
SINGLE = [name for name, latent in LATENTS.items() if latent.num_latents is None]
SEVERAL = [name for name in LATENTS if name not in SINGLE]
CLASSES = [name for name, latent in LATENTS.items() if latent.num_classes]
METHODS = ("expected_log_prob", "log_marginal")


@pytest.fixture(params=LATENTS)
def latent(request):
    return LATENTS[request.param]


def gaussian(mean, variance):
    return MultivariateNormal(mean, DiagLinearOperator(variance))


def _suite(name):
    class Suite(BaseLikelihoodTestCase, unittest.TestCase):
        seed = 1

        def create_likelihood(self, **kwargs):
            return LATENTS[name].make().float()

        def _create_targets(self, batch_shape=()):
            return LATENTS[name].targets(*batch_shape, 5).float()

        def _create_marginal_input(self, batch_shape=()):
            factor = 0.4 * torch.randn(*batch_shape, 5, 5)
            return MultivariateNormal(0.5 * torch.randn(*batch_shape, 5), factor @ factor.mT + 0.1 * torch.eye(5))

        def _test_marginal(self, batch_shape):
            if name == "poisson":
                return super()._test_marginal(batch_shape)
            likelihood, q = self.create_likelihood(), self._create_marginal_input(batch_shape)  # classes have no mean
            with torch.no_grad():
                draws = likelihood(q.to_data_independent_dist().sample(torch.Size([10000]))).probs.mean(0)
            self.assertAllClose(likelihood(q).probs, draws, rtol=0.05, atol=0.01)

    Suite.__name__ = Suite.__qualname__ = f"Test{name.title().replace('_', '')}"
    return Suite


globals().update({f"Test{name.title().replace('_', '')}": _suite(name) for name in SINGLE})


# ---- p(y | f) ------------------------------------------------------------------------------------------------------


def test_log_prob_is_that_of_the_conditional(latent):
    if latent.make is multinomial_counts:
        pytest.skip("counts of any totals are no single distribution")
    likelihood, y = latent.make(), latent.targets(2, 5)
    f = latent.marginals(2, 5)[0]
    conditional = likelihood(f)
    assert conditional.batch_shape == (2, 5)
    torch.testing.assert_close(likelihood.log_prob(y, f), conditional.log_prob(y), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("f", [-40.0, 0.0, 40.0])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", CLASSES)
def test_log_prob_and_two_derivatives_are_finite_in_the_tails(name, dtype, f):
    latent = LATENTS[name]
    likelihood = latent.make().to(dtype)
    y = torch.arange(latent.num_classes)
    f = torch.full(latent.latent_shape(latent.num_classes), f, dtype=dtype).requires_grad_()
    value = likelihood.log_prob(y, f)
    assert value.dtype == dtype
    (slope,) = torch.autograd.grad(value.sum(), f, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), f)
    assert bool((value <= 0).all())
    assert bool((bend <= 1e-6).all())  # concave
    for tensor_ in (value, slope, bend):
        assert bool(tensor_.isfinite().all())


@pytest.mark.parametrize("name", CLASSES)
def test_probabilities_of_all_classes_sum_to_one(name):
    latent = LATENTS[name]
    likelihood = latent.make()
    mean, variance = latent.marginals(50)
    mean, variance = 20 * mean, 30 * variance
    labels = torch.arange(latent.num_classes).unsqueeze(-1).expand(-1, 50)
    for log_probs in (likelihood.log_prob(labels, mean), likelihood.log_density(labels, mean, variance)):
        torch.testing.assert_close(log_probs.logsumexp(0), torch.zeros(50, dtype=F64), rtol=0, atol=2e-10)


# ---- gpytorch's methods --------------------------------------------------------------------------------------------


def test_integrals_agree_with_monte_carlo(latent):
    """z-scores of 2e5 draws below 5."""
    likelihood, y = latent.make().requires_grad_(False), latent.targets(4)
    mean, variance = latent.marginals(4)
    noise = torch.randn(200_000, *mean.shape, generator=torch.Generator().manual_seed(0), dtype=F64)
    log_probs = likelihood.log_prob(y, mean + variance.sqrt() * noise)
    q = gaussian(mean, variance)
    z = (likelihood.expected_log_prob(y, q) - log_probs.mean(0)) / (log_probs.std(0) / 200_000**0.5)
    assert float(z.abs().max()) < 5
    probs = log_probs.exp()
    z = (likelihood.log_marginal(y, q).exp() - probs.mean(0)) / (probs.std(0) / 200_000**0.5)
    assert float(z.abs().max()) < 5


@pytest.mark.parametrize("name", CLASSES)
def test_the_predictive_distribution_is_categorical_with_the_log_marginals(name):
    latent = LATENTS[name]
    likelihood, q = latent.make(), gaussian(*latent.marginals(3, 5))
    predictive = likelihood(q)
    assert isinstance(predictive, Categorical)
    assert predictive.probs.shape == (3, 5, latent.num_classes)
    for k in range(latent.num_classes):
        expected = likelihood.log_marginal(torch.full((3, 5), k), q).exp()
        torch.testing.assert_close(predictive.probs[..., k], expected, rtol=1e-9, atol=1e-12)
    assert predictive.sample().shape == (3, 5)


def test_a_batch_is_a_loop(latent):
    likelihood, y = latent.make(), latent.targets(2, 3, 5)
    mean, variance = latent.marginals(2, 3, 5)
    for method in METHODS:
        together = getattr(likelihood, method)(y, gaussian(mean, variance))
        assert together.shape == (2, 3, 5)
        alone = getattr(likelihood, method)(y[1, 2], gaussian(mean[1, 2], variance[1, 2]))
        torch.testing.assert_close(together[1, 2], alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", SEVERAL)
def test_a_multitask_distribution_serves_as_a_batch(name):
    latent = LATENTS[name]
    likelihood, y = latent.make(), latent.targets(5)
    mean, variance = latent.marginals(5)
    tasks = MultitaskMultivariateNormal.from_batch_mvn(gaussian(mean, variance))
    assert tasks.mean.shape == (5, 3)
    for method in METHODS:
        expected = getattr(likelihood, method)(y, gaussian(mean, variance))
        torch.testing.assert_close(getattr(likelihood, method)(y, tasks), expected)
    if latent.num_classes:
        torch.testing.assert_close(likelihood(tasks).probs, likelihood(gaussian(mean, variance)).probs)


@pytest.mark.parametrize("name", SINGLE)
def test_tasks_of_one_latent_are_summed(name):
    latent = LATENTS[name]
    likelihood, y = latent.make(), latent.targets(5, 2)
    mean, variance = latent.marginals(5, 2)
    tasks = MultitaskMultivariateNormal(mean, DiagLinearOperator(variance.flatten()))
    for method in METHODS:
        expected = getattr(likelihood, method)(y.flatten(), gaussian(mean.flatten(), variance.flatten()))
        torch.testing.assert_close(getattr(likelihood, method)(y, tasks), expected.view(5, 2).sum(-1))


def test_float32_stays_float32_and_is_accurate(latent):
    y, (mean, variance) = latent.targets(6), latent.marginals(6)
    q, single = gaussian(mean, variance), gaussian(mean.float(), variance.float())
    for method in METHODS:
        exact = getattr(latent.make(), method)(y, q)
        for targets in (y.float(), y.long()):
            value = getattr(latent.make().float(), method)(targets, single)
            assert value.dtype == torch.float32
            torch.testing.assert_close(value.double(), exact, rtol=3e-6, atol=3e-6)


def test_integer_targets_lose_no_digits_to_float32(latent):
    y, q = 3 * latent.targets(4) if latent.num_classes == 0 else latent.targets(4), gaussian(*latent.marginals(4))
    for method in METHODS:
        expected = getattr(latent.make(), method)(y, q)
        torch.testing.assert_close(getattr(latent.make(), method)(y.long(), q), expected, rtol=1e-14, atol=1e-14)


def test_gradients_agree_with_finite_differences(latent):
    likelihood, y = latent.make(), latent.targets(3)
    mean, variance = (t.clone().requires_grad_() for t in latent.marginals(3))
    inputs = [mean, variance, *likelihood.parameters()]
    for method in ("expected_log_density", "log_density"):

        def total(method=method):
            return getattr(likelihood, method)(y, mean, variance).sum()

        gradients = torch.autograd.grad(total(), inputs)
        for tensor_, gradient in zip(inputs, gradients, strict=True):
            flat = tensor_.data.view(-1)
            start, values = flat[0].item(), []
            for step in (1e-4, -1e-4):
                flat[0] = start + step
                values.append(total().item())
            flat[0] = start
            assert gradient.flatten()[0].item() == pytest.approx((values[0] - values[1]) / 2e-4, rel=1e-5, abs=1e-7)


def test_the_exact_bound_takes_every_likelihood(latent):
    likelihood, y, (mean, variance) = latent.make(), latent.targets(4), latent.marginals(4)
    bound = Quadrature().bind(likelihood, y)(mean, variance)
    torch.testing.assert_close(bound, likelihood.expected_log_density(y, mean, variance))


@pytest.mark.parametrize("name", ["ordinal_logit", "stick_breaking"])
def test_softplus_terms_are_the_log_density(name):
    latent = LATENTS[name]
    likelihood, y = latent.make(), latent.targets(2, 6)
    f = 5 * latent.marginals(2, 6)[0]
    terms = likelihood.softplus_terms(y)
    for tensor_ in (terms.constant, terms.slope, terms.weight, terms.sign, terms.offset):
        assert bool(tensor_.isfinite().all())
    value = terms.lower_bound(lambda mean, variance: torch.nn.functional.softplus(mean), f, torch.zeros_like(f))
    torch.testing.assert_close(value, likelihood.log_prob(y, f), rtol=1e-12, atol=1e-12)


def test_probit_and_the_default_rules_agree():
    """The base class's adaptive quadrature against the likelihoods' own methods."""
    for name in SINGLE:
        latent = LATENTS[name]
        likelihood, y, (mean, variance) = latent.make(), latent.targets(20), latent.marginals(20)
        for method in ("expected_log_density", "log_density"):
            expected = getattr(LatentLikelihood, method)(likelihood, y, mean, variance)
            torch.testing.assert_close(getattr(likelihood, method)(y, mean, variance), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["poisson", "ordinal_logit"])
def test_many_data_are_integrated_as_few(name):
    latent = LATENTS[name]
    y, (mean, variance) = latent.targets(4500), latent.marginals(4500)
    part = slice(4090, 4100)
    together = LatentLikelihood.log_density(latent.make(), y, mean, variance)
    alone = LatentLikelihood.log_density(latent.make(), y[part], mean[part], variance[part])
    torch.testing.assert_close(together[part], alone, rtol=1e-9, atol=1e-9)


# ---- copies and errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_equal_and_independent(latent, clone):
    likelihood, y, q = latent.make(), latent.targets(4), gaussian(*latent.marginals(4))
    other = clone(likelihood)
    assert torch.equal(other.log_marginal(y, q), likelihood.log_marginal(y, q))
    for parameter in likelihood.parameters():
        parameter.data.add_(1.0)
        assert not torch.equal(other.log_marginal(y, q), likelihood.log_marginal(y, q))
    other.load_state_dict(likelihood.state_dict(), strict=True)
    assert torch.equal(other.log_marginal(y, q), likelihood.log_marginal(y, q))


@pytest.mark.parametrize("name", CLASSES)
def test_labels_out_of_range_are_refused(name):
    latent = LATENTS[name]
    likelihood, q, k = latent.make(), gaussian(*latent.marginals(4)), latent.num_classes
    y = latent.targets(4)
    for wrong in (-1.0, float(k), 0.5):
        y[2] = wrong
        for method in METHODS:
            with pytest.raises(ValueError, match=re.escape(f"0, ..., {k - 1}; got {{{wrong:g}}}, first at index 2")):
                getattr(likelihood, method)(y, q)
    y[2] = math.nan
    with pytest.raises(ValueError, match="targets must be finite; got nan at index 2"):
        likelihood.log_marginal(y, q)
    with pytest.raises(TypeError, match="float16"):
        likelihood.check(latent.targets(4).half())
    with pytest.raises(ValueError, match="num_classes must be at least 2; got 1"):
        type(likelihood)(1)


@pytest.mark.parametrize("wrong", [-1.0, 1.5])
def test_what_is_no_count_is_refused(wrong):
    for name in ("poisson", "multinomial_counts"):
        y = LATENTS[name].targets(4)
        y.view(-1)[1] = wrong
        with pytest.raises(ValueError, match=f"must be counts 0, 1, 2, ...; got {wrong:g} at index"):
            LATENTS[name].make().log_marginal(y, gaussian(*LATENTS[name].marginals(4)))


def test_targets_and_latents_that_do_not_fit_are_refused(latent):
    q = gaussian(*latent.marginals(4))
    for method in METHODS:
        with pytest.raises(
            ValueError, match="targets must broadcast against the latent function; got targets of shape"
        ):
            getattr(latent.make(), method)(latent.targets(3), q)
    if latent.num_latents is not None:
        q = gaussian(torch.zeros(2, 4), torch.ones(2, 4))
        with pytest.raises(ValueError, match=r"has num_latents = 3: .* mean of shape \(2, 4\)"):
            latent.make().log_marginal(latent.targets(4), q)


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_missing_from_the_data_is_no_error(name):
    latent = LATENTS[name]
    likelihood = latent.make()
    y, q = torch.zeros(4), gaussian(*latent.marginals(4))
    loss = -likelihood.expected_log_prob(y, q).sum()
    if list(likelihood.parameters()):
        for gradient in torch.autograd.grad(loss, list(likelihood.parameters())):
            assert bool(gradient.isfinite().all())
    assert bool((likelihood(q).probs > 0).all())


@pytest.mark.parametrize("name", ["multinomial", "stick_breaking", "ordinal_logit"])
def test_gpytorchs_elbo_trains_with_it(name):
    """Three noisy bands of classes along a line: the bound rises and the classes are found."""
    latent = LATENTS[name]
    torch.manual_seed(0)
    x = torch.linspace(-3, 3, 60).unsqueeze(-1)
    y = torch.bucketize(x.squeeze(-1), torch.tensor([-1.0, 1.0]))
    likelihood = latent.make().float()
    batch = torch.Size([] if latent.num_latents is None else [latent.num_latents])

    class Model(gpytorch.models.ApproximateGP):
        def __init__(self):
            q = gpytorch.variational.CholeskyVariationalDistribution(10, batch_shape=batch)
            points = torch.linspace(-3, 3, 10).view(10, 1).expand(*batch, 10, 1)
            super().__init__(gpytorch.variational.VariationalStrategy(self, points, q))
            self.mean_module = gpytorch.means.ZeroMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x):
            return MultivariateNormal(self.mean_module(x), 4 * self.covar_module(x))

    model = Model()
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=60)
    optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.2)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = -mll(model(x), y).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    model.eval()
    with torch.no_grad():
        assert float((likelihood(model(x)).probs.argmax(-1) == y).float().mean()) > 0.9


@pytest.mark.parametrize("method", ["log_marginal", "expected_log_prob"])
def test_targets_and_distributions_of_other_kinds(method):
    f = MultivariateNormal(torch.zeros(3), torch.eye(3))
    ask = getattr(likelihoods.StudentTLikelihood(), method)
    with pytest.raises(TypeError, match=r"targets must be a torch\.Tensor; got list"):
        ask([0.0, 1.0, 2.0], f)
    with pytest.raises(TypeError, match=r"the distribution of f, as a model returns it; got a Tensor"):
        ask(torch.zeros(3), torch.zeros(3))
    with pytest.raises(ValueError, match=r"got targets of shape \(3, 1\)"):
        ask(torch.zeros(3, 1), f)


@pytest.mark.parametrize(
    ("make", "least"),
    [
        (likelihoods.OrdinalLogitLikelihood, 2),
        (likelihoods.MultinomialLogitLikelihood, 2),
        (likelihoods.StickBreakingLikelihood, 2),
        (likelihoods.DirichletLikelihood, 2),
        (likelihoods.MultivariatePoissonLikelihood, 1),
        (lambda n: likelihoods.ExponentialFamilyLikelihood(n, torch.sin, torch.cos), 1),
    ],
)
def test_numbers_of_classes_are_whole(make, least):
    for wrong in (least + 0.5, str(least), None):
        with pytest.raises(TypeError, match="must be a whole number"):
            make(wrong)
    with pytest.raises(ValueError, match=f"must be at least {least}; got {least - 1}"):
        make(least - 1)
    make(torch.tensor(least))
