r"""The sum of a Gaussian and an independent Student-t variable, as a mixture of normals.

Student-t noise of scale s and n degrees of freedom is Gaussian noise of variance s^2 / w, w ~ Gamma(n / 2, rate n / 2):

    P(Y <= y) = int Gamma(w | n / 2, n / 2) Phi((y - m) / sqrt(v + s^2 / w)) dw

Over log w the integrand is analytic, and a trapezoidal rule of some fifty nodes, the same for all data, converges
geometrically.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from gpytorch.distributions import Distribution
from torch import Tensor
from torch.distributions import constraints

from gpext.distributions.drawing import drawn_from
from gpext.distributions.predictive.compound import AdditiveNoisePredictive
from gpext.distributions.predictive.newton_quantiles import check_probability
from gpext.distributions.predictive.normal_mixture_quantiles import AT_ONCE, normal_mixture_quantiles
from gpext.distributions.with_cdf import StudentT
from gpext.quadrature import student_t_log_normalizer
from gpext.quadrature.softmax import gumbel
from gpext.special import exp_remainder

DIGITS = 28.0  # -log of the error of the sum over w
_FAR = 1e300  # of z^2, where the distribution function is 0 or 1 to float64


class NormalPlusStudentT(Distribution):
    """The sum of a Gaussian N(loc, variance) and an independent Student-t variable times `scale`, (...) each.

    Example:
        >>> import torch
        >>> one = torch.ones(1).double()
        >>> y = NormalPlusStudentT(0 * one, one, 3 * one, one)
        >>> y.cdf(y.icdf(0.9))
        tensor([0.9000], dtype=torch.float64)
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}
    support = constraints.real

    def __init__(self, loc: Tensor, variance: Tensor, df: Tensor, scale: Tensor) -> None:
        self.loc, self.normal_variance, self.df, self.scale = loc, variance, df, scale
        super().__init__(loc.shape, validate_args=False)

    @property
    def _noise(self) -> StudentT:
        return StudentT(df=self.df, loc=self.loc, scale=self.scale, validate_args=False)

    @property
    def mean(self) -> Tensor:
        """`loc`; nan for df <= 1."""
        return self._noise.mean

    @property
    def variance(self) -> Tensor:
        """The sum of both; infinite for 1 < df <= 2, nan below."""
        return self._noise.variance + self.normal_variance

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density."""
        noise = self.scale.square()
        found = student_t_log_normalizer(value - self.loc, self.normal_variance, self.df, noise, 1.0)
        return found.to(self.loc.dtype)

    def cdf(self, value: Tensor) -> Tensor:
        """Return P(Y <= value), to about 1e-12 of the smaller tail; differentiable."""
        z, v, a, noise = torch.broadcast_tensors(
            value - self.loc, self.normal_variance, 0.5 * self.df, self.scale.square()
        )
        z, v, a, noise = z.double(), v.double(), a.double(), noise.double()
        with torch.no_grad():
            low, high, step = mixing_range(a, DIGITS)
            square = (z.square() / (2 * a * noise)).clamp_max(_FAR)
            low = low - square.log1p()  # left of it the integrand falls like w^a
            num_nodes = int(((high - low) / step).max().ceil()) + 1 if z.numel() else 1
        t, weight = mixing_rule(a, low, high, num_nodes)
        total = (weight * torch.special.ndtr(z * (v + noise * (-t).exp()).rsqrt())).sum(0)
        return total.clamp(max=1).to(self.loc.dtype)  # the weights sum to one but for rounding

    def icdf(self, value: Tensor | float) -> Tensor:
        """Return the quantiles, to about 1e-11 of the smaller tail; no gradient.

        Raises:
            ValueError: a probability is not strictly between 0 and 1.
        """
        with torch.no_grad():
            q = check_probability(value, self.loc)
            q, *given = torch.broadcast_tensors(q, self.loc, self.normal_variance, 0.5 * self.df, self.scale.square())
            levels, loc, v, a, noise = (field.reshape(-1).double() for field in (q, *given))
            if not len(levels):
                return q
            digits = DIGITS - float(torch.minimum(levels, 1 - levels).amin().log())
            low, high, step = mixing_range(a, digits)
            num_nodes = int(((high - low) / step).max().ceil()) + 1
            fields = torch.stack([levels, v, a, noise, low, high])
            found = [_quantiles(part, num_nodes) for part in fields.split(max(AT_ONCE // num_nodes, 1), -1)]
            return (loc + torch.cat(found)).view(q.shape).to(q)

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape sample_shape + batch_shape; from torch's global generator by default."""
        with torch.no_grad(), drawn_from(generator):
            noise = self._noise.sample(torch.Size(sample_shape))
            return noise + self.normal_variance.sqrt() * torch.randn_like(noise)


class CompoundStudentT(AdditiveNoisePredictive):
    """`AdditiveNoisePredictive` of Student-t noise, whose density, distribution function and quantiles are a mixture's.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpext.likelihoods import StudentTLikelihood
        >>> y = StudentTLikelihood().double()(MultivariateNormal(torch.zeros(1).double(), torch.eye(1).double()))
        >>> y.cdf(y.icdf(0.9)).detach()
        tensor([0.9000], dtype=torch.float64)
    """

    def _sum(self, mean: Tensor, variance: Tensor) -> NormalPlusStudentT:
        noise = self.conditional(mean)
        assert isinstance(noise, StudentT)
        return NormalPlusStudentT(mean, variance, noise.df, noise.scale)

    def _log_density(self, value: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return self._sum(mean, variance).log_prob(value)

    def _cdf(self, value: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return self._sum(mean, variance).cdf(value)

    def icdf(self, value: Tensor | float) -> Tensor:
        """The quantile, to about 1e-11 of the smaller tail; no gradient.

        Raises:
            ValueError: a probability is not strictly between 0 and 1.
        """
        with torch.no_grad():
            return self._sum(self.latent_mean, self.latent_variance).icdf(value)


def mixing_range(a: Tensor, digits: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return between which log w lies but for e^-digits, w ~ Gamma(a, rate a), and the step of a rule, (...)."""
    reach = digits / a + (2 * digits / a).sqrt()
    return -reach, reach.log1p(), gumbel.gumbel_step(a) * (gumbel.DIGITS / DIGITS)


def mixing_rule(a: Tensor, low: Tensor, high: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Return nodes log w and their weights (J, ...) under Gamma(a, rate a), a trapezoidal rule."""
    place = torch.arange(num_nodes, dtype=a.dtype, device=a.device).view(-1, *(1,) * low.dim())
    t = low + (high - low) / max(num_nodes - 1, 1) * place
    return t, torch.softmax(-a * exp_remainder(t), 0)


def _quantiles(fields: Tensor, num_nodes: int) -> Tensor:
    """Return quantiles (B,) less the location, of probability, variance, n / 2, s^2 and the ends of the rule (6, B)."""
    q, variance, a, noise, low, high = fields
    t, weights = mixing_rule(a, low, high, num_nodes)
    rate = (variance + noise * (-t).exp()).rsqrt().mT
    return normal_mixture_quantiles(q.unsqueeze(0), weights.mT, torch.zeros_like(rate), rate).squeeze(0)
