r"""Langevin draws of hyperparameters from gradients that are right on average [FE15 Sec. 5].

    theta <- theta + eps / 2 M g + N(0, eps M),   eps_t = a (b + t)^-gamma until it is frozen     (gpext.optim.SGLD)

M is the inverse of the negative Hessian of the log posterior at its mode, both for a subset of the data and exact; the
Hessian is scaled up to all data. In units of M the posterior is about a unit ball, so step sizes need no tuning: a step
of size eps widens the draws by about eps / 8 of a standard deviation.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence

import torch
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor
from tqdm import tqdm

from gpext.optim import SGLD, PolynomialDecay, minimize_lbfgs
from gpext.samplers.draws import WELL_MIXED, SamplingStatus, split_r_hat
from gpext.samplers.hyperposterior import HyperPosterior
from gpext.samplers.log_posterior import LogPosterior

_SUBSET = 500
_STEP = 1e-4  # of the finite differences, in unconstrained space
_FLATTEST = 0.1  # curvature in unconstrained space, below which a direction counts as this curved
_SPREAD = 1.0  # of the starts, in units of M


class SGLDSampler:
    """Draws of the hyperparameters of an ExactGP, each at the cost of a gradient.

    Args:
        mll: :class:`gpext.mlls.UnbiasedMarginalLogLikelihood` for tens of thousands of data, or gpytorch's exact one.
        hyperparameters: which parameters to draw; by default all that require gradients. The others stay.

    Raises:
        TypeError, ValueError: as :class:`gpext.samplers.LogPosterior`.
    """

    def __init__(self, mll: ExactMarginalLogLikelihood, hyperparameters: Sequence[str] | None = None) -> None:
        self.target = LogPosterior(mll, hyperparameters)

    def run(
        self,
        num_samples: int,
        num_chains: int = 4,
        warmup: int = 500,
        *,
        step_size: tuple[float, float, float] = (0.9, 9.0, 0.3),
        freeze_below: float = 0.002,
        thinning: int = 1,
        preconditioner: Tensor | None = None,
        generator: torch.Generator | None = None,
        progress: bool = True,
    ) -> HyperPosterior:
        """Return draws; Ctrl-C, or a model that cannot be evaluated, ends it early and keeps the finished chains.

        Args:
            num_samples: draws kept of each chain.
            num_chains: independent chains, from starts about the mode of the subset.
            warmup: steps before.
            step_size: a, b and gamma of :class:`gpext.optim.PolynomialDecay`.
            freeze_below: see there.
            thinning: keep every so many-th.
            preconditioner: M (P, P) in unconstrained space; by default as above.
            generator: for the subset, the starts and the noise, on the CPU; seeded with 0 by default.
            progress: show a progress bar on a terminal.

        Raises:
            ValueError: a number that is not positive, or a preconditioner that does not fit.
        """
        if min(num_samples, num_chains, thinning) < 1 or warmup < 0:
            raise ValueError(
                "expected num_samples, num_chains, thinning >= 1 and warmup >= 0; got "
                f"{num_samples}, {num_chains}, {thinning}, {warmup}."
            )
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        began, status, chains = time.perf_counter(), None, []
        steps = warmup + num_samples * thinning
        bar = tqdm(total=num_chains * steps, disable=None if progress else True, desc="SGLD")
        note = ""
        try:
            mode, M = mode_and_scale(self.target, generator)
            M = M if preconditioner is None else preconditioner
            root = torch.linalg.cholesky(M)
            for _ in range(num_chains):
                start = mode + _SPREAD * (root @ torch.randn(len(mode), dtype=torch.float64, generator=generator))
                theta = start.clone().requires_grad_()
                optimizer = SGLD([theta], lr=step_size[0], preconditioner=M, generator=generator)
                schedule = PolynomialDecay(optimizer, *step_size, freeze_below=freeze_below)
                kept = []
                for step in range(steps):
                    theta.grad = -self.target.gradient(theta.detach())
                    optimizer.step()
                    schedule.step()
                    bar.update()
                    if step >= warmup and (step - warmup + 1) % thinning == 0:
                        kept.append(theta.detach().clone())
                chains.append(torch.stack(kept))
        except KeyboardInterrupt:
            status = SamplingStatus.INTERRUPTED
        except FloatingPointError as error:
            status, note = SamplingStatus.BREAKDOWN, f" ({error} Lower the step size.)"
        bar.close()
        size = self.target.moved.size
        raw = torch.stack(chains) if chains else torch.zeros(0, 0, size, dtype=torch.float64)
        r_hat = split_r_hat(raw) if chains else float("nan")
        if status is None:
            status = SamplingStatus.MIXED if r_hat < WELL_MIXED else SamplingStatus.NOT_MIXED
        seconds = time.perf_counter() - began
        message = (
            f"SGLD, {len(chains)} chains of {num_samples} draws in {seconds:.1f} s, largest split R-hat {r_hat:.4f}: "
            f"{status.value}{note}."
        )
        return HyperPosterior(
            self.target,
            raw,
            status,
            message,
            seconds,
            r_hat,
            torch.full((len(chains),), torch.nan, dtype=torch.float64),
        )


def mode_and_scale(target: LogPosterior, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the mode of the log posterior of a subset of the data (P,) and M (P, P), all in unconstrained space."""
    subset = _of_subset(target, generator)
    size = subset.moved.size
    theta = subset.moved.read().requires_grad_()

    def loss() -> Tensor:
        value = subset.value(theta.detach())
        if value == -torch.inf:
            raise torch.linalg.LinAlgError("no such model")
        theta.grad = -subset.gradient(theta.detach())
        return torch.tensor(-value, dtype=torch.float64)

    minimize_lbfgs(loss, [theta], max_steps=200, tolerance=1e-6)
    mode = theta.detach()
    columns = []
    for j in range(size):
        step = torch.zeros(size, dtype=torch.float64).index_fill_(0, torch.tensor(j), _STEP)
        columns.append((subset.gradient(mode - step) - subset.gradient(mode + step)) / (2 * _STEP))
    hessian = torch.stack(columns)
    values, axes = torch.linalg.eigh(0.5 * (hessian + hessian.mT) * (target.num_data / subset.num_data))
    values = values.clamp_min(_FLATTEST)
    return mode, (axes / values) @ axes.mT


def _of_subset(target: LogPosterior, generator: torch.Generator) -> LogPosterior:
    """Return the exact log posterior of some of the data."""
    model = copy.deepcopy(target.model)
    number = target.num_data
    if number > _SUBSET:
        index = torch.randperm(number, generator=generator)[:_SUBSET]
        inputs = tuple(x[index.to(x.device)] for x in model.train_inputs)
        model.set_train_data(inputs, model.train_targets[index.to(model.train_targets.device)], strict=False)
    exact = ExactMarginalLogLikelihood(model.likelihood, model)
    return LogPosterior(exact, [slot.name for slot in target.moved.slots])
