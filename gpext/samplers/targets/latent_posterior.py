"""The posterior that a Gibbs sampler draws from: a prior over f, an augmented likelihood, targets, and hyperparameters.

Chains have hyperparameters of their own, so the priors of C chains are a batch of C; where none moves, they share one.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from torch import Tensor

from gpext.checks import check_finite, check_tensor
from gpext.designs import DesignLinearOperator
from gpext.inference import require_augmentation
from gpext.inference.gibbs import draw_sites
from gpext.inference.problem import Problem
from gpext.kernels import dense_covariance
from gpext.likelihoods import AugmentedLikelihood
from gpext.likelihoods.checks import HyperparameterError
from gpext.models import LatentGP
from gpext.parallel import described, fingerprint, tensors_of
from gpext.posteriors import DensePrior, NeighbourPrior
from gpext.samplers.targets.chain_target import ChainTarget
from gpext.samplers.targets.hyperparameters import Hyperparameters
from gpext.sites import GaussianSites
from gpext.threads import factor_flops


class Target(ChainTarget):
    """p(f | y) for a given prior: no hyperparameter moves.

    Args:
        prior: p(f) (..., N).
        likelihood: with an augmentation.
        targets: (..., N).
        jitter: added to the diagonal of the prior covariance.

    Raises:
        TypeError, ValueError: as the inference rules.
    """

    of_prior: Sequence[int] = ()  # which of the P hyperparameters are the prior's
    of_likelihood: Sequence[int] = ()
    model: LatentGP | None = None
    _kinds: tuple[type, ...] = (DensePrior,)  # of priors

    def __init__(
        self, prior: MultivariateNormal, likelihood: AugmentedLikelihood, targets: Tensor, jitter: float
    ) -> None:
        with torch.no_grad():
            if isinstance(prior.lazy_covariance_matrix, DesignLinearOperator):
                prior = _dense(prior)
            problem = Problem.of(prior, require_augmentation(likelihood), targets, jitter)
        if not isinstance(problem.prior, self._kinds):
            raise TypeError(
                "GibbsSampler needs a prior of f with a covariance of its own for all data, or a LatentGP with "
                "neighbours; got a prior of low rank, or one by neighbours without its model."
            )
        assert isinstance(problem.prior, DensePrior | NeighbourPrior)
        self._prior = problem.prior
        self._observe(likelihood, targets, problem.jitter, problem.prior.mean.shape, prior.mean.dtype)

    def _observe(
        self,
        likelihood: AugmentedLikelihood,
        targets: Tensor,
        jitter: float,
        latent_shape: torch.Size,  # of f (..., N) of one chain
        dtype: torch.dtype,
    ) -> None:
        self.likelihood, self.targets = require_augmentation(likelihood), targets
        self.jitter = self._least_jitter = jitter
        self.latent_shape, self.dtype = latent_shape, dtype
        with torch.no_grad():
            self._augmentation = likelihood.augmentation(targets)

    @property
    def device(self) -> torch.device:
        """That of the targets."""
        return self.targets.device

    @property
    def flops(self) -> float:
        """Those of the factors that a step of one chain needs."""
        return factor_flops(self.latent_shape[-1], number=self.latent_shape[:-1].numel())

    @property
    def origin(self) -> dict[str, Any]:
        """The identity of the target."""
        return {
            "hyperparameters": [],
            "model": described(self.described),
            "latent shape": list(self.latent_shape),
            "fingerprint of the data": fingerprint(self.data),
        }

    @property
    def described(self) -> torch.nn.Module:
        """The model, or the likelihood if there is none."""
        return self.likelihood

    @property
    def fixed(self) -> list[Tensor]:
        """The parameters and buffers that are not moved, float64."""
        return tensors_of(self.described)

    @property
    def data(self) -> list[Tensor]:
        """The targets and the prior, float64."""
        assert isinstance(self._prior, DensePrior)
        return [self.targets.double(), self._prior.mean.double(), self._prior.covariance.double()]

    @property
    def size(self) -> int:
        """P."""
        return self.begin(1).size(-1)

    def begin(self, num_chains: int) -> Tensor:
        """Return the hyperparameters of every chain at the start (C, P)."""
        return torch.zeros(num_chains, 0, dtype=torch.float64, device="cpu")

    def prior(self, raw: Tensor) -> DensePrior | NeighbourPrior:
        """Return the priors of chains with hyperparameters (C, P): a batch of C, or one for all."""
        return self._prior

    def sites(self, latent: Tensor, raw: Tensor, generator: torch.Generator) -> GaussianSites:
        """Return sites (C, ..., N) at w ~ p(w | f, y), for latent values (C, ..., N)."""
        return draw_sites(self._augmentation, latent, generator=generator)

    def constrained(self, raw: Tensor) -> dict[str, Tensor]:
        """Return hyperparameters (..., *shape) by parameter name for raw values (..., P)."""
        return {}


class ModelTarget(Target):
    """p(f, theta | y) of a model; works on a copy of it.

    Args:
        model: with its likelihood and training data.
        names: parameters to move; None for those with a prior.
        jitter: added to the diagonal of the prior covariance.
        logarithms: see :class:`gpext.samplers.targets.hyperparameters.Hyperparameters`.

    Raises:
        TypeError, ValueError: as the inference rules; or a name that is not a parameter's.
    """

    model: LatentGP
    _kinds = (DensePrior, NeighbourPrior)

    def __init__(
        self, model: LatentGP, names: Sequence[str] | None, jitter: float, *, logarithms: bool = False
    ) -> None:
        self._take(model, names, logarithms)
        super().__init__(self._prior_of_observed(), self.model.likelihood, model.train_targets, jitter)

    @torch.inference_mode(False)  # a copy made in it would have no parameters that move
    def _take(self, model: LatentGP, names: Sequence[str] | None, logarithms: bool) -> None:
        strategy = model.variational_strategy
        if strategy.sparse_inputs is not None and strategy.neighbours is None:
            raise TypeError(
                "samplers of f need its exact prior, or one by neighbours; build the LatentGP without "
                "inducing_inputs, or with neighbours beside them."
            )
        self.model = copy.deepcopy(model).eval()
        self._x = self.model.train_inputs[0]
        self._moved = Hyperparameters(self.model, names, logarithms=logarithms)
        self._own = self._moved.read()
        likelihood = self.model.likelihood
        self.of_likelihood = self._moved.coordinates_of(likelihood)
        self.of_prior = [j for j in range(self._moved.size) if j not in self.of_likelihood]

    @property
    def flops(self) -> float:
        """Those of the factors that a step of one chain needs."""
        if self.model.variational_strategy.neighbours is None:
            return super().flops
        assert isinstance(self._prior, NeighbourPrior)
        return self.latent_shape[:-1].numel() * self._prior.graph.dissection.work

    @property
    def origin(self) -> dict[str, Any]:
        """The identity of the target."""
        return {**super().origin, "hyperparameters": [slot.coordinate for slot in self._moved.slots]}

    @property
    def described(self) -> torch.nn.Module:
        """The model."""
        return self.model

    @property
    def fixed(self) -> list[Tensor]:
        """The parameters and buffers that are not moved, float64."""
        return tensors_of(self.model, [slot.parameter for slot in self._moved.slots])

    @property
    def data(self) -> list[Tensor]:
        """Inputs and what was observed, float64."""
        return [self._x.double(), self.targets.double()]

    def begin(self, num_chains: int) -> Tensor:
        """Return the model's own values for every chain (C, P), and set the model to them."""
        self._moved.write(self._own)
        return self._own.expand(num_chains, -1).clone()

    def prior(self, raw: Tensor) -> DensePrior | NeighbourPrior:
        """Return the priors of chains with hyperparameters (C, P): a batch of C, or one for all."""
        if not self.of_prior:
            return self._prior
        priors: list[Any] = [self.prior_at(row) for row in raw]  # all of a kind
        return type(self._prior).stack(priors)

    def sites(self, latent: Tensor, raw: Tensor, generator: torch.Generator) -> GaussianSites:
        """Return sites (C, ..., N) at w ~ p(w | f, y), for latent values (C, ..., N)."""
        if not self.of_likelihood:
            return super().sites(latent, raw, generator)
        sites = []
        for f, row in zip(latent, raw, strict=True):
            self._moved.write(row)
            sites.append(draw_sites(self.likelihood.unchecked_augmentation(self.targets), f, generator=generator))
        return GaussianSites(torch.stack([s.shift for s in sites]), torch.stack([s.precision for s in sites]))

    def constrained(self, raw: Tensor) -> dict[str, Tensor]:
        """Return hyperparameters (..., *shape) by parameter name for raw values (..., P)."""
        return self._moved.constrained(raw)

    def names_of(self, coordinates: Sequence[int]) -> list[str]:
        """Return the names of the parameters that coordinates belong to, in the order of the flat vector."""
        return [slot.name for slot in self._moved.slots if slot.place.start in coordinates]

    def log_density_given_sites(self, raw: Tensor, coordinate: int, sites: GaussianSites) -> Tensor:
        """Return log p(theta_j | w, y, the rest) () up to a constant, f integrated out, at raw values (P,).

        It is -inf where there is no such prior of f.
        """
        try:
            prior = self.prior_at(raw)
        except HyperparameterError:
            return torch.tensor(-torch.inf, dtype=torch.float64, device="cpu")
        posterior = prior.condition(sites)
        return _or_nowhere(posterior.log_normalizer.sum().cpu() + self._moved.log_prior(coordinate))

    def log_density_given_latent(self, raw: Tensor, coordinate: int, latent: Tensor) -> Tensor:
        """Return log p(theta_j | f, y, the rest) () up to a constant, w integrated out, at raw values (P,).

        It is -inf where there is no such likelihood.
        """
        self._moved.write(raw)
        log_likelihood = self.likelihood.unchecked_augmentation(self.targets).log_prob(latent).sum()
        return _or_nowhere(log_likelihood.cpu() + self._moved.log_prior(coordinate))

    def likelihood_at(self, raw: Tensor) -> AugmentedLikelihood:
        """Return a copy of the likelihood with its parameters at raw values (P,)."""
        self._moved.write(raw)
        return copy.deepcopy(self.likelihood)

    def prior_at(self, raw: Tensor) -> DensePrior | NeighbourPrior:
        """Return the prior of f at the training inputs at raw values (P,), and keep the largest jitter of any.

        Raises:
            HyperparameterError: it is not finite.
        """
        self._moved.write(raw)
        prior = self._prior_of_observed()
        covariance = prior.lazy_covariance_matrix
        by_neighbours = NeighbourPrior.of(prior.mean, covariance, self._least_jitter)
        if by_neighbours is None:
            known: DensePrior | NeighbourPrior = DensePrior.of(prior.mean, covariance.to_dense(), self._least_jitter)
        else:
            known, added = by_neighbours
            self.jitter = max(self.jitter, added)
        if not bool(known.mean.isfinite().all() and known.is_finite):
            raise HyperparameterError("the prior has NaN or infinite entries; check the kernel's parameters.")
        return known

    def new_inputs(self, x: Tensor) -> Tensor:
        """Return new inputs as (..., S, d).

        Raises:
            ValueError: they are not finite or not of the training inputs' dimension.
        """
        return checked_inputs(x, self._x)

    def predicted_at(self, raw: Tensor, latent: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and variances (..., S) of f at new inputs (..., S, d) given a draw."""
        prior = self.prior_at(raw)
        if isinstance(prior, NeighbourPrior):
            mean, variance = self.model.variational_strategy.predict_given(prior, latent, x)
            return mean, above_rounding(variance, self._forward(x).variance.double())
        return conditional(latent, prior, *self._beside(x))

    def _beside(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the prior mean at new inputs, the covariance with the training inputs, and the variance there."""
        size = self._x.size(-2)
        joint = self._forward(torch.cat([self._x, x], -2))
        cross = joint.lazy_covariance_matrix[..., :size, size:].to_dense().double()
        if self.model.design is not None:
            cross = self.model.design.times_matrix(cross)
        return joint.mean[..., size:].double(), cross, joint.variance[..., size:].double()

    @torch.no_grad()
    def _forward(self, x: Tensor) -> MultivariateNormal:
        return self.model.forward(x)

    @torch.no_grad()
    def _prior_of_observed(self) -> MultivariateNormal:
        """Return the prior of the values that the data depend on."""
        strategy = self.model.variational_strategy
        return strategy.prior_distribution if strategy.neighbours is not None else _dense(strategy.prior_distribution)


def checked_inputs(x: Tensor, train_x: Tensor) -> Tensor:
    """Return new inputs as (..., S, d), d as that of the training inputs.

    Raises:
        ValueError: they are not finite or not of that dimension.
    """
    check_tensor("x", x)
    check_finite("x", x)
    columns = x.unsqueeze(-1) if x.dim() == 1 else x
    d = train_x.size(-1) if train_x.dim() > 1 else 1
    if columns.dim() < 2 or columns.size(-1) != d:
        raise ValueError(
            f"expected new inputs (S, {d}), of the dimension of the training inputs; got {tuple(x.shape)}."
        )
    return columns


def conditional(
    latent: Tensor, prior: DensePrior, test_mean: Tensor, cross: Tensor, test_variance: Tensor
) -> tuple[Tensor, Tensor]:
    """Return mean and variance of f_* given f = latent (..., N): (..., S) each."""
    root = prior.square_root
    reduced = root.solve(cross)  # A (..., N, S)
    whitened = root.solve((latent - prior.mean).unsqueeze(-1))
    mean = test_mean + (reduced.mT @ whitened).squeeze(-1)
    return mean, above_rounding(test_variance - reduced.square().sum(-2), test_variance)


def above_rounding(variance: Tensor, prior_variance: Tensor) -> Tensor:
    """Return variances that are no less than rounding: at a training input nothing else is left, of either sign."""
    return torch.maximum(variance, torch.finfo(prior_variance.dtype).eps * prior_variance)


def _dense(prior: MultivariateNormal) -> MultivariateNormal:
    """Return the same distribution, its covariance evaluated."""
    return MultivariateNormal(prior.mean, to_linear_operator(dense_covariance(prior.lazy_covariance_matrix)))


def _or_nowhere(log_density: Tensor) -> Tensor:
    return torch.where(log_density.isfinite(), log_density, -torch.inf)
