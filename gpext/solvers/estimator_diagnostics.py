r"""The exact effect of random truncation on a solve, from all truncations of a complete run of conjugate gradients.

With d_j the increments of the random part, J its end, R_j = sum_{k >= j} d_k the remainder before increment j, and
P_j > 0,

    x~ = h + sum_{j <= J} d_j / P_j,   E x~ = h + R_0,   Cov x~ = sum_{j >= 1} w_j R_j R_j',   w_j = 1/P_j - 1/P_{j-1}

because Cov[1{J >= j}/P_j, 1{J >= k}/P_k] = 1/P_min(j, k) - 1 and, summed by parts, no term is negative. Where P_j = 0
from some j on, the sum ends there, and the rest is bias. Of two independent estimates with mean m,

    Var(x~1' B x~2) = 2 sum_j w_j (R_j' B m)^2 + sum_{j, k} w_j w_k (R_j' B R_k)^2,    B symmetric.

N draws show only what they reach: beyond the first j with N P_j < 1 an increment is reached less than once. If the
remainder there is larger than the standard error of draws that end before it, the draws show another mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.solvers.steps import Product, SolveStatus
from gpext.solvers.survival import Survival, law_of
from gpext.solvers.unbiased_cg import Run, log_survival, truncation_shape


@dataclass(frozen=True)
class EstimatorDiagnostics:
    """The distribution of an estimate, and what a number of draws of it can show.

    Example:
        >>> import torch
        >>> from gpext.solvers import estimator_diagnostics
        >>> A = torch.diag(torch.linspace(1, 9, 9).double())
        >>> report = estimator_diagnostics(lambda v: A @ v, torch.ones(9, 1).double())
        >>> report.num_draws, report.expected_steps <= 9
        (4000, True)
    """

    mean: Tensor  # m = E x~ (..., n, R)
    bias: Tensor  # m - x, x the end of the run (..., n, R)
    variance: Tensor  # of each entry (..., n, R); infinite beyond the largest number
    expected_steps: float  # products with A, of a run that makes all estimates
    first_steps: int  # l, those taken anyway
    num_steps: int  # to the end
    log_probability: Tensor  # log P_j (T, ..., R)
    left: Tensor  # R_j (T, ..., n, R)
    weight: Tensor  # w_j (T, ..., R), w_0 = 0
    num_draws: int  # N
    reach: Tensor  # P_j of the last increment before which |x - x_j| is more than `matter` of |x| (..., R)
    unseen: Tensor  # |x - x_j| / |x| before the first j with N P_j < 1 (..., R)
    standard_error: Tensor  # over |x|, as N draws that end before it show it (..., R)
    status: SolveStatus  # of the run to the end

    @property
    def shows_mean(self) -> Tensor:
        """Whether N draws can show the mean (..., R): what they never reach is no more than their standard error."""
        return self.unseen <= self.standard_error.clamp_min(100 * torch.finfo(self.unseen.dtype).eps)

    @property
    def message(self) -> str:
        """The conclusion that N draws allow, with advice where they do not show the mean."""
        if self.status is not SolveStatus.CONVERGED:
            return f"the run to the end has not reached it: {self.status.value}."
        if bool(self.shows_mean.all()):
            return f"{self.num_draws} draws show the mean in {self.expected_steps:.1f} products each."
        column = torch.where(self.shows_mean, 0.0, self.unseen).flatten().argmax()
        unseen, error = float(self.unseen.flatten()[column]), float(self.standard_error.flatten()[column])
        return (
            f"{self.num_draws} draws cannot show the mean: increments that they reach less than once carry "
            f"{unseen:.2g} of the solution, where they show a standard error of {error:.2g}. The chance of reaching "
            f"the last that matter is {float(self.reach.min()):.2g}. Take survival=Matched(), a smaller tolerance or "
            "a preconditioner."
        )

    def linear_variance(self, v: Tensor) -> Tensor:
        """Return Var(v' x~) (..., R) for v (..., n, R)."""
        return _weighted(self.weight, (self.left * v).sum(-2).square())

    def quadratic_variance(self, product: Product) -> Tensor:
        """Return Var(x~1' B x~2) (..., R) of two independent estimates.

        Args:
            product: v -> B v for (..., n, R); B symmetric.
        """
        single = _weighted(self.weight, (self.left * product(self.mean)).sum(-2).square())
        gram = torch.einsum("j...nr,k...nr->jk...r", self.left, product(self.left)).square()
        return 2 * single + _weighted(self.weight, _weighted(self.weight.unsqueeze(1), gram))


@torch.no_grad()
def estimator_diagnostics(
    matvec: Product,
    b: Tensor,
    *,
    num_estimates: int = 1,
    start: Tensor | None = None,
    precondition: Product | None = None,
    tolerance: float = 0.1,
    survival: Survival | None = None,
    share_columns: bool = False,
    max_steps: int | None = None,
    num_draws: int = 4000,
    matter: float = 0.01,
) -> EstimatorDiagnostics:
    """Return the distribution of an estimate of :func:`gpext.solvers.unbiased_cg`, from a run to the end.

    All T increments of the random part are kept: T n R numbers.

    Args:
        matvec: v -> A v, as for `unbiased_cg`, like the other arguments up to `max_steps`.
        b: (..., n, R).
        num_estimates: E, of one run; for the expected steps.
        start: x0.
        precondition: r -> P^-1 r.
        tolerance: where the random part begins.
        survival: P_j.
        share_columns: whether columns end together.
        max_steps: maximum number of products.
        num_draws: N, at least 1.
        matter: relative size of the remainder from which on increments matter.

    Raises:
        TypeError: as for `unbiased_cg`.
        ValueError: as for `unbiased_cg`, or N is less than 1.

    Example:
        >>> import torch
        >>> A = torch.diag(torch.linspace(1, 9, 9).double())
        >>> report = estimator_diagnostics(lambda v: A @ v, torch.ones(9, 1).double())
        >>> bool(report.bias.abs().max() < 1e-8), report.status.name
        (True, 'CONVERGED')
    """
    if num_draws < 1:
        raise ValueError(f"num_draws must be at least 1; got {num_draws}.")
    law = law_of(survival)
    run = Run(matvec, b, start=start, precondition=precondition, tolerance=tolerance, max_steps=max_steps)
    head = run.first_steps()
    first = run.steps
    increments: list[Tensor] = []
    laws: list[Tensor] = []
    while run.goes_on:
        laws.append(log_survival(law, len(laws), run.fall, share_columns))
        increments.append(run.step().increment)
    shape = truncation_shape(b, num_estimates, share_columns)
    d = torch.stack(increments) if increments else b.new_zeros(0, *b.shape)
    log_p = torch.stack(laws).to(d) if laws else b.new_zeros(0, *shape[1:])
    reached = -torch.expm1(num_estimates * torch.log1p(-log_p.exp()).flatten(1).sum(-1))  # by one of the estimates
    log_p = log_p.expand(d.shape[:-2] + d.shape[-1:])

    is_summed = log_p.unsqueeze(-2) > -torch.inf
    left = _from_the_end(torch.where(is_summed, d, 0.0))  # R_j
    after = _from_the_end(d)  # x - x_j
    mean, solution = head + left[:1].sum(0), head + after[:1].sum(0)
    weight = _increase(log_p)  # w_j
    size = solution.norm(dim=-2)
    size = torch.where(size > 0, size, 1.0)

    matters = after.norm(dim=-2) > matter * size
    reach = torch.where(matters, log_p, 0.0).exp().amin(0) if len(d) else torch.ones_like(size)
    number = (log_p.exp() * num_draws >= 1).sum(0)  # of increments that are reached
    ends = torch.cat([after, torch.zeros_like(head).unsqueeze(0)])
    unseen = ends.gather(0, number.unsqueeze(-2).expand_as(head).unsqueeze(0)).squeeze(0)
    seen = torch.arange(len(d), device=d.device).view(-1, *(1,) * number.dim()) < number
    shown = _weighted(torch.where(seen, weight, 0.0).unsqueeze(-2), (after - unseen).square()).sum(-2)
    return EstimatorDiagnostics(
        mean=mean,
        bias=mean - solution,
        variance=_weighted(weight.unsqueeze(-2), left.square()),
        expected_steps=first + float(reached.sum()),
        first_steps=first,
        num_steps=run.steps,
        log_probability=log_p,
        left=left,
        weight=weight,
        num_draws=num_draws,
        reach=reach,
        unseen=unseen.norm(dim=-2) / size,
        standard_error=(shown / num_draws).sqrt() / size,
        status=run.status(is_cut=True),
    )


def _from_the_end(d: Tensor) -> Tensor:
    """Return sum_{k >= j} d_k for each j; small ones are summed first."""
    return d.flip(0).cumsum(0).flip(0)


def _increase(log_p: Tensor) -> Tensor:
    """Return 1 / P_j - 1 / P_{j-1} (T, ..., R), infinite beyond the largest number; 0 at first, and where P_j = 0."""
    previous = torch.cat([log_p[:1], log_p[:-1]])
    return torch.where(log_p > -torch.inf, -torch.expm1(log_p - previous) * (-log_p).exp(), 0.0)


def _weighted(weight: Tensor, values: Tensor) -> Tensor:
    """Return sum_j w_j v_j, in which infinity times zero is zero."""
    return torch.where((weight > 0) & (values > 0), weight * values, 0.0).sum(0)
