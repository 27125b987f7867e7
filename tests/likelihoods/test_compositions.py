"""Likelihoods made of others, against densities by definition, integrals in one and two dimensions, and plain ones.

A composition of nothing (weights of one, offsets of zero, no limit, one family) is the inner likelihood; whole
weights are repeated data, and an offset is a prior mean.
"""

import copy
import math
import pickle

import gpytorch
import mpmath
import numpy as np
import pyro
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from scipy import stats

import gpext
from gpext.inference import CAVI, EP, KL, Laplace, Taylor
from gpext.likelihoods import (
    BernoulliLogitLikelihood,
    Censored,
    Hurdle,
    LaplaceLikelihood,
    MixedLikelihood,
    MultinomialLogitLikelihood,
    NegativeBinomialLogLikelihood,
    Offset,
    OrdinalLogitLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
    SuperGaussianLikelihood,
    Truncated,
    Weighted,
    ZeroInflated,
)
from gpext.quadrature import gauss_hermite
from tests.members import F64, pseudo_huber_phi, tensor

GENERATOR = torch.Generator().manual_seed(0)
X = torch.linspace(0, 3, 6, dtype=F64)
K = torch.exp(-((X[:, None] - X) ** 2)) + 1e-6 * torch.eye(6, dtype=F64)
MEAN = 0.3 * X
WEIGHTS = tensor(1, 2, 1, 3, 1, 2)
OFFSETS = torch.randn(6, dtype=F64, generator=GENERATOR)
RULES = {"CAVI": CAVI(), "EP": EP(), "KL": KL(), "Laplace": Laplace(), "Taylor": Taylor()}
REAL = tensor(0.3, -1.2, 2.5, 0.4, 0.1, -0.6)
BASES = {
    "logit": (BernoulliLogitLikelihood, tensor(0, 1, 1, 0, 1, 0)),
    "student-t": (StudentTLikelihood, REAL),
    "laplace": (LaplaceLikelihood, REAL),
    "pseudo-huber": (lambda: SuperGaussianLikelihood(pseudo_huber_phi), REAL),
    "poisson": (PoissonLikelihood, torch.tensor([0, 1, 5, 2, 0, 1])),
    "ordinal": (lambda: OrdinalLogitLikelihood(3), torch.tensor([0, 1, 2, 1, 0, 2])),
    "gaussian": (gpytorch.likelihoods.GaussianLikelihood, REAL),
    "probit": (gpytorch.likelihoods.BernoulliLikelihood, tensor(0, 1, 1, 0, 1, 0)),
}
AUGMENTED = ("logit", "student-t", "laplace", "pseudo-huber")
SERVED = [
    (base, rule)
    for base in BASES
    for rule in RULES
    if (rule != "CAVI" or base in AUGMENTED) and not (base == "laplace" and rule in ("Laplace", "Taylor"))
]


def prior_of(mean=MEAN, covariance=K):
    return MultivariateNormal(mean, to_linear_operator(covariance))


def with_gradient(rule, prior_of_scale, likelihood, y):
    """The evidence and its derivatives in a prior scale and in the likelihood's parameters."""
    scale = torch.ones((), dtype=F64, requires_grad=True)
    result = rule.infer(prior_of_scale(scale), likelihood, y)
    wanted = [scale, *likelihood.parameters()]
    gradient = torch.autograd.grad(result.log_evidence, wanted, allow_unused=True, materialize_grads=True)
    return result, gradient


