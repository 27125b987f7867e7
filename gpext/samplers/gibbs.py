r"""A sampler of the exact posterior of f, and of hyperparameters, for any likelihood with an augmentation.

One sweep of every chain; each part leaves p(f, theta | y) invariant:

    w | f, theta                        one independent draw a datum
    kernel and mean parameters | w      f integrated out: slice sampling of A(nu, tau; theta) + log p(theta)
    f | w, theta                        a Gaussian, drawn at once                           [GWO20 Sec. 3.4]
    likelihood parameters | f           w integrated out: slice sampling of sum log p(y | f, theta) + log p(theta)

Integrating w out takes the place of the parameter expansion of [JVV11 Sec. 5], whose aim is to weaken the tie between
the noise scale and w: without w there is none (docs/evidence/gibbs_sampling.md has both). Where no hyperparameter
moves, a sweep is one Cholesky a chain, a sparse one where the prior is by nearest neighbours: then the draws are of
the exact posterior under that prior.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from gpext.likelihoods import AugmentedLikelihood
from gpext.models import LatentGP
from gpext.samplers.engine import Sampler, Start
from gpext.samplers.latent_draws import GibbsDraws
from gpext.samplers.latent_step import draw_given_sites, sites_of
from gpext.samplers.slice_sampling import SliceWidths, slice_sweep
from gpext.samplers.state import ChainState
from gpext.samplers.targets.latent_posterior import ModelTarget, Target


class GibbsSampler(Sampler[GibbsDraws]):
    """Exact posterior draws by alternating w and f, many chains at once.

    Every chain starts at a draw of the prior of f and at the model's hyperparameters.

    Args:
        prior: p(f) at the training inputs (..., N); or a :class:`gpext.models.LatentGP`, which brings likelihood and
            targets along, and whose hyperparameters can move. It may have neighbours, of what inducing inputs leave
            if there are some; neighbours stay as they were chosen.
        likelihood: any likelihood with an augmentation.
        targets: (..., N).
        hyperparameters: of a model, the names of the parameters to move, as in `model.named_parameters()`, with or
            without `raw_`; () for none. By default all that a registered prior depends on and that require gradients.
            One without a prior has a uniform prior, under which the posterior may be improper. The others stay as they
            are.
        jitter: added to the diagonal of the prior covariance; a singular one needs none.
        overrelaxation: rho in [0, 1): the draw of f given w has correlation -rho with the last [Adler 1981]; 0 for
            independent draws. Averages of f gain, with the default a factor 2 to 3 in effective sample size; those of
            f^2 gain where chains mix slowly and lose up to half where w and f are hardly tied
            (docs/evidence/gibbs_sampling.md). Where the prior moves, the draw is independent.

    Raises:
        TypeError: the likelihood has no augmentation; or likelihood or targets are missing, or given beside a model.
        ValueError: targets are not finite, outside the support or of the wrong shape; there is no such parameter;
            `overrelaxation` is not in [0, 1).

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpext.likelihoods import BernoulliLogitLikelihood
        >>> prior = MultivariateNormal(torch.zeros(2).double(), torch.eye(2).double())
        >>> sampler = GibbsSampler(prior, BernoulliLogitLikelihood(), torch.tensor([0.0, 1.0]).double())
        >>> draws = sampler.run(50, num_chains=3, warmup=10, generator=torch.Generator().manual_seed(0))
        >>> draws.latent.shape
        torch.Size([3, 50, 2])
    """

    name = "Gibbs"
    together = True
    result = GibbsDraws
    target: Target

    def __init__(
        self,
        prior: MultivariateNormal | LatentGP,
        likelihood: AugmentedLikelihood | None = None,
        targets: Tensor | None = None,
        *,
        hyperparameters: Sequence[str] | None = None,
        jitter: float = 0.0,
        overrelaxation: float = 0.6,
    ) -> None:
        if not 0 <= overrelaxation < 1:
            raise ValueError(f"overrelaxation must be in [0, 1); got {overrelaxation}.")
        self._overrelaxation = overrelaxation
        given = likelihood is not None or targets is not None
        if isinstance(prior, LatentGP):
            if given:
                raise TypeError("a LatentGP brings its likelihood and targets along: expected GibbsSampler(model).")
            self.target = ModelTarget(prior, hyperparameters, jitter)
        else:
            if likelihood is None or targets is None:
                raise TypeError("expected GibbsSampler(prior, likelihood, targets) or GibbsSampler(model).")
            if hyperparameters:
                raise TypeError("only a model's hyperparameters can move: expected GibbsSampler(model).")
            if not isinstance(prior, MultivariateNormal):
                raise TypeError(
                    f"expected a prior of f, a gpytorch MultivariateNormal, or a LatentGP; got {type(prior).__name__}."
                )
            self.target = Target(prior, likelihood, targets, jitter)

    def init(self, start: Start) -> list[ChainState]:
        """Return the state of chains at draws of the prior of f and at the model's hyperparameters."""
        (chains,), (generator,) = start.chains, start.generators
        raw = self.target.begin(len(chains))
        shape = torch.Size((len(chains), *self.target.latent_shape))
        latent = self.target.prior(raw).draw(shape, generator=generator)
        return [ChainState(raw, latent, SliceWidths.first(self.target.size))]

    def step(self, state: ChainState, generator: torch.Generator) -> ChainState:
        """Return the state after one sweep.

        Raises:
            gpext.samplers.chain_ranks.BreakdownError: a matrix has no factor.
        """
        target, raw, widths = self.target, state.raw, state.kernel.widths
        sites = target.sites(state.latent, raw, generator)
        if isinstance(target, ModelTarget):
            given = [sites_of(sites, chain) for chain in range(len(raw))]
            raw = slice_sweep(target.of_prior, raw, widths, target.log_density_given_sites, given, generator)
        latent = draw_given_sites(
            target.prior(raw),
            sites,
            state.latent.shape,
            current=state.latent,
            # The prior's move has integrated f out: what f was no longer belongs to the state.
            overrelaxation=0.0 if target.of_prior else self._overrelaxation,
            generator=generator,
        )
        if isinstance(target, ModelTarget):
            density = target.log_density_given_latent
            raw = slice_sweep(target.of_likelihood, raw, widths, density, list(latent), generator)
        kernel = state.kernel.adapted(state.raw, raw) if state.warmup_left else state.kernel
        return replace(state, raw=raw, latent=latent, kernel=kernel)

    def restored_kernel(self, stored: object, num_chains: int, where: str) -> SliceWidths:
        """Return the widths of slices that were stored.

        Raises:
            ValueError: it is something else.
        """
        return SliceWidths.restored(stored, self.target.size, where)
