"""The search for a fixed point of EP where the likelihood has several latents a datum."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gpext.bounds.contracts import HasJointTiltedMoments
from gpext.inference.ep_internals.damped_sweeps import sweep_damped
from gpext.inference.ep_internals.joint_matching import JointAt, JointMatch, match_jointly
from gpext.inference.ep_internals.stages import Stages, Start
from gpext.inference.expansion import warn_of_dense_blocks
from gpext.inference.result import InferenceResult
from gpext.likelihoods.curvature import diagonal_blocks
from gpext.posteriors import DensePrior, precision_blocks
from gpext.quadrature import JointMoments
from gpext.sites import BlockSites, GaussianSites

_CALMER = (1.0, 0.4, 0.15)  # of the damping asked for
_LOWER = 0.5  # of the power asked for
_PATIENCE = 15  # evaluations without progress


class JointSearch(Stages):
    """Damped sweeps, with smaller steps where they do not converge, and at last from a solution at half the power."""

    def run(self, start: Start) -> JointMatch:
        """Return the best match: converged at the power asked for, else at half of it, else the nearest to one."""
        if not isinstance(self.problem.likelihood, HasJointTiltedMoments):
            raise TypeError(
                f"EP takes likelihoods of one latent function per datum, and of several that have a method "
                f"joint_tilted_moments(targets, mean, covariance, power); {type(self.problem.likelihood).__qualname__} "
                "has none. Use gpext.inference.KL()."
            )
        f = self.problem.mean.detach()
        if isinstance(self.problem.prior, DensePrior) and f.size(-2) > 2:
            warn_of_dense_blocks(
                "EP couples the latents of a datum in any way",
                f,
                "Give inducing inputs, or use gpext.inference.Laplace() or KL(), which cost O(D n^3).",
            )
        at = self.at(self.power)
        begin = at(self.begin(start))
        if start is not None and not bool(begin.size.isfinite().all()):
            begin = at(self.begin(None))
        found = self._swept(at, begin, self.power)
        if self.has_converged(found) or self.left() <= 0:
            return found
        lower = self.at(_LOWER * self.power)
        there = self._swept(lower, lower(self.begin(None)), _LOWER * self.power)
        if not self.has_converged(there):
            return found
        again = self._swept(at, at(there.sites), self.power)
        return again if self.has_converged(again) else there

    def _swept(self, at: JointAt, current: JointMatch, power: float) -> JointMatch:
        """Return the end of sweeps from a match, in smaller steps where they have not converged."""
        for share in _CALMER:
            if self.has_converged(current) or not bool(current.size.isfinite().all()):
                break
            found, trace = sweep_damped(
                self.problem,
                at,
                current,
                hold=False,
                damping=share * self.damping,
                max_sweeps=self.left(),
                patience=_PATIENCE,
                tolerance=self.tolerance,
            )
            self.note("sweeps", power, trace)
            current = found
        return current

    def begin(self, start: Start) -> BlockSites:
        """Return the sites to start from."""
        sites = start.sites if isinstance(start, InferenceResult) else start
        if isinstance(sites, GaussianSites):  # of independent latents
            return BlockSites(sites.shift, diagonal_blocks(sites.precision)).to(torch.float64)
        if sites is not None:
            return BlockSites(sites.shift, precision_blocks(sites)).to(torch.float64)
        shift = torch.zeros_like(self.problem.mean.detach())
        return BlockSites(shift, diagonal_blocks(shift))

    def at(self, power: float) -> JointAt:
        """Return the function that evaluates sites at a power."""
        return partial(match_jointly, self.problem, partial(self._tilt, power), power, norm=self.norm)

    def _tilt(self, power: float, mean: Tensor, covariance: Tensor) -> JointMoments:
        return self.problem.likelihood.joint_tilted_moments(self.problem.targets, mean, covariance, power)

    def log_normalizers(self, found: JointMatch) -> Tensor:
        """Return log Z^ (..., N) at fixed cavities, in the graph of the likelihood's parameters."""
        return self._tilt(found.power, found.cavity_mean, found.cavity_variance).log_normalizer
