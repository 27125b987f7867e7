r"""A sampler of hyperparameters whose gradients may be estimates [FE15 Sec. 5].

Steps are those of :mod:`gpext.samplers.langevin`, M is about the covariance of the posterior
(:mod:`gpext.samplers.targets.mode`), and theta logarithms where there is only a lower bound. Two things go beyond the
paper, whose Eq. 5 with its steps a (b + t)^-gamma is an option: noise is averaged, and that of the gradients
compensated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from gpext.callers import warn_caller
from gpext.inference import InferenceWarning
from gpext.parallel import Ranks
from gpext.samplers import langevin
from gpext.samplers.engine import Plan, Sampler, Start
from gpext.samplers.hyperposterior import HyperPosterior
from gpext.samplers.langevin import LangevinOptions, LangevinState, check_preconditioner, check_warmup
from gpext.samplers.state import ChainState
from gpext.samplers.targets.log_posterior import LogPosterior
from gpext.samplers.targets.mode import mode_and_scale, scattered


class SGLDSampler(Sampler[HyperPosterior]):
    """Draws of the hyperparameters of an ExactGP, each at the cost of a gradient.

    Args:
        mll: :class:`gpext.mlls.UnbiasedMarginalLogLikelihood` for tens of thousands of data, or gpytorch's exact one.
        hyperparameters: which parameters to draw; by default all that require gradients. The others stay.

    Raises:
        TypeError, ValueError: as :class:`gpext.samplers.targets.log_posterior.LogPosterior`.

    Example:
        >>> import gpytorch, torch, gpext
        >>> from gpytorch.priors import LogNormalPrior
        >>> class Model(gpytorch.models.ExactGP):
        ...     def __init__(self, x, y):
        ...         super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        ...         self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel()
        ...         self.covar_module.register_prior("lengthscale_prior", LogNormalPrior(0.0, 1.0), "lengthscale")
        ...         self.likelihood.register_prior("noise_prior", LogNormalPrior(-2.0, 1.0), "noise")
        ...
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> x = torch.linspace(0, 6, 20).double()
        >>> model = Model(x, torch.sin(x)).double()
        >>> sampler = SGLDSampler(gpext.mlls.UnbiasedMarginalLogLikelihood(model.likelihood, model))
        >>> draws = sampler.run(5, num_chains=2, warmup=41, progress=False, generator=torch.Generator().manual_seed(0))
        >>> draws.draws["covar_module.lengthscale"].shape
        torch.Size([2, 5, 1, 1])
    """

    name = "SGLD"
    together = False
    result = HyperPosterior
    target: LogPosterior

    def __init__(self, mll: ExactMarginalLogLikelihood, hyperparameters: Sequence[str] | None = None) -> None:
        self.target = LogPosterior(mll, hyperparameters, logarithms=True)

    def run(
        self,
        num_samples: int,
        num_chains: int = 4,
        warmup: int = 500,
        *,
        step_size: float | tuple[float, float, float] | None = None,
        freeze_below: float = 0.0,
        averaged: bool = True,
        compensated: bool = True,
        preconditioner: Tensor | None = None,
        thinning: int = 1,
        generator: torch.Generator | None = None,
        resume: HyperPosterior | None = None,
        checkpoint: str | Path | None = None,
        directory: str | Path | None = None,
        progress: bool = True,
        ranks: Ranks | None = None,
    ) -> HyperPosterior:
        """Return draws, from starts about the mode of a subset of the data.

        Half of the steps of the warm-up take two estimates of the gradient.

        Args:
            num_samples: as are those that are not described here, see :meth:`Sampler.run`.
            num_chains: see there.
            warmup: see there.
            step_size: in units of M. A number; or a, b and gamma of :class:`gpext.optim.PolynomialDecay`; by default as
                long as the noise of the gradients lets it, found in the warm-up.
            freeze_below: of the schedule: the ratio of Eq. 7 at which it stays as it is, 0.002 in the paper.
            averaged: average the noise of neighbouring steps; else Eq. 5.
            compensated: reduce the noise by that of the gradients, as far as the warm-up knew it.
            preconditioner: M (P, P) in the coordinates of the draws; by default as above.
            thinning: see there.
            generator: see there.
            resume: see there.
            checkpoint: see there.
            directory: see there.
            progress: see there.
            ranks: see there.

        Raises:
            TypeError, ValueError: as :meth:`Sampler.run`; a step size or preconditioner that does not fit; estimates of
                gradients with neither a warm-up nor a step size.
        """
        plan = Plan.of(
            num_samples, num_chains, warmup, thinning, generator, resume, checkpoint, directory, progress, ranks
        )
        if preconditioner is not None:
            check_preconditioner(preconditioner, self.target.size)
        options = LangevinOptions(step_size, freeze_below, averaged, compensated)
        found = self._run(plan, partial(self.init, options=options, preconditioner=preconditioner), repr(options))
        overload = max(langevin.overload(state.kernel) for state in found.states)
        if overload > 1:
            warn_caller(
                f"the step size is {overload:.2g} times the longest at which the noise of the gradients can be "
                "compensated: draws are too wide. Take a smaller step_size, or None, or more probes.",
                InferenceWarning,
            )
        return found

    def init(
        self, start: Start, *, options: LangevinOptions | None = None, preconditioner: Tensor | None = None
    ) -> list[ChainState]:
        """Return the states of chains about the mode of a subset of the data.

        Raises:
            ValueError: a warm-up too short to find a step size in; or the log posterior is not finite at the model's
                own hyperparameters.
        """
        options = LangevinOptions() if options is None else options
        if options.step_size is None:
            check_warmup(self.target, start.warmup)
        self.target.reset()
        mode, M = mode_and_scale(self.target, start.shared)
        M = M if preconditioner is None else preconditioner.detach().double().cpu()
        places = scattered(mode, M, start.num_chains, start.shared).unsqueeze(1)
        kernel = langevin.init(self.target, M, options)
        return [ChainState(places[number], places[number, :, :0], kernel) for (number,) in start.chains]

    def step(self, state: ChainState, generator: torch.Generator) -> ChainState:
        """Return the state after a Langevin step."""
        adapt = state.warmup_left > 0
        place, kernel = langevin.step(state.kernel, state.raw[0], self.target, generator, adapt=adapt)
        return replace(state, raw=place.unsqueeze(0), kernel=kernel)

    def restored_kernel(self, stored: object, num_chains: int, where: str) -> LangevinState:
        """Return the state of Langevin steps that was stored.

        Raises:
            ValueError: it is something else.
        """
        return langevin.restored(stored, self.target.size, where)
