"""Likelihoods whose noise varies with the input: against quadrature over the log scale, at which f is Gaussian."""

import copy
import math
import pickle

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator

import gpext
from gpext.inference import EP, KL, Laplace, Status
from gpext.likelihoods import (
    HeteroscedasticGaussianLikelihood,
    HeteroscedasticStudentTLikelihood,
    StudentTLikelihood,
)
from gpext.likelihoods.curvature import diagonal_blocks
from gpext.quadrature import joint_expectation
from tests.members import F64
from tests.statistics import misfit

KINDS = [HeteroscedasticGaussianLikelihood, HeteroscedasticStudentTLikelihood]


def problem(n, *, scale=0.3, seed=0):
    """Means, covariances of the latents of each datum, and targets."""
    generator = torch.Generator().manual_seed(seed)
    y, mean = (torch.randn(*shape, n, generator=generator, dtype=F64) for shape in ((), (2,)))
    root = torch.randn(n, 2, 2, generator=generator, dtype=F64)
    V = scale * (root @ root.mT + 0.2 * torch.eye(2, dtype=F64))
    return 2 * y, mean, V.movedim(0, -1)


def plane(mean, covariance, log_factor, size=2001, reach=12.0):
    """Sums over a grid of (f, g) for one datum: log Z, the mean and the covariance."""
    L = torch.linalg.cholesky(covariance)
    line = torch.linspace(-reach, reach, size, dtype=F64)
    z = torch.cartesian_prod(line, line).mT
    f = mean.unsqueeze(-1) + L @ z
    log_weight = log_factor(f) - 0.5 * z.square().sum(0) + 2 * (line[1] - line[0]).log() - math.log(2 * math.pi)
    log_z = log_weight.logsumexp(0)
    weight = (log_weight - log_z).exp()
    m = f @ weight
    centred = f - m.unsqueeze(-1)
    return log_z, m, (weight * centred) @ centred.mT


def grid_evidence(mean, covariance, y, log_noise_mean, log_noise_covariance, points=141, reach=7.0):
    """log int N(y | mean, covariance + diag(e^{2g})) N(g) dg for two Gaussian data."""
    L = torch.linalg.cholesky(log_noise_covariance)
    line = torch.linspace(-reach, reach, points, dtype=F64)
    u = torch.cartesian_prod(line, line)
    g = log_noise_mean + u @ L.mT
    total = covariance + torch.diag_embed((2 * g).exp())
    log_p = torch.distributions.MultivariateNormal(mean, total).log_prob(y)
    return (log_p - 0.5 * u.square().sum(-1) + 2 * (line[1] - line[0]).log() - math.log(2 * math.pi)).logsumexp(0)


