"""The base of distributions of an angle: a distribution function from a cut, quantiles, and credible arcs."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from gpytorch.distributions import Distribution
from torch import Tensor

from gpext.distributions.circular.angle_table import AngleTable
from gpext.distributions.predictive.newton_quantiles import check_probability


@dataclass(frozen=True)
class Arc:
    """The angles at most `half_width` from `centre`, in radians.

    Example:
        >>> import torch
        >>> arc = Arc(torch.tensor([0.0]), torch.tensor([0.5]))
        >>> arc.half_width
        tensor([0.5000])
    """

    centre: Tensor  # (...) in (-pi, pi]
    half_width: Tensor  # (...) below pi

    @property
    def lower(self) -> Tensor:
        """The end at which the arc begins, anticlockwise; may be below -pi."""
        return self.centre - self.half_width

    @property
    def upper(self) -> Tensor:
        """The end of the arc above `lower`; may be above pi."""
        return self.centre + self.half_width

    def contains(self, angle: Tensor) -> Tensor:
        """Whether angles, of any turn, lie on the arc; they broadcast with it."""
        return wrap(angle - self.centre).abs() <= self.half_width


class CircularDistribution(Distribution):
    """A distribution of angles in radians with a smooth density.

    The circle is cut half a turn from `mean`, where `cdf` is 0, and 1 a turn later.

    Example:
        >>> import torch
        >>> from gpext.likelihoods import VonMisesLikelihood
        >>> f = torch.tensor([[2.0], [0.0]]).double()
        >>> angle = VonMisesLikelihood().double()(f)
        >>> angle
        VonMises(loc: tensor([0.], dtype=torch.float64), concentration: tensor([2.], dtype=torch.float64))
    """

    @abstractmethod
    def _make_table(self) -> AngleTable:
        """Return the density as a series."""

    @cached_property
    def _table(self) -> AngleTable:
        return self._make_table()

    def cdf(self, value: Tensor) -> Tensor:
        """The probability between the cut and angles of any turn, that broadcast with the batch shape; no gradient."""
        if self._validate_args:
            self._validate_sample(value)
        with torch.no_grad():
            table = self._table
            return table.cdf(table.place(wrap(value.double() - table.loc))).to(table.dtype)

    def icdf(self, value: Tensor | float) -> Tensor:
        """The quantile between mean - pi and mean + pi, not wrapped: of two the lower is the smaller. No gradient.

        Raises:
            ValueError: a probability is not strictly between 0 and 1.
        """
        with torch.no_grad():
            table = self._table
            probability = check_probability(value, table.loc)
            return (table.loc + table.offset(table.quantile(probability))).to(table.dtype)

    def quantile(self, q: Tensor | float) -> Tensor:
        """The same as `icdf`."""
        return self.icdf(q)

    def credible_arc(self, probability: float) -> Arc:
        """Return the shortest arc that has a probability; no gradient.

        Of a density with one mode these are the angles of highest density. Of one with two the arc may span the valley
        between them, and where no direction is preferred its centre means nothing.

        Raises:
            ValueError: the probability is not strictly between 0 and 1.
        """
        with torch.no_grad():
            table = self._table
            check_probability(probability, table.loc)
            offset, half_width = table.shortest_arc(probability)
            return Arc(wrap(table.loc + offset).to(table.dtype), half_width.to(table.dtype))


def wrap(angle: Tensor) -> Tensor:
    """Return the angle in (-pi, pi]."""
    return math.pi - torch.remainder(math.pi - angle, 2 * math.pi)
