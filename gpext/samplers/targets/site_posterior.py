r"""The posterior of kernel and mean parameters given Gaussian sites of f: that of a Gaussian regression.

Given w, a likelihood with an augmentation is a site exp(nu f - tau f^2 / 2) a datum, tau > 0, so that

    p(y | theta, w)  is, up to what does not depend on theta,  N(nu / tau | mu(theta), K(theta) + diag(1 / tau))

the density of pseudo-targets nu / tau with noise of variance 1 / tau, a variance for each datum.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpext.inference import CAVI
from gpext.kernels import dense_covariance
from gpext.likelihoods import AugmentedLikelihood
from gpext.mlls import UnbiasedMarginalLogLikelihood
from gpext.models import LatentGP
from gpext.operators import UnbiasedSolver
from gpext.posteriors import DensePrior
from gpext.samplers.targets.log_posterior import LogPosterior
from gpext.samplers.targets.mode import mode_and_scale
from gpext.sites import GaussianSites

_SUBSET = 500
_ROUNDS = 3  # of sites given parameters and parameters given sites, towards the mode
_LATENT = "latent_gp"


class SiteRegression(ExactGP):
    """The prior of a LatentGP, observed with a noise of its own at each datum.

    Args:
        model: a LatentGP; becomes a part of this one.
        jitter: added to the diagonal of the prior covariance.
    """

    def __init__(self, model: LatentGP, jitter: float) -> None:
        x = model.train_inputs[0]
        ones = torch.ones_like(x[:, 0])
        super().__init__(x, ones, FixedNoiseGaussianLikelihood(ones))
        self.latent_gp, self._jitter = model, jitter

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the prior of f at x."""
        prior = self.latent_gp.forward(x)
        return prior.add_jitter(self._jitter) if self._jitter else prior

    def observe(self, sites: GaussianSites) -> None:
        """Take pseudo-targets and noise from sites (N,), whose precisions are positive."""
        noise = sites.precision.reciprocal()
        self.set_train_data(targets=(noise * sites.shift).to(self.train_targets), strict=False)
        self.likelihood.noise = noise.to(self.train_targets)


class SiteMarginalLogLikelihood(ExactMarginalLogLikelihood):
    """The log evidence of the sites of a SiteRegression, with its derivatives in closed form: one Cholesky each.

    It is the log density of the pseudo-targets but for what does not depend on the prior.
    """

    def forward(self, function_dist: MultivariateNormal, target: Tensor) -> Tensor:
        """Return it per datum (), nan where the prior is not positive semidefinite or not finite."""
        precision = self.likelihood.noise.reciprocal()
        prior = DensePrior.of(function_dist.mean, dense_covariance(function_dist.lazy_covariance_matrix), 0.0)
        posterior = prior.condition(GaussianSites(precision * target, precision))
        value = posterior.log_normalizer + prior.follow(posterior, None)
        value = torch.where(posterior.positive_definite, value, torch.nan)
        return self._add_other_terms(value, ()) / len(target)


class SitePosterior(LogPosterior):
    """log p(theta | w, y) up to a constant, theta parameters of the prior of f, by their logarithms; of a copy.

    Args:
        model: a LatentGP for targets (N,).
        names: which of its parameters, with or without `raw_`.
        solver: how to estimate gradients without a factorisation; None for exact ones by factorisation.
        jitter: added to the diagonal of the prior covariance.
    """

    def __init__(self, model: LatentGP, names: Sequence[str], solver: UnbiasedSolver | None, jitter: float) -> None:
        regression = SiteRegression(copy.deepcopy(model), jitter)
        if solver is None:
            mll: ExactMarginalLogLikelihood = SiteMarginalLogLikelihood(regression.likelihood, regression)
        else:
            mll = UnbiasedMarginalLogLikelihood(regression.likelihood, regression, solver=solver)
        super().__init__(mll, [f"{_LATENT}.{name}" for name in names], logarithms=True)

    def condition_on(self, sites: GaussianSites) -> None:
        """Condition on sites (N,).

        Raises:
            FloatingPointError: a precision is zero or infinite, or a shift is not finite.
        """
        usable = (sites.precision > 0) & sites.precision.isfinite() & sites.shift.isfinite()
        if not bool(usable.all()):
            index = int((~usable).nonzero()[0])
            raise FloatingPointError(
                f"site {index} has shift {float(sites.shift[index]):g} and precision {float(sites.precision[index]):g}."
            )
        self.model.observe(sites)
        self._y = self.model.train_targets


def conditional_mode(
    model: LatentGP, names: Sequence[str], jitter: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return a mode of prior parameters (P,) and the scale M (P, P) of their posterior given w, about there.

    Of a subset of the data, with sites that CAVI finds there, w at its mean; the parameters of the likelihood stay. See
    :mod:`gpext.samplers.targets.mode`.

    Raises:
        ValueError: the log posterior is not finite at the model's own parameters.
    """
    model = copy.deepcopy(model)
    x, y = model.train_inputs[0], model.train_targets
    share = min(_SUBSET / len(y), 1.0)
    if share < 1:
        index = torch.randperm(len(y), generator=generator, device="cpu")[:_SUBSET].to(y.device)
        model.set_train_data(x[index], model.likelihood.take(y, index), strict=False)
    posterior = SitePosterior(model, names, None, jitter)
    likelihood: AugmentedLikelihood = model.likelihood
    for _ in range(_ROUNDS):
        with torch.no_grad():
            prior = posterior.model.forward(*model.train_inputs)
            sites = CAVI().infer(prior, likelihood, model.train_targets).sites
        assert isinstance(sites, GaussianSites)  # a likelihood with an augmentation has one latent
        posterior.condition_on(sites)
        mode, M = mode_and_scale(posterior, generator)
        posterior.moved.write(mode)
    return mode, share * M
