"""Integration over one hyperparameter on a grid: weights, mixtures, unchanged models, and bad input."""

import copy
import math
import pickle

import gpytorch
import pytest
import torch
from gpytorch.constraints import GreaterThan, Positive
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood, VariationalELBO
from gpytorch.priors import GammaPrior
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy

import gpext
from gpext import FitStatus, fit, fit_grid
from gpext.inference import EP, KL, Laplace
from gpext.likelihoods import StudentTLikelihood
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.training import full_batch, grid
from tests.members import F64
from tests.sparse_models import SparseGP

N = 25
OUTPUTSCALE = "model.covar_module.outputscale"


class Prior:
    def begin(self):
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Latent(Prior, gpext.models.LatentGP):
    def __init__(self, x, y, likelihood, rule):
        super().__init__(x, y, likelihood, rule)
        self.begin()


class Exact(Prior, gpytorch.models.ExactGP):
    def __init__(self, x, y):
        super().__init__(x, y, GaussianLikelihood())
        self.begin()


def data(dtype=F64):
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(N, 1, generator=generator, dtype=F64)
    y = torch.sin(2 * x.squeeze(-1)) + 0.1 * torch.randn(N, generator=generator, dtype=F64)
    y[::8] += 3.0
    return x.to(dtype), y.to(dtype)


def made(rule=None, constraint=None, dtype=F64, **kwargs):
    x, y = data(dtype)
    likelihood = StudentTLikelihood(deg_free_constraint=constraint or GreaterThan(1.0), **kwargs)
    model = Latent(x, y, likelihood, rule or Laplace()).to(dtype)
    likelihood.deg_free = torch.tensor(4.0, dtype=dtype)
    return LatentMarginalLogLikelihood(likelihood, model), x, y


def exact():
    x, y = data()
    model = Exact(x, y).double()
    return ExactMarginalLogLikelihood(model.likelihood, model), x, y


NEW_X = torch.linspace(-0.5, 4.5, 7, dtype=F64).unsqueeze(-1)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Laplace(), EP(), KL()], ids=lambda rule: type(rule).__name__)
def test_each_value_is_trained_alone_and_counts_by_its_evidence(rule):
    mll, x, y = made(rule)
    values = [1.5, 3.0, 8.0]
    found = fit_grid(mll, x, y, values=values, tolerance=1e-6, progress=False)
    assert found.values.tolist() == values
    evidences = []
    for value, model, result in zip(values, found.models, found.results, strict=True):
        assert result.status is FitStatus.CONVERGED
        assert not model.training
        assert model.likelihood.deg_free.item() == pytest.approx(value, rel=1e-12)
        alone, _, _ = made(rule)
        alone.likelihood.deg_free = torch.tensor(value, dtype=F64)
        alone.likelihood.raw_deg_free.requires_grad_(False)
        fit(alone, x, y, tolerance=1e-6, progress=False)
        evidences.append(alone.model.result.log_evidence.item())
    torch.testing.assert_close(found.log_evidence, torch.tensor(evidences, dtype=F64), rtol=0, atol=2e-3)
    shares = [math.exp(evidence - max(evidences)) for evidence in evidences]
    torch.testing.assert_close(
        found.weights, torch.tensor([share / sum(shares) for share in shares], dtype=F64), rtol=0, atol=2e-3
    )
    assert found.weights.sum().item() == pytest.approx(1.0, abs=1e-12)


def test_the_papers_grid_is_the_default_of_degrees_of_freedom():
    mll, x, y = made()
    found = fit_grid(mll, x, y, max_steps=1, progress=False)
    assert len(found.values) == 15
    assert found.values[[0, -1]].tolist() == pytest.approx([1.5, 20.0])
    gaps = found.values.log().log().diff()
    torch.testing.assert_close(gaps, gaps[:1].expand(14))
    assert {result.status for result in found.results} == {FitStatus.MAX_STEPS}  # kept, and reported
    assert "MAX_STEPS" in str(found)
    assert len(str(found).splitlines()) == 16


