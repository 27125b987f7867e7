"""Laws of the rules of inference, for every pair of a rule and a likelihood that it supports."""

from dataclasses import replace

import pytest
import scipy.optimize
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import to_linear_operator

from gpext.bounds import PiecewiseQuadratic, Quadrature
from gpext.inference import KL, Laplace, Status, Taylor
from gpext.likelihoods import BernoulliLogitLikelihood
from gpext.sites import BlockSites, GaussianSites, JointSites
from tests.latent_cases import CASES, PAIRS, RULES
from tests.members import F64

KL_CASES = [name for name, case in CASES.items() if "kl" in case.rules]
pytestmark = pytest.mark.filterwarnings("ignore::gpext.inference.DenseBlocksWarning")
pairs = pytest.mark.parametrize(("name", "rule"), PAIRS)


def mean(result):
    """The posterior mean, latents first: where they are coupled gpytorch has them last."""
    coupled = isinstance(result.posterior, MultitaskMultivariateNormal)
    return result.posterior.mean.mT if coupled else result.posterior.mean


def precision(sites):
    """The precision of the sites in the order of the posterior: diagonal, or of all latents of all data."""
    if isinstance(sites, GaussianSites):
        return torch.diag_embed(sites.precision)
    if isinstance(sites, BlockSites):
        blocks = sites.precision
    else:
        w = sites.direction
        blocks = torch.diag_embed(sites.precision.mT).permute(1, 2, 0) + sites.coupling * w.unsqueeze(0) * w.unsqueeze(
            1
        )
    return torch.diag_embed(blocks).transpose(1, 2).flatten(2, 3).flatten(0, 1)  # latent by latent


@pairs
def test_converges_to_a_finite_result_of_the_right_shapes(name, rule):
    case = CASES[name]
    likelihood, prior, y = case.problem(15)
    result = RULES[rule].infer(prior(), likelihood, y)
    assert result.status is Status.CONVERGED, result.message
    latents = () if case.num_latents is None else (case.num_latents,)
    assert mean(result).shape == (*latents, 15) == result.sites.shift.shape
    assert result.log_evidence.shape == ()
    assert result.log_loo.shape == (15,)
    for value in (mean(result), result.posterior.variance, result.log_evidence, result.log_loo, result.trace):
        assert bool(value.isfinite().all())
    assert bool((result.posterior.variance > 0).all())


@pairs
def test_the_posterior_is_the_prior_times_the_sites(name, rule):
    likelihood, prior, y = CASES[name].problem(12)
    p = prior()
    result = RULES[rule].infer(p, likelihood, y)
    K, mu = p.covariance_matrix.detach(), p.mean.detach()
    if isinstance(result.sites, JointSites):
        K, mu = torch.block_diag(*K), mu.flatten()
    shift = result.sites.shift.reshape(mu.shape)
    V = torch.linalg.inv(torch.linalg.inv(K) + precision(result.sites))
    m = (V @ (shift.unsqueeze(-1) + torch.linalg.solve(K, mu.unsqueeze(-1)))).squeeze(-1)
    torch.testing.assert_close(mean(result), m.reshape(mean(result).shape), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result.posterior.covariance_matrix, V, rtol=1e-6, atol=1e-6)


@pairs
def test_evidence_gradient_agrees_with_finite_differences_of_converged_runs(name, rule):
    likelihood, prior, y = CASES[name].problem(12)
    trained = [p for p in likelihood.parameters() if p.requires_grad]
    parameters = [prior.log_kernel, prior.mean, *trained]
    RULES[rule].infer(prior(), likelihood, y).log_evidence.backward()
    for parameter in parameters:
        assert parameter.grad is not None
        flat, gradient = parameter.data.view(-1), parameter.grad.reshape(-1)
        for i in range(len(flat)):
            values, start, step = [], flat[i].item(), 1e-4
            for offset in (-2, -1, 1, 2):
                flat[i] = start + offset * step
                values.append(RULES[rule].infer(prior(), likelihood, y).log_evidence.item())
            flat[i] = start
            difference = (8 * (values[2] - values[1]) - (values[3] - values[0])) / (12 * step)
            assert gradient[i].item() == pytest.approx(difference, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("name", "rule"), [pair for pair in PAIRS if pair[1] in ("kl", "cavi", "ep")])
@pytest.mark.parametrize("tolerance", [1e-2, 1e-3])
def test_the_evidence_at_stationary_sites_errs_by_the_square_of_the_tolerance(name, rule, tolerance):
    likelihood, prior, y = CASES[name].problem(20)
    exact = RULES[rule].infer(prior(), likelihood, y).log_evidence
    rough = replace(RULES[rule], tolerance=tolerance).infer(prior(), likelihood, y).log_evidence
    assert abs(float((rough - exact).detach())) < 10 * tolerance**2 * len(prior.x)


