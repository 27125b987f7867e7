r"""The augmented bound with q(u) eliminated: a deterministic objective for hyperparameters [Titsias 2009, GWO20 A.3].

At fixed w the optimal q(u) is known for any hyperparameters theta, and

    L(theta; w) = sum_i { E_q[log C_i + g_i f_i - w_i h_i^2] + c_i^2 w_i + log phi(c_i^2) } - KL(q(u) || p(u))

at that q is a lower bound on log p(y), for every theta; w_i = -phi'/phi at c_i^2. It equals
log int N(g | mu, Q) prod exp(nu g - tau g^2/2) dg - sum tau (k - q) / 2 + sum c with Q = K_xz K_zz^-1 K_zx, written
here so that nothing large cancels. Because q is optimal, dL/dtheta is the derivative at fixed q.

Each evaluation first refreshes the w_i at its own theta, by coordinate ascent from where the last evaluation left them,
so that L is close to its maximum over w and its gradient to that of the maximum.

Cost for N data and M inducing points: one triangular solve and one product of size M x M x N, and a solve and a product
more for each refresh. The kernel is evaluated twice, in blocks of data that stay in cache; memory is one M x N matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpext.augmentations import Augmentation
from gpext.likelihoods import AugmentedLikelihood
from gpext.posteriors import (
    InducingPosterior,
    back_substitute,
    condition_inducing,
    cross_gradient,
    factorise,
    inducing_gradient,
    project,
)
from gpext.sites import GaussianSites
from gpext.variational.bound_gradients import push_back
from gpext.variational.site_variational_strategy import SiteVariationalStrategy


@dataclass
class _Block:
    """A slice of the data, its auxiliary variables, and the prior there at the current parameters."""

    x: Tensor  # (..., B, d)
    y: Tensor  # (..., B)
    started: bool = False
    tilt: Tensor = field(init=False)  # c_i^2 (..., B); kept between evaluations
    augmentation: Augmentation = field(init=False)
    whitened: Tensor = field(init=False)  # A (..., M, B)
    prior_mean: Tensor = field(init=False)  # mu (..., B)
    conditional_variance: Tensor = field(init=False)  # k_ii - q_ii (..., B)

    def sites(self) -> GaussianSites:
        shift, precision = self.augmentation.site(self.augmentation.radial.mean(self.tilt))
        return GaussianSites(shift.expand(self.tilt.shape), precision.expand(self.tilt.shape))


class CollapsedBound:
    """L(theta; w) over fixed data, with its derivatives in the hyperparameters and the likelihood's parameters.

    Args:
        strategy: the variational strategy of the model; :meth:`commit` writes its q(u).
        likelihood: any likelihood with an augmentation.
        x: inputs (..., N, d).
        y: targets (..., N).
        num_refreshes: coordinate-ascent steps over w in each evaluation, before the bound is taken.
        block_size: data handled at a time.
    """

    def __init__(
        self,
        strategy: SiteVariationalStrategy,
        likelihood: AugmentedLikelihood,
        x: Tensor,
        y: Tensor,
        *,
        num_refreshes: int = 1,
        block_size: int = 1024,
    ) -> None:
        self.strategy, self.likelihood, self.num_refreshes = strategy, likelihood, num_refreshes
        self.num_data = y.size(-1)
        self._blocks = [
            _Block(x[..., start : start + block_size, :], y[..., start : start + block_size])
            for start in range(0, self.num_data, block_size)
        ]
        self._natural: tuple[Tensor, Tensor] | None = None

    def evaluate(self, *, gradient: bool = True, refresh: bool = True) -> Tensor:
        """Return L (...), float64, at the current parameters.

        Args:
            gradient: add the derivatives of the loss -L / N, summed over batches, to the parameters' `.grad`.
            refresh: update w first; otherwise L is taken at the c^2 that the last evaluation ended with. Its
                derivatives are exact then, but for parameters inside a phi that is differentiated automatically: those
                are exact once w has converged.

        Raises:
            torch.linalg.LinAlgError: K_zz or the precision of q(u) is not positive definite.
        """
        with torch.set_grad_enabled(gradient):
            inducing_covariance = self.strategy.inducing_covariance()
        with torch.no_grad():
            chol = self._load_prior(inducing_covariance)
            posterior, gram = self._condition()
            for _ in range(self.num_refreshes if refresh else 0):
                for block in self._blocks:
                    self._refresh(block, posterior)
                posterior, gram = self._condition()
            back = back_substitute(chol, posterior, inducing_covariance.dtype) if gradient else None
        value = -posterior.divergence_from_prior
        vector = torch.zeros_like(posterior.mean)
        for block in self._blocks:
            marginals = posterior.marginals(block.whitened, block.prior_mean, block.conditional_variance)
            block_value, block_vector = self._backpropagate(block, marginals, back)
            value, vector = value + block_value, vector + block_vector
            if refresh:
                block.tilt = block.augmentation.tilt(*marginals)
        if gradient and inducing_covariance.requires_grad:
            derivative = inducing_gradient(chol, posterior, vector, gram) / -self.num_data
            inducing_covariance.backward(derivative.to(inducing_covariance.dtype))
        return value

    def settle(self, *, tolerance: float = 1e-6, max_refreshes: int = 100) -> Tensor:
        """Refresh w at the current parameters until L / N gains less than `tolerance`; return L (...).

        An optimiser leaves behind the w of its last trial point, which need not be near the best one.
        """
        last = self.evaluate(gradient=False)
        for _ in range(max_refreshes):
            value = self.evaluate(gradient=False)
            if bool(((value - last) / self.num_data < tolerance).all()):
                break
            last = value
        return value

    @torch.no_grad()
    def commit(self) -> None:
        """Write the q(u) of the last evaluation into the strategy."""
        assert self._natural is not None, "evaluate first"
        self.strategy.posterior()  # initialises the distribution if it is new
        self.strategy.move(*self._natural, rate=1.0)

    def _load_prior(self, inducing_covariance: Tensor) -> Tensor:
        chol = factorise(inducing_covariance)
        factor = chol.to(inducing_covariance.dtype)
        for block in self._blocks:
            cross = self.strategy.cross_blocks(block.x)
            block.whitened = torch.linalg.solve_triangular(factor, cross.covariance, upper=False)
            block.prior_mean = cross.mean
            block.conditional_variance = cross.variance - block.whitened.square().sum(-2)
            block.augmentation = self.likelihood.augmentation(block.y)
            if not block.started:  # where the strategy's q(u) stands: at the prior if it is new
                self._refresh(block, self.strategy.posterior())
                block.started = True
        return chol

    @torch.no_grad()
    def _refresh(self, block: _Block, posterior: InducingPosterior) -> None:
        marginals = posterior.marginals(block.whitened, block.prior_mean, block.conditional_variance)
        block.tilt = block.augmentation.tilt(*marginals)

    def _condition(self) -> tuple[InducingPosterior, Tensor]:
        sums = [project(block.whitened, block.prior_mean, block.sites()) for block in self._blocks]
        vector = torch.stack([vector.double() for vector, _ in sums]).sum(0)
        gram = torch.stack([gram.double() for _, gram in sums]).sum(0)
        self._natural = (vector, gram)
        precision = gram.clone()
        precision.diagonal(dim1=-2, dim2=-1).add_(1)
        return condition_inducing(vector, precision), gram

    def _backpropagate(
        self, block: _Block, marginals: tuple[Tensor, Tensor], back: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the block's share of L and of A g, g = nu - tau m; with `back`, push its derivatives back."""
        mean, variance = marginals
        weight = -1 / self.num_data
        with torch.no_grad():
            sites = block.sites()
            precision = sites.precision
            mean_gradient = sites.shift - precision * mean
            vector = (block.whitened @ mean_gradient.unsqueeze(-1)).squeeze(-1).double()
        with torch.set_grad_enabled(back is not None):
            terms = block.augmentation if back is None else self.likelihood.augmentation(block.y)
            w = terms.radial.mean(block.tilt)
            expected = (
                terms.log_constant
                + terms.potential * mean
                - w * (terms.tilt(mean, variance) - block.tilt)
                + terms.radial.log_phi(block.tilt)
            )
            if back is not None:
                cross = self.strategy.cross_blocks(block.x)
                push_back(
                    (
                        cross.covariance,
                        cross_gradient(back, block.whitened, weight * mean_gradient, weight * precision),
                    ),
                    (cross.variance, -0.5 * weight * precision),
                    (cross.mean, weight * mean_gradient),
                    (expected, torch.full_like(expected, weight)),
                )
        return expected.detach().double().sum(-1), vector
