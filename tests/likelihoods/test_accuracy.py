"""Integrals and predictions of every likelihood against references by mpmath, in hard cases."""

import copy
import importlib
import math
import pickle

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator.operators import DiagLinearOperator
from scipy import stats

from gpext import likelihoods
from tests.members import F64, MEMBERS, student_t, tensor
from tests.statistics import misfit

LEGENDRE = np.polynomial.legendre.leggauss(20)


@pytest.fixture(params=MEMBERS)
def member(request):
    return MEMBERS[request.param]


def gaussian(mean, variance):
    return MultivariateNormal(tensor(*mean), DiagLinearOperator(tensor(*variance)))


def reference(log_density, mean, variance, knots, scale):
    """E[log p] and log E[p] under N(mean, variance): Gauss-Legendre on panels graded towards the knots."""
    sd = math.sqrt(variance)
    low, high = min(mean, *knots) - 13 * sd, max(mean, *knots) + 13 * sd
    edges = [np.linspace(low, high, int((high - low) / min(sd, 1) / 0.13) if high - low < 1e4 * sd else 1000)]
    edges.append(np.linspace(mean - 13 * sd, mean + 13 * sd, 200))
    for knot in knots:
        offsets = scale * 2.0 ** np.arange(-30, 40, 0.5)
        edges.append(np.concatenate([[knot], knot + offsets, knot - offsets]))
    edges = np.unique(np.clip(np.concatenate(edges), low, high))
    half = np.diff(edges)[:, None] / 2
    f = edges[:-1, None] + half * (1 + LEGENDRE[0])
    log_weight = np.log(half * LEGENDRE[1]) + stats.norm.logpdf(f, mean, sd)
    values = log_density(f)
    exponent = values + log_weight
    peak = exponent.max()
    return (np.exp(log_weight) * values).sum(), peak + math.log(np.exp(exponent - peak).sum())


def noise_model(kind, scale):
    if kind == "student_t":
        likelihood = likelihoods.StudentTLikelihood().double()
        likelihood.deg_free = tensor(4.0)
        density = stats.t(4.0, scale=scale).logpdf
    elif kind == "laplace":
        likelihood = likelihoods.LaplaceLikelihood().double()

        def density(e):
            return -math.log(2 * scale) - np.abs(e) / scale  # scipy's underflows

    else:
        likelihood, a = likelihoods.Matern32Likelihood().double(), math.sqrt(3) / scale

        def density(e):
            return math.log(a / 4) + np.log1p(a * np.abs(e)) - a * np.abs(e)

    likelihood.noise = tensor(scale**2)
    return likelihood, density


@pytest.mark.parametrize("y", [0.0, 0.7, 1e3])
@pytest.mark.parametrize(("scale", "variance"), [(1e-3, 1.0), (0.1, 1.0), (1.0, 1e-6), (1.0, 1.0), (10.0, 1.0)])
@pytest.mark.parametrize("kind", ["student_t", "laplace", "matern32"])
def test_noise_integrals_agree_with_a_reference_in_hard_cases(kind, scale, variance, y):
    likelihood, density = noise_model(kind, scale)
    mean, log_marginal = reference(lambda f: density(y - f), 0.0, variance, [y], scale)
    q, target = gaussian([0.0], [variance]), tensor(y)
    assert likelihood.expected_log_prob(target, q).item() == pytest.approx(mean, rel=1e-8)
    assert likelihood.log_marginal(target, q).item() == pytest.approx(log_marginal, rel=1e-8)


def test_where_twenty_fixed_nodes_fail():
    """Student-t of scale 0.1 under a unit Gaussian: gpytorch's fixed rule gives -2.56, the truth is -0.93."""
    stock = gpytorch.likelihoods.StudentTLikelihood().double()
    ours = likelihoods.StudentTLikelihood().double()
    q, y = gaussian([0.0], [1.0]), tensor(0.0)
    for likelihood in (stock, ours):
        likelihood.deg_free, likelihood.noise = tensor(4.0), tensor(0.01)
    _, truth = reference(stats.t(4.0, scale=0.1).logpdf, 0.0, 1.0, [0.0], 0.1)
    assert truth == pytest.approx(-0.93, abs=0.01)
    assert ours.log_marginal(y, q).item() == pytest.approx(truth, rel=1e-9)
    assert abs(stock.log_marginal(y, q).item() - truth) > 0.5