def maximised_bound(case, prior, likelihood, y):
    """The evidence lower bound maximised over a mean and a full Cholesky factor, by L-BFGS."""
    bound = Quadrature().bind(likelihood, y)
    K, mu = prior.covariance_matrix.detach(), prior.mean.detach()
    n = K.size(-1)
    L = torch.linalg.cholesky(K)
    lower = torch.ones(n, n).tril().bool()
    batch = mu.shape[:-1]

    def loss(theta, gradient):
        theta = torch.from_numpy(theta).requires_grad_()
        whitened, flat = theta[: mu.numel()].view(mu.shape), theta[mu.numel() :].view(*batch, -1)
        factor = torch.zeros(*batch, n, n, dtype=F64)
        factor[..., lower] = flat
        diagonal = factor.diagonal(dim1=-2, dim2=-1)
        factor = factor - torch.diag_embed(diagonal) + torch.diag_embed(diagonal.exp())
        mean, root = mu + (L @ whitened.unsqueeze(-1)).squeeze(-1), L @ factor
        log_det = 2 * diagonal.sum()
        divergence = 0.5 * (factor.square().sum() + whitened.square().sum() - log_det - mu.numel())
        value = divergence - bound(mean, root.square().sum(-1)).sum()
        (by_theta,) = torch.autograd.grad(value, theta)
        return (value.item(), by_theta.numpy()) if gradient else value.item()

    start = torch.zeros(mu.numel() + batch.numel() * int(lower.sum()), dtype=F64).numpy()
    options = {"maxiter": 5000, "maxfun": 10000, "ftol": 1e-15, "gtol": 1e-8, "maxcor": 50}
    return -scipy.optimize.minimize(loss, start, args=(True,), jac=True, method="L-BFGS-B", options=options).fun


@pytest.mark.parametrize("name", KL_CASES)
def test_kl_is_the_best_gaussian(name):
    case = CASES[name]
    likelihood, prior, y = case.problem(30)
    likelihood.requires_grad_(False)
    result = KL().infer(prior(), likelihood, y)
    expected = maximised_bound(case, prior(), likelihood, y)
    assert result.log_evidence.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", KL_CASES)
