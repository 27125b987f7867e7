r"""A gpytorch variational strategy with one Gaussian site for each datum: full-data inference, no inducing points.

The "inducing points" are the training inputs, and q(f) = p(f) prod_i t_i(f_i) / Z is the posterior that an inference
rule finds there; the sites are what is stored. Predictions condition the joint prior on them.

With M inducing inputs Z the prior is the sparse one, under which the f_i are independent given f(Z) and keep their own
variances (FITC) [Snelson & Ghahramani 2006]; a step of every rule then takes O(N M^2) [Naish-Guzman & Holden 2007]:

    L L' = K_zz + jitter,   Phi = K_xz L^-T,   p(f) = N(mu, Phi Phi' + diag(k_ii - |phi_i|^2))

With neighbours it is that of :mod:`gpext.operators.neighbour_covariance`, whose precision is sparse; with both, the
covariance that inducing inputs leave is by neighbours, not diagonal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.models import ApproximateGP
from gpytorch.variational import _VariationalDistribution, _VariationalStrategy
from linear_operator.operators import (
    DiagLinearOperator,
    LinearOperator,
    LowRankRootAddedDiagLinearOperator,
    LowRankRootLinearOperator,
    RootLinearOperator,
)
from torch import Tensor

from gpext.bounds import num_latents
from gpext.callers import warn_caller
from gpext.designs import Design
from gpext.inference import InferenceResult, InferenceWarning, Rule, Status
from gpext.inference.problem import Problem
from gpext.kernels import accurate, dense_covariance
from gpext.posteriors import (
    JointPosterior,
    LowRankJointPosterior,
    LowRankPosterior,
    NeighbourJointPosterior,
    NeighbourPosterior,
    NeighbourPrior,
    factorise,
    predict_latent,
)
from gpext.sites import BlockSites, CoupledSites, GaussianSites, JointSites
from gpext.variational.design_inputs import row_variances
from gpext.variational.neighbour_choice import NeighbourChoice
from gpext.variational.prior_blocks import FactorCache, outside_inference_mode, split_covariance


class _Sites(_VariationalDistribution):
    """The sites as buffers, so that they are saved with the model."""

    shift: Tensor
    precision: Tensor
    coupling: Tensor | None
    direction: Tensor | None

    def __init__(self, num_data: int, like: Tensor) -> None:
        super().__init__(num_data, torch.Size())
        self.register_buffer("shift", like.new_zeros(num_data))
        self.register_buffer("precision", like.new_zeros(num_data))

        self.register_buffer("coupling", None)  # of sites that couple several latents
        self.register_buffer("direction", None)

    @property
    def value(self) -> GaussianSites | JointSites:
        if self.precision.dim() > self.shift.dim():
            return BlockSites(self.shift, self.precision)
        if self.coupling is None or self.direction is None:
            return GaussianSites(self.shift, self.precision)
        return CoupledSites(self.shift, self.precision, self.coupling, self.direction)

    def set(self, sites: GaussianSites | JointSites) -> None:
        self.shift, self.precision = sites.shift.detach(), sites.precision.detach()
        self.coupling = self.direction = None
        if isinstance(sites, CoupledSites):
            self.coupling, self.direction = sites.coupling.detach(), sites.direction.detach()

    def forward(self) -> Any:
        raise NotImplementedError("sites alone are no distribution; see LatentVariationalStrategy.result().")

    def initialize_variational_distribution(self, prior_dist: MultivariateNormal) -> None:
        """Do nothing: sites of zero are the prior."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("shift", "precision", "coupling", "direction"):  # their shapes show when the model is first called
            if prefix + name in state_dict:
                setattr(self, name, torch.zeros_like(state_dict[prefix + name]).to(self.shift))
        super()._load_from_state_dict(state_dict, prefix, *args)


