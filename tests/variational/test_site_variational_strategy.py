"""Updates of q(u), against gpytorch's natural-gradient step and full CAVI; gradients against autograd."""

import copy
import pickle
import unittest

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import VariationalELBO
from gpytorch.test.variational_test_case import VariationalTestCase
from gpytorch.variational import CholeskyVariationalDistribution, NaturalVariationalDistribution

import gpext
from gpext.inference import CAVI
from gpext.likelihoods import StudentTLikelihood, VonMisesLikelihood
from gpext.mlls import AugmentedELBO
from gpext.variational import SiteVariationalStrategy, UpdateOptions
from gpext.variational.prior_blocks import hyperparameters
from tests.members import F64, MEMBERS, student_t
from tests.sparse_models import SparseGP, inputs, pair, randomise

N, M = 30, 7


@pytest.fixture(params=MEMBERS)
def member(request):
    return MEMBERS[request.param]


def natural(model):
    return [p.detach().clone() for p in model.natural]


def assert_same(actual, expected, tolerance=1e-10):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def ngd_step(model, likelihood, x, y, rate, num_data):
    mll = AugmentedELBO(likelihood, model.train(), num_data=num_data)
    optimizer = gpytorch.optim.NGD(model.natural, num_data=num_data, lr=rate)
    optimizer.zero_grad()
    (-mll(model(x), y)).sum().backward()
    optimizer.step()


# ---- the step ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1.0, 0.1])
@pytest.mark.parametrize("size", [N, 5])
def test_update_is_the_natural_gradient_step_of_gpytorch(member, rate, size):
    ours, theirs = pair(inputs(M, 2))
    x, y = inputs(size, 2, seed=1), member.targets(size)
    ours.base.update(x, y, member.likelihood, rate, num_data=N)
    before = natural(theirs)
    ngd_step(theirs, member.likelihood, x, y, rate, N)
    assert float((before[0] - theirs.natural[0].detach()).abs().max()) > 1e-2
    assert_same(natural(ours), natural(theirs))


@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_minibatch_updates_average_to_the_full_one(member, rate):
    x, y = inputs(N, 2, seed=1), member.targets(N)
    full = randomise(SparseGP(inputs(M, 2)))
    full.base.update(x, y, member.likelihood, rate)
    parts = []
    for start in range(0, N, 10):
        model = randomise(SparseGP(inputs(M, 2)))
        model.base.update(x[start : start + 10], y[start : start + 10], member.likelihood, rate, num_data=N)
        parts.append(natural(model))
    assert_same([sum(p) / 3 for p in zip(*parts, strict=True)], natural(full))


def test_with_the_training_inputs_as_inducing_points_it_is_full_cavi(member):
    x = torch.linspace(0, 12, 15, dtype=F64).unsqueeze(-1)
    y = member.targets(15)
    model = SparseGP(x.clone(), jitter_val=1e-9).eval()
    full = CAVI(max_steps=3000).infer(MultivariateNormal(*_dense_prior(model, x)), member.likelihood, y)
    for _ in range(full.num_steps + 1):
        model.base.update(x, y, member.likelihood)
    posterior = model(x)
    torch.testing.assert_close(posterior.mean, full.posterior.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        posterior.covariance_matrix, full.posterior.covariance_matrix.detach(), rtol=1e-6, atol=1e-6
    )
    evidence = 15 * AugmentedELBO(member.likelihood, model, num_data=15)(posterior, y)
    torch.testing.assert_close(evidence, full.log_evidence, rtol=1e-6, atol=1e-6)


def _dense_prior(model, x):
    prior = model.forward(x)
    return prior.mean.detach(), prior.covariance_matrix.detach()


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1.0, 0.3, 0.01])
def test_full_batch_updates_never_decrease_the_bound(member, rate):
    x, y = inputs(N, 2, seed=1), member.targets(N)
    model = SparseGP(inputs(M, 2))
    mll = AugmentedELBO(member.likelihood, model.train(), num_data=N)
    values = []
    for _ in range(15):
        values.append(float(mll(model(x), y).detach()))
        model.base.update(x, y, member.likelihood, rate)
    values = torch.tensor(values, dtype=F64)
    assert bool((values.diff() >= -1e-12 * values.abs().max()).all())
    assert values[-1] > values[0] + 1e-3


