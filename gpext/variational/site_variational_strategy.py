r"""A gpytorch variational strategy whose q(u) is updated in closed form from Gaussian sites [GWO20 App. A.3].

With a minibatch of B of the N data, s = N / B, and the sites (nu, tau) at its current marginals,

    eta    <- (1 - rho) eta    + rho s A (nu - tau mu)
    Lambda <- (1 - rho) Lambda + rho (I + s A diag(tau) A')

in the whitened coordinates of :mod:`gpext.posteriors.inducing`. With the sites of an augmentation this is the
natural-gradient step of size rho on the augmented bound: gpytorch's NGD(lr=rho) on :class:`gpext.mlls.AugmentedELBO`
moves q(u) to the same place, and rho = 1 on all the data is exact coordinate ascent. With those of E = E_q log p(y | f)
itself, tau = -2 dE/dv and nu = dE/dm + tau m, it is that step on the exact ELBO, for any likelihood [Khan & Lin 2017];
there rho is halved until the bound of the batch, s sum_i E_i - KL(q || p), does not fall.

A likelihood of D latent functions wants D independent q(u), a batch of them: its E_i depends on D marginals.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.models import ApproximateGP
from gpytorch.variational import NaturalVariationalDistribution, VariationalStrategy
from torch import Tensor

from gpext.inference import (
    LikelihoodTerm,
    augmented_sites,
    augmented_terms,
    exact_terms,
    require_augmentation,
)
from gpext.likelihoods import AugmentedLikelihood, LatentLikelihood
from gpext.likelihoods.checks import check_finite
from gpext.posteriors import InducingPosterior, condition_inducing, factorise, project
from gpext.variational.bound_gradients import backpropagate
from gpext.variational.prior_blocks import CrossBlocks, FactorCache, dense_covariance, split_covariance

_MOST_HALVINGS = 30  # counts of a million want twenty


class SiteVariationalStrategy(VariationalStrategy):
    """gpytorch's whitened `VariationalStrategy` with a closed-form :meth:`update` of q(u).

    Use it in any `ApproximateGP`; predictions, `kl_divergence`, `state_dict` and every gpytorch objective work as with
    its parent. q(u) is a `NaturalVariationalDistribution`, so gpytorch's NGD can also train it.

    Args:
        model: the ApproximateGP this belongs to (pass `self`).
        inducing_points: Z, (..., M, d).
        variational_distribution: q(u); a `NaturalVariationalDistribution` of the shape of Z by default.
        learn_inducing_locations: whether Z is a parameter.
        jitter_val: added to the diagonal of K_zz and to the prior variances; gpytorch's default (1e-4 in float32, 1e-6
            in float64) if None.

    Raises:
        TypeError: the variational distribution has no natural parameters.
    """

    def __init__(
        self,
        model: ApproximateGP,
        inducing_points: Tensor,
        variational_distribution: NaturalVariationalDistribution | None = None,
        learn_inducing_locations: bool = True,
        jitter_val: float | None = None,
    ) -> None:
        if inducing_points.dim() == 1:
            inducing_points = inducing_points.unsqueeze(-1)
        if variational_distribution is None:
            variational_distribution = NaturalVariationalDistribution(
                inducing_points.size(-2), batch_shape=inducing_points.shape[:-2], mean_init_std=0.0
            ).to(inducing_points)
        if not isinstance(variational_distribution, NaturalVariationalDistribution):
            raise TypeError(
                "SiteVariationalStrategy updates natural parameters: expected a NaturalVariationalDistribution (or "
                f"None for the default), got {type(variational_distribution).__name__}."
            )
        super().__init__(model, inducing_points, variational_distribution, learn_inducing_locations, jitter_val)
        self._factors = FactorCache()
        self._known = FactorCache()  # the parameters that gpytorch's memos were made at, in eval mode

    @property
    def variational_distribution(self) -> MultivariateNormal:
        """q(u) at the present parameters.

        gpytorch's memo of it outlives them, and the graph that a backward pass has freed: Pyro's guides ask for q(u)
        before they call the model. So in training it is made anew, and in eval mode where a parameter has changed.
        """
        if self.training:
            self._clear_cache()
        else:
            key = [*self.prior_key(), *self._variational_distribution.parameters()]
            if self._known.get(key) is None:
                self._clear_cache()
                self._known.put(key, self.inducing_points)
        return super().variational_distribution

    def kl_divergence(self) -> Tensor:
        """Return KL(q(u) || p(u)) (...); in training that of the last call, with which it shares its graph."""
        q = super().variational_distribution if self.training else self.variational_distribution
        return torch.distributions.kl_divergence(q, self.prior_distribution)

    def update(
        self,
        x: Tensor,
        y: Tensor,
        likelihood: LatentLikelihood,
        rate: float = 1.0,
        num_data: int | None = None,
        *,
        bound: LikelihoodTerm | None = None,
        gradient: LikelihoodTerm | None = None,
    ) -> Tensor | None:
        """Move q(u) a fraction `rate` of the way to the optimum for these data, in natural parameters.

        Args:
            x: inputs (..., B, d).
            y: targets (..., B), or what the likelihood takes.
            likelihood: any likelihood of gpext.
            rate: rho in (0, 1].
            num_data: N, if (x, y) is a minibatch; their number by default.
            bound: whose sites: the augmented bound's, the default where the likelihood has one, or those of the exact
                expectation of log p(y | f), where rho is halved until the bound of this batch does not fall (and q(u)
                stays as it is if it always would).
            gradient: also add the derivatives of the loss -ELBO / N, at q(u) before the step, to the `.grad` of the
                hyperparameters and the likelihood's parameters, from the same kernel evaluation. The ELBO has the
                augmented bound or the exact expectation of log p(y | f); None leaves `.grad` alone.

        Returns:
            With a `gradient`, the ELBO it belongs to, per datum, before the step, (...).

        Raises:
            TypeError: a likelihood that is not gpext's, an augmented bound of one that has none, or half precision.
            ValueError: bad data or rate. q(u) is unchanged after any error.
            torch.linalg.LinAlgError: K_zz or the precision of q(u) is not positive definite.
            FloatingPointError: the step is not finite.
        """
        bound = _require_term(likelihood, bound)
        if not 0 < rate <= 1:
            raise ValueError(f"rate must be in (0, 1]; got {rate}.")
        if gradient not in (None, "augmented", "exact"):
            raise ValueError(f"gradient must be None, 'augmented' or 'exact'; got {gradient!r}.")
        if gradient == "augmented":
            require_augmentation(likelihood)
        size = check_batch(x, likelihood.datum_shape(y), num_data)
        check_dtype(x, self.inducing_points)
        num_data = num_data or size
        scale = num_data / size
        with torch.set_grad_enabled(gradient is not None):
            cross = self.cross_blocks(x)
            inducing_covariance = self.inducing_covariance() if gradient is not None else None
        with torch.no_grad():
            chol = self._factor() if inducing_covariance is None else factorise(inducing_covariance)
            whitened = torch.linalg.solve_triangular(chol.to(x.dtype), cross.covariance, upper=False)
            posterior = self.posterior()
            conditional_variance = cross.variance - whitened.square().sum(-2)
            mean, variance = posterior.marginals(whitened, cross.mean, conditional_variance)
            if bound == "exact":
                terms = exact_terms(likelihood, y, mean, variance)
                sites = terms.best_sites(mean)
            else:
                sites = augmented_sites(likelihood.augmentation(y), mean, variance)
            vector, gram = project(whitened, cross.mean, sites)
        if not bool(vector.isfinite().all()):
            raise FloatingPointError(
                "the update of q(u) is not finite: a parameter of the kernel, the mean or the likelihood is NaN or "
                "infinite, or a value overflowed; check them, rescale the data or work in float64."
            )
        value = None
        if inducing_covariance is not None:
            if gradient == "augmented":
                local, local_gram = augmented_terms(likelihood, y, mean, variance, sites), gram
            elif bound == "exact":
                local, local_gram = terms, gram
            else:
                local = exact_terms(likelihood, y, mean, variance)
                local_gram = (whitened * local.precision.unsqueeze(-2)) @ whitened.mT
            weight = -scale / num_data
            backpropagate(inducing_covariance, cross, chol, whitened, posterior, local, local_gram, weight)
            value = (scale * local.total - total_divergence(posterior, likelihood)) / num_data
        if bound == "exact":

            def batch_bound(moved: InducingPosterior) -> Tensor:
                marginals = moved.marginals(whitened, cross.mean, conditional_variance)
                expected = likelihood.expected_log_density(y, *marginals).double().sum(-1)
                return scale * expected - total_divergence(moved, likelihood)

            here = scale * terms.total - total_divergence(posterior, likelihood)
            rate = self._rising_rate(vector, gram, rate, scale, here, batch_bound)
        self.move(vector, gram, rate, scale)
        return value

    @torch.no_grad()
    def _rising_rate(
        self,
        vector: Tensor,
        gram: Tensor,
        rate: float,
        scale: float,
        here: Tensor,
        bound_at: Callable[[InducingPosterior], Tensor],
    ) -> float:
        """Return the first of rate, rate / 2, ... whose step does not take a bound below `here`, or 0."""
        distribution = self._variational_distribution
        eta, precision = distribution.natural_vec.double(), -2 * distribution.natural_mat.double()
        target = scale * gram.double()
        target.diagonal(dim1=-2, dim2=-1).add_(1)
        rounding = 100 * torch.finfo(vector.dtype).eps * here.abs()
        for _ in range(_MOST_HALVINGS):
            try:
                moved = condition_inducing(
                    torch.lerp(eta, scale * vector.double(), rate), torch.lerp(precision, target, rate)
                )
                if bool((bound_at(moved) >= here - rounding).all()):
                    return rate
            except torch.linalg.LinAlgError:  # a negative precision too many: shorten the step
                pass
            rate /= 2
        return 0.0

    def inducing_covariance(self) -> Tensor:
        """Return K_zz + jitter I (..., M, M), in the autograd graph."""
        dense = dense_covariance(self.model.forward(self.inducing_points).lazy_covariance_matrix)
        return dense + torch.diag_embed(dense.new_full(dense.shape[:-1], self.jitter_val))

    def cross_blocks(self, x: Tensor) -> CrossBlocks:
        """Return K_zx, the prior variances k_ii + jitter and the prior mean mu_i, in the autograd graph."""
        inducing_points = self.inducing_points
        if inducing_points.shape[:-2] != x.shape[:-2]:
            x, inducing_points = self._expand_inputs(x, inducing_points)
        prior = self.model.forward(torch.cat([inducing_points, x], dim=-2))
        size = inducing_points.size(-2)
        cross, variance = split_covariance(prior.lazy_covariance_matrix, size)
        return CrossBlocks(cross, variance + self.jitter_val, prior.mean[..., size:])

    def prior_key(self) -> list[Tensor]:
        """Return everything the prior over u depends on, to tell whether what was made of it still holds."""
        return [*self.model.hyperparameters(), self.inducing_points, torch.tensor(self.jitter_val)]

    def _factor(self) -> Tensor:
        """Return L with L L' = K_zz + jitter I, kept while the hyperparameters stay as they are."""
        key = self.prior_key()
        chol = self._factors.get(key)
        if chol is None:
            chol = factorise(self.inducing_covariance())
            self._factors.put(key, chol)
        return chol

    def posterior(self) -> InducingPosterior:
        """Return q(v) of the whitened inducing values, initialising it to the prior if it is new.

        Raises:
            torch.linalg.LinAlgError: its precision is not positive definite.
        """
        distribution = self._variational_distribution
        if not self.variational_params_initialized.item():
            distribution.initialize_variational_distribution(self.prior_distribution)
            self.variational_params_initialized.fill_(1)
        return condition_inducing(distribution.natural_vec, -2 * distribution.natural_mat)

    @torch.no_grad()
    def move(self, vector: Tensor, gram: Tensor, rate: float, scale: float = 1.0) -> None:
        """Set eta <- (1 - rate) eta + rate scale vector and Lambda <- (1 - rate) Lambda + rate (I + scale gram)."""
        distribution = self._variational_distribution
        eta, half = distribution.natural_vec, distribution.natural_mat  # half is -Lambda / 2
        eta.mul_(1 - rate).add_(vector.to(eta.dtype), alpha=rate * scale)
        half.mul_(1 - rate).add_(gram.to(half.dtype), alpha=-0.5 * rate * scale)
        half.diagonal(dim1=-2, dim2=-1).sub_(0.5 * rate)
        self._clear_cache()


