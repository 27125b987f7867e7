"""LatentGP in the scripts of gpytorch and BoTorch users: training, prediction, copies, dtypes and batches."""

import copy
import io
import pickle

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal

import gpext
from gpext.inference import CAVI, EP, KL, InferenceWarning, Laplace, Status, Taylor
from gpext.likelihoods import (
    BayesianSVMLikelihood,
    BernoulliLogitLikelihood,
    MultinomialLogitLikelihood,
    OrdinalLogitLikelihood,
    PoissonLikelihood,
    StickBreakingLikelihood,
    StudentTLikelihood,
)
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.models import LatentGP
from tests.members import F64
from tests.neutral_settings import kept_settings


class Model(LatentGP):
    def __init__(self, x, y, likelihood, inference=None, batch=()):
        super().__init__(x, y, likelihood, inference)
        batch = torch.Size(batch)
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        kernel = gpytorch.kernels.RBFKernel(batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel, batch_shape=batch)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def data(n=40, dtype=F64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(n, 1, generator=generator, dtype=F64)
    y = (torch.rand(n, generator=generator, dtype=F64) < torch.sigmoid(4 * torch.sin(2 * x[:, 0]))).to(F64)
    return x.to(dtype), y.to(dtype)


def made(inference=None, dtype=F64, **kwargs):
    x, y = data(dtype=dtype, **kwargs)
    model = Model(x, y, BernoulliLogitLikelihood(), inference).to(dtype)
    return model, LatentMarginalLogLikelihood(model.likelihood, model), x, y


RULES = [KL(), KL(schedule="sequential"), EP(), Laplace(), CAVI(), Taylor()]
rules = pytest.mark.parametrize(
    "rule", RULES, ids=lambda rule: f"{type(rule).__name__}-{getattr(rule, 'schedule', '')}"
)


@pytest.mark.slow
@rules
def test_trains_by_lbfgs_and_predicts(rule):
    model, mll, x, y = made(rule)
    before = mll(model(x), y).item()
    result = gpext.fit(mll, x, y, progress=False)
    assert result.status is gpext.FitStatus.CONVERGED
    assert mll(model.train()(x), y).item() > before + 0.01
    predictive = model.likelihood(model.eval()(x))
    at_best = ((torch.sin(2 * x[:, 0]) > 0) == (y > 0.5)).double().mean()  # of the true labels
    assert ((predictive.probs > 0.5) == (y > 0.5)).double().mean() > at_best - 0.1


@rules
def test_predictions_in_inference_mode_leave_a_model_that_trains_and_has_gradients(rule):
    model, mll, x, y = made(rule)
    with torch.inference_mode():
        seen = model.likelihood(model.eval()(x)).probs
        mll(model.train()(x), y)
    assert seen.isfinite().all()
    inputs = x.clone().requires_grad_()
    model.likelihood(model.eval()(inputs)).probs.sum().backward()
    assert inputs.grad.isfinite().all()
    (-mll(model.train()(x), y)).backward()
    assert model.covar_module.raw_outputscale.grad.isfinite()


def test_trains_in_an_adam_loop():
    model, mll, x, y = made()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3)
    values = []
    for _ in range(80):
        optimizer.zero_grad()
        loss = -mll(model(x), y)
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    reference, mll, x, y = made()
    gpext.fit(mll, x, y, progress=False)
    optimum = -mll(reference.train()(x), y).item()
    assert values[0] - values[-1] > 0.7 * (values[0] - optimum)  # near a flat optimum Adam is slow
    assert values[-1] > optimum - 1e-3


@pytest.fixture
def settings_restored():
    with kept_settings():
        yield


def test_trains_with_botorch(settings_restored):
    fit = pytest.importorskip("botorch.fit")
    model, mll, x, y = made()
    fit.fit_gpytorch_mll(mll)
    reference, other, x, y = made()
    gpext.fit(other, x, y, progress=False)
    assert mll(model.train()(x), y).item() == pytest.approx(other(reference.train()(x), y).item(), abs=1e-4)


