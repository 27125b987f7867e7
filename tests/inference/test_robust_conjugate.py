"""Robust conjugate regression: generalised Bayes by brute force, its limits, its evidence and what it refuses."""

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from linear_operator import to_linear_operator

import gpext
from gpext.inference import KL, RobustConjugate, Status
from gpext.likelihoods import PoissonLikelihood
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.models import LatentGP
from tests.members import F64


def made(n=8, *, seed=0, batch=(), noise=0.3):
    """A prior with a mean, Gaussian noise, and targets with an outlier."""
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.rand(n, generator=generator, dtype=F64)
    mean = torch.linspace(-0.3, 0.5, n, dtype=F64)
    y = x.sin() + 0.5 * torch.randn(*batch, n, generator=generator, dtype=F64)
    y[..., -1] += 7
    likelihood = GaussianLikelihood().double()
    likelihood.noise = torch.tensor(noise, dtype=F64)
    return x, mean, likelihood, y


def prior(x, mean, lengthscale=0.8, outputscale=1.2):
    K = outputscale * torch.exp(-0.5 * ((x.unsqueeze(-1) - x) / lengthscale).square())
    return MultivariateNormal(mean, to_linear_operator(K + 1e-6 * torch.eye(len(x), dtype=F64)))


def pseudo_data(y, mean, noise, c):
    """z and tau from the weights by autograd, by their definitions."""
    y = y.clone().requires_grad_()
    squared_weight = noise / 2 / (1 + ((y - mean) / c).square())
    (slope,) = torch.autograd.grad(squared_weight.log().sum(), y)
    return (y - noise * slope).detach(), (2 * squared_weight / noise**2).detach()