@pytest.mark.slow
def test_integrals_agree_with_a_reference(member):
    mean, variance = [-2.0, 0.3, 1.0, 2.5], [0.1, 1.0, 9.0, 1e-4]
    y = member.targets(4, seed=5)
    q = gaussian(mean, variance)
    expected_log_prob = member.likelihood.expected_log_prob(y, q)
    log_marginal = member.likelihood.log_marginal(y, q)
    for i in range(4):
        target = float(y[i])
        density = np.vectorize(lambda f, target=target: member.log_density(target, f))
        knots = [target, 2 * target - 1]  # the kink of the noise, and of the hinge
        first, second = reference(density, mean[i], variance[i], knots, 1.0)
        assert expected_log_prob[i].item() == pytest.approx(first, rel=1e-8)
        assert log_marginal[i].item() == pytest.approx(second, rel=1e-8, abs=1e-9)


@pytest.mark.parametrize("name", ["bernoulli_logit", "logit_by_hand", "negative_binomial"])
@pytest.mark.parametrize("mean", [-300.0, 300.0])
def test_wrong_and_certain_predictions_do_not_underflow(name, mean):
    likelihood, q = MEMBERS[name].likelihood, gaussian([mean], [4.0])
    target = tensor(1.0 if mean < 0 else 0.0)
    # log E sigma(f)^y sigma(-f)^r ~ log E e^{-r |f|} = -r |m| + r^2 v / 2
    r = 2.3 if name == "negative_binomial" and mean > 0 else 1.0
    expected = -r * 300 + 2 * r**2 + (math.log(2.3) if name == "negative_binomial" and mean < 0 else 0)
    assert likelihood.log_marginal(target, q).item() == pytest.approx(expected, rel=1e-9)


# ---- predictions ---------------------------------------------------------------------------------------------------

MEAN, VARIANCE = [0.4, -1.0], [1.0, 0.05]


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_the_svm_keeps_both_tails(label, dtype):
    wrong = torch.tensor([60.0 * (0.5 - label)], dtype=dtype)  # p(wrong class) = 1 / (1 + e^62), e^-62 in effect
    predictive = likelihoods.BayesianSVMLikelihood()(gaussian(wrong, torch.full_like(wrong, 1e-6)))
    assert predictive.log_prob(torch.full_like(wrong, label)).item() == pytest.approx(-62.0, abs=1e-4)
    assert predictive.log_prob(torch.full_like(wrong, 1 - label)).item() == pytest.approx(0.0, abs=1e-20)


def predictive_grid(member):
    """Points y (..., 2) and quadrature weights for sums over the predictive density at MEAN."""
    if member.support == "real":
        u = torch.arange(-16, min(member.reach, 40.0), 0.1, dtype=F64)
        y = torch.cat([u.exp(), -u.exp()])
        return y.unsqueeze(-1) + tensor(*MEAN), 0.1 * torch.cat([u, u]).exp().unsqueeze(-1)
    y = torch.arange(2.0 if member.support == "binary" else 4000.0, dtype=F64)
    return y.unsqueeze(-1).expand(-1, 2), torch.ones(len(y), 1, dtype=F64)


@pytest.mark.slow
def test_predictive_density_is_normalised_and_has_the_moments_it_says(member):
    predictive = member.likelihood(gaussian(MEAN, VARIANCE))
    y, weight = predictive_grid(member)
    mass = predictive.log_prob(y).exp() * weight
    torch.testing.assert_close(mass.sum(0), torch.ones(2, dtype=F64), rtol=1e-6, atol=1e-6)
    mean = (mass * y).sum(0)
    torch.testing.assert_close(predictive.mean, mean, rtol=1e-5, atol=1e-5)
    variance = (mass * (y - mean).square()).sum(0)
    if member is not MEMBERS["learnable"]:  # its second moment converges too slowly for the grid
        torch.testing.assert_close(predictive.variance, variance, rtol=1e-4, atol=1e-4)


def test_predictive_density_is_the_log_marginal(member):
    y, q = member.targets(2), gaussian(MEAN, VARIANCE)
    if member is MEMBERS["bayesian_svm"]:  # normalised over the two classes, datum by datum in f
        probs = [reference(np.vectorize(_svm_class), m, v, [-1.0, 1.0], 1.0)[0] for m, v in zip(MEAN, VARIANCE)]  # noqa: B905
        torch.testing.assert_close(member.likelihood(q).probs, tensor(*probs), rtol=1e-8, atol=0)
        return
    torch.testing.assert_close(member.likelihood(q).log_prob(y), member.likelihood.log_marginal(y, q))