# ---- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", ["augmented", "exact"])
@pytest.mark.parametrize("size", [N, 4])
def test_gradients_are_those_of_autograd_through_the_elbo(member, gradient, size):
    ours, theirs = pair(inputs(M, 2))
    x, y = inputs(size, 2, seed=1), member.targets(size)
    likelihood, other = member.make(), member.make()
    value = ours.base.update(x, y, likelihood, 0.5, num_data=N, gradient=gradient)
    objective = (AugmentedELBO if gradient == "augmented" else VariationalELBO)(other, theirs.train(), num_data=N)
    expected = objective(theirs(x), y)
    (-expected).backward()
    torch.testing.assert_close(value, expected.detach(), rtol=1e-10, atol=1e-10)
    pairs = dict(ours.named_hyperparameters()), dict(theirs.named_hyperparameters())
    assert pairs[0].keys() == pairs[1].keys()
    assert any("inducing_points" in name for name in pairs[0])
    assert any("mean_module" in name for name in pairs[0])
    for name, parameter in pairs[0].items():
        assert float(pairs[1][name].grad.abs().max()) > 1e-6, name
        torch.testing.assert_close(parameter.grad, pairs[1][name].grad, rtol=1e-9, atol=1e-10)
    for a, b in zip(likelihood.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-10)
    assert all(p.grad is None for p in ours.natural)


def kernels():
    k = gpytorch.kernels
    return {
        "plain": k.RBFKernel(),
        "active_dims": k.RBFKernel(active_dims=(1,)),
        "scaled_active_dims": k.ScaleKernel(k.MaternKernel(nu=1.5, active_dims=(0,))),
        "outer_active_dims": k.ScaleKernel(k.MaternKernel(nu=2.5), active_dims=(1,)),
        "sum": k.ScaleKernel(k.RBFKernel()) + k.ScaleKernel(k.MaternKernel(nu=0.5, active_dims=(0,))),
        "product": k.ScaleKernel(k.RBFKernel(active_dims=(0,)) * k.PeriodicKernel(active_dims=(1,))),
        "linear": k.LinearKernel() + k.RBFKernel(),
        "piecewise_polynomial": k.PiecewisePolynomialKernel(),
        "rational_quadratic": k.RQKernel(),
    }


@pytest.mark.parametrize("name", kernels())
@pytest.mark.parametrize("size", [N, 4])
def test_step_and_gradients_with_kernels_of_every_structure(name, size):
    ours, theirs = pair(inputs(M, 2))
    x, y = inputs(size, 2, seed=1), MEMBERS["student_t"].targets(size)
    for model in (ours, theirs):
        model.covar_module = kernels()[name].double()
    ours.base.update(x, y, student_t(), 0.5, num_data=N, gradient="augmented")
    ngd_step(theirs, student_t(), x, y, 0.5, N)
    assert_same(natural(ours), natural(theirs))
    pairs = dict(ours.named_hyperparameters()), dict(theirs.named_hyperparameters())
    for key, parameter in pairs[0].items():
        torch.testing.assert_close(parameter.grad, pairs[1][key].grad, rtol=1e-8, atol=1e-9)


def test_gradients_accumulate_and_are_left_alone_without_the_option():
    model, likelihood = randomise(SparseGP(inputs(M, 2))), student_t()
    start = natural(model)
    x, y = inputs(N, 2, seed=1), MEMBERS["student_t"].targets(N)
    assert model.base.update(x, y, likelihood) is None
    parameters = [*model.hyperparameters(), *likelihood.parameters()]
    assert all(p.grad is None for p in parameters)
    first = []
    for _ in range(2):
        for p, value in zip(model.natural, start, strict=True):
            p.data.copy_(value)
        model.base.update(x, y, likelihood, gradient="augmented")
        first.append([p.grad.clone() for p in parameters])
    assert_same(first[1], [2 * g for g in first[0]])