class LatentVariationalStrategy(_VariationalStrategy):
    """q(f) at the training inputs by a rule of `gpext.inference`, and predictions from it.

    Args:
        model: the model this belongs to, with `likelihood` and `train_targets`.
        train_inputs: (..., N, d).
        rule: how to infer.
        sparse_inputs: Z (M, d) for the sparse prior, learnt with the hyperparameters unless there are neighbours, too;
            None for the exact one.
        design: A (N, P), if datum i sees (A f)_i of the values f at P inputs; None if it sees f_i.
        neighbours: how neighbours are chosen, for the nearest-neighbour prior; None for the exact one.

    Example:
        >>> import gpytorch, torch, gpext
        >>> class Model(gpext.models.LatentGP):
        ...     def __init__(self, x, y, likelihood):
        ...         super().__init__(x, y, likelihood)
        ...         self.mean_module = gpytorch.means.ConstantMean()
        ...         self.covar_module = gpytorch.kernels.RBFKernel()
        ...
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> x = torch.linspace(0, 1, 8).double()
        >>> model = Model(x, (x > 0.5).double(), gpext.likelihoods.BernoulliLogitLikelihood()).double()
        >>> strategy = model.variational_strategy
        >>> strategy.result().status.name, strategy.sites.precision.shape
        ('CONVERGED', torch.Size([8]))
    """

    def __init__(
        self,
        model: ApproximateGP,
        train_inputs: Tensor,
        rule: Rule,
        sparse_inputs: Tensor | None = None,
        design: Design | None = None,
        neighbours: NeighbourChoice | None = None,
    ) -> None:
        super().__init__(model, train_inputs, _Sites(_num_data(train_inputs, design), train_inputs), False)
        self.design = design
        self.neighbours = None if neighbours is None else neighbours.to(train_inputs.device)
        # Data are no part of a state dict, as with ExactGP: one that is loaded keeps the inputs its targets belong to.
        self.register_buffer("inducing_points", self.inducing_points, persistent=False)
        self.rule = rule
        self.sparse_inputs = None
        if sparse_inputs is not None:
            # With neighbours of what Z leaves, Z moves to where that approximation, not the prior, suits the data.
            self.sparse_inputs = torch.nn.Parameter(sparse_inputs.detach().clone(), requires_grad=neighbours is None)
        self._known: FactorCache[Tensor] = FactorCache()
        self._result: InferenceResult | None = None
        self._result_of: tuple[Any] = (None,)  # the likelihood; a module alone would become a part of this one

    @property
    def num_data(self) -> int:
        """The number of training data."""
        return _num_data(self.inducing_points, self.design)

    def set_rule(self, rule: Rule) -> None:
        """Infer by another rule from now on."""
        self.rule, self._result = rule, None

    @property
    def sites(self) -> GaussianSites | JointSites | None:
        """The sites that the next inference starts from; None before the first one."""
        return self._variational_distribution.value if bool(self.variational_params_initialized.item()) else None

    def start_from(self, sites: GaussianSites | JointSites) -> None:
        """Let the next inference start from these sites, of an earlier one for these data."""
        self._variational_distribution.set(sites)
        self.variational_params_initialized.fill_(1)
        self._result = None

    def set_inputs(self, train_inputs: Tensor, design: Design | None = None) -> None:
        """Replace the training inputs and the design; the sites start anew."""
        self.inducing_points, self.design = train_inputs, design
        self._variational_distribution = _Sites(self.num_data, train_inputs)
        if self.neighbours is not None:
            self.neighbours.reset(train_inputs.size(-2))
        self.variational_params_initialized.fill_(0)
        self._result = None

    def choose_neighbours(self) -> bool:
        """Choose neighbours by the current lengthscales, if the prior has any; return whether they have changed."""
        known = self.neighbours
        return known is not None and known.choose(self.model, self.inducing_points, self._root_of)

    @property
    def prior_distribution(self) -> MultivariateNormal:
        """p(f) at the training inputs, or p(A f) with a design."""
        if self.neighbours is not None:
            return self.neighbours.prior(self.model, self.inducing_points, self._root_of, several=self._is_joint)
        if self.sparse_inputs is None:
            prior = self.model.forward(self.inducing_points)
            return prior if self.design is None else self.design(prior)
        mean, root, rest = self._sparse_prior(self.inducing_points, self.sparse_inputs)
        if self.design is not None:
            mean, root = self.design.times(mean), self.design.times_matrix(root)
            rest = (self._variance_of_rows(self.design) - root.square().sum(-1)).clamp_min(0)  # by rounding alone
        covariance = LowRankRootAddedDiagLinearOperator(LowRankRootLinearOperator(root), DiagLinearOperator(rest))
        return MultivariateNormal(mean, covariance)

    def _sparse_prior(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mu (..., N), Phi (..., N, M) and what Phi Phi' leaves of the variances (..., N)."""
        if z.shape[:-2] != x.shape[:-2]:
            x, z = self._expand_inputs(x, z)
        size = z.size(-2)
        joint = self.model.forward(torch.cat([z, x], dim=-2))
        cross, variance = split_covariance(joint.lazy_covariance_matrix, size)
        inner = dense_covariance(self.model.forward(z).lazy_covariance_matrix).double()
        inner = inner + self.jitter_val * torch.eye(size, dtype=inner.dtype, device=inner.device)
        root = torch.linalg.solve_triangular(factorise(inner), cross.double(), upper=False).mT
        rest = variance.double() - root.square().sum(-1)
        rest = rest.clamp_min(0)  # with jitter in K_zz, it is negative by rounding alone
        return joint.mean[..., size:], root.to(x.dtype), rest.to(x.dtype)

    @property
    def _root_of(self) -> Callable[[Tensor], Tensor] | None:
        z = self.sparse_inputs
        return None if z is None else lambda x: self._sparse_prior(x, z)[1]

    def _variance_of_rows(self, design: Design) -> Tensor:
        """Return the prior variances a_i' K a_i (..., N), from the covariances of the inputs of one row each."""
        x = self.inducing_points
        return row_variances(self.model.forward, x.unsqueeze(0) if self._is_joint and x.dim() == 2 else x, design)

    @property
    def _is_joint(self) -> bool:
        return num_latents(self.model.likelihood) is not None

    @property
    def variational_distribution(self) -> MultivariateNormal:
        """q(f) at the training inputs, or q(A f) with a design."""
        return self.result().posterior

    def kl_divergence(self) -> Tensor:
        """Return KL(q(f) || p(f)) (...), summed over the latents of a datum."""
        conditioned = self.result().conditioned
        if isinstance(conditioned, JointPosterior):
            expected = conditioned.sites.expected_log(conditioned.mean, conditioned.blocks).sum(-1)
            return expected - conditioned.log_normalizer
        expected = conditioned.sites.expected_log(conditioned.mean, conditioned.variance).sum(-1)
        divergence = expected - conditioned.log_normalizer
        return divergence.sum(-1) if self._is_joint else divergence

    @outside_inference_mode()
    def infer(self, prior: MultivariateNormal, targets: Tensor) -> InferenceResult:
        """Run the rule, starting from the sites of the last time.

        Args:
            prior: p(f) at the training inputs; the evidence is differentiable in it.
            targets: what was observed there.
        """
        start = self.sites
        fits = start is not None and start.shift.shape[-1:] == prior.event_shape
        result = self.rule.infer(prior, self.model.likelihood, targets, start=start if fits else None)
        if result.status is not Status.CONVERGED:
            warn_caller(result.message, InferenceWarning)
        if result.status is not Status.NOT_POSITIVE_DEFINITE and bool(result.log_evidence.isfinite().all()):
            self._variational_distribution.set(result.sites)
            self.variational_params_initialized.fill_(1)
        return result

    @outside_inference_mode()
    @torch.no_grad()
    def result(self) -> InferenceResult:
        """Return the inference at the current parameters, outside the graph; kept while they stay as they are."""
        is_known = self._result_of[0] is self.model.likelihood and self._known.get(self._key()) is not None
        if self._result is None or not is_known:
            result = self.infer(self.prior_distribution, self.model.train_targets)
            self._keep(replace(result, log_evidence=result.log_evidence.detach()))
        assert self._result is not None
        return self._result

    @outside_inference_mode()
    @torch.no_grad()
    def restore(
        self, sites: GaussianSites | JointSites, log_evidence: Tensor, status: Status, trace: Tensor, message: str
    ) -> None:
        """Make the :meth:`result` that of an earlier inference for these data and parameters, which ended at `sites`.

        The sites that the next inference starts from are in the state dict, and stay.

        Args:
            sites: float64.
            log_evidence: see :class:`gpext.inference.InferenceResult`.
            status: likewise.
            trace: likewise.
            message: likewise.
        """
        problem = Problem.of(self.prior_distribution, self.model.likelihood, self.model.train_targets, self.rule.jitter)
        found = problem.result("", problem.condition(sites), log_evidence, status, [*trace])
        self._keep(replace(found, log_evidence=log_evidence, status=status, trace=trace, message=message))

    def _keep(self, result: InferenceResult) -> None:
        """Keep a result while parameters and data stay as they are."""
        self._result, self._result_of = result, (self.model.likelihood,)
        self._known.put(self._key(), self.inducing_points)

    def _key(self) -> list[Tensor]:
        known = self.neighbours
        chosen = [] if known is None else [t for t in (known.scale, known.chosen) if t is not None]
        return [*self.model.parameters(), *chosen, self.inducing_points, self.model.train_targets]

    @outside_inference_mode()
    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return q(f) at new inputs (..., S, d), differentiable in them."""
        conditioned = self.result().conditioned
        if isinstance(conditioned, LowRankPosterior | LowRankJointPosterior) and self.sparse_inputs is not None:
            mean, root, _ = self._sparse_prior(x, self.sparse_inputs)
            exact = self.model.forward(x).lazy_covariance_matrix
            return conditioned.predict(mean, root, exact - RootLinearOperator(root))
        train_x = self.inducing_points
        if isinstance(conditioned, NeighbourPosterior | NeighbourJointPosterior):
            assert self.neighbours is not None
            return self.neighbours.predict(self.model.forward, train_x, self._root_of, conditioned, x)
        if train_x.shape[:-2] != x.shape[:-2]:
            x, train_x = self._expand_inputs(x, train_x)
        size = train_x.size(-2)
        joint = self.model.forward(torch.cat([train_x, x], dim=-2))
        covariance = accurate(joint.lazy_covariance_matrix)
        cross = covariance[..., :size, size:].to_dense()
        return self.predict(joint.mean[..., size:], cross, covariance[..., size:, size:])

    def predict(self, mean: Tensor, cross: Tensor, covariance: LinearOperator) -> MultivariateNormal:
        """Return the posterior of S values that are jointly Gaussian with f at the training inputs.

        Args:
            mean: their prior mean (..., S).
            cross: prior covariances of f at the training inputs and them (..., P, S).
            covariance: theirs (..., S, S).

        Raises:
            NotImplementedError: the model has inducing inputs or neighbours, by which alone its predictions know the
                data.
        """
        if self.sparse_inputs is not None or self.neighbours is not None:
            raise NotImplementedError(
                "a model with inducing_inputs or neighbours predicts f alone; leave them out for the posterior of a "
                "part of f."
            )
        conditioned = self.result().conditioned
        assert not isinstance(conditioned, NeighbourPosterior | NeighbourJointPosterior)
        if self.design is not None:
            if isinstance(conditioned, LowRankPosterior | LowRankJointPosterior):
                return predict_latent(conditioned, mean, cross, covariance)
            cross = self.design.times_matrix(cross)
        return conditioned.predict(mean, cross, covariance)

    def predict_given(self, prior: NeighbourPrior, latent: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and variances (..., S) of f at new inputs (S, d) given its values at the training inputs.

        Args:
            prior: by neighbours, at the current parameters.
            latent: f (..., N).
            x: (S, d).
        """
        assert self.neighbours is not None
        return self.neighbours.predict_given(self.model.forward, self.inducing_points, self._root_of, prior, latent, x)

    def __call__(self, x: Tensor, prior: bool = False, **kwargs: Any) -> MultivariateNormal:
        """Return p(f) (with `prior`) or q(f) at inputs x; the sparse prior is that of the training inputs alone."""
        if not prior:
            return self.forward(x)
        if self.training and (self.design is not None or self.neighbours is not None):
            return self.prior_distribution
        if self.sparse_inputs is not None and torch.equal(x, self.inducing_points):
            return self.prior_distribution
        return self.model.forward(x, **kwargs)


def _num_data(inputs: Tensor, design: Design | None) -> int:
    return inputs.size(-2) if design is None else design.num_data
