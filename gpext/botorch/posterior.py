r"""The joint posterior of observations y at q inputs, as BoTorch samples from it.

    f = mean + root z_1,    y_i = F^{-1}(Phi(z_2i) | f_i),    z_1, z_2 ~ N(0, I)

with F(y | f) the distribution function of the likelihood: the same normal base samples give the same draws, which vary
smoothly with f where y is continuous, as Monte Carlo acquisition functions require.
"""

from __future__ import annotations

import torch
from botorch.posteriors import GPyTorchPosterior, Posterior
from botorch.sampling.get_sampler import GetSampler
from botorch.sampling.normal import IIDNormalSampler, NormalMCSampler, SobolQMCNormalSampler
from gpytorch.likelihoods import Likelihood
from torch import Tensor
from torch.distributions import Distribution
from torch.quasirandom import SobolEngine

from gpext.distributions import with_cdf


class ObservationPosterior(Posterior):
    """p(y) at q inputs jointly: draws, and the mean and variance of each observation.

    Args:
        latent: the posterior of f, of one output.
        likelihood: of one latent, whose `forward` returns p(y | f).

    Draws need `icdf` of p(y | f): Student-t, Laplace, Matern-3/2, Beta, Bernoulli and ordinal likelihoods have one.

    Example:
        >>> import torch
        >>> from botorch.posteriors import GPyTorchPosterior
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpext.likelihoods import BernoulliLogitLikelihood
        >>> latent = GPyTorchPosterior(MultivariateNormal(torch.zeros(2).double(), torch.eye(2).double()))
        >>> ObservationPosterior(latent, BernoulliLogitLikelihood()).mean.mT
        tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """

    def __init__(self, latent: GPyTorchPosterior, likelihood: Likelihood) -> None:
        self.latent, self.likelihood = latent, likelihood

    @property
    def device(self) -> torch.device:
        """The device of the latent posterior."""
        return self.latent.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the latent posterior."""
        return self.latent.dtype

    @property
    def mean(self) -> Tensor:
        """E[y] (..., q, 1); nan or infinite where the likelihood has none."""
        return self._predictive.mean.unsqueeze(-1)

    @property
    def variance(self) -> Tensor:
        """Var[y] (..., q, 1); nan or infinite where the likelihood has none."""
        return self._predictive.variance.unsqueeze(-1)

    @property
    def _predictive(self) -> Distribution:
        return self.likelihood.marginal(self.latent.distribution)

    @property
    def batch_shape(self) -> torch.Size:
        """The batch shape of the latent posterior, (...)."""
        return self.latent.distribution.batch_shape

    @property
    def base_sample_shape(self) -> torch.Size:
        """(..., q, 2): a normal number for f and one for its observation."""
        return torch.Size((*self.latent.base_sample_shape, 2))

    @property
    def batch_range(self) -> tuple[int, int]:
        """The dimensions of `base_sample_shape` that are batches."""
        return 0, -2

    def _extended_shape(self, sample_shape: torch.Size = torch.Size()) -> torch.Size:  # noqa: B008
        return self.latent._extended_shape(sample_shape)

    def rsample(self, sample_shape: torch.Size | None = None) -> Tensor:
        """Return draws (*sample_shape, ..., q, 1) of the observations, with the gradient of f where y is continuous.

        Raises:
            NotImplementedError: p(y | f) has no `icdf`.
        """
        sample_shape = torch.Size([1]) if sample_shape is None else sample_shape
        shape = torch.Size((*sample_shape, *self.base_sample_shape))
        return self.rsample_from_base_samples(sample_shape, torch.randn(shape, dtype=self.dtype, device=self.device))

    def rsample_from_base_samples(self, sample_shape: torch.Size, base_samples: Tensor) -> Tensor:
        """Return the draws (*sample_shape, ..., q, 1) that belong to base samples (*sample_shape, ..., q, 2).

        Raises:
            NotImplementedError: p(y | f) has no `icdf`.
        """
        of_latent, of_noise = base_samples.unbind(-1)
        f = self.latent.rsample_from_base_samples(sample_shape, of_latent).squeeze(-1)
        conditional = with_cdf(self.likelihood(f))
        try:
            y = conditional.icdf(torch.special.ndtr(of_noise))
        except NotImplementedError as error:
            raise NotImplementedError(
                f"p(y | f) of {type(self.likelihood).__qualname__} ({type(conditional).__name__}) has no icdf, which "
                "joint draws of observations are made by. Take posterior(X) of the latent function, with an objective "
                "that maps f to what matters, or likelihood(f).sample() of its draws f."
            ) from error
        return y.to(f.dtype).unsqueeze(-1)


@GetSampler.register(ObservationPosterior)
def _sampler(posterior: ObservationPosterior, sample_shape: torch.Size, *, seed: int | None = None) -> NormalMCSampler:
    """Return BoTorch's sampler of normal base samples: quasi-random ones, up to their largest dimension."""
    size = posterior.base_sample_shape[-2:].numel()
    kind = SobolQMCNormalSampler if size <= SobolEngine.MAXDIM else IIDNormalSampler
    return kind(sample_shape=sample_shape, seed=seed)
