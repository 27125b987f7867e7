r"""Tweedie observations with log link: zeros and positive amounts, the sum of a Poisson number of gamma variables.

With d = f - log y and e2(x) = e^x - 1 - x of :mod:`gpext.distributions.tweedie`, for f ~ N(m, v),

    log p(y | f) = log p(y | e^f = y) - y^(2-p) [e2((2-p) d) / (2-p) + e2(-(p-1) d) / (p-1)] / phi
    E[e2(c d)] = e2(c E d + c^2 v / 2) + c^2 v / 2
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.constraints import Interval, Positive
from gpytorch.priors import Prior
from torch import Tensor

from gpext.checks import show_index
from gpext.distributions import Tweedie
from gpext.distributions.tweedie_density import tweedie_log_prob
from gpext.likelihoods.checks import floating_like
from gpext.likelihoods.latent import LatentLikelihood

_POWERS = (1.01, 1.99)


class TweedieLikelihood(LatentLikelihood):
    r"""Amounts that may be zero: rain, claims, catches, with mean :math:`\mu = e^f` and variance :math:`\phi \mu^p`.

    :math:`P(0 | f) = \exp(-\mu^{2-p} / (\phi (2 - p)))`; positive amounts have a density [Dunn & Smyth 2005], to 1e-10.
    `power` p and `dispersion` phi are trained with the other parameters. The log density is concave in f, and its
    expectation has a closed form. Tails are known to 1e-12, in some 10 to 50 microseconds: amounts of which only a
    limit is known can be :class:`gpext.likelihoods.Censored`. An exposure, such as the years of an insurance policy,
    belongs in :class:`gpext.likelihoods.Offset` as its logarithm.

    Args:
        batch_shape: shape of a batch of parameters.
        dispersion_prior: of `dispersion`.
        dispersion_constraint: of `dispersion`; positive by default.
        power_prior: of `power`.
        power_constraint: of `power`, within (1, 2); 1.01 to 1.99 by default, where the density has been verified. At 1
            the law is Poisson's, of multiples of phi, and at 2 the gamma distribution, for which there are likelihoods.

    Raises:
        ValueError: a constraint that lets the power leave (1, 2).

    Example:
        >>> import torch
        >>> likelihood = TweedieLikelihood().initialize(dispersion=1.0, power=1.5)
        >>> likelihood.log_prob(torch.tensor([0.0, 1.0]), torch.zeros(2)).detach()
        tensor([-2.0000, -1.0286])
    """

    def __init__(
        self,
        batch_shape: torch.Size = torch.Size(),  # noqa: B008  gpytorch's own signature; a Size is immutable
        dispersion_prior: Prior | None = None,
        dispersion_constraint: Interval | None = None,
        power_prior: Prior | None = None,
        power_constraint: Interval | None = None,
    ) -> None:
        super().__init__()
        powers = Interval(*_POWERS) if power_constraint is None else power_constraint
        low, high = float(powers.lower_bound.min()), float(powers.upper_bound.max())
        if not 1 < low < high < 2:
            raise ValueError(
                f"power_constraint must keep the power within (1, 2); got bounds {low:g} and {high:g}. Take "
                "gpytorch.constraints.Interval(1.01, 1.99); at 1 PoissonLikelihood and at 2 GammaLikelihood apply."
            )
        self.register_parameter("raw_dispersion", torch.nn.Parameter(torch.zeros(*batch_shape, 1)))
        self.register_parameter("raw_power", torch.nn.Parameter(torch.zeros(*batch_shape, 1)))
        if dispersion_prior is not None:
            self.register_prior("dispersion_prior", dispersion_prior, _get_dispersion, _set_dispersion)
        if power_prior is not None:
            self.register_prior("power_prior", power_prior, _get_power, _set_power)
        self.register_constraint(
            "raw_dispersion", Positive() if dispersion_constraint is None else dispersion_constraint
        )
        self.register_constraint("raw_power", powers)

    @property
    def dispersion(self) -> Tensor:
        """Phi (*batch_shape, 1)."""
        return self.raw_dispersion_constraint.transform(self.raw_dispersion)

    @dispersion.setter
    def dispersion(self, value: Tensor | float) -> None:
        value = torch.as_tensor(value).to(self.raw_dispersion)
        self.initialize(raw_dispersion=self.raw_dispersion_constraint.inverse_transform(value))

    @property
    def power(self) -> Tensor:
        """P (*batch_shape, 1)."""
        return self.raw_power_constraint.transform(self.raw_power)

    @power.setter
    def power(self, value: Tensor | float) -> None:
        value = torch.as_tensor(value).to(self.raw_power)
        self.initialize(raw_power=self.raw_power_constraint.inverse_transform(value))

    def check_support(self, targets: Tensor) -> None:
        """Raise ValueError if a target is negative."""
        wrong = (targets < 0).nonzero()
        if len(wrong):
            index = tuple(wrong[0].tolist())
            raise ValueError(
                f"targets must be zero or positive; got {float(targets[index]):g} at index {show_index(index)}."
            )

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(targets | f) (..., N), of zeros the log probability."""
        log_p = tweedie_log_prob(targets.double(), f.double(), self.dispersion.double(), self.power.double())
        return log_p.to(floating_like(targets, f).dtype)

    def expected_log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log p(y | f)] under N(mean, variance), elementwise.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        parameters = self.dispersion.double(), self.power.double()
        log_p = tweedie_log_prob(targets.double(), mean.double(), *parameters, variance=variance.double())
        return log_p.to(floating_like(targets, mean).dtype)

    def knots(self, targets: Tensor) -> Tensor:
        """Return log y, about which p(y | f) may be narrow, and of a zero where P(0 | f) falls off."""
        phi, p, y = self.dispersion.detach().double(), self.power.detach().double(), targets.double()
        edge = (phi * (2 - p)).log() / (2 - p)
        return torch.where(y > 0, y.log(), edge).unsqueeze(0)

    def expansion_point(self, targets: Tensor) -> Tensor:
        """Return log y, where Taylor expands; of zeros that of half the smallest positive target."""
        y = targets.double()
        least = torch.where(y > 0, y, torch.inf).amin()
        return torch.where(y > 0, y, torch.where(least.isfinite(), 0.5 * least, 1.0)).log()

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Tweedie:
        """Return p(y | f)."""
        return Tweedie(function_samples, self.dispersion.to(function_samples), self.power.to(function_samples))


def _get_dispersion(module: TweedieLikelihood) -> Tensor:
    return module.dispersion


def _set_dispersion(module: TweedieLikelihood, value: Tensor) -> None:
    module.dispersion = value


def _get_power(module: TweedieLikelihood) -> Tensor:
    return module.power


def _set_power(module: TweedieLikelihood, value: Tensor) -> None:
    module.power = value