def test_frozen_inducing_points_get_no_gradient():
    model = randomise(SparseGP(inputs(M, 2), learn=False))
    model.base.update(
        inputs(N, 2, seed=1), MEMBERS["student_t"].targets(N), student_t(), gradient="augmented", num_data=N
    )
    assert model.covar_module.raw_outputscale.grad is not None
    assert not isinstance(model.base.inducing_points, torch.nn.Parameter)


@pytest.mark.parametrize("change", ["parameter", "data", "inducing", "load"])
def test_a_change_of_hyperparameters_between_updates_is_seen(change):
    """Whatever the strategy keeps between updates, a step is taken at the current parameters."""
    x, y, likelihood = inputs(N, 2, seed=1), MEMBERS["student_t"].targets(N), MEMBERS["student_t"].likelihood
    used = randomise(SparseGP(inputs(M, 2)))
    used.base.update(x, y, likelihood)

    def apply(model):
        if change == "parameter":
            model.covar_module.base_kernel.lengthscale = 0.3
        elif change == "data":
            model.covar_module.raw_outputscale.data.add_(1.0)
        elif change == "inducing":
            model.base.inducing_points.data.add_(0.2)
        else:
            state = {name: value + 0.1 if "raw" in name else value for name, value in model.state_dict().items()}
            model.load_state_dict(state)

    apply(used)
    fresh = SparseGP(inputs(M, 2))
    apply(fresh)
    for p, value in zip(fresh.natural, natural(used), strict=True):
        p.data.copy_(value)
    fresh.base.variational_params_initialized.fill_(1)
    for model in (used, fresh):
        model.base.update(x, y, likelihood, 0.5)
    assert_same(natural(used), natural(fresh), 1e-12)


def test_the_key_of_the_factor_has_every_hyperparameter_and_no_other():
    model = SparseGP(inputs(M, 2))
    assert {id(p) for p in hyperparameters(model)} == {id(p) for p in model.hyperparameters()}
    assert not {id(p) for p in model.base.prior_key()} & {id(p) for p in model.natural}


def test_another_jitter_is_seen():
    x, y, likelihood = inputs(N, 2, seed=1), MEMBERS["student_t"].targets(N), MEMBERS["student_t"].likelihood
    used, fresh = randomise(SparseGP(inputs(M, 2))), randomise(SparseGP(inputs(M, 2), jitter_val=0.1))
    used.base.prepare(x, y, likelihood, "augmented")
    used.base.jitter_val = 0.1
    for model in (used, fresh):
        model.base.update(x, y, likelihood, 0.5)
    assert_same(natural(used), natural(fresh), 1e-12)


@pytest.mark.parametrize("bound", ["augmented", "exact"])
def test_an_update_from_a_prepared_batch(member, bound):
    x, y = inputs(N, 2, seed=1), member.targets(N)
    known, seen = (randomise(SparseGP(inputs(M, 2))) for _ in range(2))
    more = torch.cat([x, inputs(N, 2, seed=2)]), torch.cat([y, y.flip(0)])
    first, second = known.base.prepare(*more, member.likelihood, bound).split(N, member.likelihood)
    torch.testing.assert_close(second.targets, y.flip(0))
    known.base.update_prepared(first, member.likelihood, UpdateOptions(bound, 0.5, 2 * N))
    seen.base.update(x, y, member.likelihood, 0.5, 2 * N, bound=bound)
    assert_same(natural(known), natural(seen))


# ---- errors --------------------------------------------------------------------------------------------------------


def batch_of(**changes):
    given = {
        "x": inputs(N, 2, seed=1),
        "y": MEMBERS["student_t"].targets(N),
        "likelihood": MEMBERS["student_t"].likelihood,
    }
    return {**given, **changes}