@pytest.mark.slow
@rules
def test_warm_and_cold_sites_lead_to_the_same_result(rule):
    model, mll, x, y = made(rule)
    gpext.fit(mll, x, y, progress=False)
    warm = model.result
    cold = Model(x, y, BernoulliLogitLikelihood(), rule).double()
    cold.load_state_dict({k: v for k, v in model.state_dict().items() if "variational" not in k}, strict=False)
    assert cold.result.num_steps >= warm.num_steps
    torch.testing.assert_close(cold.result.log_evidence, warm.log_evidence, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(cold.result.posterior.mean, warm.posterior.mean, rtol=1e-5, atol=1e-5)


def test_predictions_condition_the_joint_prior():
    model, _, x, _ = made()
    test_x = torch.linspace(-1, 5, 7, dtype=F64).unsqueeze(-1)
    joint = model.forward(torch.cat([x, test_x]))
    K, sites = joint.covariance_matrix, model.result.sites
    n = len(x)
    V = torch.linalg.inv(K[:n, :n] + 1e-9 * torch.eye(n) + torch.diag(1 / sites.precision))
    mean = joint.mean[n:] + K[n:, :n] @ V @ (sites.shift / sites.precision - joint.mean[:n])
    covariance = K[n:, n:] - K[n:, :n] @ V @ K[:n, n:]
    predicted = model.eval()(test_x)
    torch.testing.assert_close(predicted.mean, mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(predicted.covariance_matrix, covariance, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model(x).mean, model.result.posterior.mean, rtol=1e-6, atol=1e-6)


def test_predictions_are_differentiable_in_the_inputs():
    model, _, _, _ = made()
    test_x = torch.tensor([[0.7]], dtype=F64, requires_grad=True)
    model.eval()(test_x).mean.sum().backward()
    step = 1e-5
    with torch.no_grad():
        difference = (model(test_x + step).mean - model(test_x - step).mean) / (2 * step)
    assert test_x.grad.item() == pytest.approx(difference.item(), rel=1e-6)


def test_inference_is_repeated_only_when_something_has_changed():
    model, _, x, _ = made()
    model.eval()
    first = model.result
    assert model.result is first
    model(x + 0.1)
    assert model.result is first
    model.covar_module.outputscale = 3.0
    assert model.result is not first
    second = model.result
    model.inference = Laplace()
    assert model.result is not second
    assert "Laplace" in model.result.message


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "state_dict"])
def test_copies_predict_alike(copied):
    model, mll, x, y = made()
    gpext.fit(mll, x, y, max_steps=3, progress=False)
    if copied == "deepcopy":
        twin = copy.deepcopy(model)
    elif copied == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        twin = Model(x, y, BernoulliLogitLikelihood()).double()
        twin.load_state_dict(torch.load(file, weights_only=True))
    test_x = x[:5] + 0.05
    torch.testing.assert_close(twin.eval()(test_x).mean, model.eval()(test_x).mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", [KL(), Laplace(), CAVI()], ids=lambda rule: type(rule).__name__)
def test_float32_agrees_with_float64(rule):
    single, double = made(rule, dtype=torch.float32), made(rule)
    values = [mll(model(x), y) for model, mll, x, y in (single, double)]
    assert values[0].dtype == torch.float32
    torch.testing.assert_close(values[0].double(), values[1], rtol=1e-4, atol=1e-5)
    means = [model.eval()(x + 0.01).mean for model, _, x, _ in (single, double)]
    torch.testing.assert_close(means[0].double(), means[1], rtol=1e-2, atol=1e-3)
    single[0].double()
    assert single[0].train_targets.dtype == F64
    torch.testing.assert_close(single[0](double[2] + 0.01).mean, means[1], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_batch_of_models_is_a_loop():
    x, y = data(25)
    ys = torch.stack([y, 1 - y, y])
    model = Model(x, ys, BernoulliLogitLikelihood(), batch=(3,)).double()
    model.covar_module.outputscale = torch.tensor([1.0, 2.0, 30.0], dtype=F64)
    mll = LatentMarginalLogLikelihood(model.likelihood, model)
    value = mll(model(x), ys)
    assert value.shape == (3,)
    test_x = x[:4] + 0.1
    together = model.eval()(test_x).mean
    for i, scale in enumerate((1.0, 2.0, 30.0)):
        alone = Model(x, ys[i], BernoulliLogitLikelihood()).double()
        alone.covar_module.outputscale = scale
        one = LatentMarginalLogLikelihood(alone.likelihood, alone)(alone(x), ys[i])
        torch.testing.assert_close(value[i], one, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(together[i], alone.eval()(test_x).mean, rtol=1e-5, atol=1e-6)
    model.train()
    assert gpext.fit(mll, x, ys, progress=False).status is gpext.FitStatus.CONVERGED


def test_new_training_data():
    model, mll, x, y = made()
    gpext.fit(mll, x, y, max_steps=3, progress=False)
    with pytest.raises(RuntimeError, match="cannot modify shape"):
        model.set_train_data(x[:10], y[:10])
    assert len(model.train_targets) == 40
    model.set_train_data(x[:10], y[:10], strict=False)
    fresh = Model(x[:10], y[:10], BernoulliLogitLikelihood()).double()
    fresh.load_state_dict({k: v for k, v in model.state_dict().items() if "variational" not in k}, strict=False)
    torch.testing.assert_close(model.eval()(x).mean, fresh.eval()(x).mean, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="finite"):
        model.set_train_data(x[:10] * float("nan"), y[:10])
    assert bool(model.train_inputs[0].isfinite().all())


@pytest.mark.parametrize("size", [40, 25])
def test_a_state_dict_leaves_the_data_alone(size):
    trained, mll, x, y = made()
    gpext.fit(mll, x, y, max_steps=3, progress=False)
    others = data(size, seed=5)
    model = Model(*others, BernoulliLogitLikelihood()).double()
    model.load_state_dict(trained.state_dict())
    assert torch.equal(model.train_inputs[0], others[0])
    fresh = Model(*others, BernoulliLogitLikelihood()).double()
    fresh.load_state_dict({k: v for k, v in trained.state_dict().items() if "variational" not in k}, strict=False)
    torch.testing.assert_close(model.eval()(x).mean, fresh.eval()(x).mean, rtol=1e-5, atol=1e-5)


def test_inputs_as_the_one_entry_of_a_tuple():
    model, _, x, y = made()
    model.set_train_data((x + 0.1,), y)
    assert torch.equal(Model((x + 0.1,), y, BernoulliLogitLikelihood()).train_inputs[0], model.train_inputs[0])
    assert torch.equal(model.eval()(*model.train_inputs).mean, model(x + 0.1).mean)
    for wrong in ((x, x), [x.tolist()], x.numpy(), None):
        for use in (model, lambda x: Model(x, y, BernoulliLogitLikelihood())):
            with pytest.raises(TypeError, match=r"inputs must be a torch\.Tensor; got"):
                use(wrong)
    with pytest.raises(TypeError, match=r"targets must be a torch\.Tensor; got list"):
        model.set_train_data(x, y.tolist())


def test_targets_outside_the_support_are_refused_at_the_door():
    model, _, x, y = made()
    for likelihood in (BernoulliLogitLikelihood(), gpytorch.likelihoods.BernoulliLikelihood()):
        with pytest.raises(ValueError, match=r"targets must be in \{0, 1\}"):
            Model(x, 2 * y - 1, likelihood)
    with pytest.raises(ValueError, match=r"targets must be in \{0, 1\}"):
        model.set_train_data(x + 1, 2 * y - 1)
    assert torch.equal(model.train_inputs[0], x)
    assert torch.equal(model.train_targets, y)


def test_priors_come_in_as_with_an_exact_gp():
    model, mll, x, y = made()
    plain = mll(model(x), y)
    prior = gpytorch.priors.GammaPrior(3.0, 6.0)
    model.covar_module.base_kernel.register_prior("lengthscale_prior", prior, "lengthscale")
    expected = plain + prior.log_prob(model.covar_module.base_kernel.lengthscale).sum() / len(y)
    torch.testing.assert_close(mll(model(x), y), expected)


def test_the_divergence_is_that_of_the_posterior_from_the_prior():
    model, _, x, y = made()
    q, p = model.variational_strategy.variational_distribution, model.variational_strategy.prior_distribution
    jitter = 1e-8 * torch.eye(len(x), dtype=F64)
    q, p = (torch.distributions.MultivariateNormal(d.mean, d.covariance_matrix + jitter) for d in (q, p))
    expected = torch.distributions.kl_divergence(q, p)
    torch.testing.assert_close(model.variational_strategy.kl_divergence(), expected, rtol=1e-4, atol=1e-4)
    expectation = model.likelihood.expected_log_prob(y, model.variational_strategy.variational_distribution).sum()
    elbo = expectation - model.variational_strategy.kl_divergence()
    torch.testing.assert_close(elbo, model.result.log_evidence, rtol=1e-8, atol=1e-8)


def test_stock_likelihoods_train():
    x, y = data(30)
    for likelihood in (gpytorch.likelihoods.BernoulliLikelihood(), gpytorch.likelihoods.PoissonLikelihood()):
        for rule in (KL(), Laplace()):
            model = Model(x, y, likelihood, rule).double()
            result = gpext.fit(LatentMarginalLogLikelihood(likelihood, model), x, y, progress=False)
            assert result.status is gpext.FitStatus.CONVERGED


def test_learns_the_likelihood():
    generator = torch.Generator().manual_seed(2)
    x = torch.linspace(0, 6, 80, dtype=F64)
    y = torch.sin(x) + 0.1 * torch.randn(80, generator=generator, dtype=F64)
    y[::9] += 5.0
    likelihood = StudentTLikelihood().double()
    model = Model(x, y, likelihood).double()
    result = gpext.fit(LatentMarginalLogLikelihood(likelihood, model), x, y, progress=False)
    assert result.status is gpext.FitStatus.CONVERGED
    assert likelihood.noise.item() < 0.05
    assert (model.eval()(x).mean - torch.sin(x)).abs().mean() < 0.1


# ---- bad input -----------------------------------------------------------------------------------------------------


def test_errors_say_what_was_expected():
    model, _, x, y = made()
    with pytest.raises(RuntimeError, match=r"model.eval\(\)"):
        model(x + 1)
    with pytest.raises(TypeError, match="float32"):
        model.eval()(x.float())
    with pytest.raises(ValueError, match="finite"):
        model(x * float("nan"))
    for bad_rule in (KL, "laplace"):
        with pytest.raises(TypeError, match="instance of a rule"):
            Model(x, y, BernoulliLogitLikelihood(), bad_rule)
        with pytest.raises(TypeError, match="instance of a rule"):
            model.inference = bad_rule
    with pytest.raises(TypeError, match="LatentGP"):
        LatentMarginalLogLikelihood(model.likelihood, gpytorch.models.GP())
    with pytest.raises(ValueError, match=r"model\.likelihood"):
        LatentMarginalLogLikelihood(BernoulliLogitLikelihood(), model)
    for bad_x, bad_y in ((x[:0], y[:0]), (x, y[:-1]), (x, y + float("inf"))):
        with pytest.raises(ValueError, match=r"expected|equally many|finite"):
            Model(bad_x, bad_y, BernoulliLogitLikelihood())
    with pytest.raises(TypeError, match="float16"):
        Model(x.half(), y, BernoulliLogitLikelihood())
    with pytest.raises(ValueError, match=r"\{0, 1\}"):
        Model(x, y + 1, BernoulliLogitLikelihood()).double().eval()(x)


def test_what_does_not_converge_says_so():
    model, mll, x, y = made(KL(max_steps=1))
    model.covar_module.outputscale = 100.0
    with pytest.warns(InferenceWarning, match="max_steps"):
        mll(model(x), y)
    with pytest.warns(InferenceWarning, match="max_steps"):
        assert model.result.status is Status.MAX_STEPS
    with pytest.warns(InferenceWarning, match="max_steps"):
        result = gpext.fit(mll, x, y, max_steps=1, progress=False)
    assert "stopped at max_steps before the tolerance was reached" in result.message


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-6, 403.0, 1e6])
@pytest.mark.parametrize("length", [1e-3, 1.0, 1e6])
@pytest.mark.parametrize("rule", [KL(), Laplace(), CAVI(max_steps=20000)], ids=lambda rule: type(rule).__name__)
def test_hyperparameters_at_the_edge(rule, scale, length):
    model, mll, x, y = made(rule)
    model.covar_module.outputscale, model.covar_module.base_kernel.lengthscale = scale, length
    value = mll(model(x), y)
    value.backward()
    assert value.isfinite().item()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
    assert model.result.status is Status.CONVERGED


@pytest.mark.parametrize("rule", [KL(), Laplace(), CAVI()], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("case", ["one datum", "one class", "duplicates"])
def test_odd_data(rule, case):
    x, y = {
        "one datum": (torch.zeros(1, 1, dtype=F64), torch.ones(1, dtype=F64)),
        "one class": (data()[0], torch.ones(40, dtype=F64)),
        "duplicates": (torch.zeros(10, 1, dtype=F64), data(10)[1]),
    }[case]
    model = Model(x, y, BernoulliLogitLikelihood(), rule).double()
    result = gpext.fit(LatentMarginalLogLikelihood(model.likelihood, model), x, y, max_steps=20, progress=False)
    assert result.status in (gpext.FitStatus.CONVERGED, gpext.FitStatus.MAX_STEPS)
    predictive = model.likelihood(model.eval()(x + 0.1))
    assert bool(predictive.probs.isfinite().all())


# ---- other likelihoods ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", [MultinomialLogitLikelihood, StickBreakingLikelihood, OrdinalLogitLikelihood])
def test_classes_train_and_predict(kind):
    x, _ = data(60)
    y = (x[:, 0] / 4 * 3).floor().clamp(0, 2)
    likelihood = kind(3).double()
    batch = () if likelihood.num_latents is None else (likelihood.num_latents,)
    model = Model(x, y, likelihood, batch=batch).double()
    mll = LatentMarginalLogLikelihood(likelihood, model)
    before = mll(model(x), y).item()
    result = gpext.fit(mll, x, y, max_steps=15, progress=False)
    assert result.objective > before + 0.1
    probs = likelihood(model.eval()(x)).probs
    assert probs.shape == (60, 3)
    assert (probs.argmax(-1) == y).double().mean() > 0.9
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(x[:3]).mean, model(x[:3]).mean)
    fresh = Model(x, y, kind(3).double(), batch=batch).double()
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh.eval()(x[:3]).mean, model(x[:3]).mean, rtol=1e-5, atol=1e-5)


