"""Expectation propagation: exact where it must be, equal to a plain sequential version, and stable on hard data."""

import math

import gpytorch
import pytest
import torch
from gpytorch.constraints import Positive
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator

from benchmarks.ep_map import grid
from benchmarks.ep_problems import EXAMPLES, random_problem
from gpext.bounds import conditional_log_prob
from gpext.inference import EP, KL, InferenceResult, Laplace, Status
from gpext.inference.ep_internals.levenberg_marquardt import (
    levenberg_marquardt,
    moved_sites,
    normal_equations,
    stacked_residual,
)
from gpext.inference.ep_internals.moment_matching import match
from gpext.inference.ep_internals.stages import Search
from gpext.inference.problem import Problem
from gpext.likelihoods import (
    BernoulliLogitLikelihood,
    LaplaceLikelihood,
    StickBreakingLikelihood,
    StudentTLikelihood,
)
from gpext.likelihoods.tilted_moments import tilt
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.models import LatentGP
from gpext.sites import GaussianSites
from tests.latent_cases import CASES
from tests.members import F64
from tests.seeds import as_written


def gaussian(covariance, mean=0.0):
    return MultivariateNormal(torch.full(covariance.shape[:-1], mean, dtype=F64), to_linear_operator(covariance))


def smooth(x, lengthscale, magnitude):
    distance = torch.cdist(x, x) / lengthscale
    return magnitude**2 * (torch.exp(-0.5 * distance.square()) + 1e-8 * torch.eye(len(x), dtype=F64))


def student_t(deg_free, scale):
    likelihood = StudentTLikelihood(deg_free_constraint=Positive()).double()
    likelihood.initialize(deg_free=torch.tensor(deg_free, dtype=F64), noise=torch.tensor(scale**2, dtype=F64))
    return likelihood