class Model(LatentGP):
    def __init__(self, x, y, likelihood, rule, **options):
        super().__init__(x, y, likelihood, rule, **options)
        self.mean_module = gpytorch.means.ConstantMean().to(x)
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).to(x)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.mark.parametrize("threshold", [1e12, float("inf")])
def test_an_infinite_threshold_is_exact_regression(threshold):
    x, mean, likelihood, y = made()
    p = prior(x, mean)
    result = RobustConjugate(threshold=threshold).infer(p, likelihood, y)
    noisy = p.covariance_matrix + likelihood.noise * torch.eye(8, dtype=F64)
    gain = torch.linalg.solve(noisy, p.covariance_matrix).mT
    exact = torch.distributions.MultivariateNormal(mean, noisy).log_prob(y)
    torch.testing.assert_close(result.log_evidence, exact, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(result.posterior.mean, mean + gain @ (y - mean), rtol=1e-10, atol=1e-10)
    V = p.covariance_matrix - gain @ p.covariance_matrix
    torch.testing.assert_close(result.posterior.covariance_matrix, V, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(result.log_loo, KL().infer(p, likelihood, y).log_loo, rtol=1e-10, atol=1e-10)


def test_it_is_the_generalised_posterior_of_the_weighted_fisher_divergence():
    """By a grid over f and the loss as it is defined: (w s)^2 + 2 d(w^2 s)/dy."""
    noise, c, mean = 0.4, 0.7, torch.tensor([0.2, -0.1], dtype=F64)
    y, K = torch.tensor([0.9, -2.0], dtype=F64), torch.tensor([[1.0, 0.6], [0.6, 1.3]], dtype=F64)
    axis = torch.linspace(-8, 8, 801, dtype=F64)
    f = torch.cartesian_prod(axis, axis)  # (G, 2)
    targets = y.expand_as(f).clone().requires_grad_()
    squared_weight = noise / 2 / (1 + ((targets - mean) / c).square())
    score = -(targets - f) / noise
    (slope,) = torch.autograd.grad((squared_weight * score).sum(), targets)
    loss = (squared_weight * score.square() + 2 * slope).sum(-1).detach()
    log_posterior = torch.distributions.MultivariateNormal(mean, K).log_prob(f) - loss
    weights = log_posterior.softmax(-1)
    expected = weights @ f
    covariance = (f - expected).mT @ (weights.unsqueeze(-1) * (f - expected))

    likelihood = GaussianLikelihood().double()
    likelihood.noise = torch.tensor(noise, dtype=F64)
    result = RobustConjugate(threshold=c).infer(MultivariateNormal(mean, to_linear_operator(K)), likelihood, y)
    torch.testing.assert_close(result.posterior.mean.detach(), expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(result.posterior.covariance_matrix.detach(), covariance, rtol=1e-8, atol=1e-8)


def test_the_evidence_is_that_of_the_pseudo_targets():
    x, mean, likelihood, y = made()
    p, rule = prior(x, mean), RobustConjugate(quantile=0.6)
    z, tau = pseudo_data(y, mean, 0.3, (y - mean).abs().quantile(0.6))
    result = rule.infer(p, likelihood, y)
    expected = torch.distributions.MultivariateNormal(mean, p.covariance_matrix + (1 / tau).diag()).log_prob(z)
    torch.testing.assert_close(result.log_evidence.detach(), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(result.sites.precision, tau, rtol=1e-12, atol=0)
    torch.testing.assert_close(result.sites.shift, tau * z, rtol=1e-12, atol=1e-12)
    assert result.status is Status.CONVERGED
    assert "pseudo-targets" in result.message


@pytest.mark.parametrize("options", [{}, {"threshold": 0.9}, {"centre": torch.full((8,), 0.2, dtype=F64)}])
def test_gradient_agrees_with_finite_differences(options):
    x, mean, _, y = made()
    parameters = torch.tensor([0.8, 1.2, 0.3, 0.1], dtype=F64)  # lengthscale, outputscale, noise, shift of the mean

    def evidence(values):
        lengthscale, outputscale, noise, shift = values
        fixed = FixedNoiseGaussianLikelihood(noise.expand(8))
        return RobustConjugate(**options).infer(prior(x, mean + shift, lengthscale, outputscale), fixed, y).log_evidence

    at = parameters.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(evidence(at), at)
    for i in range(4):
        step = torch.zeros(4, dtype=F64)
        step[i] = 1e-4
        values = [evidence(parameters + k * step).item() for k in (-2, -1, 1, 2)]
        difference = (8 * (values[2] - values[1]) - (values[3] - values[0])) / 12e-4
        assert gradient[i].item() == pytest.approx(difference, rel=1e-7, abs=1e-8)


def test_the_noise_of_the_likelihood_has_its_gradient():
    x, mean, likelihood, y = made()
    RobustConjugate().infer(prior(x, mean), likelihood, y).log_evidence.backward()
    at = torch.tensor(0.3, dtype=F64, requires_grad=True)
    fixed = FixedNoiseGaussianLikelihood(at.expand(8))
    (expected,) = torch.autograd.grad(RobustConjugate().infer(prior(x, mean), fixed, y).log_evidence, at)
    constraint = likelihood.noise_covar.raw_noise_constraint
    raw = likelihood.noise_covar.raw_noise.detach().requires_grad_()
    (slope,) = torch.autograd.grad(constraint.transform(raw).sum(), raw)
    torch.testing.assert_close(likelihood.noise_covar.raw_noise.grad, expected * slope, rtol=1e-10, atol=0)


def test_the_influence_of_one_target_is_bounded():
    x, mean, likelihood, y = made()
    rule = RobustConjugate(threshold=1.0)
    means, evidences = [], []
    for size in (1e2, 1e4, 1e6):
        y[3] = size
        result = rule.infer(prior(x, mean), likelihood, y)
        assert bool((result.sites.precision >= 0).all())
        means.append(result.posterior.mean.detach())
        evidences.append(result.log_evidence.item())
    keep = torch.arange(8) != 3
    without = rule.infer(prior(x[keep], mean[keep]), likelihood, y[keep]).posterior.mean.detach()
    torch.testing.assert_close(means[-1][keep], without, rtol=0, atol=1e-5)
    assert float((means[0] - means[-1]).abs().max()) < 0.05
    exact = RobustConjugate(threshold=float("inf")).infer(prior(x, mean), likelihood, y)
    assert float(exact.posterior.mean.max()) > 1e5
    # 1 / tau grows with the square of the distance, which costs one logarithm of it, not its square
    assert evidences[1] - evidences[2] == pytest.approx(torch.tensor(100.0).log().item(), abs=1e-2)


def test_the_quantile_scales_with_the_data():
    x, mean, _, y = made()
    results = []
    for scale in (1.0, 1e3):
        likelihood = FixedNoiseGaussianLikelihood(torch.full((8,), 0.3 * scale**2, dtype=F64))
        p = prior(x, scale * mean, outputscale=1.2)
        p = MultivariateNormal(p.mean, to_linear_operator(scale**2 * prior(x, mean).covariance_matrix))
        results.append(RobustConjugate().infer(p, likelihood, scale * y))
    torch.testing.assert_close(1e3 * results[0].posterior.mean, results[1].posterior.mean, rtol=1e-9, atol=1e-9)
    gap = results[0].log_evidence - results[1].log_evidence
    assert gap.item() == pytest.approx(8 * torch.tensor(1e3).log().item(), rel=1e-6)


def test_a_batch_of_targets_is_a_loop():
    x, mean, likelihood, y = made(batch=(3,))
    p = prior(x, mean)
    together = RobustConjugate().infer(p, likelihood, y)
    assert together.log_evidence.shape == (3,)
    for b in range(3):
        alone = RobustConjugate().infer(p, likelihood, y[b])
        torch.testing.assert_close(together.log_evidence[b], alone.log_evidence, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(together.posterior.mean[b], alone.posterior.mean, rtol=1e-10, atol=1e-10)


def test_noise_of_each_datum():
    x, mean, _, y = made()
    noise = torch.linspace(0.1, 0.9, 8, dtype=F64)
    p = prior(x, mean)
    result = RobustConjugate(threshold=1.0).infer(p, FixedNoiseGaussianLikelihood(noise), y)
    z, tau = pseudo_data(y, mean, noise, 1.0)
    expected = torch.distributions.MultivariateNormal(mean, p.covariance_matrix + (1 / tau).diag()).log_prob(z)
    torch.testing.assert_close(result.log_evidence, expected, rtol=1e-10, atol=1e-10)


def test_float32_and_one_datum_and_duplicates():
    x, mean, likelihood, y = made()
    exact = RobustConjugate().infer(prior(x, mean), likelihood, y)
    p = prior(x, mean)
    single = MultivariateNormal(mean.float(), to_linear_operator(p.covariance_matrix.float()))
    result = RobustConjugate().infer(single, likelihood.float(), y.float())
    assert result.posterior.mean.dtype == result.log_evidence.dtype == torch.float32
    torch.testing.assert_close(result.posterior.mean, exact.posterior.mean.float(), rtol=1e-4, atol=1e-4)
    one = RobustConjugate().infer(prior(x[:1], mean[:1]), GaussianLikelihood().double(), y[:1])
    assert one.status is Status.CONVERGED
    same = prior(x[:1].repeat(5), mean[:5])
    assert RobustConjugate().infer(same, GaussianLikelihood().double(), y[:5]).status is Status.CONVERGED


@pytest.mark.parametrize("kind", ["inducing", "design"])
def test_models_with_inducing_inputs_and_with_designs(kind):
    x, _, likelihood, y = made(20)
    x = torch.linspace(0, 3, 20, dtype=F64).unsqueeze(-1)
    options = (
        {"inducing_inputs": x} if kind == "inducing" else {"design": gpext.designs.rows_of(torch.eye(20, dtype=F64))}
    )
    exact = Model(x, y, likelihood, RobustConjugate())
    other = Model(x, y, likelihood, RobustConjugate(), **options)
    losses = []
    for model in (exact, other):
        loss = -LatentMarginalLogLikelihood(likelihood, model)(model(x), y)
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-3)  # the jitter of inducing inputs
    first, second = (model.covar_module.raw_outputscale.grad for model in (exact, other))
    torch.testing.assert_close(first, second, rtol=1e-2, atol=1e-3)
    with torch.no_grad():
        new = x[:5] + 0.05
        first, second = (model.eval()(new) for model in (exact, other))
    torch.testing.assert_close(first.mean, second.mean, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(first.variance, second.variance, rtol=1e-2, atol=1e-2)


def test_it_trains_among_outliers_where_gaussian_noise_does_not():
    x = torch.linspace(0, 1, 60, dtype=F64).unsqueeze(-1)
    generator = torch.Generator().manual_seed(2)
    f = torch.sin(7 * x.squeeze(-1))
    y = f + 0.1 * torch.randn(60, generator=generator, dtype=F64)
    y[::10] = 20.0
    errors = []
    for rule in (RobustConjugate(threshold=float("inf")), RobustConjugate()):
        model = Model(x, y, GaussianLikelihood().double(), rule)
        mll = LatentMarginalLogLikelihood(model.likelihood, model)
        for _ in range(2):
            gpext.fit(mll, x, y, progress=False)
            model.inference = model.inference.centred_at(model.result)
        errors.append(float((model.eval()(x).mean.detach() - f).square().mean().sqrt()))
    assert errors[1] < 0.1 < 1 < errors[0]


def test_it_is_compared_with_other_rules():
    x, _, likelihood, y = made()
    table = gpext.models.compare_inference(Model(x, y, likelihood, KL()), [KL(), RobustConjugate()])
    assert table.rules[1].name == "RobustConjugate"
    assert table.rules[1].status == "CONVERGED"


def test_it_refuses_what_is_not_gaussian_and_says_what_works():
    x, mean, _, _ = made()
    with pytest.raises(TypeError, match=r"GaussianLikelihood or FixedNoiseGaussianLikelihood.*KL\(\)"):
        RobustConjugate().infer(prior(x, mean), PoissonLikelihood(), torch.ones(8, dtype=F64))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"quantile": 0.0}, "quantile must be"),
        ({"quantile": 1.5}, "quantile must be"),
        ({"threshold": 0.0}, "threshold must be positive"),
        ({"threshold": float("nan")}, "threshold must be positive"),
        ({"centre": torch.tensor([float("nan")])}, "centre"),
        ({"jitter": -1.0}, "jitter"),
    ],
)
def test_it_refuses_bad_options(options, text):
    with pytest.raises(ValueError, match=text):
        RobustConjugate(**options)


def test_it_refuses_data_that_do_not_fit():
    x, mean, likelihood, y = made()
    p = prior(x, mean)
    with pytest.raises(ValueError, match="centre of 8 data; got shape"):
        RobustConjugate(centre=torch.zeros(3)).infer(p, likelihood, y)
    with pytest.raises(ValueError, match="noise of the likelihood of 8 data"):
        RobustConjugate().infer(p, FixedNoiseGaussianLikelihood(torch.ones(3, dtype=F64)), y)
    with pytest.raises(ValueError, match=r"Give one, in the units of the targets: RobustConjugate\(threshold"):
        RobustConjugate().infer(p, likelihood, mean)
    with pytest.raises(ValueError, match="index"):
        RobustConjugate().infer(p, likelihood, torch.where(torch.arange(8) == 2, torch.nan, y))


def test_no_posterior_is_reported():
    _, mean, likelihood, y = made()
    wrong = MultivariateNormal(mean, to_linear_operator(-torch.eye(8, dtype=F64)))
    result = RobustConjugate(threshold=float("inf")).infer(wrong, likelihood, y)
    assert result.status is Status.NOT_POSITIVE_DEFINITE
    assert result.log_evidence == -torch.inf