NAN_Y = MEMBERS["student_t"].targets(N).index_fill(0, torch.tensor(3), torch.nan)
NAN_X = inputs(N, 2, seed=1).index_fill(0, torch.tensor(3), torch.nan)
ERRORS = {
    "nan target": (batch_of(y=NAN_Y), ValueError, "index 3"),
    "nan input": (batch_of(x=NAN_X), ValueError, r"index \(3, 0\)"),
    "labels": (batch_of(likelihood=MEMBERS["bernoulli_logit"].likelihood), ValueError, r"\{0, 1\}"),
    "half": (batch_of(y=torch.zeros(N).half()), TypeError, "float16"),
    "empty": (batch_of(x=torch.zeros(0, 2).double(), y=torch.zeros(0).double()), ValueError, "empty"),
    "rate 0": (batch_of(rate=0.0), ValueError, r"rate must be in \(0, 1\]; got 0"),
    "rate 1.5": (batch_of(rate=1.5), ValueError, "rate"),
    "rate nan": (batch_of(rate=float("nan")), ValueError, "rate"),
    "num_data": (batch_of(num_data=N - 1), ValueError, rf"num_data \({N - 1}\) is smaller than the batch \({N}\)"),
    "num_data 0": (batch_of(num_data=0), ValueError, "num_data"),
    "half a datum": (batch_of(num_data=N + 0.5), TypeError, "num_data must be a whole number; got 30.5"),
    "share -1": (batch_of(num_data=2 * N, share=-1), ValueError, "share must not be negative; got -1"),
    "share": (batch_of(num_data=2 * N, share=N - 1), ValueError, "from 30, its own, to 60, all; got 29"),
    "share of more": (batch_of(num_data=2 * N, share=2 * N + 1), ValueError, "from 30, its own, to 60, all; got 61"),
    "share without num_data": (batch_of(share=N + 1), ValueError, "from 30, its own, to 30, all; got 31"),
    "half a share": (batch_of(num_data=2 * N, share=N + 0.5), TypeError, "share must be a whole number"),
    "shapes": (batch_of(y=torch.zeros(N - 1).double()), ValueError, r"got \(30, 2\) and \(29,\)"),
    "columns": (batch_of(x=torch.zeros(N, 3).double()), ValueError, "expected inputs of 2 columns"),
    "vector": (batch_of(x=torch.zeros(N).double()), ValueError, "expected inputs"),
    "stock": (
        batch_of(likelihood=gpytorch.likelihoods.GaussianLikelihood()),
        TypeError,
        "a likelihood of gpext",
    ),
}


