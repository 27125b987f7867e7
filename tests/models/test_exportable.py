"""An exported or compiled sparse model predicts what the model does, at any number of inputs, without its data."""

import io

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import LinearKernel, MaternKernel, RBFKernel, RQKernel, ScaleKernel
from gpytorch.mlls import VariationalELBO
from gpytorch.variational import CholeskyVariationalDistribution
from gpytorch.variational import VariationalStrategy as Stock

import gpext
from gpext.inference import EP, KL, Laplace
from gpext.likelihoods import StudentTLikelihood
from gpext.models import exportable
from gpext.variational import SiteVariationalStrategy
from tests.members import F64

X = torch.rand(50, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
Y = torch.sin(5 * X[:, 0]) + X[:, 1]
X_NEW = torch.rand(9, 2, generator=torch.Generator().manual_seed(1), dtype=F64) * 1.5 - 0.2
KERNELS = {
    "rbf": lambda: ScaleKernel(RBFKernel(ard_num_dims=2)),
    "matern": lambda: ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=2)),
    "sum": lambda: ScaleKernel(RQKernel(active_dims=[0])) + LinearKernel(active_dims=[1]),
    "product": lambda: MaternKernel(nu=1.5, active_dims=[0]) * RBFKernel(active_dims=[1]),
}


class Sparse(gpytorch.models.ApproximateGP):
    def __init__(self, kernel, strategy=SiteVariationalStrategy, batch=()):
        Z = X[:12].expand(*batch, 12, 2).clone()
        options = () if strategy is SiteVariationalStrategy else (CholeskyVariationalDistribution(12),)
        super().__init__(strategy(self, Z, *options))
        self.mean_module = gpytorch.means.LinearMean(2)
        self.covar_module = kernel
        self.to(X)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Latent(gpext.models.LatentGP):
    def __init__(self, kernel, rule, **options):
        super().__init__(X, Y, StudentTLikelihood().to(F64), rule, **options)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel
        self.to(X)

    forward = Sparse.forward


def trained(kernel, strategy=SiteVariationalStrategy):
    model = Sparse(kernel, strategy)
    mll = VariationalELBO(StudentTLikelihood().to(F64), model, len(Y))
    gpext.fit(mll, X, Y, max_steps=3, progress=False)
    return model


def direct(model, x):
    with torch.no_grad():
        q = model.eval()(x)
        return q.mean, q.variance


def assert_equal(found, expected, tolerance=1e-12):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=tolerance, atol=tolerance)


def exported(module, x=X_NEW):
    return torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("inputs")},))


MODELS = {
    **{f"sites-{name}": lambda make=make: trained(make()) for name, make in KERNELS.items()},
    "stock": lambda: trained(KERNELS["matern"](), Stock),
    **{
        f"latent-{type(rule).__name__}": lambda rule=rule: Latent(KERNELS["matern"](), rule, inducing_inputs=X[:12])
        for rule in (KL(), EP(), Laplace())
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_predicts_the_same_at_any_number_of_inputs(name):
    model = MODELS[name]()
    module = exportable(model)
    assert_equal(module(X_NEW), direct(model, X_NEW))
    buffer = io.BytesIO()
    torch.export.save(exported(module), buffer)
    buffer.seek(0)
    program = torch.export.load(buffer).module()
    for x in (X_NEW, X_NEW[:2], X):
        assert_equal(program(x), direct(model, x))
    assert not any(50 in tensor.shape for tensor in module.state_dict().values())


def test_a_batch_of_models():
    model = Sparse(ScaleKernel(RBFKernel(batch_shape=torch.Size([2])), batch_shape=torch.Size([2])), batch=(2,))
    model.covar_module.outputscale = torch.tensor([0.5, 2.0], dtype=F64)
    assert_equal(exportable(model)(X_NEW), direct(model, X_NEW))


def test_float32_models():
    model = trained(KERNELS["matern"]()).float()
    found = exportable(model)(X_NEW.float())
    assert found[0].dtype == torch.float32
    assert_equal(found, direct(model, X_NEW.float()), 1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, on what it does not trace
@pytest.mark.parametrize(
    ("form", "backend"), [("model", "aot_eager"), ("exportable", "eager"), ("exportable", "aot_eager")]
)
def test_a_compiled_model_predicts_the_same(form, backend):
    model = trained(KERNELS["matern"]())
    expected = direct(model, X_NEW)

    def by_model(x):
        q = model(x)
        return q.mean, q.variance

    with torch.no_grad():
        assert_equal(
            torch.compile(by_model if form == "model" else exportable(model), backend=backend)(X_NEW), expected
        )
    torch.compiler.reset()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Latent(KERNELS["rbf"](), KL()),
        lambda: gpytorch.models.ExactGP(X, Y, gpytorch.likelihoods.GaussianLikelihood()),
        gpytorch.kernels.RBFKernel,
    ],
)
def test_other_models_are_refused(make):
    with pytest.raises(TypeError, match="expected a sparse model"):
        exportable(make())
