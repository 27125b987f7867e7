"""Normal distributions of latent values whose variances are those of their covariance, however small.

gpytorch raises every variance below 1e-10 (1e-6 in float32) to that number and warns that it is negative; a latent
function of outputscale 1e-12, or the posterior of a thousand float32 data, has such variances and no fault.
"""

from __future__ import annotations

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from torch import Tensor


class LatentNormal(MultivariateNormal):
    """gpytorch's MultivariateNormal with the variances of its covariance, zero (of a linear kernel at 0) included.

    Where rounding has made one negative, gpytorch's floor and its warning apply.

    Example:
        >>> import torch
        >>> from linear_operator import to_linear_operator
        >>> LatentNormal(torch.zeros(2), to_linear_operator(torch.zeros(2, 2))).variance
        tensor([0., 0.])
    """

    @property
    def variance(self) -> Tensor:
        """The marginal variances, like the mean."""
        diagonal = self.lazy_covariance_matrix.diagonal(dim1=-2, dim2=-1)
        if bool((diagonal >= 0).all()):
            return diagonal.expand(torch.broadcast_shapes(diagonal.shape, self.loc.shape))
        return super().variance


class MultitaskLatentNormal(MultitaskMultivariateNormal, LatentNormal):
    """gpytorch's MultitaskMultivariateNormal with the variances of its covariance, as :class:`LatentNormal`.

    Example:
        >>> import torch
        >>> MultitaskLatentNormal(torch.zeros(2, 3), torch.eye(6)).variance.shape
        torch.Size([2, 3])
    """
