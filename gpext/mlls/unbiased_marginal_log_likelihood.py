"""The log marginal likelihood of an ExactGP whose gradient is unbiased and costs a few products [FE15 Eq. 9]."""

from __future__ import annotations

import math
from typing import Any

from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ExactGP
from linear_operator.operators import LinearOperator, MulLinearOperator, SumLinearOperator
from torch import Tensor

from gpext.checks import check_finite
from gpext.operators import UnbiasedSolveOperator, UnbiasedSolver


class UnbiasedMarginalLogLikelihood(ExactMarginalLogLikelihood):
    """gpytorch's ExactMarginalLogLikelihood with unbiased derivatives and without a factorisation.

    The value is for monitoring: its log determinant is that of the preconditioner alone or, with
    `UnbiasedSolver(log_det="lanczos")`, an estimate that costs more products than the derivatives.

    Args:
        likelihood: a Gaussian one.
        model: any ExactGP: sums of kernels, priors, fixed noise; not batched.
        num_probes: vectors of random signs for the derivatives of the log determinant.
        solver: options of the solves, in place of `num_probes`.

    Raises:
        TypeError: another model, or something else than a solver.
        ValueError: the model's inputs or targets are not finite, or its covariance has a product of kernels that
            is approximated.

    Example:
        >>> import gpytorch, torch
        >>> class Model(gpytorch.models.ExactGP):
        ...     def __init__(self, x, y, likelihood):
        ...         super().__init__(x, y, likelihood)
        ...         self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel()
        ...
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> x = torch.linspace(0, 1, 20).double()
        >>> likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
        >>> model = Model(x, x.sin(), likelihood).double()
        >>> mll = UnbiasedMarginalLogLikelihood(likelihood, model)
        >>> (-mll(model(x), x.sin())).backward()
        >>> model.covar_module.raw_lengthscale.grad.shape
        torch.Size([1, 1])
    """

    def __init__(
        self, likelihood: Likelihood, model: ExactGP, num_probes: int = 4, *, solver: UnbiasedSolver | None = None
    ) -> None:
        super().__init__(likelihood, model)
        if not isinstance(model, ExactGP):
            raise TypeError(f"expected an ExactGP; got {type(model).__qualname__}.")
        if not isinstance(solver, UnbiasedSolver | None):
            raise TypeError(f"expected a gpext.operators.UnbiasedSolver; got {type(solver).__name__}.")
        for x in model.train_inputs or ():
            check_finite("inputs", x)
        if model.train_targets is not None:
            check_finite("targets", model.train_targets)
            if model.train_targets.dim() != 1:
                raise ValueError(
                    f"expected targets (N,) of one GP, no batch and one task; got {tuple(model.train_targets.shape)}."
                )
        self.solver = UnbiasedSolver(num_probes=num_probes) if solver is None else solver

    def forward(self, function_dist: MultivariateNormal, target: Tensor, *params: Any, **kwargs: Any) -> Tensor:
        """Return the log marginal likelihood per datum ()."""
        output = self.likelihood(function_dist, *params, **kwargs)
        given = output.lazy_covariance_matrix.evaluate_kernel()
        _check_exact(given)
        covariance = UnbiasedSolveOperator(given, solver=self.solver)
        # Not by log_prob: that factorises the matrix where gpytorch's fast computations are off, as botorch has them.
        quadratic, log_det = covariance.inv_quad_logdet(target - output.mean, logdet=True)
        size = function_dist.event_shape.numel()
        value = -0.5 * (quadratic + log_det + size * math.log(2 * math.pi))
        return self._add_other_terms(value, params) / size


def _check_exact(covariance: LinearOperator) -> None:
    """Raise for linear_operator's product of two matrices by roots, where these are of a limited rank."""
    if isinstance(covariance, MulLinearOperator) and covariance.size(-1) > settings.max_cholesky_size.value():
        raise ValueError(
            "gpytorch's ProductKernel multiplies matrices that are not stored by roots of a limited rank, which is no "
            "covariance to have unbiased gradients of. Write gpext.kernels.keops.ProductKernel(k1, k2), or take "
            "ScaleKernel and AdditiveKernel from gpext.kernels.keops, too: then k1 * k2 is exact."
        )
    if isinstance(covariance, SumLinearOperator):
        for part in covariance.linear_ops:
            _check_exact(part)
    elif isinstance(base := getattr(covariance, "base_linear_op", None), LinearOperator):  # a multiple, or a batch
        _check_exact(base)