def _svm_class(f):
    one, zero = -2 * max(0.0, 1 - f), -2 * max(0.0, 1 + f)
    return 1 / (1 + math.exp(zero - one))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, m in MEMBERS.items() if m.support != "binary"])
def test_cdf_and_quantile_belong_to_the_density(name):
    member = MEMBERS[name]
    predictive = member.likelihood(gaussian(MEAN, VARIANCE))
    if member.support == "real":
        a, b = tensor(-1.0, -1.5), tensor(0.9, 0.4)
        nodes, weights = (torch.from_numpy(v) for v in np.polynomial.legendre.leggauss(60))
        y = a + (b - a) * (nodes.unsqueeze(-1) + 1) / 2
        mass = (0.5 * (b - a) * weights.unsqueeze(-1) * predictive.log_prob(y).exp()).sum(0)
        torch.testing.assert_close(predictive.cdf(b) - predictive.cdf(a), mass, rtol=1e-5, atol=1e-6)
        for p in (0.01, 0.5, 0.999):
            level = torch.full((2,), p, dtype=F64)
            torch.testing.assert_close(predictive.cdf(predictive.quantile(level)), level, rtol=1e-8, atol=0)
    else:
        mass = predictive.log_prob(torch.arange(6, dtype=F64).unsqueeze(-1).expand(6, 2)).exp().sum(0)
        torch.testing.assert_close(predictive.cdf(tensor(5.0, 5.0)), mass, rtol=1e-8, atol=0)


def test_samples_follow_the_predictive_distribution(member):
    """Frequencies of an event against its probability."""
    torch.manual_seed(0)
    predictive = member.likelihood(gaussian(MEAN, VARIANCE))
    draws = predictive.sample(torch.Size([20000]))
    assert draws.shape == (20000, 2)
    if member.support == "binary":
        probability, events = predictive.mean, draws
    else:
        point = tensor(1.0, 0.0)
        probability, events = predictive.cdf(point), (draws <= point).double()
    assert misfit(events, probability, variance=probability * (1 - probability)) < 1


# ---- shapes and copies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_equal_and_independent(member, clone):
    likelihood, y, q = member.make(), member.targets(2), gaussian(MEAN, VARIANCE)
    other = clone(likelihood)
    assert torch.equal(other.log_marginal(y, q), likelihood.log_marginal(y, q))
    assert torch.equal(other(q).mean, likelihood(q).mean)
    for parameter in likelihood.parameters():
        parameter.data.add_(1.0)
    if list(likelihood.parameters()):
        assert not torch.equal(other.log_marginal(y, q), likelihood.log_marginal(y, q))


@pytest.mark.parametrize(
    ("kind", "name", "support"),
    [
        (likelihoods.StudentTLikelihood, "noise", "student_t"),
        (likelihoods.LaplaceLikelihood, "noise", "laplace"),
        (likelihoods.Matern32Likelihood, "noise", "matern32"),
        (likelihoods.NegativeBinomialLogitLikelihood, "total_count", "negative_binomial"),
        (likelihoods.NegativeBinomialLogLikelihood, "dispersion", "negative_binomial_log"),
    ],
)
def test_a_batch_of_parameters_is_a_loop(kind, name, support):
    together = kind(batch_shape=torch.Size([2])).double()
    setattr(together, name, tensor(0.3, 1.7).view(2, 1))
    y = MEMBERS[support].targets(2, 4)
    q = MultivariateNormal(torch.zeros(2, 4, dtype=F64), torch.eye(4, dtype=F64).expand(2, 4, 4))
    for i, value in enumerate((0.3, 1.7)):
        alone = kind().double()
        setattr(alone, name, tensor(value))
        for method in ("expected_log_prob", "log_marginal", "augmented_bound"):
            torch.testing.assert_close(getattr(together, method)(y, q)[i], getattr(alone, method)(y[i], q[i]))
        torch.testing.assert_close(together(q).mean[i], alone(q[i]).mean)


