"""A loaded model predicts what the saved one did, bit for bit, and continues to train; a wrong file changes nothing."""

import copy
import io
import os
import pickle

import gpytorch
import joblib
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import ExactMarginalLogLikelihood, VariationalELBO
from gpytorch.variational import IndependentMultitaskVariationalStrategy, LMCVariationalStrategy

import gpext
from gpext import files, saving
from gpext.designs import sums
from gpext.inference import CAVI, EP, KL, Laplace, RobustConjugate
from gpext.likelihoods import (
    BernoulliLogitLikelihood,
    Censored,
    HeteroscedasticGaussianLikelihood,
    MultinomialLogitLikelihood,
    StudentTLikelihood,
    Weighted,
)
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.variational import SiteVariationalStrategy
from tests.latent_cases import CASES, RULES
from tests.members import F64
from tests.sparse_models import SparseGP

X = torch.linspace(0, 4, 12, dtype=F64).unsqueeze(-1)
X_NEW = torch.linspace(-1, 5, 7, dtype=F64).unsqueeze(-1)


class Latent(gpext.models.LatentGP):
    def __init__(self, x, y, likelihood, rule=None, num_latents=None, **options):
        super().__init__(x, y, likelihood, rule, **options)
        batch = torch.Size([] if num_latents is None else [num_latents])
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        kernel = gpytorch.kernels.RBFKernel(batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel, batch_shape=batch)
        self.to(x)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def predictions(model, x=X_NEW):
    with torch.no_grad():
        q = model.eval()(x)
        return q.mean, q.covariance_matrix


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b), (a - b).abs().max()


def there_and_back(model, fresh, path):
    expected = predictions(model)
    gpext.save(model, path)
    assert_same(predictions(model), expected)  # saving leaves a model as it is
    loaded = gpext.load(path, fresh)
    assert loaded is fresh
    assert not loaded.training
    assert_same(predictions(loaded), expected)
    return loaded


PAIRS = [(name, rule) for name, case in CASES.items() for rule in case.rules]


@pytest.mark.filterwarnings("ignore::gpext.inference.expansion.DenseBlocksWarning")
@pytest.mark.parametrize(("name", "rule"), PAIRS, ids=[f"{n}-{r}" for n, r in PAIRS])
def test_predictions_of_every_rule_are_equal_bit_by_bit(name, rule, tmp_path):
    case = CASES[name]
    y = case.targets(torch.Generator().manual_seed(1), 12)

    def make(seed=0):
        model = Latent(X, y, case.make(), RULES[rule], case.num_latents)
        model.covar_module.outputscale = 0.5 + 0.2 * seed
        return model

    model = make(1)
    assert_same([model.result.log_evidence], [there_and_back(model, make(), tmp_path / "m.gpext").result.log_evidence])


def regression(dtype=F64, likelihood=StudentTLikelihood, **options):
    y = torch.sin(2 * X[:, 0]).to(dtype)
    return Latent(X.to(dtype), y, likelihood().to(dtype), KL(), **options)


def placeholder(dtype=F64, likelihood=StudentTLikelihood, **options):
    return Latent(X[:1].to(dtype), X[:1, 0].to(dtype), likelihood().to(dtype), KL(), **options)


def trained(model):
    mll = LatentMarginalLogLikelihood(model.likelihood, model)
    gpext.fit(mll, model.train_inputs[0], model.train_targets, max_steps=3, progress=False)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("sparse", [False, True])
def test_one_datum_is_enough_to_load_into_and_training_goes_on(dtype, sparse, tmp_path):
    options = {"inducing_inputs": X[::3].to(dtype)} if sparse else {}
    model = trained(regression(dtype, **options))
    expected = predictions(model, X_NEW.to(dtype))
    gpext.save(model, tmp_path / "m")
    loaded = gpext.load(tmp_path / "m", placeholder(dtype, **options))
    assert_same(predictions(loaded, X_NEW.to(dtype)), expected)
    assert torch.equal(loaded.train_inputs[0], model.train_inputs[0])
    other = copy.deepcopy(model)
    for each in (loaded, other):
        trained(each)
    assert_same(loaded.state_dict().values(), other.state_dict().values())


@pytest.mark.parametrize("rule", [EP(), Laplace(), CAVI(), RobustConjugate(), KL(schedule="sequential")])
def test_other_rules(rule, tmp_path):
    y = torch.sin(2 * X[:, 0])
    likelihood = gpytorch.likelihoods.GaussianLikelihood if isinstance(rule, RobustConjugate) else StudentTLikelihood
    make = lambda: Latent(X, y, likelihood().to(F64), rule)  # noqa: E731
    there_and_back(make(), make(), tmp_path / "m")


