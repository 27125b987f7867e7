"""Type-II MAP: hyperpriors enter the objective and its gradient; points without a posterior raise errors."""

import gpytorch
import pytest
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.distributions import MultivariateNormal
from gpytorch.priors import GammaPrior, LogNormalPrior
from linear_operator.utils.errors import NanError, NotPSDError

import gpext
from gpext.inference import EP, Laplace
from gpext.likelihoods import StudentTLikelihood
from gpext.mlls import LatentMarginalLogLikelihood
from tests.members import F64

N = 30


class Model(gpext.models.LatentGP):
    def __init__(self, x, y, likelihood, rule):
        super().__init__(x, y, likelihood, rule)
        self.mean_module = gpytorch.means.ConstantMean()
        kernel = gpytorch.kernels.RBFKernel(ard_num_dims=2, lengthscale_prior=GammaPrior(3.0, 2.0))
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def made(rule):
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.rand(N, 2, generator=generator, dtype=F64)
    y = torch.sin(2 * x[:, 0]) + 0.1 * torch.randn(N, generator=generator, dtype=F64)
    y[::15] += 1.0
    likelihood = StudentTLikelihood(
        deg_free_prior=GammaPrior(4.0, 1.0),
        deg_free_constraint=GreaterThan(1.0),
        noise_prior=LogNormalPrior(-2.0, 1.0),
    )
    model = Model(x, y, likelihood, rule).double()
    likelihood.deg_free, likelihood.noise = torch.tensor(3.0, dtype=F64), torch.tensor(0.1, dtype=F64)
    return LatentMarginalLogLikelihood(likelihood, model), x, y


@pytest.mark.parametrize("rule", [EP(tolerance=1e-10), Laplace(tolerance=1e-10)], ids=["EP", "Laplace"])
def test_the_gradient_of_the_posterior_of_all_hyperparameters_agrees_with_differences(rule):
    mll, x, y = made(rule)
    mll(mll.model(x), y).backward()
    with torch.no_grad():
        for name, parameter in mll.named_parameters():
            for index in range(parameter.numel()):
                entry, values = parameter.view(-1)[index : index + 1], []
                start, h = entry.item(), 1e-4
                for step in (2, 1, -1, -2):
                    entry.fill_(start + step * h)
                    values.append(mll(mll.model(x), y).item())
                entry.fill_(start)
                difference = (8 * (values[1] - values[2]) - (values[0] - values[3])) / (12 * h)
                given = parameter.grad.view(-1)[index].item()
                assert given == pytest.approx(difference, rel=1e-5, abs=1e-8), name


@pytest.mark.parametrize("rule", [EP(), Laplace()], ids=["EP", "Laplace"])
def test_fit_maximises_it(rule):
    mll, x, y = made(rule)
    result = gpext.fit(mll, x, y, tolerance=1e-7, initial="given", progress=False)
    assert result.status is gpext.FitStatus.CONVERGED
    mll.train()
    mll.zero_grad()
    value = mll(mll.model(x), y)
    value.backward()
    assert max(float(p.grad.abs().max()) for p in mll.parameters()) < 1e-4
    likelihood, kernel = mll.likelihood, mll.model.covar_module.base_kernel
    density = (
        likelihood.deg_free_prior.log_prob(likelihood.deg_free).sum()
        + likelihood.noise_prior.log_prob(likelihood.noise).sum()
        + kernel.lengthscale_prior.log_prob(kernel.lengthscale).sum()
    )
    assert 1.5 < likelihood.deg_free.item() < 10
    assert result.objective == pytest.approx(value.item(), abs=1e-9)
    assert N * result.objective == pytest.approx((mll.model.result.log_evidence + density).item(), abs=1e-6)


def test_a_training_that_ends_where_the_mode_vanishes_has_not_converged():
    """A Student-t's posterior may lose a mode: Laplace's evidence is infinite there, and low beyond."""
    mll, x, y = made(Laplace())
    result = gpext.fit(mll, x, y, tolerance=1e-7, progress=False)
    mll.train()
    mll.zero_grad()
    mll(mll.model(x), y).backward()
    is_flat = max(float(p.grad.abs().max()) for p in mll.parameters()) < 1e-2
    assert (result.status is gpext.FitStatus.CONVERGED) == is_flat


def test_a_prior_that_is_not_finite_is_what_a_line_search_steps_back_from():
    mll, x, y = made(EP())
    with torch.no_grad():
        mll.model.covar_module.base_kernel.raw_lengthscale.fill_(-800.0)  # softplus: zero
    with pytest.raises(NanError, match="NaN or infinite"):
        mll(mll.model(x), y)
    with torch.no_grad():
        mll.model.covar_module.base_kernel.raw_lengthscale.fill_(0.0)
    with pytest.raises(ValueError, match="targets"):  # other errors are not converted
        mll(mll.model(x), y[:-1])


def test_an_evidence_without_a_posterior_is_refused():
    mll, x, y = made(Laplace())
    rule = mll.model.inference

    class Improper:
        def infer(self, *args, **kwargs):
            result = rule.infer(*args, **kwargs)
            object.__setattr__(result, "status", gpext.inference.Status.NOT_POSITIVE_DEFINITE)
            return result

    mll.model.inference = Improper()
    with pytest.warns(gpext.inference.InferenceWarning), pytest.raises(NotPSDError):
        mll(mll.model(x), y)
    assert not bool(mll.model.variational_strategy.variational_params_initialized)


def test_targets_by_which_the_model_would_not_predict_are_refused():
    mll, x, y = made(Laplace())
    for other in (2 * y, y[:-1]):
        with pytest.raises(ValueError, match=r"model\.set_train_data\(\)"):
            mll(mll.model.train()(x), other)
    mll.model.set_train_data(targets=2 * y)
    mll(mll.model(x), 2 * y)
