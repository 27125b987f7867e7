r"""A variational bound with q(u) eliminated: a deterministic objective for hyperparameters [Titsias 2009, GWO20 A.3].

N Gaussian sites (nu, tau), numbers that stay as they are while the hyperparameters theta move, make of any prior

    q(v; theta) = N(S eta, S),   S = (I + A diag(tau) A')^-1,   eta = A (nu - tau mu)

in the whitened coordinates of :mod:`gpext.posteriors.inducing`, and

    F(theta) = sum_i F_i(m_i, v_i) - KL(q(v) || N(0, I))

is a lower bound on log p(y) for every theta and every sites, with F_i the exact E_q[log p(y_i | f_i)] or the augmented
bound on it. q adapts to theta, so F is far less stiff in theta than the ELBO at a fixed q. The derivative is the total
one, the way through q included (:mod:`gpext.posteriors.fixed_sites`), so F is an honest objective for L-BFGS.

The best sites at given theta are nu_i = g_i + t_i m_i and tau_i = t_i with g_i = dF_i/dm_i and t_i = -2 dF_i/dv_i.
:meth:`CollapsedBound.refresh` moves there: a natural-gradient step on q(u) of length one, halved until F rises. For the
augmented bound it is coordinate ascent over w, and never has to be halved.

Latents that share their prior (a kernel without batch shape) share its blocks, and their derivatives are added up.

Cost of an evaluation for N data and M inducing points: two triangular solves, and four products with derivatives, of
size M x M x N. The kernel is evaluated twice, in blocks of data that stay in cache; memory is one M x N matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpext.inference import LikelihoodTerm, LocalTerms, likelihood_terms
from gpext.likelihoods import AugmentedLikelihood, LatentLikelihood
from gpext.parallel import Ranks
from gpext.posteriors import (
    FixedSites,
    InducingPosterior,
    condition_inducing,
    factorise,
    lower_blocks,
    project,
    symmetric_matrix,
)
from gpext.sites import GaussianSites
from gpext.variational.bound_gradients import gradients_apart, push_back
from gpext.variational.design_inputs import Inputs, number_of, places, take_inputs
from gpext.variational.natural_step import total_divergence
from gpext.variational.prior_blocks import FactorCache
from gpext.variational.site_variational_strategy import SiteVariationalStrategy

_MOST_HALVINGS = 30


@dataclass
class _Block:
    """A slice of the data, its sites, and the prior there at the parameters of the last evaluation."""

    x: Inputs  # (..., B, d)
    y: Tensor  # (..., B)
    sites: GaussianSites | None = None  # kept between evaluations
    proposal: GaussianSites = field(init=False)  # the best ones at the marginals of the last q
    whitened: Tensor = field(init=False)  # A (..., M, B)
    prior_mean: Tensor = field(init=False)  # mu (..., B)
    conditional_variance: Tensor = field(init=False)  # k_ii - q_ii (..., B)

    def marginals(self, posterior: InducingPosterior) -> tuple[Tensor, Tensor]:
        return posterior.marginals(self.whitened, self.prior_mean, self.conditional_variance)


class CollapsedBound:
    """F(theta) over fixed data, with its derivatives in the hyperparameters and the likelihood's parameters.

    Args:
        strategy: the variational strategy of the model; :meth:`commit` writes its q(u).
        likelihood: any likelihood of gpext; one of D latents for D independent q(u), a batch.
        x: inputs (..., N, d), or those of a design.
        y: targets (..., N), or what the likelihood takes.
        bound: what F_i is: the augmented bound on E_q[log p(y_i | f_i)] or that expectation itself.
        start: whose q(f) gives the first sites: by default the strategy itself; or one of other inducing points.
        block_size: data handled at a time.
        ranks: processes with the same model, each with data of its own, whose bound it is; this one alone by default.

    Example:
        >>> import gpytorch, torch, gpext
        >>> class Model(gpytorch.models.ApproximateGP):
        ...     def __init__(self, z):
        ...         super().__init__(gpext.variational.SiteVariationalStrategy(self, z))
        ...         self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel()
        ...
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> x = torch.linspace(0, 1, 20).double().unsqueeze(-1)
        >>> strategy, y = Model(x[::5].clone()).double().variational_strategy, (x[:, 0] > 0.5).double()
        >>> bound = CollapsedBound(strategy, gpext.likelihoods.BernoulliLogitLikelihood(), x, y)
        >>> bool(bound.settle() > bound.num_data * torch.tensor(0.5).log())  # better than tossing a coin
        True
    """

    def __init__(
        self,
        strategy: SiteVariationalStrategy,
        likelihood: LatentLikelihood,
        x: Inputs,
        y: Tensor,
        *,
        bound: LikelihoodTerm = "augmented",
        start: SiteVariationalStrategy | None = None,
        block_size: int = 1024,
        ranks: Ranks | None = None,
    ) -> None:
        self.strategy, self.likelihood, self.bound = strategy, likelihood, bound
        self.ranks = Ranks.alone() if ranks is None else ranks
        self._start = start
        held = number_of(x)
        number = torch.tensor(float(held), dtype=torch.float64, device=places(x).device)
        self.num_data = int(self.ranks.sum(lambda: [number], [number])[0])  # N
        blocks = [slice(start, start + block_size) for start in range(0, held, block_size)]
        self._blocks = [_Block(take_inputs(x, index), likelihood.take(y, index)) for index in blocks]
        # The factor of K_zz, while what follows belongs to the current parameters.
        self._loaded: FactorCache[Tensor] = FactorCache()
        self._learns_likelihood = any(parameter.requires_grad for parameter in likelihood.parameters())
        # The terms of the likelihood at the current q, while its parameters and the prior's stay as well.
        self._local: FactorCache[list[tuple[Tensor, LocalTerms]]] = FactorCache()
        self._posterior: InducingPosterior
        self._natural: tuple[Tensor, Tensor]  # what the sites make of eta and of Lambda - I
        self._next_natural: tuple[Tensor, Tensor] | None  # what the proposals would
        self._value: Tensor

    def evaluate(self, *, gradient: bool = True) -> Tensor:
        """Return F (...), float64, at the current parameters and the sites as they are.

        The first time these are the best at the strategy's q(u): for the augmented bound, where there is one.

        Args:
            gradient: add the derivatives of the loss -F / N, summed over batches, to the parameters' `.grad`.

        Raises:
            torch.linalg.LinAlgError: K_zz or the precision of q(u) is not positive definite.
        """
        with torch.set_grad_enabled(gradient):
            inducing_covariance = self.strategy.inducing_covariance()
        key = self.strategy.prior_key()
        chol = self._loaded.get(key)
        is_first = any(block.sites is None for block in self._blocks)
        if chol is None:
            self._loaded.forget()  # an error on the way leaves blocks of two minds
            chol = self.ranks.together(lambda: self._load_prior(inducing_covariance))
            self._local.forget()
            self._natural = self._project([_known(block.sites) for block in self._blocks])
            self._posterior = _condition(*self._natural)
            self._loaded.put(key, chol)
        local = self._local.get(self._local_key())
        if local is None:
            local, total = self._first_terms() if is_first else self._local_terms()
            self._accept(local, total)
        if gradient:
            self._local.forget()  # the backward pass frees their graph
            self._backpropagate(inducing_covariance, chol, local)
        return self._value

    @torch.no_grad()
    def refresh(self) -> Tensor:
        """Move the sites towards their best values at the parameters of the last evaluation, and return F (...) there.

        The step is halved until F rises (for every GP of a batch); if it never does, the sites stay.
        """
        proposed = self._proposed_natural()
        start = self._posterior, self._natural, self._value
        tolerance = 1e-12 * self._value.abs()
        for halving in range(_MOST_HALVINGS):
            rate = 0.5**halving
            self._natural = torch.lerp(start[1][0], proposed[0], rate), torch.lerp(start[1][1], proposed[1], rate)
            try:
                self._posterior = _condition(*self._natural)
            except torch.linalg.LinAlgError:  # a negative precision too many: shorten the step
                continue
            local, total = self._local_terms()
            sites = [_known(block.sites).lerp(block.proposal, rate) for block in self._blocks]
            if bool((total >= start[2] - tolerance).all()):
                for block, moved in zip(self._blocks, sites, strict=True):
                    block.sites = moved
                self._accept(local, total)
                return self._value
        self._posterior, self._natural, self._value = start
        return self._value

    def settle(self, *, tolerance: float = 1e-6, max_refreshes: int = 100) -> Tensor:
        """Refresh the sites at the current parameters until F / N gains less than `tolerance`; return F (...)."""
        last = self.evaluate(gradient=False)
        for _ in range(max_refreshes):
            value = self.refresh()
            if bool(((value - last) / self.num_data < tolerance).all()):
                break
            last = value
        return self._value

    def forget(self) -> None:
        """Make the next evaluation start from the sites alone: an interrupt leaves what was made of them incomplete."""
        self._loaded.forget()

    @property
    def divergence(self) -> Tensor:
        """KL(q(u) || p(u)) (...) of the last evaluation or refreshment."""
        return self._posterior.divergence_from_prior

    @torch.no_grad()
    def commit(self, *, weight: float = 1.0) -> None:
        """Write the q(u) of the last evaluation or refreshment into the strategy; each site counts `weight` times."""
        self.strategy.initialise()
        vector, gram = self._natural
        self.strategy.move(weight * vector, weight * gram, rate=1.0)

    def _local_key(self) -> list[Tensor | float]:
        return [*self.strategy.prior_key(), *self.likelihood.parameters()]

    @torch.no_grad()
    def _load_prior(self, inducing_covariance: Tensor) -> Tensor:
        chol = factorise(inducing_covariance)
        factor = chol.to(inducing_covariance.dtype)
        marginals: Callable[[_Block], tuple[Tensor, Tensor]] | None = None
        if any(block.sites is None for block in self._blocks):
            marginals = self._first_marginals()
        for block in self._blocks:
            cross = self.strategy.cross_blocks(block.x)
            block.whitened = torch.linalg.solve_triangular(factor, cross.covariance, upper=False)
            block.prior_mean = cross.mean
            block.conditional_variance = cross.variance - block.whitened.square().sum(-2)
            if marginals is not None:
                block.sites = self._first_sites(block.y, *marginals(block))
        return chol

    def _first_marginals(self) -> Callable[[_Block], tuple[Tensor, Tensor]]:
        """Return the mean and variance of the start's q(f) at a block; a new strategy's own is the prior."""
        start = self._start
        if start is not None:
            return lambda block: start.marginals(block.x)
        posterior = self.strategy.posterior()
        return lambda block: block.marginals(posterior)

    @torch.no_grad()
    def _project(self, sites: list[GaussianSites]) -> tuple[Tensor, Tensor]:
        def of_this_rank() -> list[Tensor]:
            vector, gram = torch.zeros_like(eta), torch.zeros_like(half)
            for block, own in zip(self._blocks, sites, strict=True):  # with many latents a term is as large as the data
                by_block = project(block.whitened, block.prior_mean, own)
                vector += by_block[0]
                gram += by_block[1]
            return [vector, *lower_blocks(gram)]

        eta, half = (p.detach().double() for p in self.strategy._variational_distribution.parameters())
        vector, *blocks = self.ranks.sum(of_this_rank, [eta, *lower_blocks(half)])
        return vector, symmetric_matrix(blocks)

    def _local_terms(self) -> tuple[list[tuple[Tensor, LocalTerms]], Tensor]:
        """Return the means m and the terms F_i of each block at the current q, and F (...)."""
        local: list[tuple[Tensor, LocalTerms]] = []

        def of_this_rank() -> list[Tensor]:
            local.extend(self._terms_of(block) for block in self._blocks)
            return [torch.stack([terms.total for _, terms in local]).sum(0)]

        divergence = total_divergence(self._posterior, self.likelihood)
        (total,) = self.ranks.sum(of_this_rank, [divergence])
        return local, total - divergence

    def _terms_of(self, block: _Block) -> tuple[Tensor, LocalTerms]:
        with torch.no_grad():
            mean, variance = block.marginals(self._posterior)
            if not bool((mean.isfinite() & variance.isfinite()).all()):
                raise torch.linalg.LinAlgError(
                    "the marginals of q(f) are not finite at these parameters of the kernel and the mean."
                )
        return mean, likelihood_terms(self.likelihood, block.y, mean, variance, self.bound)

    def _first_terms(self) -> tuple[list[tuple[Tensor, LocalTerms]], Tensor]:
        """Return the terms at the first sites; at the prior where these overshoot, as at a count of a million."""
        try:
            local, total = self._local_terms()
            if bool(total.isfinite().all()):
                return local, total
        except torch.linalg.LinAlgError:  # not even the marginals are finite
            pass
        for block in self._blocks:
            sites = _known(block.sites)
            block.sites = GaussianSites(torch.zeros_like(sites.shift), torch.zeros_like(sites.precision))
        self._natural = self._project([_known(block.sites) for block in self._blocks])
        self._posterior = _condition(*self._natural)
        return self._local_terms()

    def _first_sites(self, y: Tensor, mean: Tensor, variance: Tensor) -> GaussianSites:
        """Return sites at which there is a q(u): precisions that are not negative."""
        kind: LikelihoodTerm = "augmented" if isinstance(self.likelihood, AugmentedLikelihood) else "exact"
        best = likelihood_terms(self.likelihood, y, mean, variance, kind).best_sites(mean)
        known = best.precision >= 0
        return GaussianSites(best.shift.where(known, 0.0), best.precision.where(known, 0.0))

    @torch.no_grad()
    def _accept(self, local: list[tuple[Tensor, LocalTerms]], value: Tensor) -> None:
        self._value = value
        if not self._learns_likelihood:  # else a write to its parameters, even of equal values, would spoil the graph
            self._local.put(self._local_key(), local)
        self._next_natural = None
        for block, (mean, terms) in zip(self._blocks, local, strict=True):
            block.proposal = terms.best_sites(mean)

    def _proposed_natural(self) -> tuple[Tensor, Tensor]:
        if self._next_natural is None:
            self._next_natural = self._project([block.proposal for block in self._blocks])
        return self._next_natural

    def _backpropagate(self, inducing_covariance: Tensor, chol: Tensor, local: list[tuple[Tensor, LocalTerms]]) -> None:
        """Push the derivatives of -F / N back to the parameters."""
        weight = -1 / self.num_data
        adjoint = FixedSites(chol, self._posterior, self._natural[1], *self._proposed_natural())
        everyone = self.ranks.size > 1
        parameters = [*self.strategy.model.hyperparameters(), *self.likelihood.parameters()] if everyone else []

        def of_this_rank() -> list[Tensor]:
            if self.ranks.rank == 0:  # it belongs to all
                push_back((inducing_covariance, (weight * adjoint.inducing()).to(inducing_covariance.dtype)))
            for block, (mean, terms) in zip(self._blocks, local, strict=True):
                by_cross, by_mean = adjoint.cross(
                    block.whitened, mean, _known(block.sites), terms.mean_gradient, terms.precision
                )
                cross = self.strategy.cross_blocks(block.x)
                push_back(
                    (cross.covariance, weight * by_cross),
                    (cross.variance, -0.5 * weight * terms.precision),
                    (cross.mean, weight * by_mean),
                    (terms.values, torch.full_like(terms.values, weight)),
                )
            return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]

        with gradients_apart(parameters) as slopes:
            slopes += self.ranks.sum(of_this_rank, parameters)


def _condition(vector: Tensor, gram: Tensor) -> InducingPosterior:
    precision = gram.clone()
    precision.diagonal(dim1=-2, dim2=-1).add_(1)
    return condition_inducing(vector, precision)


def _known(sites: GaussianSites | None) -> GaussianSites:
    assert sites is not None, "evaluate first"
    return sites
