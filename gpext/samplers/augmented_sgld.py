r"""Langevin draws of the hyperparameters of a GP whose likelihood has an augmentation.

One sweep of a chain:

    w | f, theta                        one independent draw a datum                           [GWO20 Sec. 3.4]
    kernel and mean parameters | w      f integrated out: Langevin steps, Gaussian regression with targets nu / tau
                                        and noise 1 / tau, a variance for each datum           [FE15 Eqs. 5, 9]
    f | w, theta                        a Gaussian, drawn at once
    likelihood parameters | f           w integrated out: slice sampling of sum log p(y | f, theta) + log p(theta)

Parameters of the prior and f are drawn together from p(theta, f | w, y), first theta without f, then f; those of the
likelihood and w together from the rest given f. So p(f, w, theta | y) stays as it is but for what Langevin steps do to
p(theta | w, y). Of a Gaussian with a fixed w their averaged noise would leave the covariance as it is
(:mod:`gpext.samplers.sgld`, the noise of estimated gradients compensated). As w moves between two sweeps it does not
quite: where w takes up a share r of the variance of theta, five steps of 1/2 a sweep widen theta by 0.3 % for r = 0.1,
0.8 % for 0.3 and 1.4 % for 0.6, computed for Gaussians; less for more steps. Several steps a sweep also because theta
moves less in one than w does in a draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpext.models import LatentGP
from gpext.operators import UnbiasedSolver
from gpext.samplers import langevin
from gpext.samplers.chain_ranks import BreakdownError
from gpext.samplers.engine import Sampler, Start
from gpext.samplers.langevin import LangevinOptions, LangevinState, check_preconditioner, check_warmup
from gpext.samplers.latent_draws import GibbsDraws
from gpext.samplers.latent_step import draw_given_sites, sites_of
from gpext.samplers.seeds import child_on_cpu
from gpext.samplers.slice_sampling import SliceWidths, slice_sweep
from gpext.samplers.state import ChainState
from gpext.samplers.targets.latent_posterior import ModelTarget
from gpext.samplers.targets.matrix_free import MatrixFreeTarget
from gpext.samplers.targets.mode import scattered
from gpext.samplers.targets.site_posterior import SitePosterior, conditional_mode
from gpext.schema import Anything, Each, Record
from gpext.sites import GaussianSites

_SETTLING = 5  # sweeps at the start in which parameters stay: w and f find each other


@dataclass(frozen=True)
class SlicesAndWalks:
    """The state of the transition kernel: slices for the likelihood's parameters, Langevin steps for the prior's."""

    slices: SliceWidths  # of the likelihood's parameters
    walks: tuple[LangevinState, ...]  # of the prior's, one for each chain


class AugmentedSGLDSampler(Sampler[GibbsDraws]):
    """Draws of hyperparameters and latent values where the likelihood is not Gaussian, each at the cost of gradients.

    Chains begin at draws about the mode of the prior's parameters for a subset of the data, those of the likelihood at
    the model's own.

    Args:
        model: with its likelihood, one with an augmentation, and targets (N,).
        hyperparameters: as :class:`gpext.samplers.GibbsSampler`: the names of the parameters to move, by default all
            that a registered prior depends on and that require gradients.
        solver: how to estimate gradients by products with the kernel; f is then drawn, and predicted, by solves of
            conjugate gradients. None for factorisations, up to some thousands of data: gradients are then exact.
        steps: Langevin steps a sweep.
        step_size: eps, in units of M; by default 1/2, and with a solver as long as the noise of its gradients lets it,
            found in the warm-up.
        preconditioner: M (P, P) for the prior's P parameters, in the order of the model's, by logarithms where there is
            a lower bound alone; by default the inverse curvature at the mode.
        jitter: added to the diagonal of the prior covariance.

    Raises:
        TypeError: the likelihood has no augmentation, or the model has inducing inputs, a design or neighbours.
        ValueError: a number that is not positive; no parameter of the prior moves; targets are a batch; a
            preconditioner that does not fit; there is no such parameter. And from :meth:`run`: gradients are estimates,
            with neither a step size nor a warm-up long enough to find it.

    Example:
        >>> sampler = AugmentedSGLDSampler(model)  # doctest: +SKIP
        >>> draws = sampler.run(1000, num_chains=4)  # doctest: +SKIP
        >>> draws.hyperparameters["covar_module.outputscale"].shape  # doctest: +SKIP
        torch.Size([4, 1000])
    """

    name = "SGLD within Gibbs"
    together = True
    result = GibbsDraws
    target: ModelTarget

    def __init__(
        self,
        model: LatentGP,
        *,
        hyperparameters: Sequence[str] | None = None,
        solver: UnbiasedSolver | None = None,
        steps: int = 5,
        step_size: float | None = None,
        preconditioner: Tensor | None = None,
        jitter: float = 0.0,
    ) -> None:
        if steps < 1 or not (step_size is None or step_size > 0):
            raise ValueError(f"expected steps >= 1 and step_size > 0; got {steps} and {step_size}.")
        if model.design is not None or model.variational_strategy.neighbours is not None:
            raise TypeError(
                "AugmentedSGLDSampler needs a datum at each input, and a prior without neighbours; GibbsSampler(model) "
                "serves a design, and neighbours."
            )
        if model.train_targets.dim() != 1:
            raise ValueError(f"expected targets (N,); got {tuple(model.train_targets.shape)}.")
        kind = ModelTarget if solver is None else MatrixFreeTarget
        self.target = kind(model, hyperparameters, jitter, logarithms=True)
        size = len(self.target.of_prior)
        if not size:
            raise ValueError(
                "no parameter of the prior moves: register priors of the kernel's parameters or name them in "
                "`hyperparameters`. gpext.samplers.GibbsSampler(model) draws f and the likelihood's parameters alone."
            )
        if preconditioner is not None:
            check_preconditioner(preconditioner, size)
        self._names = self.target.names_of(self.target.of_prior)
        self._posterior = SitePosterior(self.target.model, self._names, solver, jitter)
        self._steps, self._options = steps, LangevinOptions(step_size)
        self._preconditioner, self._jitter = preconditioner, jitter

    def init(self, start: Start) -> list[ChainState]:
        """Return the state of chains about the mode of the prior's parameters for a subset of the data.

        Raises:
            ValueError: a warm-up too short to find a step size in; or the log posterior is not finite at the model's
                own parameters.
        """
        (chains,), (generator,), target = start.chains, start.generators, self.target
        if self._options.step_size is None:
            check_warmup(self._posterior, start.warmup * self._steps)
        raw = target.begin(len(chains))
        mode, M = conditional_mode(target.model, self._names, self._jitter, start.shared)
        M = M if self._preconditioner is None else self._preconditioner.detach().double().cpu()
        places = scattered(mode, M, start.num_chains, start.shared)[list(chains)]
        raw[:, target.of_prior] = places.to(raw)
        latent = target.targets.new_zeros(len(chains), *target.latent_shape, dtype=torch.float64)
        for _ in range(_SETTLING):
            latent = self._draw_latent(raw, target.sites(latent, raw, generator), generator)
        walks = tuple(langevin.init(self._posterior, M, self._options) for _ in chains)
        return [ChainState(raw, latent, SlicesAndWalks(SliceWidths.first(target.size), walks))]

    def step(self, state: ChainState, generator: torch.Generator) -> ChainState:
        """Return the state after one sweep.

        Raises:
            gpext.samplers.chain_ranks.BreakdownError: a matrix has no factor, or a solve has not converged.
            FloatingPointError: there is no such model.
        """
        target, kernel, adapt = self.target, state.kernel, state.warmup_left > 0
        sites = target.sites(state.latent, state.raw, generator)
        raw, walks, on_cpu = state.raw.clone(), [], child_on_cpu(generator)
        for chain, walk in enumerate(kernel.walks):
            self._posterior.condition_on(sites_of(sites, chain))
            place = raw[chain, target.of_prior].cpu()
            for _ in range(self._steps):
                place, walk = langevin.step(walk, place, self._posterior, on_cpu, adapt=adapt)
            raw[chain, target.of_prior] = place.to(raw)
            walks.append(walk)
        latent = self._draw_latent(raw, sites, generator)
        density = target.log_density_given_latent
        raw = slice_sweep(target.of_likelihood, raw, kernel.slices.widths, density, list(latent), generator)
        slices = kernel.slices.adapted(state.raw, raw) if adapt else kernel.slices
        return replace(state, raw=raw, latent=latent, kernel=SlicesAndWalks(slices, tuple(walks)))

    def restored_kernel(self, stored: object, num_chains: int, where: str) -> SlicesAndWalks:
        """Return the slices and walks that were stored.

        Raises:
            ValueError: they are something else.
        """
        Record({"slices": Anything(), "walks": Each(Anything(), num_chains)}).check(stored, where)
        assert isinstance(stored, dict)  # checked by the record
        size = len(self.target.of_prior)
        walks = [langevin.restored(walk, size, f"{where}['walks'][{i}]") for i, walk in enumerate(stored["walks"])]
        return SlicesAndWalks(
            SliceWidths.restored(stored["slices"], self.target.size, f"{where}['slices']"), tuple(walks)
        )

    def _draw_latent(self, raw: Tensor, sites: GaussianSites, generator: torch.Generator) -> Tensor:
        """Return latent values (C, N) given sites (C, N) and hyperparameters (C, P)."""
        target = self.target
        if not isinstance(target, MatrixFreeTarget):
            return draw_given_sites(target.prior(raw), sites, sites.shift.shape, generator=generator)
        try:
            drawn = [target.draw_latent(row, sites_of(sites, c), generator) for c, row in enumerate(raw)]
        except ArithmeticError as error:
            raise BreakdownError(str(error)) from error
        return torch.stack(drawn)
