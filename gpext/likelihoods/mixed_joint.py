r"""Data of several families, some of one latent function and some of several.

With D latents in all, a datum of a family of d < D latents depends on the first d of them, s, and not on the others, r:

    log p(y | f) = log p_k(y | f_s),     u_r = 0,     U_rs = 0,     U_rr = 0

The moments of N(f | m, V) p(y | f)^eta / Z^ are those of f_s and, the others being linear in f_s and a rest that the
datum does not move, with G = V_rs V_ss^-1,

    m^_r = m_r + G (m^_s - m_s),     V^_rs = G V^_ss,     V^_rr = V_rr + G (V^_ss - V_ss) G'
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import Likelihood
from linear_operator import to_linear_operator
from linear_operator.operators import BlockDiagLinearOperator
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.functional import pad

from gpext.bounds import num_latents
from gpext.distributions.predictive.correlated_latents import in_every
from gpext.likelihoods.composed import inner_density, inner_expected, inner_point
from gpext.likelihoods.curvature import BlockCurvature, Curvature, log_prob_derivatives
from gpext.likelihoods.joint import JointLikelihood
from gpext.likelihoods.mixed import MixedLikelihood, in_order
from gpext.likelihoods.tilted_moments import tilt
from gpext.quadrature import JointMoments

Local = Callable[[Any, Tensor, Tensor, Tensor], Tensor]  # of a likelihood, targets, means, (co)variances

Made = TypeVar("Made")


class JointMixedLikelihood(MixedLikelihood, JointLikelihood):
    """A `MixedLikelihood` of which a family has several latents: the class of what `MixedLikelihood(...)` returns then.

    Latents (..., D, N), D the largest number of any family. A family of fewer depends on the first.
    """

    def __init__(self, likelihoods: Sequence[Likelihood] = (), index: Tensor | None = None) -> None:
        super().__init__(likelihoods, index)
        for number, likelihood in enumerate(likelihoods):
            if num_latents(likelihood) is not None and not isinstance(likelihood, JointLikelihood):
                raise TypeError(
                    f"of families of several latents MixedLikelihood takes those that have curvature(targets, f), a "
                    f"gpext.likelihoods.JointLikelihood; family {number} is a {type(likelihood).__qualname__}."
                )
        self.num_latents = max(num_latents(likelihood) or 1 for likelihood in likelihoods)

    def curvature(self, targets: Tensor, f: Tensor) -> Curvature | BlockCurvature:
        """Return log p(y | f) to second order at f (..., D, N); zero in the latents that a datum does not depend on.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        joined = self.join(targets)
        found: list[tuple[Tensor, Curvature | BlockCurvature]] = []
        for _, likelihood, rows in self._families(joined):
            y, own = joined[..., rows, 0], latents_of(likelihood, f[..., rows])
            found.append((rows, _curvature(likelihood, y, own, self.num_latents)))
        if all(isinstance(each, Curvature) for _, each in found):
            return _together(Curvature, found)
        return _together(BlockCurvature, found)

    def joint_log_density(self, targets: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
        """Return log int p(y | f) N(f | mean, covariance) df (..., N), by each family's own rule.

        Arguments and errors as :meth:`JointLikelihood.joint_log_density`.
        """

        def local(likelihood: Any, y: Tensor, m: Tensor, V: Tensor) -> Tensor:
            if num_latents(likelihood) is None:
                return inner_density(likelihood, y, m, V)
            return likelihood.joint_log_density(y, m, V)

        return self._integrated(local, targets, mean, covariance)

    def joint_expected_log_density(self, targets: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
        """Return E[log p(y | f)] under N(mean, covariance), (..., N); as :meth:`joint_log_density`."""

        def local(likelihood: Any, y: Tensor, m: Tensor, V: Tensor) -> Tensor:
            if num_latents(likelihood) is None:
                return inner_expected(likelihood, y, m, V)
            return likelihood.joint_expected_log_density(y, m, V)

        return self._integrated(local, targets, mean, covariance)

    def joint_tilted_moments(self, targets: Tensor, mean: Tensor, covariance: Tensor, power: float) -> JointMoments:
        """Return the moments of N(f | mean, covariance) p(y | f)^power, for EP: by each family's own rule."""
        joined = self.join(targets)
        mean, covariance = in_every(self.datum_shape(joined), mean, covariance)
        found = []
        for _, likelihood, rows in self._families(joined):
            y, m, V = joined[..., rows, 0], mean[..., rows], covariance[..., rows]
            own = latents_of(likelihood, m), blocks_of(likelihood, V)
            if num_latents(likelihood) is None:
                of = tilt(likelihood, y, power)(*own)
                moments = JointMoments(of.log_normalizer, of.mean.unsqueeze(-2), of.variance[..., None, None, :])
            else:
                moments = likelihood.joint_tilted_moments(y, *own, power)
            found.append((rows, _with_others(moments, m, V)))
        return _together(JointMoments, found)

    def expansion_point(self, targets: Tensor) -> Tensor:
        """Return where Taylor expands each datum's family (..., D, N), 0 in latents that it does not depend on."""
        joined = self.join(targets)
        found = []
        for _, likelihood, rows in self._families(joined):
            point = inner_point(likelihood, joined[..., rows, 0])
            point = point.unsqueeze(-2) if num_latents(likelihood) is None else point
            found.append((rows, _padded(point.to(joined), self.num_latents)))
        return in_order(found)

    def forward(self, function_samples: Tensor, *args: Any, family: int | None = None, **kwargs: Any) -> Distribution:
        """Return p(y | f) of one family, f (..., D, N).

        Raises:
            NotImplementedError: no family: data of several are no one distribution.
        """
        likelihood = self._family(family)
        return likelihood.forward(latents_of(likelihood, function_samples), *args, **kwargs)

    def marginal(
        self, function_dist: MultivariateNormal, *args: Any, family: int | None = None, **kwargs: Any
    ) -> Distribution:
        """Return p(y) of one family at the marginals of function_dist.

        Raises:
            NotImplementedError: no family: data of several are no one distribution.
            ValueError: function_dist has another number of latents.
        """
        likelihood = self._family(family)
        latents, several = num_latents(likelihood), isinstance(function_dist, MultitaskMultivariateNormal)
        mean, covariance = self._blocks(function_dist)
        if latents is None:
            operator = function_dist.lazy_covariance_matrix
            own = function_dist[..., 0] if several else MultivariateNormal(mean.select(-2, 0), operator[..., 0, :, :])
        elif latents == self.num_latents:
            own = function_dist
        else:  # the marginals of the data alone
            blocks = BlockDiagLinearOperator(to_linear_operator(blocks_of(likelihood, covariance).movedim(-1, -3)))
            own = MultitaskMultivariateNormal(latents_of(likelihood, mean).mT, blocks)
        return likelihood.marginal(own, *args, **kwargs)

    def _integrated(self, local: Local, targets: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
        self.check(targets)
        joined = self.join(targets)
        mean, covariance = in_every(self.datum_shape(joined), mean, covariance)
        found = []
        for _, likelihood, rows in self._families(joined):
            own = latents_of(likelihood, mean[..., rows]), blocks_of(likelihood, covariance[..., rows])
            found.append((rows, local(likelihood, joined[..., rows, 0], *own)))
        return in_order(found)

    def _by_family(self, function: Callable[..., Tensor], targets: Tensor, *latents: Tensor) -> Tensor:
        """Return function(likelihood, targets, *latents) (..., N), family by family, latents (..., D, N)."""
        joined = self.join(targets)
        found = []
        for _, likelihood, rows in self._families(joined):
            own = [latents_of(likelihood, each[..., rows]) for each in latents]
            found.append((rows, function(likelihood, joined[..., rows, 0], *own).to(latents[0].dtype)))
        return in_order(found)


def latents_of(likelihood: Any, value: Tensor) -> Tensor:
    """Return what a likelihood depends on of values (..., D, N): the first (..., N), or the first d (..., d, N)."""
    latents = num_latents(likelihood)
    return value.select(-2, 0) if latents is None else value[..., :latents, :]


def blocks_of(likelihood: Any, covariance: Tensor) -> Tensor:
    """Return the same of covariances (..., D, D, N): the variance (..., N), or the block (..., d, d, N)."""
    latents = num_latents(likelihood)
    return covariance[..., 0, 0, :] if latents is None else covariance[..., :latents, :latents, :]


def _curvature(likelihood: Any, targets: Tensor, f: Tensor, latents: int) -> Curvature | BlockCurvature:
    """Return the curvature of one family in D latents, at those of its own f (..., n) or (..., d, n)."""
    if num_latents(likelihood) is None:
        log_p, slope, bend = log_prob_derivatives(likelihood, targets, f)
        none = torch.zeros_like(f)
        gradient, precision, safe = (
            _padded(each.unsqueeze(-2), latents) for each in (slope, -bend, (-bend).clamp_min(0))
        )
        return Curvature(log_p, gradient, precision, none, torch.zeros_like(gradient), safe)
    found = likelihood.curvature(targets, f)
    gradient = _padded(found.gradient, latents)
    if isinstance(found, BlockCurvature):
        missing = latents - f.size(-2)
        blocks, expected = (pad(each, (0, 0, 0, missing, 0, missing)) for each in (found.blocks, found.expected_blocks))
        return BlockCurvature(found.log_prob, gradient, blocks, expected)
    diagonal, direction, safe = (
        _padded(each, latents) for each in (found.precision, found.direction, found.expected_precision)
    )
    return Curvature(found.log_prob, gradient, diagonal, found.coupling, direction, safe)


def _together(kind: Callable[..., Made], found: Sequence[tuple[Tensor, Any]]) -> Made:
    """Return one dataclass of tensors (..., N) for all data from those of the families, each at its rows."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(*(in_order([(rows, getattr(each, name)) for rows, each in found]) for name in names))


def _padded(value: Tensor, latents: int) -> Tensor:
    """Return values (..., d, n) with zeros for the other latents, (..., D, n)."""
    return pad(value, (0, 0, 0, latents - value.size(-2)))


def _with_others(own: JointMoments, mean: Tensor, covariance: Tensor) -> JointMoments:
    """Return the moments of D latents, N(mean, covariance) without a datum, given those of the first d with it."""
    d = own.mean.size(-2)
    if d == mean.size(-2):
        return own
    V, tilted = covariance.movedim(-1, -3), own.covariance.movedim(-1, -3)
    G = torch.linalg.solve(V[..., :d, :d], V[..., :d, d:]).mT  # (..., n, D - d, d)
    moved = G @ (own.mean - mean[..., :d, :]).mT.unsqueeze(-1)
    across = G @ tilted
    rest = V[..., d:, d:] + G @ (tilted - V[..., :d, :d]) @ G.mT
    whole = torch.cat([torch.cat([tilted, across.mT], -1), torch.cat([across, 0.5 * (rest + rest.mT)], -1)], -2)
    others = mean[..., d:, :] + moved.squeeze(-1).mT
    return JointMoments(own.log_normalizer, torch.cat([own.mean, others], -2), whole.movedim(-3, -1))
