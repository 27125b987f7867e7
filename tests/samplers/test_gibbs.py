"""Gibbs sampling: a run in parts, interrupted or read back has the draws of a single run; predictions are averages."""

import copy
import math
import pickle
import re
import resource
import signal
import sys

import arviz
import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.priors import GammaPrior, LogNormalPrior, NormalPrior
from linear_operator import to_linear_operator
from pyro.ops.stats import split_gelman_rubin

import gpext
from gpext.distributions import InversionError
from gpext.inference import InferenceWarning
from gpext.inference.gibbs import draw_latent
from gpext.likelihoods import (
    BernoulliLogitLikelihood,
    LaplaceLikelihood,
    NegativeBinomialLogitLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
    SuperGaussianLikelihood,
)
from gpext.models import LatentGP
from gpext.samplers import GibbsSampler, SamplingStatus, draw_files, storage
from tests.members import F64, rbf_prior
from tests.statistics import misfit


class Model(LatentGP):
    def __init__(self, x, y, likelihood, priors=True, inducing_inputs=None):
        super().__init__(x, y, likelihood, inducing_inputs=inducing_inputs)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        if priors:
            self.mean_module.register_prior("mean_prior", NormalPrior(0.0, 0.5), "constant")
            self.covar_module.register_prior("outputscale_prior", LogNormalPrior(0.0, 0.5), "outputscale")
            self.covar_module.base_kernel.register_prior("lengthscale_prior", GammaPrior(4.0, 4.0), "lengthscale")
        self.to(x)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def seed(number=0):
    return torch.Generator().manual_seed(number)


def data(n=12, dtype=F64):
    x = torch.linspace(0, 3, n, dtype=dtype)
    return x, torch.sin(2 * x) + 0.2 * torch.randn(n, dtype=dtype, generator=seed())


def problem(n=6, dtype=F64):
    x, y = data(n, dtype)
    prior, *_ = rbf_prior(x.unsqueeze(-1), dtype=dtype)
    return MultivariateNormal(prior.mean.detach(), prior.covariance_matrix.detach()), y


def student(dtype=F64, priors=False):
    likelihood = StudentTLikelihood().to(dtype)
    likelihood.noise = 0.1
    if priors:
        likelihood.register_prior("noise_prior", LogNormalPrior(-2.0, 0.7), "noise")
    return likelihood


def sampler(n=6):
    prior, y = problem(n)
    return GibbsSampler(prior, student(), y)


def run(the_sampler, num_samples, **options):
    return the_sampler.run(num_samples, num_chains=3, **{"warmup": 5, "generator": seed(1), **options})


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(
    "make", [student, LaplaceLikelihood, BernoulliLogitLikelihood, NegativeBinomialLogitLikelihood]
)
def test_shapes_and_dtypes(make, dtype):
    prior, y = problem(dtype=dtype)
    y = (y > 0).to(dtype) if make in (BernoulliLogitLikelihood, NegativeBinomialLogitLikelihood) else y
    draws = run(GibbsSampler(prior, make().to(dtype), y), 7)
    assert draws.latent.shape == (3, 7, 6)
    assert draws.latent.dtype == dtype
    assert bool(draws.latent.isfinite().all())
    assert (draws.num_chains, draws.num_draws, draws.hyperparameters) == (3, 7, {})


def test_batches_of_priors_and_of_targets():
    x = torch.randn(2, 5, 1, dtype=F64, generator=seed())
    prior, *_ = rbf_prior(x)
    y = torch.randn(2, 5, dtype=F64, generator=seed(1))
    draws = run(GibbsSampler(prior, student(), y), 600, warmup=50)
    assert draws.latent.shape == (3, 600, 2, 5)
    for b in range(2):
        alone = run(GibbsSampler(MultivariateNormal(prior.mean[b], prior.covariance_matrix[b]), student(), y[b]), 600)
        difference = draws.latent[:, :, b].mean((0, 1)) - alone.latent.mean((0, 1))
        assert (difference.abs() < 0.15).all()


