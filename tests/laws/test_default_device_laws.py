"""If torch's default device is the accelerator, chains, shuffles and draws are still made on the CPU."""

import contextlib

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal

import gpext
from gpext.kernels import keops
from gpext.likelihoods import BernoulliLogitLikelihood, PoissonLikelihood, StudentTLikelihood
from gpext.operators import UnbiasedSolver
from gpext.samplers import AugmentedSGLDSampler, GibbsSampler, MetropolisHastings, SGLDSampler
from gpext.solvers import conjugate_gradients, lanczos_log_det, nystrom, partial_cholesky, unbiased_cg
from gpext.solvers.choose_preconditioner import share_of_steps, with_neighbours
from gpext.variational import greedy_inducing_points, kmeans_inducing_points
from tests import accelerator
from tests.accelerator import accelerated, sent
from tests.laws.test_device_laws import NEW, Exact, Latent, Sparse, inputs, moved, targets
from tests.members import F64

EXACT = gpytorch.mlls.ExactMarginalLogLikelihood


@contextlib.contextmanager
def by_default():
    """Let the accelerator compute, and be torch's default device."""
    with accelerated(), torch.device(accelerator.DEVICE):
        yield


def there(x):
    return x.device == accelerator.DEVICE and bool(x.isfinite().all())


@pytest.mark.parametrize("batch_size", [None, 5])
def test_training_of_a_sparse_model(batch_size):
    model, likelihood, x, y = Sparse(), StudentTLikelihood().double(), inputs(), targets("real")
    new = NEW.clone()
    with by_default():
        mll = gpext.mlls.AugmentedELBO(sent(likelihood), sent(model), num_data=len(y))
        result = gpext.fit(mll, sent(x), sent(y), batch_size=batch_size, max_steps=8, progress=False)
        assert result.trace.device.type == "cpu"
        assert there(likelihood(model(sent(new))).mean)


@pytest.mark.parametrize("from_loader", [False, True])
def test_inducing_points(from_loader):
    x = inputs(20)
    with by_default():
        kernel = sent(gpytorch.kernels.RBFKernel().double())
        source = [(each,) for each in sent(x).split(6)] if from_loader else sent(x)
        assert there(kmeans_inducing_points(source, 3, max_points=10))
        assert there(greedy_inducing_points(source, 3, kernel, max_points=10))


# In three steps hyperparameters may be where the exact prior of data so near one another is singular to rounding.
@pytest.mark.filterwarnings("ignore:KL.*no step raises the objective:gpext.inference.InferenceWarning")
@pytest.mark.parametrize("options", [{}, {"neighbours": 3}], ids=str)
def test_training_of_a_latent_gp(options):
    model, new = Latent(targets("counts"), PoissonLikelihood(), **options), NEW.clone()
    with by_default():
        mll = gpext.mlls.LatentMarginalLogLikelihood(moved(model).likelihood, model)
        gpext.fit(mll, model.train_inputs[0], model.train_targets, max_steps=3, progress=False)
        assert there(model.likelihood(model(sent(new))).mean)


def samplers():
    solver = UnbiasedSolver(num_probes=4, generator=torch.Generator().manual_seed(0))
    return {
        "Gibbs": (Latent(targets("binary"), BernoulliLogitLikelihood()), GibbsSampler),
        # A step size that is found in so short a warm-up may be too long; where draws live does not depend on it.
        "augmented SGLD": (
            Latent(targets("binary"), BernoulliLogitLikelihood()),
            lambda m: AugmentedSGLDSampler(m, step_size=1e-4),
        ),
        "Metropolis": (Exact(gpytorch.kernels.RBFKernel()), lambda m: MetropolisHastings(EXACT(m.likelihood, m))),
        "SGLD": (
            Exact(keops.RBFKernel()),
            lambda m: SGLDSampler(gpext.mlls.UnbiasedMarginalLogLikelihood(m.likelihood, m, solver=solver)),
        ),
    }


@pytest.mark.parametrize("name", list(samplers()))
def test_chains(name):
    model, kind = samplers()[name]
    new, options = NEW.clone(), {"step_size": 1e-3} if name == "SGLD" else {}
    with by_default():
        draws = kind(moved(model)).run(2, num_chains=2, warmup=2, progress=False, **options)
        assert there(draws.predict(sent(new)).mean)


def test_gibbs_without_a_model():
    K, y = torch.exp(-((inputs() - inputs().mT) ** 2)), targets("binary")
    with by_default():
        prior = MultivariateNormal(sent(torch.zeros(12, dtype=F64, device="cpu")), sent(K))
        draws = GibbsSampler(prior, BernoulliLogitLikelihood(), sent(y)).run(2, num_chains=2, warmup=1, progress=False)
        assert there(draws.latent)


def test_solvers():
    x = inputs(20)
    K = torch.exp(-((x - x.mT) ** 2) / 0.02)
    with by_default():
        K, b = sent(K), sent(x)
        noise, seed = torch.full_like(b[:, 0], 0.1), torch.Generator().manual_seed(0)

        def product(v):
            return K @ v + 0.1 * v

        L = partial_cholesky(lambda i: K[:, i], K.diagonal(), noise=0.1, generator=seed)
        entries, left = (lambda i, j: K[i, j]), (1 - L[:, :5].square().sum(-1)).clamp_min(0)
        near = with_neighbours(entries, L[:, :5], left, noise, b, generator=seed)
        share = share_of_steps(entries, L[:, :5], left, noise, b, tolerance=1e-8, generator=seed)
        assert 0 < share <= 1
        for found in (
            conjugate_gradients(product, b, precondition=near).solution,
            unbiased_cg(product, b, precondition=near, generator=seed).solution,
            nystrom(lambda v: K @ v, 20, 5, like=K, generator=seed),
            lanczos_log_det(product, 20, num_probes=2, num_steps=5, like=K, generator=seed)[0],
        ):
            assert there(found)
