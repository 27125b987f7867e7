r"""The whitened strategy whose q(u) is kept in natural parameters: its prior block by block, its posterior, its moves.

In the coordinates v = L^-1 (u - mu_z), L L' = K_zz + jitter I, of :mod:`gpext.posteriors.inducing`, the prior is
N(0, I) and q(v) has eta = Lambda m and the precision Lambda; gpytorch stores eta and -Lambda / 2.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.models import ApproximateGP
from gpytorch.utils.memoize import cached
from gpytorch.variational import NaturalVariationalDistribution, VariationalStrategy
from linear_operator.operators import DiagLinearOperator, LinearOperator, TriangularLinearOperator
from torch import Tensor

from gpext.checks import check_finite, check_tensor
from gpext.kernels import dense_covariance
from gpext.posteriors import InducingPosterior, condition_inducing, factorise
from gpext.variational.design_inputs import DesignInputs, Inputs, row_variances
from gpext.variational.prior_blocks import (
    CrossBlocks,
    FactorCache,
    hyperparameters,
    is_changed_together,
    known_rows,
    outside_inference_mode,
    split_covariance,
    whiten,
)

_MANY = 1024  # inputs that suffice to test whether a model depends on its batch


class NaturalVariationalStrategy(VariationalStrategy):
    """gpytorch's whitened `VariationalStrategy` with q(u) in natural parameters, and the blocks of its prior.

    The base of :class:`SiteVariationalStrategy`, whose arguments and errors it has.
    """

    def __init__(
        self,
        model: ApproximateGP,
        inducing_points: Tensor,
        variational_distribution: NaturalVariationalDistribution | None = None,
        learn_inducing_locations: bool = True,
        jitter_val: float | None = None,
    ) -> None:
        check_tensor("inducing_points", inducing_points)
        if inducing_points.dim() == 1:
            inducing_points = inducing_points.unsqueeze(-1)
        if inducing_points.dim() < 2 or inducing_points.size(-2) == 0 or not inducing_points.is_floating_point():
            raise ValueError(
                f"expected inducing points (..., M, d) of float32 or float64, at least one; got "
                f"{tuple(inducing_points.shape)} of {inducing_points.dtype}."
            )
        check_finite("inducing_points", inducing_points)
        if variational_distribution is None:
            variational_distribution = NaturalVariationalDistribution(
                inducing_points.size(-2), batch_shape=inducing_points.shape[:-2], mean_init_std=0.0
            ).to(inducing_points)
        if not isinstance(variational_distribution, NaturalVariationalDistribution):
            raise TypeError(
                "SiteVariationalStrategy updates natural parameters: expected a NaturalVariationalDistribution (or "
                f"None for the default), got {type(variational_distribution).__name__}."
            )
        if variational_distribution.natural_vec.size(-1) != inducing_points.size(-2):
            raise ValueError(
                f"the variational distribution is of {variational_distribution.natural_vec.size(-1)} values, and there "
                f"are {inducing_points.size(-2)} inducing points."
            )
        super().__init__(model, inducing_points, variational_distribution, learn_inducing_locations, jitter_val)
        self._factors: FactorCache[Tensor] = FactorCache()
        self._known: FactorCache[Tensor] = FactorCache()  # the parameters of gpytorch's memos, in eval mode

    @property
    def variational_distribution(self) -> MultivariateNormal:
        """q(u) at the current parameters.

        gpytorch's memo of it outlives them, and the graph that a backward pass has freed: Pyro's guides ask for q(u)
        before they call the model. So in training it is made anew, and in eval mode where a parameter has changed.
        """
        if self.training:
            self._clear_cache()
        else:
            key = [*self.prior_key(), *self._variational_distribution.parameters()]
            if self._known.get(key) is None:
                self._clear_cache()
                self._known.put(key, self.inducing_points)
        return super().variational_distribution

    @outside_inference_mode()
    def __call__(self, x: Tensor, prior: bool = False, **kwargs: Any) -> MultivariateNormal:
        """Return q(f) at inputs x, or p(f) with `prior`."""
        if not prior:
            self.initialise()
        return super().__call__(x, prior=prior, **kwargs)

    def kl_divergence(self) -> Tensor:
        """Return KL(q(u) || p(u)) (...); in training that of the last call, with which it shares its graph."""
        q = super().variational_distribution if self.training else self.variational_distribution
        return torch.distributions.kl_divergence(q, self.prior_distribution)

    def inducing_covariance(self) -> Tensor:
        """Return K_zz + jitter I (..., M, M), in the autograd graph."""
        covariance = dense_covariance(self.model.forward(self.inducing_points).lazy_covariance_matrix).clone()
        covariance.diagonal(dim1=-2, dim2=-1).add_(self.jitter_val)
        return covariance

    @cached(name="cholesky_factor", ignore_args=True)
    def _cholesky_factor(self, induc_induc_covar: LinearOperator) -> TriangularLinearOperator:
        # Predictions by the matrix of training: gpytorch's own entries differ by rounding, which in float32 may leave a
        # model whose matrix cannot be factorised any more. In training, layers may look at the whole batch.
        own = induc_induc_covar if self.training else self.inducing_covariance()
        return super()._cholesky_factor(own if own.shape == induc_induc_covar.shape else induc_induc_covar)

    def cross_blocks(self, x: Inputs) -> CrossBlocks:
        """Return K_zx, the prior variances k_ii + jitter and the prior mean mu_i, in the autograd graph."""
        if isinstance(x, DesignInputs):
            return x.combine(self.cross_blocks(x.x), self._row_variances(x), self.jitter_val)
        return self._cross_of(self._prior_together(x))

    def prior_blocks(self, x: Inputs) -> tuple[Tensor, CrossBlocks]:
        """Return K_zz, up to the jitter, and the :meth:`cross_blocks`, of one evaluation if the kernel is known."""
        if isinstance(x, DesignInputs):
            inducing, at_inputs = self.prior_blocks(x.x)
            return inducing, x.combine(at_inputs, self._row_variances(x), self.jitter_val)
        size, prior = self.inducing_points.size(-2), self._prior_together(x)
        known = known_rows(prior.lazy_covariance_matrix, size)
        if known is None:
            return self.inducing_covariance(), self._cross_of(prior)
        inducing, cross = known[0].split([size, x.size(-2)], -1)
        return inducing, CrossBlocks(cross, known[1][..., size:] + self.jitter_val, prior.mean[..., size:])

    def _row_variances(self, x: DesignInputs) -> Tensor:
        """Return a_i' K a_i (..., N), in the autograd graph."""
        missing = len(self._variational_distribution.batch_shape) - (x.x.dim() - 2)
        return row_variances(self.model.forward, x.x[(None,) * max(missing, 0)], x.design)

    def _cross_of(self, prior: MultivariateNormal) -> CrossBlocks:
        """Return what :meth:`cross_blocks` does, of what :meth:`_prior_together` returned."""
        size = self.inducing_points.size(-2)
        cross, variance = split_covariance(prior.lazy_covariance_matrix, size)
        return CrossBlocks(cross, variance + self.jitter_val, prior.mean[..., size:])

    def _prior_together(self, x: Tensor) -> MultivariateNormal:
        """Return the prior at the inducing points and, after them, inputs x (..., N, d)."""
        inducing_points = self.inducing_points
        if inducing_points.shape[:-2] != x.shape[:-2]:
            x, inducing_points = self._expand_inputs(x, inducing_points)
        return self.model.forward(torch.cat([inducing_points, x], dim=-2))

    @torch.no_grad()
    def sees_its_batch(self, x: Tensor) -> bool:
        """Return whether the prior at Z, or at inputs x (..., N, d), changes where the two come together.

        A prior does not: but BatchNorm, Dropout or ScaleToBounds in a feature extractor normalise a batch by itself in
        train mode.
        """
        inducing_points, x = self.inducing_points, x[..., :_MANY, :]
        if inducing_points.shape[:-2] != x.shape[:-2]:
            x, inducing_points = self._expand_inputs(x, inducing_points)
        return is_changed_together(self.model.forward, inducing_points, x)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out gpytorch's memos, whose graph cannot be copied."""
        return {name: value for name, value in self.__dict__.items() if name != "_memoize_cache"}

    def prior_key(self) -> list[Tensor | float]:
        """Return everything the prior over u depends on, to tell whether what was made of it still holds."""
        return [*hyperparameters(self.model), self.inducing_points, self.jitter_val]

    def _factor(self) -> Tensor:
        """Return L with L L' = K_zz + jitter I, float64, kept while the hyperparameters stay the same."""
        key = self.prior_key()
        chol = self._factors.get(key)
        if chol is None:
            chol = factorise(self.inducing_covariance())
            self._factors.put(key, chol)
        return chol

    def initialise(self) -> None:
        """Set q(u) to the prior if it is new.

        gpytorch inverts its covariance. One for all latents is enough, as it is the identity; and LU factors of a
        batch may be wrong, see :mod:`gpext.threads`.
        """
        if not self.variational_params_initialized.item():
            mean = self.prior_distribution.mean
            prior = MultivariateNormal(mean, DiagLinearOperator(mean.new_ones(mean.size(-1))))
            self._variational_distribution.initialize_variational_distribution(prior)
            self.variational_params_initialized.fill_(1)

    def posterior(self, dtype: torch.dtype = torch.float64) -> InducingPosterior:
        """Return q(v) of the whitened inducing values in a dtype, initialising it to the prior if it is new.

        Raises:
            torch.linalg.LinAlgError: its precision is not positive definite.
        """
        self.initialise()
        eta, half = self._natural()
        return condition_inducing(eta, -2 * half, dtype=dtype)

    @torch.no_grad()
    def marginals(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Return mean and variance (..., N) of q(f) at inputs that have been checked, outside the graph.

        Raises:
            torch.linalg.LinAlgError: as :meth:`posterior`, or a variance has lost its digits.
        """
        at = whiten(self._factor(), self.cross_blocks(x))
        return self.posterior().marginals(at.matrix, at.mean, at.conditional_variance)

    def _natural(self) -> tuple[Tensor, Tensor]:
        """Return eta (..., M) and -Lambda / 2 (..., M, M), outside the graph."""
        distribution = self._variational_distribution
        return distribution.natural_vec.detach(), distribution.natural_mat.detach()

    @torch.no_grad()
    def move(self, vector: Tensor, gram: Tensor, rate: float) -> None:
        """Set eta <- (1 - rate) eta + rate vector and Lambda <- (1 - rate) Lambda + rate (I + gram)."""
        eta, half = self._natural()
        moved = ((1 - rate) * half).add_(gram.to(half.dtype), alpha=-0.5 * rate)
        moved.diagonal(dim1=-2, dim2=-1).sub_(0.5 * rate)
        vector = torch.lerp(eta, vector.to(eta.dtype), rate)
        half.copy_(moved)  # an interrupt on the way leaves a precision that is positive definite
        eta.copy_(vector)
        if self.__dict__.get("_memoize_cache"):
            self._clear_cache()
