r"""Langevin dynamics of one chain, as pure functions of its state [FE15 Sec. 5].

    theta <- theta + eps / 2 M g + eps^1/2 M^1/2 (xi_t + xi_{t+1}) / 2                               (gpext.optim.SGLD)

Noise of neighbouring steps is averaged: on a Gaussian no step is too long for the right covariance, where [FE15 Eq. 5]
widens draws by about eps / 8 of a standard deviation.

The covariance V of the gradients at given parameters is learnt in the warm-up, from pairs of estimates at one place,
and the noise reduced by what they bring along, v = M^1/2 V M^1/2. Uncompensated this widens draws by about eps / 8 v.
That allows for long steps that stay: as long as half of all noise is from gradients, but no more than 1/2. A chain
forgets in some 4 / eps steps, or 2 v where noise limits them, which UnbiasedSolver(controlled=True) can make a hundred
times less.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gpext.checks import check_tensor
from gpext.optim import SGLD
from gpext.optim.polynomial_decay import check_decay, decayed, freezes
from gpext.optim.sgld import WINDOW, Memory
from gpext.samplers.targets.log_posterior import LogPosterior
from gpext.schema import Anything, Each, Flag, Items, Maybe, Nothing, Number, Numbers, Record, Schema

_LONGEST = 0.5  # step
_SHARE = 0.5  # of the noise that may be from gradients
_FIRST = 0.05  # step, until their noise is known
_PAIRS = 20  # of estimates, from which on it is
_EVERY = 2  # steps of the warm-up, of which one learns from a pair
_FORGETTING = 2.0  # V is from the last 3/4 of the pairs or so


@dataclass(frozen=True)
class LangevinOptions:
    """The options of a chain; see :meth:`gpext.samplers.SGLDSampler.run`.

    Raises:
        ValueError: a number outside its range.
    """

    step_size: float | tuple[float, float, float] | None = None
    freeze_below: float = 0.0
    averaged: bool = True
    compensated: bool = True

    def __post_init__(self) -> None:
        if self.schedule is not None:
            check_decay(*self.schedule, self.freeze_below)
        if not self.freeze_below >= 0:
            raise ValueError(f"freeze_below must not be negative; got {self.freeze_below}.")

    @property
    def schedule(self) -> tuple[float, float, float] | None:
        """The step sizes as a, b and gamma of :class:`gpext.optim.PolynomialDecay`; None to find one."""
        if isinstance(self.step_size, int | float):
            if not 0 < self.step_size < float("inf"):
                raise ValueError(f"step_size must be positive and finite; got {self.step_size}.")
            return float(self.step_size), 1.0, 0.0
        return self.step_size


@dataclass(frozen=True)
class LangevinState:
    """The state of the Langevin dynamics of a chain beside its place."""

    M: Tensor  # (P, P)
    schedule: tuple[float, float, float] | None
    freeze_below: float
    averaged: bool
    compensated: bool
    step_size: float  # of the next step
    V: Tensor  # (P, P)
    frozen_at: int | None = None  # the step from which on the step size stays
    num_steps: int = 0
    num_adapted: int = 0  # steps of the warm-up, where gradients are estimates
    num_pairs: int = 0  # that V is from
    memory: Memory = field(default_factory=Memory)


def init(target: LogPosterior, M: Tensor, options: LangevinOptions) -> LangevinState:
    """Return the state of a new chain.

    Args:
        target: what it samples.
        M: about the covariance of the target (P, P).
        options: of its steps.
    """
    schedule = options.schedule
    if schedule is None:
        step_size = _FIRST if target.is_estimated else _LONGEST
    else:
        step_size = decayed(0, *schedule)
    return LangevinState(
        M, schedule, options.freeze_below, options.averaged, options.compensated, step_size, torch.zeros_like(M)
    )


def step(
    state: LangevinState, place: Tensor, target: LogPosterior, generator: torch.Generator, *, adapt: bool
) -> tuple[Tensor, LangevinState]:
    """Return the next place (P,) and state; in a warm-up learn the noise of gradients.

    Args:
        state: the current one.
        place: where the chain is, in the coordinates of the target.
        target: what it samples.
        generator: for noise and estimates, on the CPU.
        adapt: whether this is a step of the warm-up.

    Raises:
        FloatingPointError: there is no such model.
    """
    gradient = -target.gradient(place, generator=generator)
    if adapt and target.is_estimated:
        if state.num_adapted % _EVERY == 0:
            state = _learnt(state, gradient + target.gradient(place, generator=generator))
        state = replace(state, num_adapted=state.num_adapted + 1)
    theta = place.clone().requires_grad_()
    optimizer = _optimizer(state, theta, generator)
    theta.grad = gradient
    optimizer.step()
    state = replace(state, memory=optimizer.memory, num_steps=state.num_steps + 1)
    schedule, number = state.schedule, state.num_steps
    if schedule is None or state.frozen_at is not None:
        return theta.detach(), state
    if freezes(optimizer, state.freeze_below):
        return theta.detach(), replace(state, frozen_at=number)
    return theta.detach(), replace(state, step_size=decayed(number, *schedule))


def overload(state: LangevinState) -> float:
    """Return the step size in units of the longest at which the noise of the gradients can be compensated."""
    if state.num_pairs < _PAIRS or not state.compensated:
        return 0.0
    return state.step_size / _optimizer(state, torch.zeros_like(state.M[0])).largest_lr()


def check_preconditioner(M: Tensor, size: int) -> None:
    """Refuse what is no preconditioner (P, P).

    Raises:
        TypeError: it is no tensor.
        ValueError: it has another shape, or is not symmetric and positive definite.
    """
    check_tensor("preconditioner", M)
    if M.shape != (size, size):
        raise ValueError(f"expected a preconditioner ({size}, {size}); got {tuple(M.shape)}.")
    if not torch.allclose(M, M.mT) or int(torch.linalg.cholesky_ex(M).info) != 0:
        raise ValueError("the preconditioner is not symmetric and positive definite.")


def check_warmup(target: LogPosterior, steps: int) -> None:
    """Refuse a warm-up in which a step size cannot be found.

    Raises:
        ValueError: it has too few steps, and gradients are estimates.
    """
    if target.is_estimated and steps <= _PAIRS * _EVERY:
        raise ValueError(
            f"expected a warm-up of more than {_PAIRS * _EVERY} steps to find a step size in; got {steps}. Give a "
            "longer one, or a step_size."
        )


def restored(stored: object, size: int, where: str) -> LangevinState:
    """Return the state of a chain over P parameters that was stored.

    Raises:
        ValueError: it is something else; the entry is named.
    """
    count, positive = Number(whole=True, least=0), Number(least=5e-324)
    vector, matrix = (Numbers((size,) * order, torch.float64) for order in (1, 2))
    entries: dict[str, Schema] = {
        "M": matrix,
        "schedule": Maybe(Items((positive, positive, Number(least=0.0)))),
        "freeze_below": Number(least=0.0),
        "averaged": Flag(),
        "compensated": Flag(),
        "step_size": positive,
        "V": matrix,
        "frozen_at": Maybe(count),
        "num_steps": count,
        "num_adapted": count,
        "num_pairs": count,
        "memory": Anything(),
    }
    Record(entries).check(stored, where)
    assert isinstance(stored, dict)  # checked by the record
    steps = stored["num_steps"]
    remembered: dict[str, Schema] = {
        "xi": vector if stored["averaged"] and steps else Nothing(),
        "window": Each(vector, steps % WINDOW),
        "covariance": matrix if steps >= WINDOW else Nothing(),
    }
    Record(remembered).check(stored["memory"], f"{where}['memory']")
    return LangevinState(**{**stored, "memory": Memory(**stored["memory"])})


def _optimizer(state: LangevinState, theta: Tensor, generator: torch.Generator | None = None) -> SGLD:
    """Return the optimiser whose step is the chain's; without a generator it cannot take one."""
    optimizer = SGLD(
        [theta],
        lr=state.step_size,
        preconditioner=state.M,
        averaged=state.averaged,
        gradient_noise=state.V if state.num_pairs >= _PAIRS else None,
        compensated=state.compensated,
        generator=torch.Generator() if generator is None else generator,
    )
    optimizer.memory = state.memory
    return optimizer


def _learnt(state: LangevinState, difference: Tensor) -> LangevinState:
    """Return the state after an update by the difference of two estimates of the gradient (P,)."""
    pairs = state.num_pairs + 1
    rate = min(_FORGETTING / (pairs + 1), 1.0)
    V = state.V + rate * (0.5 * difference.unsqueeze(-1) * difference - state.V)
    state = replace(state, V=V, num_pairs=pairs)
    if pairs < _PAIRS or state.schedule is not None:
        return state
    return replace(state, step_size=min(_LONGEST, _optimizer(state, torch.zeros_like(V[0])).largest_lr(_SHARE)))