def test_designs(tmp_path):
    y = torch.tensor([1.0, -0.5, 0.3], dtype=F64)
    design = sums(torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 0]))
    model = Latent(X, y, StudentTLikelihood().to(F64), design=design)
    one = sums(torch.tensor([0]))
    loaded = there_and_back(model, Latent(X[:1], y[:1], StudentTLikelihood().to(F64), design=one), tmp_path / "m")
    assert loaded.design.shape == (3, 12)


def test_compositions(tmp_path):
    y = torch.stack([X[:, 0], torch.where(X[:, 0] > 2, torch.inf, X[:, 0])], -1)
    weights = torch.linspace(0.5, 2, 12, dtype=F64)
    make = lambda: Latent(X, y, Weighted(Censored(StudentTLikelihood().to(F64)), weights))  # noqa: E731
    there_and_back(make(), make(), tmp_path / "m")


@pytest.mark.parametrize("rule", [KL(), EP(), Laplace()])
def test_several_latents(rule, tmp_path):
    y = X[:, 0] - 1
    make = lambda: Latent(X, y, HeteroscedasticGaussianLikelihood().to(F64), rule, 2)  # noqa: E731
    there_and_back(make(), make(), tmp_path / "m")


def test_classes_under_a_sparse_prior(tmp_path):
    y = torch.arange(12) % 3
    make = lambda: Latent(X, y, MultinomialLogitLikelihood(3), Laplace(), 3, inducing_inputs=X[::3])  # noqa: E731
    there_and_back(make(), make(), tmp_path / "m")


# ---- models of inducing points -------------------------------------------------------------------------------------


def sparse_mll(seed=0, num_data=40):
    x = 4 * torch.rand(num_data, 1, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return VariationalELBO(StudentTLikelihood().to(F64), SparseGP(X[::2].clone()), num_data), x, torch.sin(2 * x[:, 0])


@pytest.mark.parametrize("batch_size", [None, 10])
def test_site_strategies_save_no_data_and_objectives_save_their_likelihood(batch_size, tmp_path):
    mll, x, y = sparse_mll()
    gpext.fit(mll, x, y, batch_size=batch_size, max_steps=5, progress=False)
    expected = predictions(mll.model)
    gpext.save(mll, tmp_path / "m")
    content = files.load(tmp_path / "m", saving._KEYS)[0]["content"]
    assert content["data"] == {}
    assert not any(40 in value.shape for value in content["state"].values())
    other = gpext.load(tmp_path / "m", sparse_mll()[0])
    assert_same(predictions(other.model), expected)
    assert torch.equal(other.likelihood.noise, mll.likelihood.noise)
    again = [gpext.fit(each, x, y, batch_size=batch_size, max_steps=5, progress=False) for each in (mll, other)]
    assert torch.equal(again[0].trace, again[1].trace)


class Mixed(gpytorch.models.ApproximateGP):
    def __init__(self, wrapper):
        Z = X[::3].expand(2, 4, 1).clone()
        base = SiteVariationalStrategy(self, Z)
        if wrapper is LMCVariationalStrategy:
            super().__init__(wrapper(base, num_tasks=3, num_latents=2, latent_dim=-1))
        else:
            super().__init__(wrapper(base, num_tasks=2))
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=torch.Size([2]))
        self.covar_module = gpytorch.kernels.RBFKernel(batch_shape=torch.Size([2]))
        self.to(X)

    forward = Latent.forward


@pytest.mark.parametrize("wrapper", [LMCVariationalStrategy, IndependentMultitaskVariationalStrategy])
def test_multitask_models(wrapper, tmp_path):
    model, fresh = Mixed(wrapper), Mixed(wrapper)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * torch.arange(p.numel(), dtype=F64).view(p.shape))
        natural = model.variational_strategy.base_variational_strategy._variational_distribution.natural_mat
        natural.copy_(-torch.eye(4, dtype=F64))
    model(X)  # initialises
    model.variational_strategy.base_variational_strategy.variational_params_initialized.fill_(1)
    there_and_back(model, fresh, tmp_path / "m")


class Exact(gpytorch.models.ExactGP):
    def __init__(self, x, y):
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel()
        self.to(x)

    forward = Latent.forward


def test_gpytorch_models(tmp_path):
    model = Exact(X, torch.sin(X[:, 0]))
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    gpext.fit(mll, X, model.train_targets, max_steps=3, progress=False)
    there_and_back(model, Exact(X[:1], X[:1, 0]), tmp_path / "m")


# ---- files that are refused ----------------------------------------------------------------------------------------


