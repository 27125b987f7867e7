r"""A report of the data that a model has set aside, and how surprising each is to the others [JVV11 Secs. 3, 5].

The precision of a datum's site measures its contribution. A regular one narrows the posterior; one that a
heavy-tailed likelihood has given up has a precision near zero, and one in between a negative one: it makes the
posterior wider than without it. Where the likelihood is log-concave no site is negative, and a precision near zero says
only that the likelihood is flat there, as that of a class is far from the boundary. Surprise is a matter of the
leave-one-out predictive, p(y_i | y_-i), whatever the likelihood.

A log density alone does not measure surprise: every count near 1000 has a log mass below -4, and a datum far from all
others a wide prediction. Two measures do, both zero or so for an ordinary datum and in nats:

    log 2 min(P(Y <= y_i), P(Y >= y_i))           where p(y | f) has a cdf: numbers, counts, ordered classes
    log p(y_i) - E[log p(Y)],   Y ~ p(. | y_-i)   where it has none: unordered classes, angles, points of the simplex

The first is right wherever there is an order: it does not change with the units of y, nor with any increasing function
of it, and it means the same for a narrow and a wide, for a continuous and a discrete prediction. The second needs no
order: it is zero on average for as many classes and as flat a density as there may be. (For a normal prediction at z
standard deviations they are about -z^2/2 - log z and 1/2 - z^2/2.)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from gpext.inference.result import InferenceResult
from gpext.sites import BlockSites, CoupledSites

_ROWS = 20  # of the printed table
_ERROR = 1e-10  # of a tail probability, with room; smaller ones are sorted by their density


@dataclass(frozen=True)
class OutlierReport:
    """Sites and leave-one-out predictions of all data, in their order; printing it shows the most surprising ones.

    Attributes:
        index: the data of each posterior (..., N), the most surprising first, those without a prediction last: sorted
            by `surprise`, equal ones by `log_loo`.
        precision: of the sites (..., N); of several latents, the least diagonal element (of dense blocks, the least
            eigenvalue).
        relative_precision: the same over the median of the positive precisions of that posterior; nan if none is.
        log_loo: leave-one-out log predictive density or mass of y_i (..., N), as in :class:`InferenceResult`.
        tail_probability: twice the smaller of P(Y <= y_i) and P(Y >= y_i) under the same prediction, at most 1
            (..., N), as in :class:`InferenceResult`; nan without a distribution function.
        relative_log_loo: log_loo less its expectation under the same prediction, for data without a tail probability
            (..., N); nan for the others, and where the likelihood has no p(y | f) as a distribution.
        near_zero: relative precision below which a site counts as near zero.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpext.inference import EP, outlier_report
        >>> from gpext.likelihoods import StudentTLikelihood
        >>> prior = MultivariateNormal(torch.zeros(5).double(), 0.1 * torch.eye(5).double() + 1)
        >>> likelihood = StudentTLikelihood().double()
        >>> likelihood.noise = 0.01
        >>> report = outlier_report(EP().infer(prior, likelihood, torch.tensor([0.1, 0.0, 5.0, -0.1, 0.0]).double()))
        >>> report.tail_probability.argmin()
        tensor(2)
    """

    index: Tensor
    precision: Tensor = field(repr=False)
    relative_precision: Tensor = field(repr=False)
    log_loo: Tensor = field(repr=False)
    tail_probability: Tensor = field(repr=False)
    relative_log_loo: Tensor = field(repr=False)
    near_zero: float

    @property
    def surprise(self) -> Tensor:
        """The log density of each datum given the others, less its expectation, in nats (..., N); low is surprising.

        The logarithm of the tail probability (of 1e-10 where it is smaller), without one `relative_log_loo`, and where
        that is unknown, too, `log_loo`, which compares data only as far as their predictions are equally wide.
        """
        tail = self.tail_probability.clamp(min=_ERROR).log()
        without = torch.where(self.relative_log_loo.isnan(), self.log_loo, self.relative_log_loo)
        return torch.where(self.tail_probability.isnan(), without, tail)

    @property
    def kind(self) -> np.ndarray:
        """By the precision of the site, "negative", "near zero" or "regular" (..., N)."""
        precision, relative = self.precision.cpu().numpy(), self.relative_precision.cpu().numpy()
        return np.where(precision < 0, "negative", np.where(relative >= self.near_zero, "regular", "near zero"))

    def take(self, index: Tensor) -> OutlierReport:
        """Return the report of some of the data (..., n), each as often as in index (n,); -1 stands for an unknown one.

        Example:
            >>> import torch
            >>> from gpytorch.distributions import MultivariateNormal
            >>> from gpext.inference import EP, outlier_report
            >>> from gpext.likelihoods import StudentTLikelihood
            >>> prior = MultivariateNormal(torch.zeros(2).double(), torch.eye(2).double())
            >>> result = EP().infer(prior, StudentTLikelihood().double(), torch.tensor([0.1, 9.0]).double())
            >>> report = outlier_report(result)
            >>> report.take(torch.tensor([0, 0, 1, -1])).index
            tensor([2, 0, 1, 3])
        """
        known = (index >= 0).to(self.log_loo.device)

        def taken(values: Tensor) -> Tensor:
            return torch.where(known, values[..., index], torch.nan)

        report = replace(
            self,
            precision=taken(self.precision),
            relative_precision=taken(self.relative_precision),
            log_loo=taken(self.log_loo),
            tail_probability=taken(self.tail_probability),
            relative_log_loo=taken(self.relative_log_loo),
        )
        return replace(report, index=sorted_by(report.surprise, report.log_loo))

    def __str__(self) -> str:
        kind = self.kind
        size = self.index.size(-1)
        batch = [()] if self.index.dim() == 1 else list(np.ndindex(*self.index.shape[:-1]))
        surprise = self.surprise.nan_to_num(nan=torch.inf)
        rows = [(*at, i) for at in batch for i in self.index[at].tolist()]
        rows.sort(key=lambda row: surprise[row].item())  # stable: equal ones as in the index
        by_tail = not bool(self.tail_probability.isnan().all()) or bool(self.relative_log_loo.isnan().all())
        name = "tail probability" if by_tail else "over expectation"
        lines = [f"{'datum':>10}{'LOO log density':>17}{name:>18}{'precision':>12}{'relative':>10}  site"]
        for row in rows[:_ROWS]:
            measure = (
                f"{self.tail_probability[row].item():>18.2g}" if by_tail else f"{self.relative_log_loo[row]:>18.3f}"
            )
            lines.append(
                f"{', '.join(str(i) for i in row):>10}{self.log_loo[row].item():>17.3f}{measure}"
                f"{self.precision[row].item():>12.4g}{self.relative_precision[row].item():>10.3f}  {kind[row]}"
            )
        counts = ", ".join(f"{int((kind == name).sum())} {name}" for name in ("negative", "near zero", "regular"))
        return "\n".join([*lines, f"{len(batch) * size} data: {counts}"])


def outlier_report(result: InferenceResult, *, near_zero: float = 0.1) -> OutlierReport:
    """Return the site and the leave-one-out prediction of each datum, and how surprising it is.

    Args:
        result: of any rule. Under Laplace the precision is the curvature at the mode, under CAVI never negative.
        near_zero: relative precision below which a site counts as near zero.

    Raises:
        TypeError: something else than a result.
        ValueError: `near_zero` is negative or not finite.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpext.inference import EP
        >>> from gpext.likelihoods import StudentTLikelihood
        >>> x, y = torch.linspace(0, 1, 5).double(), torch.tensor([0.0, 0.1, 9.0, 0.1, 0.2]).double()
        >>> K = torch.exp(-((x - x[:, None]) ** 2)) + 1e-6 * torch.eye(5)
        >>> prior = MultivariateNormal(torch.zeros(5).double(), K)
        >>> report = outlier_report(EP().infer(prior, StudentTLikelihood().double(), y))
        >>> report.index[0].item(), str(report.kind[2])
        (2, 'negative')
    """
    if not isinstance(result, InferenceResult):
        raise TypeError(f"expected an InferenceResult, such as model.result; got {type(result).__qualname__}.")
    if not 0 <= near_zero < torch.inf:
        raise ValueError(f"near_zero must be finite and at least 0; got {near_zero!r}.")
    sites = result.conditioned.sites
    precision = sites.precision.detach()
    if isinstance(sites, CoupledSites):
        precision = precision + sites.coupling.unsqueeze(-2) * sites.direction.square()  # the diagonal of U
    if isinstance(sites, BlockSites):
        precision = torch.linalg.eigvalsh(precision.movedim(-1, -3)).mT  # (..., D, N)
    typical = torch.where(precision > 0, precision, torch.nan).nanmedian(-1, keepdim=True).values
    relative = precision / typical
    log_loo = result.log_loo.detach()
    if precision.dim() > log_loo.dim():
        least = precision.argmin(-2, keepdim=True)
        precision, relative = (values.take_along_dim(least, -2).squeeze(-2) for values in (precision, relative))
    tail = result.loo_tail.detach()
    without = tail.isnan() & ~log_loo.isnan()
    over = log_loo - result.expected_log_loo.detach() if bool(without.any()) else torch.full_like(log_loo, torch.nan)
    over = torch.where(without, over, torch.nan)
    dtype = result.dtype
    report = OutlierReport(torch.empty(0), precision.to(dtype), relative.to(dtype), log_loo, tail, over, near_zero)
    return replace(report, index=sorted_by(report.surprise, log_loo))


def sorted_by(first: Tensor, second: Tensor) -> Tensor:
    """Return the indices (..., N) that sort by one criterion, and where that is equal by another; nan comes last."""
    first, second = (values.nan_to_num(nan=torch.inf) for values in (first, second))
    by_second = second.argsort(stable=True, dim=-1)
    return by_second.gather(-1, first.gather(-1, by_second).argsort(stable=True, dim=-1))
