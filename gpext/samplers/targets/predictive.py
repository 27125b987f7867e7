r"""Predictions of a GP at the hyperparameters as they stand, with a factorisation or by products alone.

E y* = m* + K*' A^-1 (y - m),     Var y* = k** - K*' A^-1 K* + noise,     A = K + noise
"""

from __future__ import annotations

import warnings

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from linear_operator.operators import DiagLinearOperator
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from gpext.distributions import LatentNormal
from gpext.mlls import UnbiasedMarginalLogLikelihood
from gpext.operators import UnbiasedSolveOperator
from gpext.samplers.targets.log_posterior import NO_SUCH_MODEL, LogPosterior
from gpext.solvers import SolveStatus

_CHUNK = 128  # new inputs whose solves share products


@torch.no_grad()
def predictive(target: LogPosterior, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return means and variances (..., S) of targets at new inputs, as written in the target's model.

    Where its gradients are estimates, by conjugate gradients to half of all digits; else with a factorisation.

    Args:
        target: in training mode; left in it.
        x: (..., S, d) or (S,).
        noise: of a likelihood with fixed noise, its variances at x (..., S); none by default.

    Raises:
        TypeError: noise of a likelihood that takes none.
        FloatingPointError: the hyperparameters make no covariance of the data that can be solved with.
    """
    model = target.model
    if noise is not None and not isinstance(model.likelihood, FixedNoiseGaussianLikelihood):
        raise TypeError(f"only a FixedNoiseGaussianLikelihood takes noise; got {type(model.likelihood).__qualname__}.")
    if isinstance(target.mll, UnbiasedMarginalLogLikelihood):
        shape = x.shape if x.dim() == 1 else x.shape[:-1]
        mean, variance = (each.view(shape) for each in _by_solves(target, target.mll, x.reshape(shape.numel(), -1)))
        return _observed(model.likelihood, LatentNormal(mean, DiagLinearOperator(variance)), noise)
    try:
        with target.factorised(), warnings.catch_warnings():
            warnings.simplefilter("error", NumericalWarning)  # jitter would make it another model
            return _observed(model.likelihood, model.eval()(x), noise)
    except NO_SUCH_MODEL as error:
        raise FloatingPointError(f"the covariance of the data cannot be factorised: {error}") from error
    finally:
        model.train()  # forgets what belongs to these hyperparameters


def _observed(likelihood: Likelihood, latent: MultivariateNormal, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return means and variances (..., S) of targets.

    gpytorch would add the fixed noise of the training data where there happen to be as many new inputs, and noise that
    is given twice where some is learnt beside it.
    """
    if isinstance(likelihood, FixedNoiseGaussianLikelihood):
        fixed = 0.0 if noise is None else noise.to(latent.variance)
        return latent.mean, latent.variance + fixed + likelihood.second_noise
    predicted = likelihood(latent)
    return predicted.mean, predicted.variance


def _by_solves(target: LogPosterior, mll: UnbiasedMarginalLogLikelihood, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and variances of f (S,) at new inputs (S, d)."""
    model, n = target.model, target.num_data
    output = model.likelihood(model(*model.train_inputs))
    A = UnbiasedSolveOperator(output.lazy_covariance_matrix.evaluate_kernel(), solver=mll.solver)
    weights = _solved(A, (model.train_targets - output.mean).unsqueeze(-1))
    means, variances = [], []
    for part in x.split(_CHUNK):
        joint = model.forward(torch.cat([model.train_inputs[0], part], -2))
        K = joint.lazy_covariance_matrix
        cross = K[:n, n:].to_dense()
        means.append(joint.mean[n:] + (cross.mT @ weights).squeeze(-1))
        variances.append(K[n:, n:].diagonal(dim1=-1, dim2=-2) - (cross * _solved(A, cross)).sum(-2))
    return torch.cat(means), torch.cat(variances)


def _solved(A: UnbiasedSolveOperator, b: Tensor) -> Tensor:
    tolerance = torch.finfo(b.dtype).eps ** 0.5
    if not bool(b.isfinite().all()):
        raise FloatingPointError("the covariance or the mean of the data is not finite.")
    found = A.solve_to(b, tolerance)
    if found.status is not SolveStatus.CONVERGED:
        raise FloatingPointError(
            f"a solve of size {len(b)} ended after {found.num_steps} steps, with a residual of "
            f"{float(found.residual_norm.max()):.1e} where {tolerance:.1e} was asked for: {found.status.value}. Raise "
            "the noise or its lower bound, or max_steps of the UnbiasedSolver, or predict in float64."
        )
    return found.solution