def total_divergence(posterior: InducingPosterior, likelihood: LatentLikelihood) -> Tensor:
    """Return KL(q(v) || N(0, I)) (...), summed over the latents of a datum."""
    divergence = posterior.divergence_from_prior
    return divergence if likelihood.num_latents is None else divergence.sum(-1)


def check_batch(x: Tensor, data: torch.Size, num_data: int | None = None) -> int:
    """Return B, the number of inputs x (..., B, d) that go with targets of `data` (..., B).

    Raises:
        ValueError: there are none, the numbers differ, or the inputs are not finite.
    """
    if x.dim() < 2 or not data or x.size(-2) != data[-1]:
        raise ValueError(
            f"expected inputs (..., B, d) and targets (..., B); got {tuple(x.shape)} and {tuple(data)} targets."
        )
    if data[-1] == 0:
        raise ValueError("the batch is empty: at least one datum is needed.")
    if num_data is not None and num_data < data[-1]:
        raise ValueError(f"num_data ({num_data}) is smaller than the batch ({data[-1]}).")
    check_finite("inputs", x)
    return data[-1]


def check_dtype(x: Tensor, parameters: Tensor) -> None:
    """Raise TypeError unless the inputs have the dtype of the model."""
    if x.dtype != parameters.dtype:
        raise TypeError(
            f"the inputs are {x.dtype} and the model is {parameters.dtype}; convert the inputs with "
            f"x.to({parameters.dtype}) or the model and the likelihood with .to({x.dtype}) (float32 or float64)."
        )


def _require_term(likelihood: LatentLikelihood, bound: LikelihoodTerm | None) -> LikelihoodTerm:
    """Return whose sites to take.

    Raises:
        TypeError: the likelihood has none of them.
        ValueError: no such bound.
    """
    if bound not in (None, "augmented", "exact"):
        raise ValueError(f"bound must be None, 'augmented' or 'exact'; got {bound!r}.")
    if bound == "augmented":
        require_augmentation(likelihood)
    if not isinstance(likelihood, LatentLikelihood):
        raise TypeError(
            f"sites need a likelihood of gpext; got {type(likelihood).__module__}.{type(likelihood).__qualname__}. "
            "Any other trains by gpytorch.mlls.VariationalELBO with gpytorch.optim.NGD."
        )
    return bound or ("augmented" if isinstance(likelihood, AugmentedLikelihood) else "exact")
