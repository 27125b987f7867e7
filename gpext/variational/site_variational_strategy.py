r"""A gpytorch variational strategy whose q(u) is updated in closed form from Gaussian sites [GWO20 App. A.3].

With a minibatch of B of the N data, s = N / B, and the sites (nu, tau) at its current marginals,

    eta    <- (1 - rho) eta    + rho s A (nu - tau mu)
    Lambda <- (1 - rho) Lambda + rho (I + s A diag(tau) A')

in the whitened coordinates of :mod:`gpext.posteriors.inducing`. With the sites of an augmentation this is the
natural-gradient step of size rho on the augmented bound: gpytorch's NGD(lr=rho) on :class:`gpext.mlls.AugmentedELBO`
moves q(u) to the same place, and rho = 1 on all the data is exact coordinate ascent. With those of E = E_q log p(y | f)
itself, tau = -2 dE/dv and nu = dE/dm + tau m, it is that step on the exact ELBO, for any likelihood [Khan & Lin 2017];
there rho is halved until the bound of the batch, s sum_i E_i - KL(q || p), does not fall.

A likelihood of D latent functions needs D independent q(u), a batch of them: its E_i depends on D marginals. `update`
and `gpext.fit` add their divergences up; gpytorch's objectives do where the strategy is wrapped in an
`IndependentMultitaskVariationalStrategy` with D tasks, and have D entries, each with all the data, where it is not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gpext.checks import check_tensor
from gpext.designs import Design
from gpext.inference import LikelihoodTerm, require_augmentation
from gpext.likelihoods import LatentLikelihood
from gpext.parallel import Ranks
from gpext.posteriors import InducingPosterior
from gpext.variational.batch_checks import augmentation_for, check_data, check_latents, require_term
from gpext.variational.bound_gradients import backpropagate
from gpext.variational.design_inputs import DesignInputs, Inputs, take_inputs
from gpext.variational.natural_step import (
    Batch,
    Gradient,
    UpdateOptions,
    evaluate_batch,
    evaluate_batches,
    rising_rate,
    total_divergence,
)
from gpext.variational.natural_strategy import NaturalVariationalStrategy
from gpext.variational.prior_blocks import Prepared, whiten


class SiteVariationalStrategy(NaturalVariationalStrategy):
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
        TypeError: the variational distribution has no natural parameters, or the inducing points are no tensor.
        ValueError: no inducing points, some that are not finite, or another number than the variational distribution's.

    Example:
        >>> import gpytorch, torch, gpext
        >>> class Model(gpytorch.models.ApproximateGP):
        ...     def __init__(self, inducing_points):
        ...         super().__init__(SiteVariationalStrategy(self, inducing_points))
        ...         self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel()
        ...
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> x = torch.linspace(-2, 2, 40).double().unsqueeze(-1)
        >>> model = Model(x[::8]).double()
        >>> model.variational_strategy.update(x, (x[:, 0] > 0).double(), gpext.likelihoods.BernoulliLogitLikelihood())
        >>> bool(model.eval()(x[:1]).mean < 0)
        True
    """

    def update(
        self,
        x: Tensor,
        y: Tensor,
        likelihood: LatentLikelihood,
        rate: float = 1.0,
        num_data: int | None = None,
        *,
        design: Design | None = None,
        bound: LikelihoodTerm | None = None,
        gradient: LikelihoodTerm | None = None,
        share: int | None = None,
        ranks: Ranks | None = None,
    ) -> Tensor | None:
        """Move q(u) a fraction `rate` of the way to the optimum for these data, in natural parameters.

        Args:
            x: inputs (..., B, d), or (..., P, d) with a design.
            y: targets (..., B), or what the likelihood takes.
            likelihood: any likelihood of gpext.
            rate: rho in (0, 1].
            num_data: N, if (x, y) is a minibatch; their number by default.
            design: A (B, P), a :class:`gpext.designs.Design`, if datum i depends on (A f)_i of the values f at the P
                inputs x: comparisons, sums. Of all comparisons of a data set, `design.take(index)` are those of a
                minibatch; the kernel is evaluated only at inputs whose column has an entry.
            bound: whose sites: the augmented bound's, the default where the likelihood has one, or those of the exact
                expectation of log p(y | f), where rho is halved until the bound of this batch does not fall (and q(u)
                stays as it is if it always would).
            gradient: also add the derivatives of the loss -ELBO / N, at q(u) before the step, to the `.grad` of the
                hyperparameters and the likelihood's parameters, from the same kernel evaluation. The ELBO has the
                augmented bound or the exact expectation of log p(y | f); None leaves `.grad` alone.
            share: of how many of the N data the batch is a sample; of all by default.
            ranks: processes with the same model and N, each with a batch and a `share` of its own: q(u), the
                derivatives and the value become those of all of them. This one alone by default.

        Returns:
            With a `gradient`, the ELBO it belongs to, per datum, before the step, (...).

        Raises:
            TypeError: a likelihood that is not gpext's, an augmented bound of one that has none, or half precision.
            ValueError: bad data or rate. q(u) is unchanged after any error.
            torch.linalg.LinAlgError: K_zz or the precision of q(u) is not positive definite.
            FloatingPointError: the step is not finite.
            gpext.parallel.RankError: a rank cannot be reached. Any other error of one rank is raised on all.
        """
        bound = require_term(likelihood, bound)
        ranks = Ranks.alone() if ranks is None else ranks

        def of_this_rank() -> Batch:
            if gradient not in (None, "augmented", "exact"):
                raise ValueError(f"gradient must be None, 'augmented' or 'exact'; got {gradient!r}.")
            if gradient == "augmented":
                require_augmentation(likelihood)
            options = UpdateOptions(bound, rate, num_data, share)
            inputs: Inputs = x
            if design is not None:
                check_tensor("inputs", x)
                inputs = DesignInputs(x, design)
            check_data(inputs, y, likelihood, self.inducing_points, num_data, share)
            if design is not None:
                inputs = take_inputs(inputs, slice(None))
            return self._evaluate(inputs, y, likelihood, options, gradient)

        same = f"an update of q(u), {rate=}, {bound=}, {gradient=}"
        return self._step(of_this_rank, likelihood, rate, gradient is not None, ranks, same)

    def update_unchecked(
        self,
        x: Inputs,
        y: Tensor,
        likelihood: LatentLikelihood,
        options: UpdateOptions,
        gradient: LikelihoodTerm,
        ranks: Ranks,
    ) -> Tensor:
        """Move q(u) as :meth:`update` with a `gradient`, by data that have been checked; return the ELBO per datum.

        Raises:
            torch.linalg.LinAlgError, FloatingPointError, gpext.parallel.RankError: as :meth:`update`.
        """

        def of_this_rank() -> Batch:
            return self._evaluate(x, y, likelihood, options, gradient)

        same = f"an update of q(u), rate={options.rate}, bound={options.bound!r}, {gradient=}"
        value = self._step(of_this_rank, likelihood, options.rate, True, ranks, same)
        assert value is not None  # as there is a gradient
        return value

    def update_prepared(
        self,
        data: Prepared,
        likelihood: LatentLikelihood,
        options: UpdateOptions,
        ranks: Ranks | None = None,
        value: LikelihoodTerm | None = None,
    ) -> Tensor | None:
        """Move q(u) as :meth:`update`, without a `gradient`, by a batch that :meth:`prepare` has made.

        Args:
            data: made at the current hyperparameters, for the bound of `options`.
            likelihood: that of `data`.
            options: of the step.
            ranks: as in :meth:`update`.
            value: the bound in the ELBO per datum, before the step, that is returned; None returns None.

        Raises:
            torch.linalg.LinAlgError, FloatingPointError, gpext.parallel.RankError: as :meth:`update`.
        """
        # Marginals in the model's dtype suffice where there is no bound to compare.
        dtype = self.inducing_points.dtype if options.bound == "augmented" else torch.float64
        ranks = Ranks.alone() if ranks is None else ranks

        def of_this_rank() -> Batch:
            return evaluate_batch(self.posterior(dtype), data, likelihood, options, value=value)

        same = f"an update of q(u), rate={options.rate}, bound={options.bound!r}, gradient=None"
        return self._step(of_this_rank, likelihood, options.rate, False, ranks, same)

    @torch.no_grad()
    def _step(
        self,
        of_this_rank: Callable[[], Batch],
        likelihood: LatentLikelihood,
        rate: float,
        moving: bool,
        ranks: Ranks,
        same: str,
    ) -> Tensor | None:
        """Move q(u) by the batches of all ranks; return the ELBO per datum if they have it.

        Args:
            of_this_rank: evaluates the batch, and adds derivatives to `.grad` if `moving`.
            likelihood: whose number of latents q(u) must have.
            rate: rho.
            moving: whether there are derivatives.
            ranks: to add up over.
            same: what all ranks must agree on, in words.
        """
        self.check_latents(likelihood)
        if ranks.size == 1:
            batch = of_this_rank()
        else:
            eta, half = self._natural()
            scalar = (eta[..., 0] if likelihood.num_latents is None else eta[..., 0, 0]).double()
            parameters = [*self.model.hyperparameters(), *likelihood.parameters()] if moving else []
            batch = evaluate_batches(of_this_rank, ranks, eta, half, scalar, parameters, of=same)
        if batch.gain is not None:
            here = batch.gain - total_divergence(batch.posterior, likelihood)

            def bound_at(moved: InducingPosterior) -> Tensor:
                (expected,) = ranks.sum(lambda: [batch.gain_at(moved)], [here])
                return expected - total_divergence(moved, likelihood)

            eta, half = self._natural()
            rate = rising_rate(eta, -2 * half, batch.vector, batch.gram, rate, here, bound_at)
        self.move(batch.vector, batch.gram, rate)
        if batch.total is None:
            return None
        return (batch.total - total_divergence(batch.posterior, likelihood)) / batch.num_data

    @torch.no_grad()
    def _evaluate(
        self,
        x: Inputs,
        y: Tensor,
        likelihood: LatentLikelihood,
        options: UpdateOptions,
        differentiated: LikelihoodTerm | None,
    ) -> Batch:
        """Return the batch of data that have been checked, and add the derivatives of a bound to `.grad`."""
        gradient = None
        if differentiated is None:
            chol, cross = self._factor(), self.cross_blocks(x)
        else:
            with torch.enable_grad():
                inducing_covariance, cross = self.prior_blocks(x)
            chol = self._factor()
            gradient = Gradient(differentiated, partial(backpropagate, inducing_covariance, cross, chol))
        data = Prepared(whiten(chol, cross), y, augmentation_for(options.bound, likelihood, y))
        # Of q(u) only marginals are asked for, and they are of the model's dtype, unless there is a bound to compute.
        needs_bound = options.bound == "exact" or differentiated is not None
        posterior = self.posterior(torch.float64 if needs_bound else self.inducing_points.dtype)
        return evaluate_batch(posterior, data, likelihood, options, gradient)

    @torch.no_grad()
    def prepare(self, x: Inputs, y: Tensor, likelihood: LatentLikelihood, bound: LikelihoodTerm) -> Prepared:
        """Return a batch for :meth:`update_prepared`: all that does not depend on q(u).

        The data are not checked.

        Raises:
            torch.linalg.LinAlgError: K_zz is not positive definite.
        """
        return Prepared(whiten(self._factor(), self.cross_blocks(x)), y, augmentation_for(bound, likelihood, y))

    def check_latents(self, likelihood: LatentLikelihood) -> None:
        """Raise ValueError unless there is a q(u) for each latent of a datum."""
        check_latents(likelihood, self._variational_distribution.natural_vec.shape[:-1])