def assert_refused(path, fresh, message):
    before = copy.deepcopy(fresh.state_dict()), fresh.train_inputs[0], fresh.train_targets
    with pytest.raises(ValueError, match=message):
        gpext.load(path, fresh)
    assert_same(fresh.state_dict().values(), before[0].values())
    assert torch.equal(fresh.train_inputs[0], before[1])
    assert torch.equal(fresh.train_targets, before[2])


class Other(Latent):
    pass


def test_files_of_other_models_change_nothing(tmp_path):
    gpext.save(regression(), tmp_path / "m")
    y = X[:1, 0]
    assert_refused(tmp_path / "m", Other(X[:1], y, StudentTLikelihood().to(F64)), "is of a Latent; got a Other")
    assert_refused(tmp_path / "m", Latent(X[:1], y, StudentTLikelihood().to(F64), EP()), "the model is KL there, EP")
    assert_refused(tmp_path / "m", placeholder(torch.float32), "raw_outputscale is .* float64 there, .* float32 here")
    ard = placeholder()
    ard.covar_module.base_kernel = gpytorch.kernels.RBFKernel(ard_num_dims=2).to(F64)
    assert_refused(tmp_path / "m", ard, r"raw_lengthscale is \(1, 1\) float64 there, \(1, 2\) float64 here")
    bounded = placeholder()
    interval = gpytorch.constraints.Interval(0.0, 9.0)
    bounded.covar_module.register_constraint("raw_outputscale", interval, replace=True)
    assert_refused(tmp_path / "m", bounded.to(F64), "constraint")
    labels = Latent(X[:1], torch.ones(1, dtype=F64), BernoulliLogitLikelihood().to(F64))
    assert_refused(tmp_path / "m", labels, "differ")


def test_damaged_and_later_files_change_nothing(tmp_path):
    path = tmp_path / "m"
    gpext.save(regression(), path)
    whole = path.read_bytes()
    for damaged in (whole[:100], whole[:500] + bytes([whole[500] ^ 1]) + whole[501:], b""):
        path.write_bytes(damaged)
        assert_refused(path, placeholder(), "damaged")
    files.save({"format": 2, "gpext": "9.0", "content": {}}, path)
    assert_refused(path, placeholder(), "is in format 2, of gpext 9.0")
    files.save({"something": 1}, path)
    assert_refused(path, placeholder(), "expected")
    with pytest.raises(FileNotFoundError):
        gpext.load(tmp_path / "none", placeholder())


def test_targets_outside_the_support_of_this_likelihood_change_nothing(tmp_path):
    """The structure is the same, the number of trials is not: all that was set is undone."""
    likelihood = lambda: gpytorch.likelihoods.BernoulliLikelihood()  # noqa: E731
    model = Latent(X, (X[:, 0] > 2).to(F64), likelihood())
    gpext.save(model, tmp_path / "m")
    content = files.load(tmp_path / "m", saving._KEYS)[0]
    content["content"]["data"][""]["targets"] = 2 * content["content"]["data"][""]["targets"]
    files.save(content, tmp_path / "m")
    assert_refused(tmp_path / "m", Latent(X[:1], torch.ones(1, dtype=F64), likelihood()), "0, 1")


def test_an_existing_file_stays_if_the_new_one_cannot_be_written(tmp_path, monkeypatch):
    path = tmp_path / "m"
    gpext.save(regression(), path)
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        gpext.save(regression(), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["m"]


def test_only_modules_are_saved(tmp_path):
    with pytest.raises(TypeError, match="expected a model"):
        gpext.save({"a": 1}, tmp_path / "m")


# ---- copies --------------------------------------------------------------------------------------------------------


def by_joblib(model):
    buffer = io.BytesIO()
    joblib.dump(model, buffer)
    buffer.seek(0)
    return joblib.load(buffer)


CLONES = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "joblib": by_joblib}
FITTED = {
    "latent": lambda: trained(regression()),
    "sparse latent": lambda: trained(regression(inducing_inputs=X[::3])),
    "sites": lambda: fitted_sites(None),
    "minibatches": lambda: fitted_sites(10),
}


def fitted_sites(batch_size):
    mll, x, y = sparse_mll()
    gpext.fit(mll, x, y, batch_size=batch_size, max_steps=5, progress=False)
    return mll.model


@pytest.mark.parametrize("clone", CLONES)
@pytest.mark.parametrize("name", FITTED)
@pytest.mark.parametrize("predicted", [False, True])
def test_copies_of_fitted_models_predict_the_same(name, clone, predicted):
    model = FITTED[name]()
    if predicted:
        model.eval()(X_NEW)  # memos with a graph
    other = CLONES[clone](model)
    assert_same(predictions(other), predictions(model))
