r"""Which data a model has set aside, and how surprising each is to the others [JVV11 Secs. 3, 5].

The precision of a datum's site says what it has contributed. A regular one narrows the posterior; one that a
heavy-tailed likelihood has given up has a precision near zero, and one in between a negative one: it makes the
posterior wider than without it. Where the likelihood is log-concave no site is negative, and a precision near zero says
only that the likelihood is flat there, as that of a class is far from the boundary. Surprise is a matter of the
leave-one-out predictive, p(y_i | y_-i), whatever the likelihood.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gpext.inference.result import InferenceResult

_ROWS = 20  # of the printed table


@dataclass(frozen=True)
class OutlierReport:
    """Sites and leave-one-out predictions of all data, in their order; printing it shows the most surprising ones.

    Attributes:
        index: the data of each posterior (..., N), the least leave-one-out density first; those without one last.
        precision: of the sites (..., N); of several latents, the least.
        relative_precision: the same over the median of the positive precisions of that posterior; nan if none is.
        log_loo: leave-one-out log predictive density or mass of y_i (..., N), as in :class:`InferenceResult`.
        tail_probability: twice the smaller of P(Y <= y_i) and P(Y >= y_i) under the same prediction, at most 1
            (..., N), as in :class:`InferenceResult`.
        near_zero: relative precision below which a site counts as near zero.
    """

    index: Tensor
    precision: Tensor = field(repr=False)
    relative_precision: Tensor = field(repr=False)
    log_loo: Tensor = field(repr=False)
    tail_probability: Tensor = field(repr=False)
    near_zero: float

    @property
    def kind(self) -> np.ndarray:
        """By the precision of the site, "negative", "near zero" or "regular" (..., N)."""
        precision, relative = self.precision.cpu().numpy(), self.relative_precision.cpu().numpy()
        return np.where(precision < 0, "negative", np.where(relative >= self.near_zero, "regular", "near zero"))

    def __str__(self) -> str:
        kind = self.kind
        size = self.index.size(-1)
        batch = [()] if self.index.dim() == 1 else list(np.ndindex(*self.index.shape[:-1]))
        rows = [(*at, i) for at in batch for i in self.index[at].tolist()]
        if len(batch) > 1:
            rows.sort(key=lambda row: self.log_loo[row].nan_to_num(nan=torch.inf).item())
        lines = [f"{'datum':>10}{'LOO log density':>17}{'tail probability':>18}{'precision':>12}{'relative':>10}  site"]
        for row in rows[:_ROWS]:
            name = ", ".join(str(i) for i in row)
            lines.append(
                f"{name:>10}{self.log_loo[row].item():>17.3f}{self.tail_probability[row].item():>18.2g}"
                f"{self.precision[row].item():>12.4g}{self.relative_precision[row].item():>10.3f}  {kind[row]}"
            )
        counts = ", ".join(f"{int((kind == name).sum())} {name}" for name in ("negative", "near zero", "regular"))
        return "\n".join([*lines, f"{len(batch) * size} data: {counts}"])


def outlier_report(result: InferenceResult, *, near_zero: float = 0.1) -> OutlierReport:
    """Return what the sites and the leave-one-out predictions of an inference say about each datum.

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
    precision = result.conditioned.sites.precision.detach()
    typical = torch.where(precision > 0, precision, torch.nan).nanmedian(-1, keepdim=True).values
    relative = precision / typical
    log_loo = result.log_loo.detach()
    if precision.dim() > log_loo.dim():
        least = precision.argmin(-2, keepdim=True)
        precision, relative = (values.take_along_dim(least, -2).squeeze(-2) for values in (precision, relative))
    index = log_loo.nan_to_num(nan=torch.inf).argsort(stable=True, dim=-1)
    dtype = result.dtype
    return OutlierReport(index, precision.to(dtype), relative.to(dtype), log_loo, result.loo_tail.detach(), near_zero)