@pytest.mark.parametrize("power", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("damping", [1.0, 0.8, 0.1])
def test_is_exact_for_a_gaussian_likelihood(power, damping):
    likelihood, prior, y = CASES["stock_gaussian"].problem(30)
    p = prior()
    result = EP(power=power, damping=damping, tolerance=1e-10).infer(p, likelihood, y)
    assert result.status is Status.CONVERGED
    if damping == 1.0:
        assert result.num_steps == 1
    K, noise = p.covariance_matrix.detach(), likelihood.noise.detach()
    total = K + noise * torch.eye(30, dtype=F64)
    exact = torch.distributions.MultivariateNormal(p.mean.detach(), total).log_prob(y)
    torch.testing.assert_close(result.log_evidence.detach(), exact, rtol=0, atol=1e-9)
    V = K - K @ torch.linalg.solve(total, K)
    m = p.mean.detach() + K @ torch.linalg.solve(total, y - p.mean.detach())
    torch.testing.assert_close(result.posterior.mean, m, rtol=0, atol=1e-9)
    torch.testing.assert_close(result.posterior.covariance_matrix, V, rtol=0, atol=1e-9)


def sequential(p, likelihood, y, power, sweeps=200):
    """EP site by site, with a new posterior after each and moments on a dense grid: log Z, means, variances."""
    K, mu = p.covariance_matrix.detach(), p.mean.detach()
    n = len(y)
    precision, linear = torch.linalg.inv(K), torch.linalg.solve(K, mu)
    tau, nu, log_z = (torch.zeros(n, dtype=F64) for _ in range(3))
    u = torch.linspace(-12, 12, 6001, dtype=F64)
    for _ in range(sweeps):
        old = tau.clone()
        for i in range(n):
            V = torch.linalg.inv(precision + tau.diag())
            m = V @ (linear + nu)
            r, b = 1 / V[i, i] - power * tau[i], m[i] / V[i, i] - power * nu[i]
            f = b / r + u / r.sqrt()
            with torch.no_grad():
                log_p = power * conditional_log_prob(likelihood, y[i : i + 1], f.unsqueeze(-1)).squeeze(-1)
            weight = torch.exp(log_p - 0.5 * u.square()) * (u[1] - u[0]) / math.sqrt(2 * math.pi)
            total = weight.sum()
            mean = (weight * f).sum() / total
            variance = (weight * (f - mean).square()).sum() / total
            tau[i] += 0.7 * (1 / variance - 1 / V[i, i]) / power
            nu[i] += 0.7 * (mean / variance - m[i] / V[i, i]) / power
            s, c = r + power * tau[i], b + power * nu[i]
            log_z[i] = (total.log() + 0.5 * (s / r).log() + b**2 / (2 * r) - c**2 / (2 * s)) / power
        if float((tau - old).abs().max()) < 1e-11:
            break
    V = torch.linalg.inv(precision + tau.diag())
    m = V @ (linear + nu)
    normalizer = 0.5 * ((linear + nu) @ m - linear @ mu) - 0.5 * torch.logdet(torch.eye(n, dtype=F64) + K * tau)
    return log_z.sum() + normalizer, m, V.diagonal()


@pytest.mark.parametrize("power", [1.0, 0.6])
@pytest.mark.parametrize("name", ["bernoulli_logit", "stock_bernoulli", "student_t", "laplace"])
def test_agrees_with_plain_sequential_ep(name, power):
    likelihood, prior, y = CASES[name].problem(12)
    p = prior()
    evidence, mean, variance = sequential(p, likelihood, y, power)
    result = EP(power=power, tolerance=1e-9).infer(p, likelihood, y)
    # the grid has a kink of the Laplace density between its nodes
    tolerance = 1e-4 if name == "laplace" else 1e-6
    torch.testing.assert_close(result.log_evidence.detach(), evidence, rtol=0, atol=tolerance)
    torch.testing.assert_close(result.posterior.mean, mean, rtol=0, atol=tolerance)
    torch.testing.assert_close(result.posterior.variance, variance, rtol=tolerance, atol=0)


@pytest.mark.parametrize("power", [1.0, 0.4])
def test_the_normal_equations_agree_with_finite_differences(power):
    x = torch.linspace(0, 3, 6, dtype=F64).unsqueeze(-1)
    y = torch.tensor([0.3, -0.1, 4.0, 0.5, 0.2, -0.4], dtype=F64)
    likelihood = student_t(3.0, 0.4)
    problem = Problem.of(gaussian(smooth(x, 1.0, 1.5), 0.3), likelihood, y, 0.0)
    moments = tilt(likelihood, y, power)
    precision = torch.tensor([0.4, 0.3, -0.05, 0.2, 0.5, 0.1], dtype=F64)
    current = match(problem, moments, power, GaussianSites(0.3 * y, precision))
    columns = []
    for j in range(12):
        z = torch.zeros(12, dtype=F64)
        z[j] = 1e-5
        ahead, behind = (stacked_residual(match(problem, moments, power, moved_sites(current, s * z))) for s in (1, -1))
        columns.append((ahead - behind) / 2e-5)
    jacobian = torch.stack(columns, -1)
    gram, gradient = normal_equations(current)
    torch.testing.assert_close(gram, jacobian.mT @ jacobian, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(gradient, jacobian.mT @ stacked_residual(current), rtol=1e-7, atol=1e-8)


@as_written()
def hard_problem(seed):
    """Student-t noise down to 1e-3 of the signal, and up to 40 % outliers."""
    generator = torch.Generator().manual_seed(seed)

    def between(low, high):
        return low + (high - low) * torch.rand((), generator=generator, dtype=F64).item()

    n, scale = int(20 + 60 * between(0, 1)), 10 ** between(-3, 0)
    x = 3 * torch.rand(n, 1 + seed % 3, generator=generator, dtype=F64)
    K = smooth(x, 10 ** between(-1, 0.5), 1.0)
    f = torch.linalg.cholesky(K) @ torch.randn(n, generator=generator, dtype=F64)
    y = f + scale * torch.randn(n, generator=generator, dtype=F64)
    far = torch.rand(n, generator=generator, dtype=F64) < between(0, 0.4)
    y = torch.where(far, y + 3 * torch.randn(n, generator=generator, dtype=F64), y)
    return gaussian(K), student_t(20 ** between(0, 1), scale), y


@pytest.mark.slow
def test_hard_problems_end_matched_at_the_power_they_name():
    statuses = []
    for seed in range(40):
        p, likelihood, y = hard_problem(seed)
        with torch.no_grad():
            result = EP().infer(p, likelihood, y)
        assert bool(result.log_evidence.isfinite()), seed
        power = float(result.message.split("power=")[1].split(")")[0])
        statuses.append(result.status)
        if result.status in (Status.CONVERGED, Status.REDUCED_POWER):
            problem = Problem.of(p, likelihood, y, 0.0)
            again = match(problem, tilt(likelihood, y, power), power, result.sites)
            assert float(again.size) < 2e-6, (seed, result.message)
    converged = statuses.count(Status.CONVERGED)
    assert converged >= 33  # most others have no fixed point with proper cavities at power 1
    assert converged + statuses.count(Status.REDUCED_POWER) == 40


def test_second_order_steps_converge_quadratically():
    p, likelihood, y = hard_problem(3)
    problem = Problem.of(p, likelihood, y, 0.0)
    exact = EP(tolerance=1e-10).infer(p, likelihood, y)
    generator = torch.Generator().manual_seed(0)
    noise = 1 + 0.02 * torch.randn(len(y), generator=generator, dtype=F64)

    def at(sites):
        return match(problem, tilt(likelihood, y, 1.0), 1.0, sites)

    near = at(GaussianSites(exact.sites.shift * noise, exact.sites.precision * noise))
    found, steps = levenberg_marquardt(at, near, max_steps=12, patience=12, tolerance=1e-9)
    assert float(found.size) < 1e-9
    assert len(steps) <= 8


BAD = {
    "one datum": ([[0.0]], [0.7]),
    "a datum at 1e8": ([[0.0], [1.0], [2.0]], [0.1, 1e8, -0.2]),
    "two that disagree": ([[0.0], [0.0], [1.0]], [3.0, -3.0, 0.0]),
    "constant": ([[0.0], [1.0], [2.0], [3.0]], [5.0, 5.0, 5.0, 5.0]),
    "all outliers": ([[0.0], [0.1], [0.2], [0.3]], [9.0, -8.0, 7.0, -9.5]),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("deg_free", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bad_data_end_in_something_finite(name, deg_free, dtype):
    x, y = (torch.tensor(values, dtype=F64) for values in BAD[name])
    likelihood = student_t(deg_free, 0.1).to(dtype)
    p = MultivariateNormal(torch.zeros(len(y), dtype=dtype), to_linear_operator(smooth(x, 1.0, 1.0).to(dtype)))
    result = EP().infer(p, likelihood, y.to(dtype))
    assert isinstance(result, InferenceResult)
    assert result.status in (Status.CONVERGED, Status.REDUCED_POWER), result.message
    assert bool(result.log_evidence.isfinite())
    assert bool(result.posterior.mean.isfinite().all())
    assert bool((result.posterior.variance > 0).all())


def test_a_batch_decides_for_each_posterior_alone():
    likelihood, prior, y = CASES["student_t"].problem(15)
    ys = torch.stack([y, 30 * y, torch.zeros_like(y)])
    together = EP().infer(prior(), likelihood, ys)
    assert together.status is Status.CONVERGED
    for i in range(3):
        alone = EP().infer(prior(), likelihood, ys[i])
        torch.testing.assert_close(together.log_evidence[i], alone.log_evidence, rtol=1e-6, atol=1e-6)


def test_a_warm_start_takes_fewer_steps_to_the_same_place():
    likelihood, prior, y = CASES["student_t"].problem(30)
    cold = EP().infer(prior(), likelihood, y)
    warm = EP().infer(prior(), likelihood, y, start=cold.sites)
    assert warm.num_steps < cold.num_steps
    torch.testing.assert_close(warm.log_evidence, cold.log_evidence, rtol=1e-8, atol=1e-7)


def at_neighbours():
    """Two neighbouring settings of the hard example's map."""
    settings = {(i, j): (a, b) for i, j, a, b in grid(EXAMPLES[2], "near", 40)}
    return [EXAMPLES[2].problem(*settings[place]) for place in ((20, 20), (20, 21))]


@as_written()
@torch.no_grad()
def test_a_result_at_other_hyperparameters_is_followed_by_newton_steps():
    first, second = at_neighbours()
    begun = EP().infer(first.prior, first.likelihood, first.targets)
    cold = EP(tolerance=1e-9).infer(second.prior, second.likelihood, second.targets)
    warm = EP(tolerance=1e-9).infer(second.prior, second.likelihood, second.targets, start=begun)
    assert warm.status is Status.CONVERGED
    assert "from an earlier result" in warm.message
    assert "sweeps" not in warm.message
    assert warm.num_steps <= 12 < cold.num_steps
    torch.testing.assert_close(warm.log_evidence, cold.log_evidence, rtol=1e-8, atol=1e-7)
    by_sites = EP(tolerance=1e-9).infer(second.prior, second.likelihood, second.targets, start=begun.sites)
    torch.testing.assert_close(by_sites.log_evidence, cold.log_evidence, rtol=1e-8, atol=1e-7)


@as_written()
@torch.no_grad()
def test_a_result_that_leads_nowhere_is_left_for_a_cold_start():
    first, second = at_neighbours()
    far = EP().infer(first.prior, first.likelihood, 10 * first.targets)
    cold = EP().infer(second.prior, second.likelihood, second.targets)
    warm = EP().infer(second.prior, second.likelihood, second.targets, start=far)
    assert warm.status is Status.CONVERGED
    torch.testing.assert_close(warm.log_evidence, cold.log_evidence, rtol=1e-6, atol=1e-5)
    stopped = EP(max_steps=4).infer(second.prior, second.likelihood, second.targets, start=far)
    assert stopped.status is Status.MAX_STEPS
    assert stopped.num_steps <= 4
    assert bool(stopped.log_evidence.isfinite())


@torch.no_grad()
def test_a_batch_begins_at_the_sites_of_an_earlier_result():
    likelihood, prior, y = CASES["student_t"].problem(15)
    ys = torch.stack([y, torch.zeros_like(y)])
    cold = EP().infer(prior(), likelihood, ys)
    warm = EP().infer(prior(), likelihood, ys, start=cold)
    assert warm.num_steps < cold.num_steps
    torch.testing.assert_close(warm.log_evidence, cold.log_evidence, rtol=1e-8, atol=1e-7)


def test_errors_say_what_to_do():
    likelihood, prior, y = CASES["bernoulli_logit"].problem(5)
    for bad in (0.0, -1.0, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"power must be in \(0, 1\]"):
            EP(power=bad)
        with pytest.raises(ValueError, match=r"damping must be in \(0, 1\]"):
            EP(damping=bad)
    with pytest.raises(ValueError, match="shape"):
        EP().infer(prior(), likelihood, y[:-1])
    with pytest.raises(TypeError, match=r"joint_tilted_moments.*StickBreakingLikelihood has none.*KL"):
        EP().infer(CASES["stick_breaking"].problem(5)[1](), StickBreakingLikelihood(3), torch.zeros(5))


def test_stopping_early_is_said():
    likelihood, prior, y = CASES["student_t"].problem(15)
    result = EP(max_steps=2).infer(prior(), likelihood, y)
    assert result.status is Status.MAX_STEPS
    assert bool(result.log_evidence.isfinite())


@pytest.mark.parametrize("make", [lambda: BernoulliLogitLikelihood(), lambda: LaplaceLikelihood().double()])
def test_works_under_a_latent_gp(make):
    likelihood = make()
    x = torch.linspace(0, 1, 12, dtype=F64).unsqueeze(-1)

    class Model(LatentGP):
        def __init__(self):
            super().__init__(x, (x.squeeze(-1) > 0.4).to(F64), likelihood, EP())
            self.mean_module = gpytorch.means.ZeroMean()
            self.covar_module = gpytorch.kernels.RBFKernel().double()

        def forward(self, inputs):
            return MultivariateNormal(self.mean_module(inputs), self.covar_module(inputs))

    model = Model()
    mll = LatentMarginalLogLikelihood(likelihood, model)
    loss = -mll(model(x), model.train_targets)
    loss.backward()
    assert bool(model.covar_module.raw_lengthscale.grad.isfinite().all())
    assert bool((likelihood(model.eval()(x)).mean.diff() > -1e-6).any())


@pytest.mark.parametrize("name", ["noise", "deg_free"])
@pytest.mark.parametrize("rule", [EP(), KL(), Laplace()])
def test_degenerate_parameters_are_refused(name, rule):
    likelihood = StudentTLikelihood(deg_free_constraint=Positive()).double()
    with pytest.raises(RuntimeError, match="out of bounds"):
        setattr(likelihood, name, torch.tensor(-1.0, dtype=F64))
    setattr(likelihood, name, torch.tensor(0.0, dtype=F64))
    with pytest.raises(ValueError, match=rf"{name} of StudentTLikelihood must be positive and finite; got \[0.0\]"):
        rule.infer(gaussian(torch.eye(3, dtype=F64)), likelihood, torch.tensor([0.0, 1.0, 5.0], dtype=F64))


@as_written()
def test_next_to_an_optimum_of_kl_there_is_a_solution_at_a_small_power():
    problem = random_problem("hard", 286)
    search = Search(Problem.of(problem.prior, problem.likelihood, problem.targets, 0.0), 1.0, 0.8, 1000, 1e-6)
    with torch.no_grad():
        assert not search.has_converged(search._by_bound(0.1))
        found = search._by_bound(0.002)
    assert search.has_converged(found)
    assert found.power == 0.002
    assert "second-order steps at power 0.002" in search.name(found)


def test_the_norm_over_the_data_is_the_one_asked_for():
    """At the end of a rough run the root mean square is below the tolerance, and it takes no more steps."""
    x = torch.linspace(-3, 3, 200, dtype=F64)
    y = (x > 0).to(F64)
    y[20] = 1  # one that the others contradict
    prior = gaussian(smooth(x.unsqueeze(-1), 0.3, 10.0))
    likelihood = BernoulliLogitLikelihood().double()
    problem, moments = Problem.of(prior, likelihood, y, 0.0), tilt(likelihood, y, 1.0)
    steps = {}
    for norm in ("max", "rms"):
        result = EP(tolerance=1e-3, norm=norm).infer(prior, likelihood, y)
        assert result.status is Status.CONVERGED
        steps[norm] = result.num_steps
        assert bool(match(problem, moments, 1.0, result.conditioned.sites, norm).size < 1e-3)
    assert steps["rms"] < steps["max"]
    assert bool(match(problem, moments, 1.0, result.conditioned.sites).size > 1e-3)
    with pytest.raises(ValueError, match="norm must be 'max' or 'rms'; got 'mean'"):
        EP(norm="mean")