@pytest.mark.parametrize("outputscale", [1.0, 400.0])
def test_no_step_of_kl_lowers_the_bound(name, outputscale):
    likelihood, prior, y = CASES[name].problem(40, outputscale=outputscale)
    result = KL().infer(prior(), likelihood, y)
    assert result.status is Status.CONVERGED, result.message
    assert bool((result.trace.diff() >= -1e-9 * result.log_evidence.abs()).all())


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.num_latents is None and "kl" in case.rules]
)
@pytest.mark.parametrize("n", [20, 150])  # one block and two
def test_both_schedules_find_the_same_optimum(name, n):
    likelihood, prior, y = CASES[name].problem(n, outputscale=5.0)
    parallel = KL(schedule="parallel").infer(prior(), likelihood, y)
    sequential = KL(schedule="sequential").infer(prior(), likelihood, y)
    assert sequential.status is Status.CONVERGED, sequential.message
    torch.testing.assert_close(sequential.log_evidence, parallel.log_evidence, rtol=1e-9, atol=1e-7)
    torch.testing.assert_close(sequential.posterior.mean, parallel.posterior.mean, rtol=1e-4, atol=1e-5)
    assert bool((sequential.trace.diff() >= -1e-9 * sequential.log_evidence.abs()).all())


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "laplace" in case.rules])
def test_laplace_is_taylor_at_its_own_mean(name):
    likelihood, prior, y = CASES[name].problem(15)
    laplace = Laplace(tolerance=1e-10).infer(prior(), likelihood, y)
    taylor = Taylor(expansion_point=lambda _: mean(laplace)).infer(prior(), likelihood, y)
    torch.testing.assert_close(taylor.posterior.mean, laplace.posterior.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(taylor.log_evidence, laplace.log_evidence, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "rule"), [(n, r) for n, r in PAIRS if CASES[n].num_latents is not None and r in ("laplace", "taylor")]
)
def test_a_batch_of_correlated_latents_is_a_loop(name, rule):
    case, n = CASES[name], 8
    likelihood, _, first = case.problem(n)
    second = case.targets(torch.Generator().manual_seed(5), n)
    priors = [case.problem(n, outputscale=scale)[1]() for scale in (0.6, 3.0)]
    K, mu = (torch.stack([getattr(p, f) for p in priors]).detach() for f in ("covariance_matrix", "mean"))
    together = RULES[rule].infer(
        MultivariateNormal(mu, to_linear_operator(K)), likelihood, torch.stack([first, second])
    )
    assert together.log_evidence.shape == (2,)
    for b, y in enumerate((first, second)):
        alone = RULES[rule].infer(MultivariateNormal(mu[b], to_linear_operator(K[b])), likelihood, y)
        torch.testing.assert_close(together.log_evidence[b], alone.log_evidence, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(mean(together)[b], mean(alone), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(together.log_loo[b], alone.log_loo, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_all_rules_are_exact_for_a_gaussian_likelihood():
    likelihood, prior, y = CASES["stock_gaussian"].problem(15)
    p = prior()
    noisy = p.covariance_matrix + likelihood.noise * torch.eye(15, dtype=F64)
    exact = torch.distributions.MultivariateNormal(p.mean, noisy).log_prob(y)
    loo = []
    for i in range(15):
        keep = torch.arange(15) != i
        gain = torch.linalg.solve(noisy[keep][:, keep], noisy[keep, i])
        mean, variance = p.mean[i] + gain @ (y - p.mean)[keep], noisy[i, i] - gain @ noisy[keep, i]
        loo.append(torch.distributions.Normal(mean, variance.sqrt()).log_prob(y[i]))
    for rule in (KL(), KL(schedule="sequential"), Laplace(), Taylor()):
        result = rule.infer(prior(), likelihood, y)
        torch.testing.assert_close(result.log_evidence, exact, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(result.log_loo, torch.stack(loo).detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", ["kl", "laplace"])
def test_leave_one_out_is_close_to_leaving_one_out(rule):
    likelihood, prior, y = CASES["bernoulli_logit"].problem(25, outputscale=4.0)
    p = prior()
    result = RULES[rule].infer(p, likelihood, y)
    for i in range(0, 25, 6):
        keep = torch.arange(25) != i
        K = p.covariance_matrix.detach()
        others = MultivariateNormal(p.mean[keep].detach(), K[keep][:, keep])
        rest = RULES[rule].infer(others, likelihood, y[keep])
        alone = rest.conditioned.predict(p.mean[i : i + 1].detach(), K[keep][:, i : i + 1], K[i : i + 1, i : i + 1])
        expected = likelihood.log_density(y[i : i + 1], alone.mean, alone.variance)
        assert result.log_loo[i].item() == pytest.approx(expected.item(), abs=0.05)


def test_more_pieces_are_a_better_bound_and_the_expectation_the_best():
    likelihood, prior, y = CASES["bernoulli_logit"].problem(60, outputscale=10.0)
    bounds = [PiecewiseQuadratic(pieces) for pieces in (3, 5, 10, 20)] + [Quadrature()]
    evidence = torch.stack([KL(bound).infer(prior(), likelihood, y).log_evidence for bound in bounds])
    assert bool((evidence.diff() > 0).all())
    assert (evidence[-1] - evidence[-2]).item() < 1e-3 * 60


def test_the_log_evidence_of_laplace_is_that_of_scikit_learn():
    sklearn_gp = pytest.importorskip("sklearn.gaussian_process")
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(80, 3, generator=generator, dtype=F64)
    y = (x[:, 0] + 0.5 * torch.randn(80, generator=generator, dtype=F64) > 0).to(F64)
    kernel = sklearn_gp.kernels.ConstantKernel(1.0) * sklearn_gp.kernels.RBF(1.0)
    peer = sklearn_gp.GaussianProcessClassifier(kernel, optimizer=None).fit(x.numpy(), y.numpy())
    for log_scale, log_length in ((0.0, 0.0), (4.0, 1.0), (-2.0, -1.0), (6.0, 3.0)):
        theta = torch.tensor([log_scale, log_length], dtype=F64, requires_grad=True)
        K = theta[0].exp() * torch.exp(-0.5 * torch.cdist(x, x).square() / (2 * theta[1]).exp())
        prior = MultivariateNormal(torch.zeros(80, dtype=F64), to_linear_operator(K))
        result = Laplace().infer(prior, BernoulliLogitLikelihood(), y)
        result.log_evidence.backward()
        value, gradient = peer.log_marginal_likelihood(theta.detach().numpy(), eval_gradient=True)
        assert result.log_evidence.item() == pytest.approx(value, abs=1e-6)
        torch.testing.assert_close(theta.grad, torch.from_numpy(gradient), rtol=1e-6, atol=1e-6)