def test_seeds_decide_and_pickles_and_copies_are_complete():
    first, second, other = (run(sampler(), 5, generator=seed(s)).latent for s in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    torch.manual_seed(5)
    a = sampler().run(4, 2, 3)
    torch.manual_seed(5)
    assert torch.equal(a.latent, sampler().run(4, 2, 3).latent)
    for twin in (pickle.loads(pickle.dumps(a)), copy.deepcopy(a)):
        assert torch.equal(twin.latent, a.latent)
        assert twin.status is a.status


def test_resuming_is_the_same_as_going_on():
    whole = run(sampler(), 12, thinning=2)
    part = run(sampler(), 5, thinning=2)
    rest = sampler().run(7, thinning=2, resume=part)
    assert torch.equal(rest.latent, whole.latent)
    assert part.num_draws == 5


def test_status_says_whether_the_chains_agree():
    assert run(sampler(), 2000, warmup=50).status is SamplingStatus.MIXED
    draws = run(sampler(), 2, warmup=0)
    assert draws.status is SamplingStatus.NOT_MIXED
    assert math.isnan(draws.r_hat)
    x = torch.linspace(0, 1, 20, dtype=F64).unsqueeze(-1)
    prior, *_ = rbf_prior(x, outputscale=1e6)  # classes far apart and a wide prior: known to mix slowly
    stuck = run(GibbsSampler(prior, BernoulliLogitLikelihood(), (x.squeeze(-1) > 0.5).to(F64)), 50)
    assert stuck.status is SamplingStatus.NOT_MIXED
    assert "do not agree" in stuck.message


@pytest.mark.parametrize("num_draws", [4, 7, 50])
def test_r_hat_is_that_of_the_whole_chains_however_they_are_kept(num_draws, monkeypatch):
    monkeypatch.setattr(storage, "_CHUNK_BYTES", 3 * (6 * 8) * 5)
    draws = run(sampler(), num_draws)
    expected = split_gelman_rubin(draws.latent, chain_dim=0, sample_dim=1).max()
    assert draws.r_hat == pytest.approx(float(expected), rel=1e-10)


INTERRUPTED = ("take", "_next", "step", "flush", "_write_chunk", "_write_state", "written", "write_chunk", "open")
INTERRUPTED += ("write_state", "run", "sweeps", "swept", "drive")


class Interrupt:
    """Raise KeyboardInterrupt at the n-th line that runs in the sampler's own files."""

    def __init__(self, at):
        self.left = at

    def __call__(self, frame, event, arg):
        if "gpext/samplers" not in frame.f_code.co_filename:
            return None
        if event == "line" and frame.f_code.co_name in INTERRUPTED:
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


# An interrupt can come between opening a file and the `with` that would close it.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*unclosed file::")
@pytest.mark.parametrize("on_disk", [False, True])
def test_interrupted_anywhere_it_keeps_what_is_finished(on_disk, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_CHUNK_BYTES", 3 * (6 * 8) * 2)  # two draws a chunk
    whole = run(sampler(), 6, warmup=2)
    interrupted = 0
    for at in range(30, 400, 7):
        directory = tmp_path / str(at) if on_disk else None
        try:
            sys.settrace(Interrupt(at))
            with pytest.warns(InferenceWarning, match="interrupted"):
                draws = run(sampler(), 6, warmup=2, checkpoint=directory)
        except KeyboardInterrupt:  # outside the loop: before the first sweep, or after the last
            continue
        except pytest.fail.Exception:
            break  # the run has reached its end
        finally:
            sys.settrace(None)
        assert draws.status is SamplingStatus.INTERRUPTED
        assert torch.equal(draws.latent, whole.latent[:, : draws.num_draws])
        if on_disk:
            assert not list(directory.glob("*.part"))
        resumed = sampler().run(6 - draws.num_draws, resume=draws) if draws.num_draws < 6 else draws
        assert torch.equal(resumed.latent, whole.latent)
        interrupted += 1
    assert interrupted > 15


def test_streams_to_disk_and_reads_it_back(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_CHUNK_BYTES", 3 * (6 * 8) * 4)
    whole = run(sampler(), 10)
    draws = run(sampler(), 10, checkpoint=tmp_path / "new")
    assert len(draw_files.files_in(tmp_path / "new")) == 3
    assert torch.equal(draws.latent, whole.latent)
    assert draws.r_hat == whole.r_hat
    loaded = sampler().load(tmp_path / "new")
    assert torch.equal(loaded.latent, whole.latent)
    longer = sampler().run(3, resume=loaded, directory=tmp_path / "new")  # the older name of the argument
    assert torch.equal(longer.latent, run(sampler(), 13).latent)
    with pytest.raises(ValueError, match="draws of another run"):
        run(sampler(), 2, checkpoint=tmp_path / "new")
    with pytest.raises(TypeError, match="its older name"):
        run(sampler(), 2, checkpoint=tmp_path, directory=tmp_path)
    with pytest.raises(FileNotFoundError, match="found none"):
        sampler().load(tmp_path)


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_CHUNK_BYTES", 3 * (6 * 8) * 200)
    whole = run(sampler(), 210)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # files cannot grow beyond that: writing really fails
        with pytest.warns(InferenceWarning, match="could not be written"):
            draws = run(sampler(), 210, checkpoint=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert draws.status is SamplingStatus.NOT_WRITTEN
    assert draws.num_draws == 200
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]
    resumed = sampler().run(10, resume=draws, checkpoint=tmp_path)
    assert torch.equal(resumed.latent, whole.latent)
    assert torch.equal(sampler().load(tmp_path).latent, whole.latent)


def test_a_singular_prior_in_float32_needs_none_either():
    x = torch.linspace(0, 5, 300)
    covariance = torch.exp(-0.5 * (x.unsqueeze(-1) - x) ** 2)
    assert float(torch.linalg.eigvalsh(covariance.double())[0]) < 0  # rounding has made it indefinite
    prior = MultivariateNormal(torch.zeros(300), to_linear_operator(covariance))
    draws = run(GibbsSampler(prior, student(torch.float32), torch.sin(x)), 50)
    assert draws.latent.dtype == torch.float32
    assert (draws.latent.mean((0, 1)) - torch.sin(x)).abs().max() < 0.5


def test_a_singular_prior_needs_no_jitter():
    x = torch.tensor([[0.0], [0.0], [1.0], [1.0], [1.0 + 1e-13]], dtype=F64)
    covariance = torch.exp(-0.5 * (x - x.mT) ** 2)
    y = torch.tensor([0.5, -0.5, 1.0, 1.0, 1.0], dtype=F64)
    prior = MultivariateNormal(torch.zeros(5, dtype=F64), to_linear_operator(covariance))
    draws = run(GibbsSampler(prior, student(), y), 200)
    assert (draws.latent[..., 0] - draws.latent[..., 1]).abs().max() < 1e-6
    assert draws.latent.std() > 0.1
    indefinite = to_linear_operator(torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=F64))
    with pytest.raises(ValueError, match="positive semidefinite; got a smallest eigenvalue of -1"):
        run(GibbsSampler(MultivariateNormal(torch.zeros(2, dtype=F64), indefinite), student(), y[:2]), 2)


@pytest.mark.parametrize("y", [[1e8], [0.0], [1e-300]])
def test_one_datum_however_extreme(y):
    prior = MultivariateNormal(torch.zeros(1, dtype=F64), torch.eye(1, dtype=F64))
    for likelihood in (student(), LaplaceLikelihood().double()):
        draws = run(GibbsSampler(prior, likelihood, torch.tensor(y, dtype=F64)), 100)
        assert bool(draws.latent.isfinite().all())


def test_a_breakdown_is_a_status():
    counts = torch.full((2,), 1e6, dtype=F64)
    # an eigenvalue of -0.1: a rounding error beside one of 2e6, but not beside sites of 1e4
    covariance = 1e6 * torch.tensor([[1.0, 1 + 1e-7], [1 + 1e-7, 1.0]], dtype=F64)
    prior = MultivariateNormal(torch.zeros(2, dtype=F64), to_linear_operator(covariance))
    with pytest.warns(InferenceWarning, match="pass a `jitter`"):
        draws = run(GibbsSampler(prior, NegativeBinomialLogitLikelihood(), counts), 50)
    assert draws.status is SamplingStatus.BREAKDOWN
    assert draws.latent.shape == (3, draws.num_draws, 2)
    with pytest.raises(ValueError, match="no draws"):
        draws.predict_from(torch.zeros(1), torch.zeros(2, 1), torch.ones(1))
    steady = GibbsSampler(prior, NegativeBinomialLogitLikelihood(), counts, jitter=1.0)
    assert run(steady, 5).num_draws == 5


def test_a_covariance_that_rounding_made_indefinite_gets_jitter_and_says_so():
    x = torch.linspace(0, 5, 30)
    covariance = 1e6 * torch.exp(-0.5 * (x.unsqueeze(-1) - x) ** 2)
    prior = MultivariateNormal(torch.zeros(30), to_linear_operator(covariance))
    draws = run(GibbsSampler(prior, NegativeBinomialLogitLikelihood(), torch.full((30,), 1e6)), 5)
    assert draws.num_draws == 5
    assert re.search(r"; jitter \d+\.\d+\.$", draws.message)


@pytest.mark.slow
def test_moves_hyperparameters_with_a_prior_and_no_others():
    x, y = data()
    model = Model(x, y, student(priors=True))
    model.covar_module.base_kernel.lengthscale = 0.7
    before = copy.deepcopy(model.state_dict())
    draws = run(GibbsSampler(model), 20)
    assert {name: tuple(value.shape) for name, value in draws.hyperparameters.items()} == {
        "likelihood.noise": (3, 20, 1),
        "mean_module.constant": (3, 20),
        "covar_module.outputscale": (3, 20),
        "covar_module.base_kernel.lengthscale": (3, 20, 1, 1),
    }
    assert all(bool((v.std((0, 1)) > 0).all()) for v in draws.hyperparameters.values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    chosen = run(GibbsSampler(model, hyperparameters=["likelihood.raw_deg_free", "covar_module.outputscale"]), 3)
    assert set(chosen.hyperparameters) == {"likelihood.deg_free", "covar_module.outputscale"}
    assert run(GibbsSampler(model, hyperparameters=()), 3).hyperparameters == {}
    with pytest.raises(ValueError, match=r"names of parameters of the model: .*outputscale.*; got 'scale'"):
        GibbsSampler(model, hyperparameters=["scale"])


def test_resumes_with_hyperparameters_from_disk(tmp_path):
    x, y = data()
    model = Model(x, y, student(priors=True))
    whole = run(GibbsSampler(model), 6)
    run(GibbsSampler(model), 4, checkpoint=tmp_path)
    again = GibbsSampler(model)
    resumed = again.run(2, resume=again.load(tmp_path))
    assert torch.equal(resumed.latent, whole.latent)
    for name, value in whole.hyperparameters.items():
        assert torch.equal(value, resumed.hyperparameters[name])


@pytest.mark.parametrize(("names", "expected"), [((), 0.6), (["likelihood.noise"], 0.6), (["outputscale"], 0.0)])
def test_draws_of_f_are_independent_where_the_prior_has_moved(names, expected, monkeypatch):
    asked = []

    def spy(*args, overrelaxation, **kwargs):
        asked.append(overrelaxation)
        return draw_latent(*args, overrelaxation=overrelaxation, **kwargs)

    monkeypatch.setattr("gpext.samplers.latent_step.draw_latent", spy)
    x, y = data()
    model = Model(x, y, student(priors=True))
    run(GibbsSampler(model, hyperparameters=[n.replace("output", "covar_module.output") for n in names]), 2)
    assert set(asked) == {expected}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_hyperparameters_move_wherever_the_sampler_is_made(mode):
    model = Model(*data(5), student())
    expected = GibbsSampler(model).run(3, 2, warmup=2, generator=seed(), progress=False).hyperparameters
    with mode():
        found = GibbsSampler(model).run(3, 2, warmup=2, generator=seed(), progress=False).hyperparameters
    assert len(found) == 3
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.slow
def test_hyperparameters_agree_with_quadrature():
    """One datum far out, a prior scale and a noise scale, against sums over a grid of both and of f."""
    x, y = torch.zeros(1, dtype=F64), torch.tensor([4.0], dtype=F64)
    model = Model(x, y, student(), priors=False)
    model.mean_module.requires_grad_(False)
    priors = LogNormalPrior(0.0, 1.0), LogNormalPrior(-1.0, 1.0)
    model.covar_module.register_prior("outputscale_prior", priors[0], "outputscale")
    model.likelihood.register_prior("noise_prior", priors[1], "noise")
    draws = run_chains(GibbsSampler(model), 25)

    log_s, log_noise = torch.linspace(-5, 6, 111, dtype=F64), torch.linspace(-7, 6, 131, dtype=F64)
    f = torch.linspace(-12, 16, 561, dtype=F64)
    nu = model.likelihood.deg_free.detach()
    likelihood = torch.distributions.StudentT(nu, f, (0.5 * log_noise).exp().unsqueeze(-1)).log_prob(y)  # (noise, f)
    log_f = torch.distributions.Normal(0, (0.5 * log_s).exp().view(-1, 1, 1)).log_prob(f)
    log_joint = log_f + likelihood - 0.5 * log_s.view(-1, 1, 1) ** 2 - 0.5 * (log_noise.view(-1, 1) + 1) ** 2
    weight = torch.softmax(log_joint.flatten(), 0).view_as(log_joint)
    grid = torch.meshgrid(log_s, log_noise, f, indexing="ij")
    expected = torch.stack([(weight * value).sum() for value in joint_statistics(*grid)])

    scale, noise = (draws.hyperparameters[name] for name in ("covar_module.outputscale", "likelihood.noise"))
    found = torch.stack(joint_statistics(scale.log(), noise.log().squeeze(-1), draws.latent.squeeze(-1)))
    assert misfit(found.mean(-1).mT, expected) < 1  # of chains


def joint_statistics(log_s, log_noise, f):
    return [log_s, log_noise, f, f**2, f * log_s, f * log_noise, log_s * log_noise, log_s**2, log_noise**2]


def run_chains(the_sampler, num_samples):
    return the_sampler.run(num_samples, num_chains=36, warmup=6, generator=seed(6), progress=False)


def test_predicts_by_averaging_gaussians():
    x, y = data()
    model = Model(x, y, student(), priors=False)
    draws = run(GibbsSampler(model), 40)
    x_test = torch.tensor([-0.5, 0.4, 2.9, x[3]], dtype=F64)
    predicted = draws.predict(x_test)
    joint = model.forward(torch.cat([x, x_test]).unsqueeze(-1))
    K, mean = joint.covariance_matrix.detach(), joint.mean.detach()
    gain = torch.linalg.solve(K[:12, :12], K[:12, 12:]).mT
    means = mean[12:] + (draws.latent.flatten(0, 1) - mean[:12]) @ gain.mT
    variance = (K[12:, 12:] - gain @ K[:12, 12:]).diagonal()
    torch.testing.assert_close(predicted.mean, means.mean(0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(predicted.variance, means.var(0, correction=0) + variance, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(predicted.mean[3], draws.latent[..., 3].mean(), rtol=1e-6, atol=1e-6)
    direct = draws.predict_from(mean[12:], K[:12, 12:], K[12:, 12:].diagonal())
    torch.testing.assert_close(direct.mean, predicted.mean)
    few = draws.predict(x_test, num_draws=30)
    assert few.components.batch_shape == (30, 4)

    targets = draws.predict_targets(x_test, num_draws=120)
    value = torch.tensor([0.3, -0.2, 0.9, 0.1], dtype=F64)
    log_prob = model.likelihood.log_density(value, means, variance.clamp_min(0).expand(120, 4))
    log_prob = torch.logsumexp(log_prob, 0) - math.log(120)
    torch.testing.assert_close(targets.log_prob(value), log_prob, rtol=1e-6, atol=1e-6)


def test_predicts_with_every_draw_s_hyperparameters():
    x, y = data()
    model = Model(x, y, student(priors=True))
    draws = run(GibbsSampler(model), 5)
    x_test = torch.tensor([[0.4], [500.0]], dtype=F64)
    predicted = draws.predict(x_test)
    scale = draws.hyperparameters["covar_module.outputscale"].flatten()
    far = draws.hyperparameters["mean_module.constant"].flatten()
    torch.testing.assert_close(predicted.components.variance[:, 1], scale)
    torch.testing.assert_close(predicted.components.mean[:, 1], far)
    targets = draws.predict_targets(x_test)
    assert targets.batch_shape == (2,)
    assert bool(targets.log_prob(torch.zeros(2, dtype=F64)).isfinite().all())
    with pytest.raises(TypeError, match="call predict"):
        draws.predict_from(torch.zeros(1), torch.zeros(12, 1), torch.ones(1))


def test_goes_to_arviz():
    x, y = data()
    draws = run(GibbsSampler(Model(x, y, student(priors=True))), 20)
    exported = draws.to_arviz()
    assert dict(exported.posterior.sizes)["chain"] == 3
    assert exported.posterior["latent"].shape == (3, 20, 12)
    assert float(exported.posterior["likelihood.noise"].min()) > 0
    assert len(arviz.summary(exported, var_names=["likelihood.noise"])) == 1


@pytest.mark.parametrize("priors", [False, True])
def test_pointwise_log_likelihoods_are_those_of_every_draw(priors):
    x, y = data()
    model = Model(x, y, student(priors=priors), priors=False)
    draws = run(GibbsSampler(model), 6)
    noise = draws.hyperparameters.get("likelihood.noise", torch.full((3, 6, 1), 0.1, dtype=F64))
    nu = model.likelihood.deg_free.detach()
    expected = torch.distributions.StudentT(nu, draws.latent, noise.sqrt()).log_prob(y)
    torch.testing.assert_close(draws.log_likelihood(), expected, rtol=1e-6, atol=1e-6)
    exported = draws.to_arviz(log_likelihood=True)
    assert exported.log_likelihood["targets"].shape == (3, 6, 12)


def test_takes_a_model_that_has_just_been_trained():
    x, y = data()
    model = Model(x, y, student(priors=True))
    mll = gpext.mlls.LatentMarginalLogLikelihood(model.likelihood, model)
    gpext.fit(mll, x, y, max_steps=3, progress=False)
    model.train()
    (-mll(model(x), y)).backward()
    assert run(GibbsSampler(model), 2).latent.shape == (3, 2, 12)


def test_bad_input():
    prior, y = problem()
    with pytest.raises(TypeError, match="Gibbs sampling need a likelihood with a scale-mixture augmentation"):
        GibbsSampler(prior, PoissonLikelihood(), y.abs().round())
    with pytest.raises(TypeError, match=r"expected GibbsSampler\(prior, likelihood, targets\)"):
        GibbsSampler(prior)
    with pytest.raises(ValueError, match="targets must be finite; got nan at index 2"):
        GibbsSampler(prior, student(), torch.where(torch.arange(6) == 2, torch.nan, y))
    x, y = data()
    model = Model(x, y, student())
    with pytest.raises(TypeError, match="brings its likelihood and targets along"):
        GibbsSampler(model, student(), y)
    with pytest.raises(TypeError, match="without inducing_inputs"):
        GibbsSampler(Model(x, y, student(), inducing_inputs=x[::3]))
    with pytest.raises(ValueError, match="num_samples must be at least 1; got 0"):
        sampler().run(0)
    with pytest.raises(ValueError, match="warmup must not be negative"):
        sampler().run(2, warmup=-1)
    with pytest.raises(TypeError, match=r"num_samples must be a whole number; got 2\.5"):
        sampler().run(2.5)
    with pytest.raises(TypeError, match="or a LatentGP; got Tensor"):
        GibbsSampler(prior.covariance_matrix, student(), y)
    with pytest.raises(TypeError, match="resume must be the result of an earlier run"):
        sampler().run(2, resume=3)
    with pytest.raises(TypeError, match="call predict_from"):
        run(sampler(), 2).predict(x)


def test_draws_of_something_else_are_not_gone_on_with(tmp_path):
    prior, y = problem()
    other_prior = MultivariateNormal(prior.mean, 2 * prior.covariance_matrix)
    draws = run(GibbsSampler(prior, student(), y), 3, checkpoint=tmp_path)
    for made, match in (
        (GibbsSampler(prior, student(), y + 1), "fingerprint of the data"),
        (GibbsSampler(other_prior, student(), y), "fingerprint of the data"),
        (GibbsSampler(prior, LaplaceLikelihood().double(), y), r"model \['LaplaceLikelihood'"),
        (GibbsSampler(prior[:3], student(), y[:3]), "latent shape"),
    ):
        with pytest.raises(ValueError, match=match):
            made.load(tmp_path)
        with pytest.raises(ValueError, match=match):
            made.run(2, resume=draws, progress=False)
    (path,) = tmp_path.glob("draws-*.pt")
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ValueError, match="is damaged, or was not written by gpext"):
        GibbsSampler(prior, student(), y).load(tmp_path)


class _FailingPhi(torch.nn.Module):
    """Student-t's phi, which fails after a number of calls."""

    def __init__(self, calls):
        super().__init__()
        self.left = calls

    def forward(self, r):
        self.left -= 1
        return (1 + r) ** -2 if self.left > 0 else torch.nan * r


def test_a_phi_that_cannot_be_inverted_keeps_the_draws_before_it():
    prior, y = problem(3)
    likelihood = SuperGaussianLikelihood(phi=_FailingPhi(10_000))
    the_sampler = GibbsSampler(prior, likelihood, y)
    likelihood.phi.left = 3000
    with pytest.warns(InferenceWarning, match="phi could not be inverted numerically"):
        draws = run(the_sampler, 10_000, warmup=2)
    assert draws.status is SamplingStatus.NOT_INVERTED
    assert draws.num_draws > 1
    assert bool(draws.latent.isfinite().all())
    with pytest.raises(InversionError, match="phi"):
        run(the_sampler, 5, warmup=2)


def test_predictions_are_numbers_and_bad_inputs_are_refused():
    x, y = data()
    draws = run(GibbsSampler(Model(x, y, student())), 3, warmup=1)
    for predicted in (draws.predict(x[:2]), draws.predict_targets(x[:2])):
        assert not predicted.mean.requires_grad
    for bad, match in (
        (torch.tensor([0.0, torch.nan]), "x must be finite; got nan at index 1"),
        (torch.zeros(3, 2), r"expected new inputs \(S, 1\), .* got \(3, 2\)"),
    ):
        with pytest.raises(ValueError, match=match):
            draws.predict(bad.to(F64))
    with pytest.raises(ValueError, match="num_draws must be at least 1; got 0"):
        draws.predict(x, num_draws=0)
    with pytest.raises(TypeError, match=r"Write \['covar_module.outputscale'\]"):
        GibbsSampler(Model(x, y, student()), hyperparameters="covar_module.outputscale")