@pytest.mark.parametrize("gradient", [None, "augmented", "exact"])
@pytest.mark.parametrize(("given", "error", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_leave_everything_as_it_was(given, error, message, gradient):
    model = randomise(SparseGP(inputs(M, 2)))
    refuse(model, given, error, message, gradient)


@pytest.mark.parametrize("name", ["nan target", "labels", "half", "columns"])
def test_errors_leave_a_model_that_was_never_called_as_it_was(name):
    given, error, message = ERRORS[name]
    refuse(SparseGP(inputs(M, 2)), given, error, message, None)


def refuse(model, given, error, message, gradient):
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        model.base.update(**given, gradient=gradient)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in model.parameters())


def test_an_unknown_gradient_is_refused():
    model = randomise(SparseGP(inputs(M, 2)))
    before = natural(model)
    with pytest.raises(ValueError, match="gradient"):
        model.base.update(**batch_of(), gradient="exakt")
    assert_same(natural(model), before, 0)


def test_duplicate_inducing_points_without_jitter_are_refused_and_nothing_changes():
    model = randomise(SparseGP(torch.zeros(M, 2, dtype=F64), jitter_val=0.0))
    before = natural(model)
    with pytest.raises(torch.linalg.LinAlgError, match="raise jitter_val"):
        model.base.update(**batch_of())
    assert_same(natural(model), before, 0)


def test_fewer_data_than_inducing_points():
    model = SparseGP(inputs(M, 2))
    for _ in range(3):
        model.base.update(inputs(1, 2, seed=1), MEMBERS["student_t"].targets(1), MEMBERS["student_t"].likelihood)
    assert bool(model.eval()(inputs(5, 2)).variance.isfinite().all())


def test_other_variational_distributions_are_refused():
    with pytest.raises(TypeError, match=r"natural parameters.*CholeskyVariationalDistribution"):
        SiteVariationalStrategy(None, inputs(M, 2), CholeskyVariationalDistribution(M))


# ---- shapes, copies, caches ----------------------------------------------------------------------------------------


def test_predictions_in_inference_mode_leave_gradients_possible():
    model = randomise(SparseGP(inputs(M, 2))).eval()
    x = inputs(4, 2, seed=1)
    with torch.inference_mode():
        seen = model(x).mean + 0.0
    at = x.clone().requires_grad_()
    model(at).variance.sum().backward()
    assert bool(at.grad.isfinite().all())
    torch.testing.assert_close(seen.clone(), model(x).mean.detach())
    assert not model(x).mean.is_inference()


@pytest.mark.parametrize("gradient", ["augmented", "exact"])
def test_a_batch_of_gps_is_a_loop(member, gradient):
    Z, x, y = inputs(3, M, 2), inputs(3, N, 2, seed=1), member.targets(3, N)
    together = randomise(SparseGP(Z))
    start = natural(together)
    value = together.base.update(x, y, member.likelihood, 0.5, gradient=gradient)
    assert value.shape == (3,)
    total = torch.zeros((), dtype=F64)
    for i in range(3):
        alone = randomise(SparseGP(Z[i]))
        for p, s in zip(alone.natural, start, strict=True):
            p.data.copy_(s[i])
        single = alone.base.update(x[i], y[i], member.likelihood, 0.5, gradient=gradient)
        torch.testing.assert_close(value[i], single, rtol=1e-10, atol=1e-10)
        assert_same([p[i] for p in natural(together)], natural(alone))
        torch.testing.assert_close(together.base.inducing_points.grad[i], alone.base.inducing_points.grad)
        total = total + alone.covar_module.raw_outputscale.grad
    torch.testing.assert_close(together.covar_module.raw_outputscale.grad, total, rtol=1e-9, atol=1e-10)


def test_one_set_of_inputs_serves_a_batch_of_models():
    x, y = inputs(N, 2, seed=1), MEMBERS["student_t"].targets(N)
    likelihood = MEMBERS["student_t"].likelihood
    shared, repeated = (randomise(SparseGP(inputs(3, M, 2))) for _ in range(2))
    shared.base.update(x, y, likelihood, gradient="augmented")
    repeated.base.update(x.expand(3, N, 2), y.expand(3, N), likelihood, gradient="augmented")
    assert_same(natural(shared), natural(repeated))
    assert_same([p.grad for p in shared.hyperparameters()], [p.grad for p in repeated.hyperparameters()])


@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_independent_tasks_step_as_with_gpytorch(member, rate):
    ours, theirs = pair(inputs(2, M, 2), num_tasks=2)
    x, y = inputs(N, 2, seed=1), member.targets(N, 2)
    likelihood, other = member.make(), member.make()
    ours.base.update(x, y.mT, likelihood, rate, gradient="augmented")
    ngd_step(theirs, other, x, y, rate, N)
    assert_same(natural(ours), natural(theirs))
    for a, b in zip(ours.hyperparameters(), theirs.hyperparameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-10)
    for a, b in zip(likelihood.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-10)


def test_float32_updates_follow_float64(member):
    models = SparseGP(inputs(M, 2)), SparseGP(inputs(M, 2).float(), jitter_val=1e-6)
    for _ in range(5):
        for model in models:
            dtype = model.base.inducing_points.dtype
            likelihood = member.make().to(dtype).requires_grad_(False)
            model.base.update(inputs(N, 2, seed=1).to(dtype), member.targets(N).to(dtype), likelihood)
    x = inputs(5, 2, seed=2)
    exact, single = models[0].eval()(x), models[1].eval()(x.float())
    assert single.mean.dtype == torch.float32
    torch.testing.assert_close(single.mean.double(), exact.mean, rtol=1e-2, atol=1e-2)


def updated():
    model = SparseGP(inputs(M, 2))
    for _ in range(3):
        model.base.update(**batch_of(), gradient="augmented")
    return model


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_predict_and_step_alike(clone):
    model = updated()
    other = clone(model)
    for m in (model, other):
        m.base.update(**batch_of(rate=0.5))
    assert_same(natural(model), natural(other), 0)
    x = inputs(5, 2, seed=2)
    assert torch.equal(model.eval()(x).mean, other.eval()(x).mean)
    assert other.base.model is other
    other.base.update(**batch_of(rate=0.5))  # the copy is independent
    assert not torch.equal(model.natural[0], other.natural[0])


def test_state_dict_round_trip_with_gpytorchs_strategy():
    ours, theirs = pair(inputs(M, 2))
    ours.base.update(**batch_of())
    theirs.load_state_dict(ours.state_dict(), strict=True)
    fresh = SparseGP(inputs(M, 2, seed=9))
    fresh.load_state_dict(theirs.state_dict(), strict=True)
    x = inputs(5, 2, seed=2)
    assert torch.equal(ours.eval()(x).mean, fresh.eval()(x).mean)
    torch.testing.assert_close(ours(x).mean, theirs.eval()(x).mean)


def test_predictions_after_an_update_in_eval_mode_are_fresh():
    model = randomise(SparseGP(inputs(M, 2))).eval()
    x = inputs(5, 2, seed=2)
    before = model(x).mean.detach()
    model.base.kl_divergence()
    model.base.update(**batch_of())
    after = model(x).mean.detach()
    assert float((after - before).abs().max()) > 1e-2
    torch.testing.assert_close(after, model.train()(x).mean.detach(), rtol=1e-12, atol=1e-12)


def test_a_new_strategy_starts_at_the_prior():
    model = SparseGP(inputs(M, 2))
    x = inputs(5, 2, seed=2)
    posterior, prior = model.eval()(x), model.forward(x)
    torch.testing.assert_close(posterior.mean, prior.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(posterior.variance, prior.variance, rtol=1e-5, atol=1e-5)  # jitter


def test_default_distribution_and_one_dimensional_inducing_points():
    class Model(gpytorch.models.ApproximateGP):
        def __init__(self):
            super().__init__(SiteVariationalStrategy(self, torch.linspace(0, 1, 4, dtype=F64)))
            self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel().double()

        def forward(self, x):
            return MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model = Model()
    y = MEMBERS["student_t"].targets(9)
    model.variational_strategy.update(torch.linspace(0, 1, 9, dtype=F64).unsqueeze(-1), y, student_t())
    assert model.eval()(torch.zeros(1, dtype=F64)).mean.dtype == F64


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("rate", [1.0, 0.1, 0.01])
def test_student_t_with_outliers_never_fails_on_200_data_sets(rate, dtype):
    """10 % outliers at 20 standard deviations: where the exact ELBO and NGD at rate 1 break down."""
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.rand(200, 100, 1, generator=generator, dtype=F64)
    y = torch.sin(3 * x.squeeze(-1)) + 0.1 * torch.randn(200, 100, generator=generator, dtype=F64)
    outlier = torch.rand(200, 100, generator=generator) < 0.1
    y = torch.where(outlier, y + 2 * torch.randn(200, 100, generator=generator, dtype=F64).sign(), y)
    likelihood = StudentTLikelihood().to(dtype).requires_grad_(False)
    likelihood.noise, likelihood.deg_free = 0.01, 3.0
    Z = torch.linspace(0, 3, 15, dtype=dtype).view(15, 1).repeat(200, 1, 1)
    model = SparseGP(Z).eval()
    for _ in range(20):
        model.base.update(x.to(dtype), y.to(dtype), likelihood, rate)
    with torch.no_grad():
        posterior = model(x.to(dtype))
    assert bool(posterior.mean.isfinite().all())
    assert bool((posterior.variance > 0).all())
    if rate == 1.0:
        error = (posterior.mean - torch.sin(3 * x.squeeze(-1))).square().mean(-1).sqrt()
        assert float(error.max()) < 0.2


# ---- upstream ------------------------------------------------------------------------------------------------------


class _Upstream(VariationalTestCase):
    seed = 0
    batch_shape = torch.Size([])
    distribution_cls = NaturalVariationalDistribution
    strategy_cls = SiteVariationalStrategy

    def test_fantasy_call(self, *args, **kwargs):
        self.skipTest("gpytorch's fantasy models need a CholeskyVariationalDistribution")

    test_fantasy_call_batch_inducing = test_fantasy_call
    test_fantasy_call_batch_data = test_fantasy_call
    test_fantasy_call_batch_model = test_fantasy_call


class TestUpstreamVariationalELBO(_Upstream, unittest.TestCase):
    mll_cls = VariationalELBO


class TestUpstreamPredictiveLogLikelihood(_Upstream, unittest.TestCase):
    mll_cls = gpytorch.mlls.PredictiveLogLikelihood


class TestUpstreamAugmentedELBO(_Upstream, unittest.TestCase):
    mll_cls = AugmentedELBO
    likelihood_cls = StudentTLikelihood


def test_a_step_that_is_not_finite_is_refused_and_changes_nothing(member):
    x, y = inputs(20, 2), member.targets(20)
    model = SparseGP(inputs(5, 2, seed=1))
    model.base.update(x, y, member.likelihood)
    before = natural(model)
    torch.nn.init.constant_(model.mean_module.bias, float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"):
        model.base.update(x, y, member.likelihood)
    assert_same(natural(model), before, 0.0)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_copies_after_a_call_with_gradients(mode):
    model = SparseGP(inputs(M, 2))
    x = inputs(5, 2, seed=1)
    expected = getattr(model, mode)()(x).mean
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(x).mean, expected)


def test_inducing_points_that_are_none():
    for wrong, error, message in (
        ([[0.0]], TypeError, r"inducing_points must be a torch\.Tensor; got list"),
        (torch.zeros(0, 2), ValueError, r"at least one; got \(0, 2\)"),
        (torch.arange(4), ValueError, r"of float32 or float64.*torch.int64"),
        (torch.tensor(1.0), ValueError, r"got \(\)"),
        (torch.full((3, 1), torch.nan), ValueError, "inducing_points must be finite"),
    ):
        with pytest.raises(error, match=message):
            SiteVariationalStrategy(None, wrong)
    with pytest.raises(ValueError, match="of 5 values, and there are 3 inducing points"):
        SiteVariationalStrategy(None, torch.zeros(3, 1), NaturalVariationalDistribution(5))


def test_latents_without_a_q_of_their_own():
    model = SparseGP(inputs(M, 2))
    before = natural(model)
    x, y = inputs(5, 2, seed=1), torch.zeros(5, dtype=F64)
    mll = VariationalELBO(VonMisesLikelihood(), model, num_data=5)
    for use in (
        lambda: model.base.update(x, y, mll.likelihood),
        lambda: gpext.fit(mll, x, y, progress=False),
        lambda: gpext.fit(mll, x, y, batch_size=2, progress=False),
    ):
        with pytest.raises(ValueError, match=r"num_latents = 2: expected a q\(u\) for each.*Z\.repeat\(2, 1, 1\)"):
            use()
    with pytest.raises(TypeError, match=r"inputs must be a torch\.Tensor; got list"):
        model.base.update(x.tolist(), y, student_t())
    assert_same(natural(model), before, 0.0)