@pytest.mark.parametrize("kind", KINDS)
def test_curvature_is_the_hessian_and_its_bound_is_positive(kind):
    likelihood = kind().double()
    y, f, _ = problem(9)
    y[0], f[1, 1] = 300.0, -4.0
    at = likelihood.curvature(y, f)

    def log_prob(z):
        return likelihood.unchecked_log_prob(y, z).sum()

    hessian = torch.autograd.functional.hessian(log_prob, f)  # (2, 9, 2, 9)
    U = -hessian.diagonal(dim1=1, dim2=3)
    torch.testing.assert_close(at.gradient, torch.func.grad(log_prob)(f), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(at.blocks, U, rtol=1e-10, atol=1e-10)
    size = at.blocks.abs().amax((0, 1))
    assert bool((torch.linalg.eigvalsh(at.expected_blocks.movedim(-1, 0)).amin(-1) > 0).all())
    assert bool((torch.linalg.eigvalsh((at.expected_blocks - U).movedim(-1, 0)).amin(-1) > -1e-12 * size).all())


@pytest.mark.parametrize("kind", KINDS)
def test_expectations_are_those_of_a_lattice(kind):
    likelihood = kind().double()
    y, mean, V = problem(7, scale=0.1)
    variance = V.diagonal(dim1=0, dim2=1).mT
    expected = joint_expectation(lambda f: likelihood.unchecked_log_prob(y, f), mean, diagonal_blocks(variance))
    torch.testing.assert_close(likelihood.expected_log_density(y, mean, variance), expected, rtol=1e-6, atol=1e-6)
    correlated = joint_expectation(lambda f: likelihood.unchecked_log_prob(y, f), mean, V)
    torch.testing.assert_close(likelihood.joint_expected_log_density(y, mean, V), correlated, rtol=1e-6, atol=1e-6)


def test_the_expectation_of_a_student_t_holds_at_any_ratio_of_scales():
    """Nested integrals over g and, at its nodes, the one-dimensional rule of StudentTLikelihood."""
    likelihood, one = HeteroscedasticStudentTLikelihood().double(), StudentTLikelihood().double()
    likelihood.deg_free = one.deg_free = torch.tensor(3.5, dtype=F64)
    y = torch.tensor([0.0, 1.0, 1e4, 0.3], dtype=F64)
    mean = torch.tensor([[0.0, 0.5, 0.0, 0.2], [-6.0, 4.0, 0.0, 1.0]], dtype=F64)
    variance = torch.tensor([[1.0, 9.0, 1.0, 1e-6], [0.5, 2.0, 1.0, 1e-4]], dtype=F64)
    u = torch.linspace(-8, 8, 321, dtype=F64)
    values = []
    for step in u:
        g = mean[1] + variance[1].sqrt() * step
        one.noise = torch.ones(1, dtype=F64)
        scaled = one.expected_log_density(y * (-g).exp(), mean[0] * (-g).exp(), variance[0] * (-2 * g).exp()) - g
        values.append(scaled)
    expected = torch.softmax(-0.5 * u.square(), 0) @ torch.stack(values).detach()
    found = likelihood.expected_log_density(y, mean, variance).detach()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_expectations_have_the_derivatives_of_finite_differences(kind):
    likelihood = kind().double()
    y, mean, V = problem(3)
    variance = V.diagonal(dim1=0, dim2=1).mT.contiguous()
    arguments = [mean.requires_grad_(), variance.requires_grad_(), *likelihood.parameters()]

    def expected(m, v, *raw):
        parameters = dict(zip([name for name, _ in likelihood.named_parameters()], raw, strict=True))
        return torch.func.functional_call(_Call(likelihood, "expected_log_density"), _inside(parameters), (y, m, v))

    def density(m, v, *raw):
        parameters = dict(zip([name for name, _ in likelihood.named_parameters()], raw, strict=True))
        return torch.func.functional_call(_Call(likelihood, "log_density"), _inside(parameters), (y, m, v))

    assert torch.autograd.gradcheck(expected, arguments, rtol=1e-4, atol=1e-6)
    assert torch.autograd.gradcheck(density, arguments, rtol=1e-4, atol=1e-6)


class _Call(torch.nn.Module):
    def __init__(self, likelihood, method):
        super().__init__()
        self.likelihood, self.method = likelihood, method

    def forward(self, *arguments):
        return getattr(self.likelihood, self.method)(*arguments)


def _inside(parameters):
    return {f"likelihood.{name}": value for name, value in parameters.items()}


@pytest.mark.parametrize("power", [1.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_tilted_moments_are_those_of_a_grid(kind, power):
    likelihood = kind().double()
    y, mean, V = problem(4, scale=0.1)
    y, mean = mean[0] + 0.5 * y, mean * torch.tensor([[1.0], [0.2]], dtype=F64)  # no noise narrower than the grid
    found = likelihood.joint_tilted_moments(y, mean, V, power)
    for i in range(len(y)):
        log_z, m, cov = plane(mean[:, i], V[..., i], lambda f, i=i: power * likelihood.unchecked_log_prob(y[i], f))
        torch.testing.assert_close(found.log_normalizer[i], log_z, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(found.mean[:, i], m, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(found.covariance[..., i], cov, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outlier", [1e2, 1e6])
def test_tilted_moments_of_outliers_have_converged(kind, outlier):
    """The same with nodes three times as dense."""
    from dataclasses import replace

    from gpext.quadrature import location_scale_moments

    likelihood = kind().double()
    _, mean, V = problem(5)
    y = torch.full((5,), outlier, dtype=F64)
    noise = likelihood._noise(1.0)
    with torch.no_grad():
        found, finer = (location_scale_moments(y, mean, V, replace(noise, step=noise.step / k)) for k in (1, 3))
    sd = finer.covariance.diagonal(dim1=0, dim2=1).mT.sqrt()
    torch.testing.assert_close(found.log_normalizer, finer.log_normalizer, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found.mean / sd, finer.mean / sd, rtol=1e-6, atol=1e-6)
    ratio = found.covariance / (sd.unsqueeze(0) * sd.unsqueeze(1))
    torch.testing.assert_close(ratio, finer.covariance / (sd.unsqueeze(0) * sd.unsqueeze(1)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_overflows_leaves_the_other_data_alone(kind):
    likelihood = kind().double()
    y, mean, V = problem(8)
    alone = likelihood.joint_tilted_moments(y, mean, V, 1.0)
    mean = mean.clone()
    mean[1, 2] = 500.0  # e^{2g} is infinite
    found = likelihood.joint_tilted_moments(y, mean, V, 1.0)
    others = torch.arange(len(y)) != 2
    assert not found.log_normalizer[2].isfinite()
    torch.testing.assert_close(found.log_normalizer[others], alone.log_normalizer[others], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.mean[:, others], alone.mean[:, others], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("correlated", [False, True])
def test_predictions_are_a_distribution(kind, correlated):
    """The density is the derivative of the distribution function, and quantiles are its inverse."""
    from gpext.distributions import CompoundLocationScale

    likelihood = kind().double()
    _, mean, V = problem(6)
    if not correlated:
        V = diagonal_blocks(V.diagonal(dim1=0, dim2=1).mT)
    predicted = CompoundLocationScale(mean, V, likelihood.joint_log_density, likelihood._degrees)
    y = torch.linspace(-3, 3, 5, dtype=F64).unsqueeze(-1).expand(5, 6)
    with torch.no_grad():
        step = 1e-4
        slope = (predicted.cdf(y + step) - predicted.cdf(y - step)) / (2 * step)
        torch.testing.assert_close(slope, predicted.log_prob(y).exp(), rtol=1e-6, atol=1e-7)
        q = torch.tensor([[0.001], [0.3], [0.9]], dtype=F64)
        torch.testing.assert_close(predicted.cdf(predicted.quantile(q)), q.expand(3, 6), rtol=1e-8, atol=1e-10)
        draws = predicted.sample((20000,), generator=torch.Generator().manual_seed(0))
        share = (draws <= predicted.quantile(0.3)).to(F64)
        assert misfit(share, torch.full((6,), 0.3, dtype=F64), variance=torch.full((6,), 0.21, dtype=F64)) < 4.5
        at = (2 * (mean[1] + V[1, 1])).exp()  # E[e^{2g}]
        nu = likelihood.deg_free if likelihood._degrees is not None else torch.tensor(torch.inf)
        factor = 1.0 if nu.isinf() else nu / (nu - 2)
        torch.testing.assert_close(predicted.mean, mean[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(predicted.variance, V[0, 0] + factor * at, rtol=1e-7, atol=1e-9)
    assert predicted.expand(torch.Size([2, 6])).log_prob(y[:2]).shape == (2, 6)


def location_scale(mean, covariance, deg_free=None):
    from gpext.distributions import CompoundLocationScale

    return CompoundLocationScale(mean, covariance, lambda *_: torch.zeros(()), deg_free)


def dense_tail(y, mean, covariance, deg_free, upper):
    """P(Y > y) or P(Y <= y) of one datum by fine sums over g and the precision w of a Student-t."""
    (m_f, m_g), ((v_f, c), (_, v_g)) = mean.tolist(), covariance.tolist()
    u = torch.linspace(-16, 16, 2001, dtype=F64)
    g = m_g + math.sqrt(v_g) * u
    sign = 1.0 if upper else -1.0
    gap = sign * (m_f + c / v_g * (g - m_g) - y)
    weight, variance = torch.softmax(-0.5 * u.square(), 0), (2 * g).exp()
    if deg_free is not None:
        t, a = torch.linspace(-120 / deg_free, 6, 1201, dtype=F64), 0.5 * deg_free
        weight = weight.unsqueeze(-1) * torch.softmax(a * (t - t.exp()), 0)
        gap, variance = gap.unsqueeze(-1), variance.unsqueeze(-1) * (-t).exp()
    return (weight * torch.special.ndtr(gap * (v_f - c**2 / v_g + variance).rsqrt())).sum()


@pytest.mark.parametrize("deg_free", [None, 2.1, 7.0, 80.0])
@pytest.mark.parametrize(("spread", "correlation"), [(0.05, 0.99), (0.5, 0.0), (0.5, -0.97), (1.5, 0.6)])
def test_quantiles_of_one_datum_to_1e_10_of_the_smaller_tail(deg_free, spread, correlation):
    mean = torch.tensor([[1.3], [-0.8]], dtype=F64)
    covariance = torch.tensor([[1.0, correlation * spread], [correlation * spread, spread**2]], dtype=F64)
    predicted = location_scale(
        mean, covariance.unsqueeze(-1), None if deg_free is None else torch.tensor(deg_free, dtype=F64)
    )
    levels = torch.tensor([1e-9, 0.05, 0.5, 0.9, 1 - 1e-6], dtype=F64)
    for q, y in zip(levels, predicted.icdf(levels.unsqueeze(-1)).squeeze(-1), strict=True):
        upper = bool(q > 0.5)
        tail = dense_tail(y, mean.squeeze(-1), covariance, deg_free, upper)
        torch.testing.assert_close(tail, 1 - q if upper else q, rtol=1e-10, atol=0)
        torch.testing.assert_close(predicted.cdf(y).squeeze(), q, rtol=1e-10, atol=3e-13)


def test_quantiles_are_those_of_a_student_t_where_the_latents_are_known():
    """At any level, and about a mean of 1e5 as about zero."""
    from scipy import stats

    levels = torch.tensor([[1e-30], [1e-12], [1e-4], [0.3], [0.5], [0.999]], dtype=F64)
    mean = torch.tensor([[0.0, 1e5], [0.2, -2.0]], dtype=F64)
    for deg_free in (0.7, 3.0, 40.0):
        predicted = location_scale(mean, torch.zeros(2, 2, 2, dtype=F64), torch.tensor(deg_free, dtype=F64))
        exact = torch.from_numpy(stats.t.ppf(levels.numpy(), deg_free, scale=mean[1].exp().numpy()))
        torch.testing.assert_close(predicted.icdf(levels) - mean[0], exact, rtol=1e-9, atol=1e-10)


def test_quantiles_of_batches_and_expansions_are_those_of_each_datum():
    _, mean, V = problem(6)
    for deg_free in (None, torch.tensor(4.0)):
        predicted = location_scale(mean, V, deg_free)
        levels = torch.tensor([[0.1], [0.5], [0.97]], dtype=F64)
        whole = predicted.icdf(levels)
        assert whole.shape == (3, 6)
        alone = [location_scale(mean[:, i : i + 1], V[..., i : i + 1], deg_free).icdf(levels) for i in range(6)]
        torch.testing.assert_close(whole, torch.cat(alone, -1), rtol=1e-9, atol=1e-9)
        batch = location_scale(mean.expand(3, 2, 6), V.expand(3, 2, 2, 6), deg_free)
        torch.testing.assert_close(batch.icdf(levels), whole, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(predicted.expand(torch.Size([3, 6])).quantile(levels), whole, rtol=1e-9, atol=1e-9)
        one = location_scale(mean[:, :1], V[..., :1], deg_free).icdf(levels.squeeze(-1))
        torch.testing.assert_close(one, whole[:, 0], rtol=1e-9, atol=1e-9)
        single = location_scale(mean.float(), V.float(), deg_free).icdf(levels)
        torch.testing.assert_close(single, whole.float(), rtol=1e-5, atol=1e-5)
        assert location_scale(mean[:, :0], V[..., :0], deg_free).icdf(0.5).shape == (0,)
        with pytest.raises(ValueError, match="between 0 and 1"):
            predicted.icdf(1.0)


def latents(n, *, noise_scale=0.4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.rand(n, generator=generator, dtype=F64)
    gram = torch.exp(-0.5 * (x.unsqueeze(-1) - x).square()) + 1e-9 * torch.eye(n, dtype=F64)
    K = torch.stack([1.3 * gram, noise_scale * gram])
    mean = torch.stack([torch.full((n,), 0.2, dtype=F64), torch.full((n,), -0.5, dtype=F64)])
    y = 1.5 * torch.randn(n, generator=generator, dtype=F64)
    return mean, K, y


def prior_of(mean, K):
    return MultivariateNormal(mean, to_linear_operator(K))


def test_evidences_of_two_gaussian_data_surround_the_exact_one():
    mean, K, y = latents(2)
    exact = grid_evidence(mean[0], K[0], y, mean[1], K[1])
    found = {
        rule: rule.infer(prior_of(mean, K), HeteroscedasticGaussianLikelihood(), y) for rule in (KL(), EP(), Laplace())
    }
    assert all(result.status is Status.CONVERGED for result in found.values())
    kl, ep, laplace = (result.log_evidence for result in found.values())
    assert kl < exact
    assert abs(ep - exact) < 0.05
    assert abs(ep - exact) < abs(kl - exact)
    assert abs(laplace - exact) < 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_ep_is_exact_for_one_datum(kind):
    """With one datum the cavity is the prior: at power 1 marginals and evidence are exact."""
    mean, K, y = latents(1)
    likelihood = kind().double()
    result = EP(tolerance=1e-10).infer(prior_of(mean, K), likelihood, y)
    assert result.status is Status.CONVERGED
    V = torch.diag(K[:, 0, 0])
    log_z, m, cov = plane(mean[:, 0], V, lambda f: likelihood.unchecked_log_prob(y[0], f))
    torch.testing.assert_close(result.log_evidence.detach(), log_z, rtol=0, atol=1e-6)
    torch.testing.assert_close(result.conditioned.mean[:, 0], m, rtol=0, atol=1e-6)
    torch.testing.assert_close(result.conditioned.blocks[..., 0], cov, rtol=0, atol=1e-6)


def test_constant_noise_is_the_likelihood_without_its_latent():
    """Where g hardly varies, the likelihood is Gaussian with standard deviation e^g."""
    mean, K, y = latents(8, noise_scale=1e-10)
    noise = math.exp(2 * -0.5)
    exact = MultivariateNormal(mean[0], to_linear_operator(K[0] + noise * torch.eye(8, dtype=F64))).log_prob(y)
    for rule in (KL(), EP(), Laplace()):
        result = rule.infer(prior_of(mean, K), HeteroscedasticGaussianLikelihood(), y)
        torch.testing.assert_close(result.log_evidence.detach(), exact, rtol=1e-7, atol=1e-7)


def test_many_degrees_of_freedom_are_gaussian():
    mean, K, y = latents(8)
    student = HeteroscedasticStudentTLikelihood().double()
    student.deg_free = 1e7
    for rule in (KL(), EP(), Laplace()):
        two = [rule.infer(prior_of(mean, K), kind, y) for kind in (student, HeteroscedasticGaussianLikelihood())]
        torch.testing.assert_close(two[0].log_evidence, two[1].log_evidence, rtol=1e-4, atol=1e-3)


class Noisy(gpext.models.LatentGP):
    def __init__(self, x, y, likelihood, rule, **options):
        super().__init__(x, y, likelihood, rule, **options)
        two = torch.Size([2])
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=two)
        kernel = gpytorch.kernels.RBFKernel(batch_shape=two)
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel, batch_shape=two)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def growing_noise(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.linspace(0, 1, n, dtype=F64)
    sd = 0.05 + 0.6 * x
    return x, torch.sin(6 * x) + sd * torch.randn(n, generator=generator, dtype=F64), sd


@pytest.mark.parametrize("rule", [KL(), EP(), Laplace()], ids=["kl", "ep", "laplace"])
def test_a_model_learns_that_noise_grows(rule):
    x, y, _ = growing_noise(60)
    model = Noisy(x, y, HeteroscedasticGaussianLikelihood(), rule).double()
    mll = gpext.mlls.LatentMarginalLogLikelihood(model.likelihood, model)
    result = gpext.fit(mll, x, y, progress=False)
    assert math.isfinite(result.objective)
    with torch.no_grad():
        latent = model.eval()(x)
        predicted = model.likelihood(latent)
        spread = predicted.variance.sqrt()
    assert spread[-5:].mean() > 3 * spread[:5].mean()
    low, high = predicted.quantile(torch.tensor([[0.05], [0.95]], dtype=F64))
    assert 0.75 <= ((y > low) & (y < high)).to(F64).mean() <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_sparse_prior_with_all_inputs_is_the_dense_one(kind):
    x, y, _ = growing_noise(12)
    for rule in (KL(), EP(), Laplace()):
        dense = Noisy(x, y, kind(), rule).double()
        sparse = Noisy(x, y, kind(), rule, inducing_inputs=x.unsqueeze(-1)).double()
        evidence = [model.variational_strategy.infer(model.train()(x), y).log_evidence for model in (dense, sparse)]
        torch.testing.assert_close(evidence[1], evidence[0], rtol=1e-3, atol=1e-3)  # jitter of the sparse one


@pytest.mark.parametrize("kind", KINDS)
def test_natural_gradients_reach_the_optimum_of_kl(kind):
    """With an inducing point at every input, q(u) is q(f), and steps of length one end where KL does."""
    x, y, _ = growing_noise(15)
    full = Noisy(x, y, kind(), KL(tolerance=1e-9)).double()
    with torch.no_grad():
        evidence = full.variational_strategy.infer(full.train()(x), y).log_evidence

    class Sparse(gpytorch.models.ApproximateGP):
        def __init__(self):
            strategy = gpext.variational.SiteVariationalStrategy(
                self, x.view(1, -1, 1).repeat(2, 1, 1), jitter_val=1e-9
            )
            super().__init__(strategy)
            self.mean_module, self.covar_module = full.mean_module, full.covar_module

        forward = Noisy.forward

    sparse = Sparse().double()
    likelihood = full.likelihood
    for _ in range(60):
        value = sparse.variational_strategy.update(x.unsqueeze(-1), y, likelihood, gradient="exact")
    torch.testing.assert_close(15 * value, evidence, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_bad_input_and_extremes(kind):
    likelihood = kind().double()
    mean, K, y = latents(5)
    with pytest.raises(ValueError, match=r"num_latents = 2: expected a prior of batch shape \(\.\.\., 2\)"):
        KL().infer(prior_of(mean[0], K[0]), likelihood, y)
    with pytest.raises(ValueError, match="index 3"):
        KL().infer(prior_of(mean, K), likelihood, torch.where(torch.arange(5) == 3, torch.nan, y))
    y = y.clone()
    y[2] = 1e6
    for rule in (KL(), EP(), Laplace()):
        result = rule.infer(prior_of(mean, K), likelihood, y)
        assert result.log_evidence.isfinite() or result.status is not Status.CONVERGED
    twice = pickle.loads(pickle.dumps(copy.deepcopy(likelihood)))
    torch.testing.assert_close(twice.log_prob(y, mean), likelihood.log_prob(y, mean))


def test_degrees_of_freedom_have_a_constraint_and_a_prior():
    likelihood = HeteroscedasticStudentTLikelihood(deg_free_prior=gpytorch.priors.GammaPrior(2.0, 0.1))
    likelihood.deg_free = 5.0
    assert likelihood.deg_free.item() == pytest.approx(5.0)
    assert [name for name, *_ in likelihood.named_priors()] == ["deg_free_prior"]
    with pytest.raises(TypeError, match="gpytorch constraint"):
        HeteroscedasticStudentTLikelihood(deg_free_constraint=3)


def test_float32_agrees_with_float64():
    mean, K, y = latents(10)
    for kind in KINDS:
        double = KL().infer(prior_of(mean, K), kind().double(), y)
        single = KL().infer(prior_of(mean.float(), K.float()), kind(), y.float())
        assert single.log_evidence.dtype == torch.float32
        torch.testing.assert_close(single.log_evidence.double(), double.log_evidence, rtol=1e-4, atol=1e-4)
