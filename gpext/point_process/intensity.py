r"""The intensity of a log-Gaussian Cox process, lambda_c = e^{f_c} in cell c, for a Gaussian posterior of f.

    E[lambda_c] = e^{m_c + v_c / 2},     P(lambda_c > l) = Phi((m_c - log l) / sqrt(v_c))
    Lambda(R) = sum_{c in R} A_c lambda_c,     Var[Lambda] = sum_{c, d in R} E[.]_c E[.]_d (e^{V_cd} - 1)
    N(R) ~ Poisson(Lambda(R)),    E[N] = E[Lambda],   Var[N] = E[Lambda] + Var[Lambda]

All in closed form.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor
from torch.distributions import LogNormal

from gpext.checks import check_finite, check_tensor
from gpext.distributions import log_survival
from gpext.distributions.drawing import draws_of_logs
from gpext.point_process.grid import Grid


@dataclass(frozen=True)
class ExpectedCount:
    """The number N of points in a region, of a process whose integrated intensity Lambda is uncertain.

    Attributes:
        mean: of Lambda, and of N.
        intensity_variance: of Lambda.
        variance: of N.

    Example:
        >>> import torch
        >>> mean, spread = torch.tensor(9.0), torch.tensor(4.0)
        >>> count = ExpectedCount(mean, spread, mean + spread)  # Poisson noise about an uncertain intensity
        >>> count.variance
        tensor(13.)
    """

    mean: Tensor
    intensity_variance: Tensor
    variance: Tensor


@dataclass(frozen=True)
class Intensity:
    """The posterior of the intensity in the M cells of a grid: points per unit of its area.

    Attributes:
        grid: of the cells; `grid.place(values)` makes a map of a result (M,).
        log_intensity: the joint distribution of f (M,).

    Raises:
        TypeError: something else than a MultivariateNormal.
        ValueError: not as many values as cells.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> grid = Grid.regular([(0, 1)], (2,))
        >>> intensity = Intensity(grid, MultivariateNormal(torch.zeros(2), torch.eye(2)))
        >>> intensity.exceedance(1.0)
        tensor([0.5000, 0.5000])
        >>> intensity.expected_count().mean
        tensor(1.6487)
    """

    grid: Grid
    log_intensity: MultivariateNormal = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.log_intensity, MultivariateNormal):
            raise TypeError(f"expected a MultivariateNormal of f; got {type(self.log_intensity).__name__}.")
        size, shape = int(self.grid.is_inside.sum()), self.log_intensity.mean.shape
        if shape != (size,):
            raise ValueError(f"expected a log intensity in each of {size} cells; got shape {tuple(shape)}.")

    @property
    def mean(self) -> Tensor:
        """E[lambda] (M,)."""
        return (self.log_intensity.mean + 0.5 * self.log_intensity.variance).exp()

    @property
    def stddev(self) -> Tensor:
        """The standard deviation of lambda (M,)."""
        return self.mean * torch.expm1(self.log_intensity.variance).sqrt()

    def quantile(self, probability: float) -> Tensor:
        """Return the quantile of lambda (M,); that of 0.5 is the median.

        Raises:
            ValueError: a probability outside (0, 1).
        """
        if not 0 < probability < 1:
            raise ValueError(f"probability must be between 0 and 1; got {probability!r}.")
        m, v = self.log_intensity.mean, self.log_intensity.variance
        z = torch.special.ndtri(torch.tensor(probability, dtype=torch.float64)).to(m)
        return (m + z * v.sqrt()).exp()

    def exceedance(self, threshold: float | Tensor) -> Tensor:
        """Return P(lambda > threshold) (M,).

        Args:
            threshold: an intensity, or one for each cell (M,), not negative.

        Raises:
            ValueError: a threshold that is negative or not finite.
        """
        m, v = self.log_intensity.mean, self.log_intensity.variance
        level = torch.as_tensor(threshold, dtype=m.dtype, device=m.device)
        check_finite("threshold", level)
        if bool((level < 0).any()):
            raise ValueError(f"threshold must not be negative, an intensity; got {float(level.min()):g}.")
        given = LogNormal(m, v.sqrt(), validate_args=False)
        return log_survival(given, level.expand(m.shape)).exp()

    def expected_count(self, region: Tensor | None = None) -> ExpectedCount:
        """Return mean and variance of the number of points in a region.

        Args:
            region: which cells it has (M,), bool; or the share of each cell's exposure (M,). All by default.

        Raises:
            TypeError, ValueError: something else than a tensor, or another shape.
        """
        weights = self.grid.exposure.to(self.mean)
        if region is not None:
            check_tensor("region", region)
            if region.shape != weights.shape:
                raise ValueError(
                    f"expected a region ({len(weights)},), one value of each cell; got {tuple(region.shape)}. Of a map "
                    "it is grid.take(map)."
                )
            weights = weights * region.to(weights)
        each = weights * self.mean
        variance = each @ torch.expm1(self.log_intensity.covariance_matrix) @ each
        return ExpectedCount(each.sum(), variance, each.sum() + variance)

    def draws(self, num_draws: int = 1000, *, generator: torch.Generator | None = None) -> Tensor:
        """Return joint draws of lambda (num_draws, M); `draws @ grid.exposure` are draws of Lambda.

        Raises:
            TypeError, ValueError: not a positive whole number of draws, or a covariance that is not positive
                semidefinite.
        """
        f = self.log_intensity
        return draws_of_logs(f.mean, f.covariance_matrix, num_draws, generator=generator).exp()


@torch.no_grad()
def intensity(model: torch.nn.Module, grid: Grid, inputs: Tensor | None = None) -> Intensity:
    """Return the posterior of the intensity on a grid, by a model of the log intensity that is in eval mode.

    Args:
        model: a :class:`gpext.models.LatentGP`, or any other gpytorch model of one latent function.
        grid: with the cells to predict in; a finer one than that of the data, for example.
        inputs: of the model at the cells (M, d), where they are not the centres of cells: scaled, or with covariates.

    Raises:
        RuntimeError: the model is in train mode.
        TypeError, ValueError: as :class:`Intensity`.

    Example:
        >>> import gpytorch, torch, gpext
        >>> class LogIntensity(gpext.models.LatentGP):
        ...     def __init__(self, grid, counts, likelihood):
        ...         super().__init__(grid.inputs, counts, likelihood)
        ...         self.mean_module = gpytorch.means.ConstantMean()
        ...         self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(1.5))
        ...
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> grid = Grid.regular([(0, 1), (0, 1)], (3, 3))
        >>> counts = grid.count(torch.tensor([[0.1, 0.1], [0.2, 0.3], [0.9, 0.2]]))
        >>> likelihood = gpext.likelihoods.Offset(gpext.likelihoods.PoissonLikelihood(), grid.exposure.log())
        >>> model = LogIntensity(grid, counts, likelihood).eval()
        >>> grid.place(intensity(model, grid).mean).shape
        torch.Size([3, 3])
    """
    if model.training:
        raise RuntimeError("the model is in train mode; call model.eval() to predict.")
    return Intensity(grid, model(grid.inputs if inputs is None else inputs))