def test_counts_train_and_predict():
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(0, 6, 60, dtype=F64)
    rate = torch.exp(1 + torch.sin(x))
    y = torch.poisson(rate, generator=generator)
    likelihood = PoissonLikelihood()
    model = Model(x, y, likelihood).double()
    result = gpext.fit(LatentMarginalLogLikelihood(likelihood, model), x, y, progress=False)
    assert result.status is gpext.FitStatus.CONVERGED
    predictive = likelihood(model.eval()(x))
    assert (predictive.mean / rate).log().abs().mean() < 0.2


def test_another_likelihood_of_as_many_parameters_is_another_result():
    model, _, _, _ = made()
    before = model.result.log_evidence
    model.likelihood = BayesianSVMLikelihood()
    fresh, _, _, _ = made()
    fresh.likelihood = BayesianSVMLikelihood()
    torch.testing.assert_close(model.result.log_evidence, fresh.result.log_evidence)
    assert abs(model.result.log_evidence - before) > 0.1
    assert set(model.state_dict()) == set(fresh.state_dict())
    assert not any("likelihood" in name for name, _ in model.variational_strategy.named_modules())


def test_a_fantasy_model_is_one_of_more_data():
    x, y = data(40)
    model = Model(x[:30], y[:30], BernoulliLogitLikelihood(), EP()).double()
    expected = Model(x, y, BernoulliLogitLikelihood(), EP()).double().eval()
    fantasy = model.get_fantasy_model(x[30:], y[30:])
    torch.testing.assert_close(fantasy(x).mean, expected(x).mean, rtol=1e-5, atol=1e-5)
    assert len(model.train_targets) == 30
    several = model.get_fantasy_model(x[30:, 0], torch.stack([y[30:], 1 - y[30:]]))
    assert several(x).mean.shape == (2, 40)
    torch.testing.assert_close(several(x).mean[0], expected(x).mean, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"targets must be in \{0, 1\}"):
        model.get_fantasy_model(x[30:], 2 * y[30:])
    with pytest.raises(ValueError, match="equally many"):
        model.get_fantasy_model(x[30:], y[31:])
