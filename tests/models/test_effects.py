"""The posterior of each additive effect, against dense algebra."""

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel

from gpext import designs
from gpext.inference import EP, KL, Laplace
from gpext.likelihoods import HeteroscedasticGaussianLikelihood, PoissonLikelihood, StudentTLikelihood
from gpext.models import LatentGP, effect
from tests.members import F64

GENERATOR = torch.Generator().manual_seed(0)
N = 12
X = torch.cat(
    [torch.rand(N, 2, dtype=F64, generator=GENERATOR), (torch.arange(N) % 3).double().unsqueeze(-1)], -1
)  # two numbers and a group
Y = torch.randn(N, dtype=F64, generator=GENERATOR)
NEW = torch.tensor([[0.2, 0.9, 1.0], [0.7, 0.1, 5.0]], dtype=F64)  # the last group has no data
RULES = {"EP": EP(tolerance=1e-12), "KL": KL(tolerance=1e-12), "Laplace": Laplace(tolerance=1e-12)}


class Additive(LatentGP):
    """f = mu + f_1(x_1) + f_2(x_2) + an effect of each group."""

    def __init__(self, likelihood, rule, y=Y, *, x=X, batch=(), **options):
        super().__init__(x, y, likelihood, rule, **options)
        batch = torch.Size(batch)
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        kernels = [RBFKernel(active_dims=(k,), batch_shape=batch) for k in range(3)]
        self.terms = torch.nn.ModuleList([ScaleKernel(kernel, batch_shape=batch) for kernel in kernels])
        self.double()
        self.mean_module.initialize(constant=torch.full(batch, 0.3, dtype=F64))
        for kernel, lengthscale in zip(kernels, (0.4, 0.8, 0.05), strict=True):
            kernel.lengthscale = lengthscale

    def forward(self, x):
        covariance = self.terms[0](x) + self.terms[1](x) + self.terms[2](x)
        return MultivariateNormal(self.mean_module(x), covariance)


def gaussian(noise=0.2):
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = noise
    return likelihood


def dense(model, kernel, A, y):
    with torch.no_grad():
        K, mean = model(X, prior=True).covariance_matrix, model.mean_module(X)
        S = A @ K @ A.mT + model.likelihood.noise * torch.eye(len(y), dtype=F64)
        cross = A @ kernel(X, NEW).to_dense()
        gain = torch.linalg.solve(S, cross).mT
        return gain @ (y - A @ mean), kernel(NEW).to_dense() - gain @ cross


def design_of(kind):
    if kind is None:
        return None
    rows = {"few": 7, "many": 30}[kind]
    A = torch.randn(rows, N, dtype=F64, generator=torch.Generator().manual_seed(1))
    return designs.rows_of(A)


@pytest.mark.parametrize("kind", [None, "few", "many"])
@pytest.mark.parametrize("rule", RULES)
def test_an_effect_is_that_of_dense_algebra(rule, kind):
    design = design_of(kind)
    A = torch.eye(N, dtype=F64) if design is None else design.dense()
    y = torch.randn(len(A), dtype=F64, generator=torch.Generator().manual_seed(2))
    model = Additive(gaussian(), RULES[rule], y, **({} if design is None else {"design": design})).eval()
    for kernel in (*model.terms, model.terms[0] + model.terms[1]):
        mean, covariance = dense(model, kernel, A, y)
        with torch.no_grad():
            found = effect(model, kernel, NEW)
        torch.testing.assert_close(found.mean, mean, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found.covariance_matrix, covariance, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("likelihood", [StudentTLikelihood, PoissonLikelihood])
def test_means_of_all_effects_add_up_to_f(rule, likelihood):
    y = Y if likelihood is StudentTLikelihood else Y.abs().round()
    model = Additive(likelihood().double(), RULES[rule], y).eval()
    with torch.no_grad():
        parts = [effect(model, kernel, NEW) for kernel in model.terms]
        whole = effect(model, model.terms[0] + model.terms[1] + model.terms[2], NEW)
        f = model(NEW)
        torch.testing.assert_close(sum(part.mean for part in parts) + 0.3, f.mean, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(whole.covariance_matrix, f.covariance_matrix, rtol=1e-10, atol=1e-10)
        # A group without data keeps its prior.
        torch.testing.assert_close(parts[2].mean[1], torch.zeros((), dtype=F64), rtol=0, atol=1e-12)
        assert parts[2].variance[1].item() == pytest.approx(model.terms[2].outputscale.item(), abs=1e-10)


@pytest.mark.parametrize("rule", ["KL", "Laplace"])
def test_effects_of_several_latents(rule):
    model = Additive(HeteroscedasticGaussianLikelihood(), RULES[rule], batch=(2,)).eval()
    with torch.no_grad():
        parts = [effect(model, kernel, NEW).mean for kernel in model.terms]
        f = model(NEW).mean
        of_latents = (lambda mean: mean) if f.shape == (2, 2) and rule == "KL" else (lambda mean: mean.mT)
        total = sum(parts)
        torch.testing.assert_close(of_latents(total), of_latents(f) - 0.3, rtol=1e-9, atol=1e-9)


def test_float32_and_one_datum():
    double = Additive(gaussian(), KL()).eval()
    single = Additive(gaussian().float(), KL(), Y.float(), x=X.float()).float().eval()
    with torch.no_grad():
        found = effect(single, single.terms[0], NEW.float())
        assert found.mean.dtype == torch.float32
        torch.testing.assert_close(found.mean.double(), effect(double, double.terms[0], NEW).mean, rtol=0, atol=1e-4)
        one = Additive(gaussian(), KL(), Y[:1], x=X[:1]).eval()
        K = one.terms[0].outputscale
        share = K / (3 * K + one.likelihood.noise)
        at = effect(one, one.terms[0], X[:1])
        torch.testing.assert_close(at.mean[0], (share * (Y[0] - 0.3)).squeeze(), rtol=1e-10, atol=1e-10)


def test_what_does_not_fit_is_refused():
    model = Additive(gaussian(), KL()).eval()
    with pytest.raises(TypeError, match="LatentGP"):
        effect(gaussian(), model.terms[0], NEW)
    with pytest.raises(TypeError, match="gpytorch kernel"):
        effect(model, "age", NEW)
    with pytest.raises(TypeError, match="float32"):
        effect(model, model.terms[0], NEW.float())
    with pytest.raises(ValueError, match="columns"):
        effect(model, model.terms[0], NEW[:, :2])
    wrong = NEW.clone()
    wrong[1, 0] = torch.nan
    with pytest.raises(ValueError, match=r"index \(1, 0\)"):
        effect(model, model.terms[0], wrong)
    sparse = Additive(gaussian(), KL(), inducing_inputs=X[:5]).eval()
    with pytest.raises(NotImplementedError, match="inducing_inputs"):
        effect(sparse, sparse.terms[0], NEW)