def test_float32_is_accurate_and_stays_float32(member):
    y, q = member.targets(2), gaussian(MEAN, VARIANCE)
    single = MultivariateNormal(q.mean.float(), DiagLinearOperator(q.variance.float()))
    likelihood = member.make().float()
    for method in ("expected_log_prob", "log_marginal", "augmented_bound"):
        value = getattr(likelihood, method)(y.float(), single)
        assert value.dtype == torch.float32
        exact = getattr(member.likelihood, method)(y, q)
        torch.testing.assert_close(value.double(), exact, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("variance", [1e3, 1e6])
@pytest.mark.parametrize("name", ["bernoulli_logit", "logit_by_hand", "bayesian_svm", "negative_binomial", "student_t"])
def test_log_marginals_of_vague_latents_in_float32(name, variance):
    member = MEMBERS[name]
    y, q = member.targets(2), gaussian(MEAN, [variance] * 2)
    single = MultivariateNormal(q.mean.float(), DiagLinearOperator(q.variance.float()))
    value = member.make().float().log_marginal(y.float(), single)
    assert value.dtype == torch.float32
    expected = member.make().double().log_marginal(y.float().double(), q)
    torch.testing.assert_close(value.double(), expected, rtol=2e-6, atol=2e-6)


def test_tasks_are_summed(member):
    y = member.targets(3, 2)
    mean, variance = torch.linspace(-1, 1, 6, dtype=F64).view(3, 2), torch.linspace(0.1, 2, 6, dtype=F64).view(3, 2)
    tasks = MultitaskMultivariateNormal(mean, DiagLinearOperator(variance.flatten()))
    flat = MultivariateNormal(mean.flatten(), DiagLinearOperator(variance.flatten()))
    for method in ("expected_log_prob", "log_marginal", "augmented_bound"):
        expected = getattr(member.likelihood, method)(y.flatten(), flat).view(3, 2).sum(-1)
        torch.testing.assert_close(getattr(member.likelihood, method)(y, tasks), expected)


def test_targets_that_do_not_fit_are_refused_with_both_shapes(member):
    q = gaussian(MEAN, VARIANCE)
    for method in ("expected_log_prob", "log_marginal", "augmented_bound"):
        with pytest.raises(ValueError, match=r"got targets of shape \(3,\) and a latent distribution of shape \(2,\)"):
            getattr(member.likelihood, method)(member.targets(3), q)


def test_derivatives_of_the_integrals_agree_with_finite_differences(member):
    likelihood = member.make()
    y = member.targets(2, seed=5)
    mean, variance = tensor(*MEAN).requires_grad_(), tensor(*VARIANCE).requires_grad_()

    def total(method):
        q = MultivariateNormal(mean, DiagLinearOperator(variance))
        return getattr(likelihood, method)(y, q).sum()

    inputs = [mean, variance, *likelihood.parameters()]
    for method in ("expected_log_prob", "log_marginal", "augmented_bound"):
        gradients = torch.autograd.grad(total(method), inputs, allow_unused=True)
        for tensor_, gradient in zip(inputs, gradients, strict=True):
            flat, values = tensor_.data.view(-1), []
            start = flat[0].item()
            for step in (1e-4, -1e-4):
                flat[0] = start + step
                values.append(total(method).item())
            flat[0] = start
            difference = (values[0] - values[1]) / 2e-4
            assert gradient.flatten()[0].item() == pytest.approx(difference, rel=1e-5, abs=1e-7)


def test_student_t_with_many_degrees_of_freedom_is_gaussian():
    likelihood = student_t()
    likelihood.deg_free, likelihood.noise = tensor(1e7), tensor(0.25)
    exact = stats.norm.logpdf(0.8, MEAN[0], math.sqrt(VARIANCE[0] + 0.25))
    assert likelihood.log_marginal(tensor(0.8), gaussian(MEAN[:1], VARIANCE[:1])).item() == pytest.approx(
        exact, rel=1e-6
    )


@pytest.mark.parametrize(
    ("kind", "owner"),
    [
        (likelihoods.Matern32Likelihood, "gpext.augmentations.augmentation.Augmentation"),
        (likelihoods.BernoulliLogitLikelihood, "gpext.likelihoods.latent.LatentLikelihood"),
    ],
    ids=["adaptive", "equal steps"],
)
def test_a_batch_is_integrated_some_values_at_a_time(kind, owner, monkeypatch):
    """200 draws at 10,000 new inputs would otherwise take some 20 GB."""
    likelihood, sizes = kind().double(), []
    y, mean = tensor(*[0.0, 1.0] * 4), torch.linspace(-3, 3, 48, dtype=F64).view(6, 8)
    expected = torch.stack([likelihood.log_density(y, m, 1 + m.square()) for m in mean])
    module, name = owner.rsplit(".", 1)
    whole = getattr(importlib.import_module(module), name)._integral
    monkeypatch.setattr(f"{module}._CHUNK", 12)
    monkeypatch.setattr(f"{owner}._integral", lambda *args: sizes.append(args[-1].numel()) or whole(*args))
    found = likelihood.log_density(y, mean, 1 + mean.square())
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert sizes == [12] * 4


@pytest.mark.slow
def test_many_data_are_integrated_as_few(member):
    """Beyond a few thousand data the quadrature works in chunks."""
    size = 4200
    y, mean = member.targets(size), torch.linspace(-2, 2, size, dtype=F64)
    variance = torch.full_like(mean, 4.0)
    together = MultivariateNormal(mean, DiagLinearOperator(variance))
    part = slice(4090, 4110)
    few = MultivariateNormal(mean[part], DiagLinearOperator(variance[part]))
    for method in ("expected_log_prob", "log_marginal"):
        actual = getattr(member.likelihood, method)(y, together)
        assert actual.shape == (size,)
        expected = getattr(member.likelihood, method)(y[part], few)
        torch.testing.assert_close(actual[part], expected, rtol=1e-9, atol=1e-9)


# ---- counts ----------------------------------------------------------------------------------------------------------

COUNTS = {
    "poisson": (likelihoods.PoissonLikelihood, lambda y: y, lambda y: y.clamp(min=1).log()),
    "negative binomial": (
        likelihoods.NegativeBinomialLogitLikelihood,
        lambda y: y,
        lambda y: y.clamp(min=1).log(),
    ),
    "negative binomial, log link": (
        likelihoods.NegativeBinomialLogLikelihood,
        lambda y: y,
        lambda y: y.clamp(min=1).log(),
    ),
    "trials": (
        lambda: likelihoods.MultinomialLogitLikelihood(2, 30_000),
        lambda y: torch.stack([y, 30_000 - y], -1),
        lambda y: torch.stack([y / 6_000, 0 * y]),
    ),
    "several counts": (
        lambda: likelihoods.MultivariatePoissonLikelihood(2),
        lambda y: torch.stack([y, 30_000 - y], -1),
        lambda y: torch.stack([y, 30_000 - y]).clamp(min=1).log(),
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_large_counts_keep_their_digits_in_float32(name):
    make, targets, mean = COUNTS[name]
    y = torch.tensor([0.0, 3.0, 5_000.0, 12_345.0, 29_999.0])
    single, double = make(), make().double()
    m = mean(y) + 0.1
    v = torch.full_like(m, 0.3)
    for method, arguments in (("log_prob", (m,)), ("expected_log_density", (m, v)), ("log_density", (m, v))):
        found = getattr(single, method)(targets(y), *arguments).detach()
        exact = getattr(double, method)(targets(y).double(), *(t.double() for t in arguments)).detach()
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("y", "r", "mean", "variance", "exact"),
    [  # mpmath, 30 digits
        (0.0, 1e6, 0.0, 100.0, -2.568580915832943),
        (30_000.0, 1e5, 0.2, 1.0, -12.21345635013667),
        (1e6, 10.0, 11.0, 1.0, -14.925857073959628),
        (5_000.0, 1.0, 0.0, 1.0, -36.2014760487011),
    ],
)
def test_negative_binomial_marginals_of_large_counts(y, r, mean, variance, exact):
    likelihood = likelihoods.NegativeBinomialLogitLikelihood().double()
    likelihood.total_count = torch.tensor(r, dtype=F64)
    found = likelihood.log_density(*(torch.tensor([value], dtype=F64) for value in (y, mean, variance)))
    torch.testing.assert_close(found.item(), exact, rtol=0, atol=2e-9)


@pytest.mark.parametrize("dtype", [torch.long, torch.int32, torch.float32])
def test_whole_targets_of_any_dtype_are_the_same(member, dtype):
    y = {"real": tensor(-2.0, 0.0, 3.0), "binary": tensor(0.0, 1.0, 1.0), "count": tensor(0.0, 2.0, 5.0)}[
        member.support
    ]
    f = gaussian((0.3, -1.0, 0.7), (0.5, 1.0, 0.2))
    by_hand = isinstance(member.likelihood, likelihoods.SuperGaussianLikelihood)  # its functions get float32
    tolerance = 1e-6 if by_hand else 1e-12
    for method in ("log_marginal", "expected_log_prob", "augmented_bound"):
        ask = getattr(member.likelihood, method)
        torch.testing.assert_close(ask(y.to(dtype), f).double(), ask(y, f), rtol=tolerance, atol=tolerance)
