r"""Expectation propagation that converges, for any likelihood of one latent [JVV11; Minka 2001].

Each factor p(y_i | f_i)^eta is replaced by a Gaussian site such that posterior marginals and tilted distributions have
the same mean and variance (:mod:`gpext.inference.ep_internals.moment_matching`). On likelihoods that are not
log-concave the plain iteration may oscillate, or make cavities improper. EP therefore tries these stages in turn until
one converges:

    1. damped, accelerated parallel sweeps, first with negative precisions held at zero and then with all sites free; a
       step that would make a cavity improper is shortened
    2. sweeps from the sites of a few steps of CAVI, which are all positive
    3. the branch of solutions of a likelihood whose scale is at first so wide that no datum is far out, and narrows to
       the one given; the branch may turn back (:mod:`gpext.inference.ep_internals.arclength`)
    4. a solution at a lower power: by stages 3 or 1 at 0.7 of the power, where tilted distributions are closer to
       Gaussian, or next to the optimum of KL, which is the limit of power zero. From there EP follows the branch in the
       power, up to the power asked for or the largest that has a solution on it

In a batch, whose branches would turn at different places, Levenberg-Marquardt steps on the residuals of all sites take
the place of branches, after sweeps and along the paths (:mod:`gpext.inference.ep_internals.continuation`).
docs/evidence/expectation_propagation.md reports what each stage contributes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch import Tensor

from gpext.inference.drivers.fixed_point import Norm, check_norm
from gpext.inference.ep_internals.joint_matching import JointMatch
from gpext.inference.ep_internals.joint_search import JointSearch
from gpext.inference.ep_internals.moment_matching import Match
from gpext.inference.ep_internals.stages import Search, Stages, Start
from gpext.inference.problem import Problem
from gpext.inference.result import InferenceResult, check_options
from gpext.inference.rule import Rule
from gpext.likelihoods.tilted_moments import tilt

M = TypeVar("M", Match, JointMatch)


@dataclass(frozen=True)
class EP(Rule):
    """Expectation propagation: marginals that match the moments of their tilted distributions.

    Serves any likelihood of one latent, gpext's or gpytorch's. It starts from the prior by default, or from an earlier
    result for these data or its sites. A result at other hyperparameters is the better start: its cavities, from which
    Newton steps are taken, stay near a solution over longer distances than its sites. Visit the points of a grid or
    path of hyperparameters in order, each from the result of a neighbour.

    Args:
        power: eta in (0, 1]: 1 is EP, less is fractional (power) EP, towards 0 variational inference.
        damping: length of a step in the sites, in (0, 1].
        max_steps: maximum number of site evaluations, each one factorisation with variances.
        tolerance: converged when every marginal's mean matches to this many standard deviations, and its variance to
            this fraction.
        jitter: added to the diagonal of the prior covariance; none is needed.
        norm: "max" if the tolerance is for every marginal; "rms" if it is for the root mean square over the data of
            the larger of the two, which bounds how far the evidence is from its stationary value: :func:`gpext.fit`
            asks for it while it trains.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpext.likelihoods import StudentTLikelihood
        >>> prior = MultivariateNormal(torch.zeros(2).double(), torch.eye(2).double())
        >>> result = EP().infer(prior, StudentTLikelihood().double(), torch.tensor([0.0, 9.0]).double())
        >>> result.status.name
        'CONVERGED'
    """

    power: float = 1.0
    damping: float = 0.8
    max_steps: int = 1000
    tolerance: float = 1e-6
    jitter: float = 0.0
    norm: Norm = "max"

    def __post_init__(self) -> None:
        check_options(self.jitter, self.max_steps, self.tolerance)
        check_norm(self.norm)
        for name in ("power", "damping"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1]; got {getattr(self, name)!r}.")

    def _solve(self, problem: Problem, start: Start) -> InferenceResult:
        options = self.power, self.damping, self.max_steps, self.tolerance
        if problem.num_latents is not None:
            joint = JointSearch(problem, *options, norm=self.norm)
            return self._conclude(problem, joint, joint.run(start), joint.log_normalizers)
        search = Search(problem, *options, norm=self.norm)
        return self._conclude(problem, search, self._find(search, start), partial(self._log_normalizers, problem))

    def _conclude(
        self, problem: Problem, search: Stages, found: M, log_normalizers: Callable[[M], Tensor]
    ) -> InferenceResult:
        """Return the result; log Z^ at fixed cavities has the evidence's derivatives in the likelihood's parameters."""
        local = log_normalizers(found).sum(-1) / found.power
        evidence = problem.attach(found.value, local, found.posterior)
        return problem.result(search.name(found), found.posterior, evidence, search.status(found), search.trace)

    def _find(self, search: Search, start: Start) -> Match:
        """Return the best match of a search; other schedules override it (`benchmarks/ep_schedules.py`)."""
        return search.run(start)

    def _log_normalizers(self, problem: Problem, found: Match) -> Tensor:
        if not any(parameter.requires_grad for parameter in problem.likelihood.parameters()):
            return found.tilted.log_normalizer
        moments = tilt(problem.likelihood, problem.targets, found.power)
        return moments(found.cavity_mean, found.cavity_variance).log_normalizer