def test_values_start_from_their_trained_neighbours_outwards(monkeypatch):
    mll, x, y = made()
    seen = []

    def watched(member, *args, **kwargs):
        deg_free, scale = member.likelihood.deg_free.item(), member.model.covar_module.outputscale.item()
        result = fit(member, *args, **kwargs)
        seen.append((round(deg_free, 6), scale, member.model.covar_module.outputscale.item()))
        return result

    monkeypatch.setattr(grid, "fit", watched)
    fit_grid(mll, x, y, values=[1.5, 2.5, 4.5, 9.0], progress=False)
    assert [deg_free for deg_free, _, _ in seen] == [4.5, 9.0, 2.5, 1.5]
    assert seen[0][1] == mll.model.covar_module.outputscale.item()
    assert seen[1][1] == seen[2][1] == seen[0][2]
    assert seen[3][1] == seen[2][2]


def test_mixtures_of_a_gaussian_model_are_those_computed_by_hand():
    mll, x, y = exact()
    values = torch.tensor([0.3, 1.0, 3.0], dtype=F64)
    found = fit_grid(mll, x, y, parameter=OUTPUTSCALE, values=values, progress=False)
    evidence, means, variances, noises, log_probs = [], [], [], [], []
    for value, model in zip(values, found.models, strict=True):
        assert model.covar_module.outputscale.item() == pytest.approx(value.item(), rel=1e-6)
        K = model.covar_module(torch.cat([x, NEW_X])).to_dense().detach()
        noise, mu = model.likelihood.noise.detach(), model.mean_module.constant.detach()
        C = K[:N, :N] + noise * torch.eye(N, dtype=F64)
        prior = torch.distributions.MultivariateNormal(mu.expand(N), C)
        evidence.append(prior.log_prob(y))
        means.append(mu + K[N:, :N] @ torch.linalg.solve(C, y - mu))
        covariance = K[N:, N:] - K[N:, :N] @ torch.linalg.solve(C, K[:N, N:])
        variances.append(covariance.diagonal())
        noises.append(noise)
        predictive = MultivariateNormal(means[-1], covariance + noise * torch.eye(len(NEW_X), dtype=F64))
        log_probs.append(predictive.log_prob(means[0]))
    w = torch.softmax(torch.stack(evidence), 0)
    torch.testing.assert_close(found.log_evidence, torch.stack(evidence), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.weights, w, rtol=1e-5, atol=1e-6)
    means, variances = torch.stack(means), torch.stack(variances)
    with torch.no_grad():
        latent, predictive = found.latent(NEW_X), found.predict(NEW_X)
        mean = w @ means
        variance = w @ (variances + means.square()) - mean.square()
        torch.testing.assert_close(latent.mean, mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(latent.variance, variance, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(predictive.mean, mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(predictive.variance, variance + w @ torch.cat(noises), rtol=1e-4, atol=1e-5)
        expected = torch.logsumexp(w.log() + torch.stack(log_probs), 0)
        torch.testing.assert_close(predictive.log_prob(means[0]), expected, rtol=1e-4, atol=1e-4)


def test_one_value_is_fit():
    mll, x, y = made(EP())
    found = fit_grid(mll, x, y, values=[4.0], progress=False)
    mll.likelihood.raw_deg_free.requires_grad_(False)
    result = fit(mll, x, y, progress=False)
    assert found.weights.tolist() == [1.0]
    assert found.results[0].objective == pytest.approx(result.objective, abs=1e-9)
    with torch.no_grad():
        expected = mll.likelihood(mll.model(NEW_X))
        given = found.predict(NEW_X)
        at = torch.zeros(7, dtype=F64)
        torch.testing.assert_close(given.log_prob(at), expected.log_prob(at), rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(given.mean, expected.mean, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("constraint", [Positive(), GreaterThan(1.0)])
def test_two_or_fewer_degrees_of_freedom(constraint):
    mll, x, y = made(EP(), constraint)
    found = fit_grid(mll, x, y, values=[1.5, 2.0, 4.0], progress=False)
    with torch.no_grad():
        predictive = found.predict(NEW_X)
        assert bool(predictive.variance.isinf().all())
        assert bool(found.latent(NEW_X).variance.isfinite().all())
        q = predictive.icdf(0.9)
        torch.testing.assert_close(predictive.cdf(q), torch.full((7,), 0.9, dtype=F64), rtol=0, atol=1e-9)


def test_the_users_model_stays_as_it_was():
    mll, x, y = made()
    mll.likelihood.raw_noise.requires_grad_(False)
    before = copy.deepcopy(mll.state_dict())
    training = mll.training
    found = fit_grid(mll, x, y, values=[2.0, 5.0], max_steps=2, progress=False)
    assert all(torch.equal(value, before[name]) for name, value in mll.state_dict().items())
    assert mll.likelihood.raw_deg_free.requires_grad
    assert mll.training is training
    assert all(p.grad is None for p in mll.parameters())
    for member in found.mlls:
        assert not member.likelihood.raw_deg_free.requires_grad
        assert torch.equal(member.likelihood.noise, mll.likelihood.noise)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_grid_trains_wherever_it_is_asked_for(mode):
    mll, x, y = made(Laplace())
    options = {"parameter": "likelihood.deg_free", "values": [3.0, 8.0], "max_steps": 3, "progress": False}
    expected = fit_grid(mll, x, y, **options).weights
    with mode():
        assert torch.equal(fit_grid(mll, x, y, **options).weights, expected)


def test_nothing_else_to_train_leaves_the_evidences():
    mll, x, y = made()
    mll.requires_grad_(False)
    found = fit_grid(mll, x, y, values=[2.0, 5.0], progress=False)
    expected = []
    for value in (2.0, 5.0):
        mll.likelihood.deg_free = torch.tensor(value, dtype=F64)
        expected.append(mll.model.result.log_evidence)
    torch.testing.assert_close(found.log_evidence, torch.stack(expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_copies_predict_alike(dtype):
    mll, x, y = made(EP(), dtype=dtype)
    found = fit_grid(mll, x, y, values=[2.0, 5.0], max_steps=3, progress=False)
    x = NEW_X.to(dtype)
    with torch.no_grad():
        expected = found.predict(x).log_prob(torch.zeros(7, dtype=dtype))
        assert expected.dtype == dtype
        for again in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
            torch.testing.assert_close(again.predict(x).log_prob(torch.zeros(7, dtype=dtype)), expected)


def test_a_sparse_model_with_a_stock_objective():
    x, y = data()
    model = SparseGP(x[:6], strategy=VariationalStrategy)
    model.variational_strategy._variational_distribution = CholeskyVariationalDistribution(6).double()
    likelihood = StudentTLikelihood().double()
    found = fit_grid(VariationalELBO(likelihood, model, num_data=N), x, y, values=[3.0, 7.0], max_steps=5)
    for evidence, member in zip(found.log_evidence, found.mlls, strict=True):
        with torch.no_grad():
            assert N * member.train()(member.model(x), y).item() == pytest.approx(evidence.item(), abs=1e-6)


# ---- priors --------------------------------------------------------------------------------------------------------


def test_log_prior_masses_multiply_the_evidence():
    mll, x, y = made()
    options = {"values": [1.5, 3.0, 8.0], "max_steps": 2, "progress": False}
    plain = fit_grid(mll, x, y, **options)
    tilted = fit_grid(mll, x, y, log_prior=lambda values: -values, **options)
    expected = plain.weights * torch.exp(-plain.values)
    torch.testing.assert_close(tilted.weights, expected / expected.sum())


def test_a_registered_prior_is_a_density_over_unequal_spacings():
    prior = GammaPrior(2.0, 0.5)
    mll, x, y = made(deg_free_prior=prior)
    values = [1.5, 2.0, 4.0]
    found = fit_grid(mll, x, y, values=values, progress=False)
    evidence = torch.stack([model.result.log_evidence for model in found.models])
    density = prior.log_prob(found.values)
    torch.testing.assert_close(found.log_evidence, evidence + density, rtol=1e-6, atol=1e-6)
    weights = (evidence + density).softmax(0) * torch.tensor([0.25, 1.25, 1.0], dtype=F64)
    torch.testing.assert_close(found.weights, weights / weights.sum(), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="registered prior"):
        fit_grid(mll, x, y, values=values, log_prior=torch.zeros_like, progress=False)


def test_priors_of_the_others_count_where_they_end():
    mll, x, y = made(noise_prior=GammaPrior(2.0, 5.0))
    found = fit_grid(mll, x, y, values=[2.0, 4.0], log_prior=torch.zeros_like, progress=False)
    for evidence, model in zip(found.log_evidence, found.models, strict=True):
        density = model.likelihood.noise_prior.log_prob(model.likelihood.noise).sum()
        assert (model.result.log_evidence + density).item() == pytest.approx(evidence.item(), abs=1e-6)


# ---- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parameter": "likelihood.degfree", "values": [3.0]}, r"no scalar parameter .*likelihood\.deg_free"),
        ({"parameter": "somewhere.else", "values": [3.0]}, "no scalar parameter"),
        ({"parameter": OUTPUTSCALE}, "give the values"),
        ({"values": [3.0, 2.0]}, "increase"),
        ({"values": []}, "increase"),
        ({"values": [3.0, math.nan]}, "finite"),
        ({"values": [0.9, 3.0]}, r"0\.9 is outside its constraint .*deg_free_constraint"),
        ({"parameter": "likelihood.noise", "values": [0.0, 1.0]}, "outside its constraint"),
    ],
)
def test_bad_arguments_are_refused_before_training(options, message, monkeypatch):
    mll, x, y = made()
    monkeypatch.setattr(grid, "fit", None)
    with pytest.raises(ValueError, match=message):
        fit_grid(mll, x, y, progress=False, **options)


def test_gpytorchs_constraint_on_degrees_of_freedom_is_named():
    mll, x, y = made(constraint=GreaterThan(2.0))
    with pytest.raises(ValueError, match=r"deg_free = 1\.5 is outside .*Positive\(\)"):
        fit_grid(mll, x, y, values=[1.5, 3.0], progress=False)


def test_by_default_its_values_are_those_of_the_papers_grid_that_it_takes():
    mll, x, y = made()
    every = fit_grid(mll, x, y, max_steps=1, progress=False).values
    mll, x, y = made(constraint=GreaterThan(2.0))
    assert torch.equal(fit_grid(mll, x, y, max_steps=1, progress=False).values, every[every > 2])


def test_a_vector_is_no_grid_parameter():
    mll, x, y = made()
    kernel = gpytorch.kernels.RBFKernel(ard_num_dims=2).double()
    mll.model.covar_module.base_kernel = kernel
    mll.model.set_train_data(x.expand(-1, 2).contiguous(), y, strict=False)
    with pytest.raises(ValueError, match="no scalar parameter"):
        fit_grid(mll, x, y, parameter="model.covar_module.base_kernel.lengthscale", values=[1.0], progress=False)


def test_a_member_that_breaks_down_is_kept_without_weight(monkeypatch):
    mll, x, y = made()
    objective = full_batch.fit_objective

    def fragile(run, *arguments):
        if run.mll.likelihood.deg_free.item() > 6:
            raise torch.linalg.LinAlgError("not positive definite")
        return objective(run, *arguments)

    monkeypatch.setattr("gpext.training.fitting.fit_objective", fragile)
    found = fit_grid(mll, x, y, values=[2.0, 4.0, 7.0], progress=False)
    assert [result.status.name for result in found.results] == ["CONVERGED", "CONVERGED", "BREAKDOWN"]
    assert "not positive definite" in found.results[2].message
    assert found.weights[2] == 0
    assert found.log_evidence[2] == -math.inf
    with torch.no_grad():
        assert bool(found.predict(NEW_X).log_prob(torch.zeros(7, dtype=F64)).isfinite().all())
    with pytest.raises(ValueError, match="broke down at every value"):
        fit_grid(mll, x, y, values=[7.0, 8.0], progress=False)


def test_an_interrupt_is_one(monkeypatch):
    mll, x, y = made()
    interrupted = fit(mll, x, y, callback=lambda step, value: step == 1, progress=False)
    result = copy.copy(interrupted)
    object.__setattr__(result, "status", FitStatus.INTERRUPTED)
    monkeypatch.setattr(grid, "fit", lambda *args, **kwargs: result)
    with pytest.raises(KeyboardInterrupt):
        fit_grid(mll, x, y, values=[2.0], progress=False)


def test_quiet_when_asked(capsys):
    mll, x, y = made()
    fit_grid(mll, x, y, values=[2.0], max_steps=1, progress=False)
    assert capsys.readouterr() == ("", "")