@pytest.mark.parametrize(("base", "rule"), SERVED)
def test_an_offset_is_a_prior_mean(base, rule):
    make, y = BASES[base]
    likelihood = make().double()
    result, gradient = with_gradient(RULES[rule], lambda s: prior_of(MEAN, s * K), Offset(likelihood, OFFSETS), y)
    plain, expected = with_gradient(RULES[rule], lambda s: prior_of(MEAN + OFFSETS, s * K), likelihood, y)
    torch.testing.assert_close(result.log_evidence, plain.log_evidence, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(result.log_loo, plain.log_loo, rtol=1e-6, atol=1e-6)
    shifted = result.conditioned.mean + OFFSETS
    torch.testing.assert_close(shifted, plain.conditioned.mean, rtol=1e-6, atol=1e-6)
    report, reference = (gpext.inference.outlier_report(each) for each in (result, plain))
    torch.testing.assert_close(report.tail_probability, reference.tail_probability, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("base", "rule"), [pair for pair in SERVED if pair[1] != "EP"])
def test_whole_weights_are_repeated_data(base, rule):
    make, y = BASES[base]
    likelihood = make().double()
    again = torch.repeat_interleave(torch.arange(6), WEIGHTS.long())
    repeated = K[again][:, again]
    result, gradient = with_gradient(RULES[rule], lambda s: prior_of(MEAN, s * K), Weighted(likelihood, WEIGHTS), y)
    plain, expected = with_gradient(RULES[rule], lambda s: prior_of(MEAN[again], s * repeated), likelihood, y[again])
    torch.testing.assert_close(result.log_evidence, plain.log_evidence, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("base", "rule"), SERVED)
def test_a_composition_of_nothing_is_the_likelihood_inside(base, rule):
    make, y = BASES[base]
    likelihood, one = make().double(), torch.ones(6, dtype=F64)
    plain = RULES[rule].infer(prior_of(), likelihood, y)
    others = [Weighted(likelihood, one), Offset(likelihood, 0 * one)]
    if rule != "CAVI":
        others.append(MixedLikelihood([likelihood], torch.zeros(6, dtype=torch.long)))
    for other in others:
        found = RULES[rule].infer(prior_of(), other, y)
        torch.testing.assert_close(found.log_evidence, plain.log_evidence, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found.conditioned.mean, plain.conditioned.mean, rtol=1e-8, atol=1e-8)
    if base in ("student-t", "laplace", "pseudo-huber", "poisson", "gaussian") and rule != "CAVI":
        found = RULES[rule].infer(prior_of(), Censored(likelihood), torch.stack([y, y], -1))
        torch.testing.assert_close(found.log_evidence, plain.log_evidence, rtol=1e-10, atol=1e-10)


def test_weights_under_ep_are_exact_for_one_datum():
    """The normaliser of p(y | f)^w N(f) by Gauss-Hermite, for which EP is exact."""
    y, w = tensor(1.0), tensor(2.7)
    result = EP().infer(prior_of(tensor(0.2), tensor([1.3])), Weighted(BernoulliLogitLikelihood(), w), y)
    nodes, weights = gauss_hermite(100)
    f = 0.2 + math.sqrt(1.3) * nodes.double()
    expected = torch.log((weights.double() * torch.sigmoid(f) ** 2.7).sum())
    torch.testing.assert_close(result.log_evidence, expected, rtol=1e-8, atol=1e-8)


def test_gibbs_sampling_with_weights_and_offsets():
    """Against repeated data with a shifted mean: the same posterior, by independent chains."""
    from tests.statistics import block_means, misfit_between

    again = torch.repeat_interleave(torch.arange(6), WEIGHTS.long())
    for base in ("logit", "student-t", "laplace"):
        make, y = BASES[base]
        likelihood = make().double()
        composed = Offset(Weighted(likelihood, WEIGHTS), OFFSETS)
        run = {"num_samples": 2000, "num_chains": 4, "warmup": 50, "progress": False}
        seeds = [torch.Generator().manual_seed(s) for s in (1, 2)]
        found = gpext.samplers.GibbsSampler(prior_of(), composed, y).run(**run, generator=seeds[0])
        prior = prior_of((MEAN + OFFSETS)[again], K[again][:, again])
        plain = gpext.samplers.GibbsSampler(prior, likelihood, y[again]).run(**run, generator=seeds[1])
        first = WEIGHTS.long().cumsum(0) - WEIGHTS.long()
        means = block_means(plain.latent[..., first] - OFFSETS, 20)
        assert misfit_between(block_means(found.latent, 20), means) < 1
    composed = Weighted(SuperGaussianLikelihood(pseudo_huber_phi).double(), WEIGHTS)
    with pytest.raises(TypeError, match="no closed form"):
        gpext.samplers.GibbsSampler(prior_of(), composed, REAL).run(5, 1, 0, progress=False)


LOW = tensor(-torch.inf, 0.2, 0.5, -1.0, 0.1, 40.0)
HIGH = tensor(-0.4, torch.inf, 0.5, 2.0, 0.1 + 1e-4, torch.inf)


def test_censored_normal_and_student_t_by_their_definition():
    f = torch.linspace(-2, 2, 6, dtype=F64)
    gaussian = Censored(gpytorch.likelihoods.GaussianLikelihood().double())
    gaussian.likelihood.noise = 0.7
    inner = StudentTLikelihood().double().initialize(noise=0.7, deg_free=4.2)
    student = Censored(inner)
    for likelihood, law in (
        (gaussian, lambda m: stats.norm(m, math.sqrt(gaussian.likelihood.noise.item()))),
        (student, lambda m: stats.t(inner.deg_free.item(), m, math.sqrt(inner.noise.item()))),
    ):
        found = likelihood.log_prob(torch.stack([LOW, HIGH], -1), f).detach().numpy()
        for i in range(6):
            given = law(float(f[i]))
            low, high = float(LOW[i]), float(HIGH[i])
            if low == high:
                expected = given.logpdf(low)
            elif math.isinf(low):
                expected = given.logcdf(high)
            elif math.isinf(high):
                expected = given.logsf(low)
            else:
                expected = math.log(given.cdf(high) - given.cdf(low))
            rounding = 1e-12 / min(1.0, high - low) if low < high else 0.0  # of the difference of two cdfs
            assert abs(found[i] - expected) < 1e-10 * max(1, abs(expected)) + rounding
    slope = torch.autograd.functional.jacobian(lambda f: gaussian.log_prob(torch.stack([LOW, HIGH], -1), f), f)
    assert bool(slope.isfinite().all())


def test_censored_counts_are_sums_of_masses():
    f = tensor(0.3, 1.0, 2.0)
    likelihood = Censored(PoissonLikelihood())
    found = likelihood.log_prob(tensor([2, 5], [3, torch.inf], [-torch.inf, 4]), f)
    law = [stats.poisson(math.exp(float(each))) for each in f]
    expected = [math.log(law[0].cdf(5) - law[0].cdf(1)), law[1].logsf(2), law[2].logcdf(4)]
    torch.testing.assert_close(found, tensor(*expected), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rule", ["EP", "KL", "Laplace"])
def test_two_censored_data_against_two_dimensional_quadrature(rule):
    """The evidence: EP and Laplace within their own error on exact data of this kind, KL from below."""
    likelihood = Censored(gpytorch.likelihoods.GaussianLikelihood().double())
    likelihood.likelihood.noise = 0.2
    y = tensor([-torch.inf, 0.3], [0.9, 1.4])
    covariance = tensor([1.0, 0.6], [0.6, 1.5])
    result = RULES[rule].infer(prior_of(tensor(0.1, -0.2), covariance), likelihood, y)
    nodes, weights = (each.double() for each in gauss_hermite(80))
    z = torch.cartesian_prod(nodes, nodes) @ torch.linalg.cholesky(covariance).mT + tensor(0.1, -0.2)
    log_p = likelihood.log_prob(y, z).sum(-1)
    exact = torch.logsumexp(torch.cartesian_prod(weights, weights).prod(-1).log() + log_p, 0).item()
    assert result.status.name == "CONVERGED"
    slack = {"EP": 2e-3, "KL": 2e-2, "Laplace": 5e-2}[rule]
    assert exact - slack < result.log_evidence.item() < exact + (1e-9 if rule == "KL" else slack)


def test_far_censored_data_have_finite_posteriors():
    """A limit forty standard deviations of the prior away: finite, in both dtypes, under every rule."""
    for dtype in (torch.float32, torch.float64):
        for make in (gpytorch.likelihoods.GaussianLikelihood, StudentTLikelihood):
            likelihood = Censored(make().to(dtype))
            y = torch.tensor([[40.0, torch.inf], [-torch.inf, -40.0], [0.0, 0.0]], dtype=dtype)
            prior = MultivariateNormal(torch.zeros(3, dtype=dtype), torch.eye(3, dtype=dtype))
            for rule in ("EP", "KL", "Laplace"):
                result = RULES[rule].infer(prior, likelihood, y)
                assert result.status.name == "CONVERGED"
                assert bool(result.log_evidence.isfinite())
                assert result.log_evidence.dtype == dtype
                if make is gpytorch.likelihoods.GaussianLikelihood:
                    assert bool((result.conditioned.mean[:2].abs() > 3).all())


FAR = tensor([40.0, torch.inf], [-torch.inf, -40.0], [40.0, 41.0], [0.3, 0.3])


@pytest.mark.parametrize("rule", ["EP", "KL", "Laplace", "Taylor"])
@pytest.mark.parametrize("wrap", [Censored, lambda inner: Weighted(Censored(inner), tensor(1, 3, 0.5, 1))])
@pytest.mark.parametrize("make", [gpytorch.likelihoods.GaussianLikelihood, StudentTLikelihood])
def test_far_censored_data_have_finite_derivatives(make, wrap, rule):
    """Limits forty standard deviations of the noise from where the prior is narrow: nothing is infinite or nan."""
    likelihood = wrap(make().double().initialize(noise=1.0))
    assert bool(likelihood.log_prob(FAR, torch.zeros(4, dtype=F64)).isfinite().all())
    result, gradient = with_gradient(RULES[rule], lambda s: prior_of(MEAN[:4], 1e-2 * s * K[:4, :4]), likelihood, FAR)
    assert bool(result.log_evidence.isfinite())
    assert bool(result.conditioned.mean.isfinite().all())
    assert bool((result.conditioned.variance > 0).all())
    assert all(bool(each.isfinite().all()) for each in gradient)


def test_a_far_censored_datum_is_exact_under_ep():
    """Forty standard deviations of y away: evidence and mean from the normal tail with 50 digits."""
    for limit, noise in ((40.0, 1.0), (400.0, 100.0), (13.0, 1e-2)):
        likelihood = Censored(gpytorch.likelihoods.GaussianLikelihood().double().initialize(noise=noise))
        result = EP().infer(prior_of(tensor(0.0), tensor([0.09])), likelihood, tensor([limit, torch.inf]))
        with mpmath.workdps(50):
            sd = mpmath.sqrt(mpmath.mpf(0.09) + mpmath.mpf(likelihood.likelihood.noise.item()))
            z = mpmath.mpf(limit) / sd
            tail = mpmath.ncdf(-z)
            log_tail, mean = float(mpmath.log(tail)), float(mpmath.mpf(0.09) / sd * mpmath.npdf(z) / tail)
        torch.testing.assert_close(result.log_evidence.item(), log_tail, rtol=1e-11, atol=0)
        torch.testing.assert_close(result.conditioned.mean.item(), mean, rtol=1e-9, atol=0)


def test_tobit_regression_recovers_what_was_cut_off():
    """Importance sampling from the prior, 200000 draws: EP's posterior means within its error and 2 %."""
    y = tensor([0.4, 0.4], [1.0, torch.inf], [1.0, torch.inf], [0.2, 0.2], [-torch.inf, -0.5], [-0.1, -0.1])
    likelihood = Censored(gpytorch.likelihoods.GaussianLikelihood().double())
    likelihood.likelihood.noise = 0.1
    result = EP().infer(prior_of(), likelihood, y)
    draws = MEAN + torch.randn(200000, 6, dtype=F64, generator=GENERATOR) @ torch.linalg.cholesky(K).mT
    weight = torch.softmax(likelihood.log_prob(y, draws).sum(-1), 0)
    mean = weight @ draws
    error = (weight.square() @ (draws - mean).square()).sqrt()
    assert bool(((result.conditioned.mean - mean).abs() < 4.5 * error + 0.02 * K.diagonal().sqrt()).all())


@pytest.mark.parametrize("make", [PoissonLikelihood, lambda: NegativeBinomialLogLikelihood().double()])
def test_zero_inflated_truncated_and_hurdle_counts_sum_to_one(make):
    """Masses sum to one; means and variances are those of the masses; draws have these masses."""
    f, counts = tensor(0.4), torch.arange(400, dtype=F64)
    for likelihood in (ZeroInflated(make()), Hurdle(make()), Truncated(make(), lower=1), Truncated(make(), 2, 6)):
        inside = counts[(counts >= getattr(likelihood, "lower", 0)) & (counts <= getattr(likelihood, "upper", 400))]
        mass = likelihood.log_prob(inside, f.expand(len(inside))).exp().detach()
        torch.testing.assert_close(mass.sum(), torch.ones((), dtype=F64), rtol=1e-10, atol=1e-10)
        given = likelihood.forward(f)
        torch.testing.assert_close(given.log_prob(inside).exp().detach(), mass, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(given.cdf(inside).detach(), mass.cumsum(0), rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(
            gpext.distributions.log_cdf(given, inside[:-1]).exp().detach(), mass.cumsum(0)[:-1], rtol=1e-9, atol=1e-10
        )
        if getattr(likelihood, "lower", 0) <= 1:
            mean = (mass * inside).sum()
            torch.testing.assert_close(given.mean.squeeze().detach(), mean, rtol=1e-9, atol=1e-9)
            variance = (mass * (inside - mean).square()).sum()
            torch.testing.assert_close(given.variance.squeeze().detach(), variance, rtol=1e-8, atol=1e-8)
        drawn = given.sample(torch.Size([20000]), generator=torch.Generator().manual_seed(1)).flatten()
        seen = torch.stack([(drawn == value).double().mean() for value in inside[:4]])
        error = (mass[:4] * (1 - mass[:4]) / 20000).sqrt()
        assert bool(((seen - mass[:4]).abs() < 4.5 * error).all())


@pytest.mark.parametrize("rule", ["EP", "KL", "Laplace", "Taylor"])
@pytest.mark.parametrize("make", [ZeroInflated, Hurdle, lambda inner: Truncated(inner, upper=8)])
def test_counts_with_other_zeros_under_every_rule(make, rule):
    """Derivatives in all parameters by differences of the evidence."""
    likelihood = make(NegativeBinomialLogLikelihood()).double()
    y = torch.tensor([0, 1, 5, 2, 0, 1])
    result, gradient = with_gradient(RULES[rule], lambda s: prior_of(MEAN, s * K), likelihood, y)
    assert result.status.name == "CONVERGED"
    for parameter, found in zip(likelihood.parameters(), gradient[1:], strict=True):
        values = []
        for step in (1e-4, -1e-4):
            moved = copy.deepcopy(likelihood)
            with torch.no_grad():
                dict(zip(likelihood.parameters(), moved.parameters(), strict=True))[parameter].add_(step)
                values.append(RULES[rule].infer(prior_of(), moved, y).log_evidence)
        torch.testing.assert_close(found.squeeze(), (values[0] - values[1]) / 2e-4, rtol=1e-4, atol=1e-6)


FAMILIES = torch.tensor([0, 1, 2, 0, 1, 2])
MIXED_Y = tensor(3, 1, 0.4, 0, 0, -2.0)


def mixed():
    return MixedLikelihood([PoissonLikelihood(), BernoulliLogitLikelihood(), StudentTLikelihood()], FAMILIES).double()


@pytest.mark.parametrize("rule", ["EP", "KL", "Laplace", "Taylor"])
def test_independent_data_of_several_families_have_the_evidences_of_each(rule):
    """Under a prior of independent values the joint evidence is the sum of those of the families."""
    likelihood, variance = mixed(), tensor(0.5, 1, 1.5, 2, 0.7, 0.9)
    found = RULES[rule].infer(prior_of(MEAN, variance.diag()), likelihood, MIXED_Y)
    total = 0
    for k, part in enumerate(likelihood.likelihoods):
        rows = k == FAMILIES
        alone = RULES[rule].infer(prior_of(MEAN[rows], variance[rows].diag()), part, MIXED_Y[rows])
        torch.testing.assert_close(found.conditioned.mean[rows], alone.conditioned.mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.log_loo[rows], alone.log_loo, rtol=1e-6, atol=1e-6)
        total = total + alone.log_evidence
    torch.testing.assert_close(found.log_evidence, total, rtol=1e-9, atol=1e-9)
    joined = likelihood.join(MIXED_Y)
    columns = MixedLikelihood([*likelihood.likelihoods])
    again = RULES[rule].infer(prior_of(MEAN, variance.diag()), columns, joined)
    torch.testing.assert_close(again.log_evidence, found.log_evidence)


def model_of(likelihood, y, x=X, **options):
    class Model(gpext.models.LatentGP):
        def __init__(self):
            super().__init__(x, y, likelihood, **options)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
            self.to(x)

        def forward(self, inputs):
            return MultivariateNormal(self.mean_module(inputs), self.covar_module(inputs))

    return Model()


COMPOSED = {
    "weighted": lambda: (Weighted(PoissonLikelihood(), WEIGHTS), torch.tensor([0, 1, 5, 2, 0, 1])),
    "offset": lambda: (Offset(StudentTLikelihood().double(), OFFSETS), REAL),
    "censored": lambda: (Censored(StudentTLikelihood().double()), torch.stack([LOW.clamp_max(3), HIGH], -1)),
    "weighted censored": lambda: (
        Weighted(Censored(StudentTLikelihood().double()), WEIGHTS),
        torch.stack([LOW.clamp_max(3), HIGH], -1),
    ),
    "hurdle": lambda: (Hurdle(PoissonLikelihood()).double(), torch.tensor([0, 1, 5, 2, 0, 1])),
    "mixed": lambda: (mixed(), MIXED_Y),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_models_train_predict_and_are_copied(name):
    likelihood, y = COMPOSED[name]()
    model = model_of(likelihood, y)
    mll = gpext.mlls.LatentMarginalLogLikelihood(likelihood, model)
    result = gpext.fit(mll, X, y, progress=False, max_steps=10)
    assert result.objective > -torch.inf
    model.eval()
    likelihood.eval()
    with torch.no_grad():
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(copy.deepcopy(likelihood)))):
            assert type(twin) is type(model) or type(twin) is type(likelihood)
        options = {"family": 1} if name == "mixed" else {}
        predicted = likelihood(model(X[:4]), **options)
    assert bool(predicted.mean.isfinite().all())
    assert str(gpext.inference.outlier_report(model.result)).count("\n") >= 6


@pytest.mark.parametrize("name", COMPOSED)
def test_minibatches_take_the_numbers_of_their_data(name):
    """The objective over all data is the mean of those of its batches; `fit` trains on batches."""
    likelihood, y = COMPOSED[name]()

    class Model(gpytorch.models.ApproximateGP):
        def __init__(self):
            strategy = gpext.variational.SiteVariationalStrategy(self, X[:4].unsqueeze(-1))
            super().__init__(strategy)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
            self.to(X)

        def forward(self, inputs):
            return MultivariateNormal(self.mean_module(inputs), self.covar_module(inputs))

    model, x = Model(), X.unsqueeze(-1)
    model.train()
    with torch.no_grad():
        whole = likelihood.expected_log_prob(y, model(x))
        for rows in (torch.tensor([4, 0]), slice(1, 3)):
            part = likelihood.expected_log_prob(likelihood.take(y, rows), model(x[rows]))
            torch.testing.assert_close(part, whole[rows], rtol=1e-7, atol=1e-8)
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, len(x))
    result = gpext.fit(mll, x, y, progress=False, max_steps=4, batch_size=2)
    assert math.isfinite(result.objective)


@pytest.mark.parametrize("name", COMPOSED)
def test_a_pyro_program_takes_targets_of_several_numbers(name):
    """The log density of a program is that of the likelihood, by `observe` and as gpytorch's models call it."""
    likelihood, y = COMPOSED[name]()
    f = torch.linspace(-1, 1, 6, dtype=F64)
    expected = likelihood.log_prob(y, f).sum()

    def observed():
        gpext.ppl.observe("y", likelihood, f, y)

    def as_gpytorch():
        likelihood.pyro_model(pyro.distributions.Delta(f), y)

    for program in (observed, as_gpytorch):
        trace = pyro.poutine.trace(program).get_trace()
        torch.testing.assert_close(trace.log_prob_sum(), expected, rtol=1e-9, atol=1e-9)


def test_an_exposure_is_predicted_with():
    likelihood = Offset(PoissonLikelihood(), OFFSETS)
    f = MultivariateNormal(tensor(0.2, 0.3), 0.1 * torch.eye(2, dtype=F64))
    exposure = tensor(2.0, 5.0)
    torch.testing.assert_close(likelihood(f, offset=exposure.log()).mean, exposure * likelihood(f).mean)
    torch.testing.assert_close(likelihood(f).mean, PoissonLikelihood()(f).mean)


def test_bad_input_is_refused():
    y = torch.tensor([0, 1, 5, 2, 0, 1])
    with pytest.raises(ValueError, match="weights must be positive; got 0 at index 2"):
        Weighted(PoissonLikelihood(), tensor(1, 1, 0))
    with pytest.raises(ValueError, match="offset must be finite; got -inf"):
        Offset(PoissonLikelihood(), tensor(1, 0).log())
    with pytest.raises(ValueError, match="holds weights of 6 data, and there are targets of shape \\(4,\\)"):
        Weighted(PoissonLikelihood(), WEIGHTS).log_prob(y[:4], torch.zeros(4))
    with pytest.raises(ValueError, match="whose last number is that of the weights"):
        Weighted(PoissonLikelihood()).log_prob(y, torch.zeros(6))
    with pytest.raises(TypeError, match="Weighted takes a likelihood of one latent function"):
        Weighted(MultinomialLogitLikelihood(3), WEIGHTS)
    with pytest.raises(TypeError, match="Offset takes a likelihood of gpext or gpytorch"):
        Offset("poisson")
    with pytest.raises(TypeError, match=r"Put it inside: Censored\(Truncated\(...\)\)"):
        Truncated(Censored(PoissonLikelihood()), lower=1)
    with pytest.raises(ValueError, match="expected limits lower < upper"):
        Truncated(PoissonLikelihood(), 3, 3)
    with pytest.raises(ValueError, match=r"targets must be between 1 and inf; got 0 at index 0"):
        Truncated(PoissonLikelihood(), lower=1).log_prob(y, torch.zeros(6))
    censored = Censored(gpytorch.likelihoods.GaussianLikelihood())
    fine = [0.2, 0.9]
    for pair, message in (
        ([1.0, 0.0], r"the lower limit must not be above the upper one; got \(1, 0\) at index 1"),
        ([-torch.inf, torch.inf], r"a datum must have a finite limit; got \(-inf, inf\) at index 1"),
        ([torch.nan, 0.0], r"limits must be numbers, or infinite; got \(nan, 0\) at index 1"),
        ([-torch.inf, -torch.inf], "a lower limit may be -inf and an upper one inf"),
        ([torch.inf, torch.inf], "a lower limit may be -inf and an upper one inf"),
    ):
        for likelihood in (censored, Weighted(censored, tensor(1, 2)), Offset(censored, tensor(1, 2))):
            with pytest.raises(ValueError, match=message):
                likelihood.log_prob(torch.tensor([fine, pair]), torch.zeros(2))
    with pytest.raises(TypeError, match=r"targets must be a torch.Tensor; got list"):
        censored.log_prob([fine], torch.zeros(1))
    with pytest.raises(TypeError, match=r"Put it inside: Weighted\(Censored\(...\)\)"):
        Censored(Weighted(PoissonLikelihood()))
    counts = torch.tensor([[1.0, 2.0], [-torch.inf, 3.0], [0.0, 4.5]])  # a row is that of the data, whatever is open
    with pytest.raises(
        ValueError, match=r"of the upper limits: targets must be counts 0, 1, 2, ...; got 4.5 at index 2"
    ):
        Censored(PoissonLikelihood()).log_prob(counts, torch.zeros(3))
    for offset in (tensor(1, 0), tensor(1, -3)):
        with pytest.raises(
            ValueError, match=r"offset must be finite; got \S+ at index 1. An exposure must be positive"
        ):
            Offset(PoissonLikelihood(), offset.log())
    for kind in (ZeroInflated, Hurdle):
        with pytest.raises(TypeError, match=f"{kind.__name__} takes a likelihood of counts; StudentTLikelihood has"):
            kind(StudentTLikelihood())
        with pytest.raises(ValueError, match=r"counts 0, 1, 2, ...; got -2 at index 1"):
            kind(PoissonLikelihood()).log_prob(tensor(1, -2), torch.zeros(2))
    with pytest.raises(
        ValueError, match=r"row 2, of family 0 \(Truncated\): targets must be between 0 and 1; got 2. Move"
    ):
        MixedLikelihood([Truncated(StudentTLikelihood(), 0, 1), PoissonLikelihood()]).log_prob(
            tensor([0.5, 0], [1, 1], [2, 0]), torch.zeros(3)
        )
    for family, message in ((5, "family must be from 0 to 2; got 5"), (-1, "family must not be negative; got -1")):
        with pytest.raises(ValueError, match=message):
            mixed()(MultivariateNormal(torch.zeros(2), torch.eye(2)), family=family)
    with pytest.raises(ValueError, match=r"expected pairs \(lower, upper\)"):
        censored.log_prob(torch.zeros(3), torch.zeros(3))
    with pytest.raises(TypeError, match="the tails of Bernoulli are not known"):
        Censored(BernoulliLogitLikelihood()).log_prob(torch.tensor([[0.0, 1.0]]), torch.zeros(1))
    with pytest.raises(ValueError, match=r"row 4, of family 1 .*BernoulliLogit.* targets must be in"):
        mixed().log_prob(tensor(3, 1, 0.4, 0, 7, -2.0), torch.zeros(6))
    with pytest.raises(ValueError, match="families must be from 0 to 0; got 1 at index 1"):
        MixedLikelihood([PoissonLikelihood()], torch.tensor([0, 1]))
    with pytest.raises(NotImplementedError, match="name one"):
        mixed()(MultivariateNormal(torch.zeros(2), torch.eye(2)))
    assert np.isfinite(float(Weighted(PoissonLikelihood(), WEIGHTS).log_prob(y, torch.zeros(6)).sum()))


def test_the_noise_inside_has_a_floor():
    y = torch.stack([REAL, REAL], -1)
    y[0, 0], y[1, 1] = -torch.inf, torch.inf
    likelihood = Weighted(Censored(StudentTLikelihood().double()), WEIGHTS)
    model_of(likelihood, y)
    constraint = likelihood.likelihood.likelihood.raw_noise_constraint
    assert isinstance(constraint, gpext.likelihoods.NoiseFloor)


def test_langevin_draws_with_offsets():
    """A subset of the data keeps its offsets."""
    model = model_of(Offset(StudentTLikelihood().double(), OFFSETS), REAL)
    prior = gpytorch.priors.LogNormalPrior(0.0, 0.5)
    model.covar_module.register_prior("outputscale_prior", prior, "outputscale")
    draws = gpext.samplers.AugmentedSGLDSampler(model, step_size=0.1).run(3, 1, 2, progress=False)
    assert bool(draws.latent.isfinite().all())


def test_fitted_models_are_drawn_with_the_values_that_were_seen():
    for name, number in (("weighted", 6), ("offset", 6), ("censored", 1), ("weighted censored", 1), ("hurdle", 6)):
        likelihood, y = COMPOSED[name]()
        ax = gpext.plots.fitted(model_of(likelihood, y))
        drawn = [len(line.get_xdata()) for line in ax.get_lines()] + [len(c.get_offsets()) for c in ax.collections]
        assert number in drawn, name
