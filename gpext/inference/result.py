"""The result of an inference rule."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from torch import Tensor

from gpext.distributions import LatentNormal
from gpext.posteriors import JointPosterior, Posterior
from gpext.sites import GaussianSites, JointSites


class Status(Enum):
    """The outcome of an iteration; the value is a sentence with advice.

    Example:
        >>> Status.CONVERGED.name, bool(Status.STALLED.value)
        ('CONVERGED', True)
    """

    CONVERGED = "converged"
    MAX_STEPS = "stopped at max_steps before the tolerance was reached; increase max_steps"
    REDUCED_POWER = "converged, but at a smaller power than was asked for, where no solution was found; see the stages"
    STALLED = "no step raises the objective any more; loosen the tolerance if it is rounding, or give another start"
    NOT_POSITIVE_DEFINITE = "the posterior covariance is not positive definite; raise jitter or check the kernel"
    NOT_FINITE = "a value overflowed or became NaN; rescale the targets or work in float64"


def check_options(jitter: float, max_steps: int = 0, tolerance: float = 0.0) -> None:
    """Raise ValueError if an option of a rule is negative or not finite."""
    for name, value in (("jitter", jitter), ("max_steps", max_steps), ("tolerance", tolerance)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and not negative; got {value!r}.")


class InferenceWarning(UserWarning):
    """An inference has ended otherwise than by converging; the message is the result's.

    Example:
        >>> import warnings, torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpext.inference import KL
        >>> from gpext.likelihoods import PoissonLikelihood
        >>> prior = MultivariateNormal(torch.zeros(2).double(), torch.eye(2).double())
        >>> result = KL(max_steps=2).infer(prior, PoissonLikelihood(), torch.tensor([9.0, 0.0]).double())
        >>> result.status.name  # a rule returns it; a model warns
        'MAX_STEPS'
    """


@contextmanager
def without_inference_warnings() -> Iterator[None]:
    """Leave out the warnings of inferences that need not converge, or whose status is told otherwise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InferenceWarning)
        yield


@dataclass(frozen=True)
class InferenceResult:
    """The outcome of `rule.infer(prior, likelihood, targets)`.

    Attributes:
        log_evidence: lower bound on, or approximation of, log p(y), shape (...); differentiable (once) in the prior and
            in the likelihood's parameters, the way through the sites included (which is none at a stationary point).
        status: how the iteration ended.
        num_steps: number of steps, each about one Cholesky factorisation and a triangular solve; the cost of finding
            a start is not included.
        trace: the evidence after each step, (num_steps, ...).
        message: the rule, its steps and how it ended, in one sentence.
        conditioned: the prior conditioned on the sites, float64.
        dtype: that of the prior, and of what is returned.
        targets: those of the data.
        log_density: (targets, mean, variance) -> log int p(y | f) N(f | mean, variance) df; of coupled latents it takes
            the covariances of each datum (..., D, D, N).
        two_sided_tail: likewise, -> twice the smaller tail of that distribution beyond y, nan if it has no cdf.
        expected_log_density: likewise, -> the expectation of its log density under itself.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpext.inference import KL
        >>> from gpext.likelihoods import BernoulliLogitLikelihood
        >>> prior = MultivariateNormal(torch.zeros(2).double(), torch.eye(2).double())
        >>> result = KL().infer(prior, BernoulliLogitLikelihood(), torch.tensor([1.0, 0.0]))
        >>> result.posterior.mean.sign(), result.log_loo.shape, result.status.name
        (tensor([ 1., -1.], dtype=torch.float64), torch.Size([2]), 'CONVERGED')
    """

    log_evidence: Tensor
    status: Status
    num_steps: int
    trace: Tensor
    message: str
    conditioned: Posterior | JointPosterior = field(repr=False)
    dtype: torch.dtype = field(repr=False)
    targets: Tensor = field(repr=False)
    log_density: Callable[[Tensor, Tensor, Tensor], Tensor] = field(repr=False)
    two_sided_tail: Callable[[Tensor, Tensor, Tensor], Tensor] = field(repr=False)
    expected_log_density: Callable[[Tensor, Tensor, Tensor], Tensor] = field(repr=False)

    @cached_property
    def posterior(self) -> MultivariateNormal:
        """q(f) at the training inputs, in the dtype of the prior.

        A batch of D for D latents; where they are coupled, a MultitaskMultivariateNormal of D tasks.
        """
        if isinstance(self.conditioned, JointPosterior):
            return self.conditioned.distribution(self.dtype)
        covariance = to_linear_operator(self.conditioned.covariance.to(self.dtype))
        return LatentNormal(self.conditioned.mean.to(self.dtype), covariance)

    @property
    def sites(self) -> GaussianSites | JointSites:
        """The Gaussian sites that stand for the likelihood."""
        return self.conditioned.sites.to(self.dtype)

    @cached_property
    def log_loo(self) -> Tensor:
        r"""Leave-one-out log predictive densities, log p(y_i | y_-i) (..., N), from the cavities [R&W Sec. 5.4.2].

        The log density of y_i under :math:`\int p(y_i|f) N(f | m_{-i}, v_{-i}) df`; nan where a cavity has no positive
        variance, as a site of very negative precision can leave it. The sites are those of all data, so y_i has had a
        say in its own prediction: little under KL and Laplace; under CAVI, whose sites are too narrow, the densities
        come out too high (khan_2012 notebook).
        """
        return self._at_cavities(self.log_density)

    @cached_property
    def loo_tail(self) -> Tensor:
        """The two-sided tail probability of y_i under the prediction of `log_loo` (..., N).

        2 min(P(Y <= y_i), P(Y >= y_i)), at most 1, to about 1e-12. nan as `log_loo`, and where p(y | f) has several
        latents or no cumulative distribution function.
        """
        return self._at_cavities(self.two_sided_tail)

    @cached_property
    def expected_log_loo(self) -> Tensor:
        """E[log p(Y | y_-i)] for Y from that prediction (..., N): what `log_loo` is on average if the model is right.

        Exact where Y has finitely many values; otherwise the mean over 8 draws, the same each time: an error of a third
        of the spread of log p(Y), in eight times the time of `log_loo`. nan as that is, and where the likelihood does
        not say p(y | f) as a distribution.
        """
        return self._at_cavities(self.expected_log_density)

    def _at_cavities(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        mean, variance = self.conditioned.leave_one_out
        if isinstance(self.conditioned, JointPosterior):
            return self._at_joint_cavities(function, mean, variance)
        proper = (variance > 0) & variance.isfinite() & mean.isfinite()
        with torch.no_grad():
            values = function(self.targets, torch.where(proper, mean, 0), torch.where(proper, variance, 1))
        proper = proper if values.dim() == mean.dim() else proper.all(-2)
        return torch.where(proper, values, torch.nan).to(self.dtype)

    def _at_joint_cavities(
        self, function: Callable[[Tensor, Tensor, Tensor], Tensor], mean: Tensor, covariance: Tensor
    ) -> Tensor:
        V = covariance.movedim(-1, -3)
        chol, info = torch.linalg.cholesky_ex(V)
        proper = (info == 0) & chol.isfinite().all(-1).all(-1) & mean.isfinite().all(-2)
        unit = torch.eye(V.size(-1), dtype=V.dtype, device=V.device)
        V = torch.where(proper[..., None, None], V, unit).movedim(-3, -1)
        with torch.no_grad():
            values = function(self.targets, torch.where(proper.unsqueeze(-2), mean, 0), V)
        return torch.where(proper, values, torch.nan).to(self.dtype)
