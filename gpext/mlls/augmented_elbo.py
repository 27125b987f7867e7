"""The augmented evidence lower bound, where VariationalELBO takes the exact expectation [GWO20 App. A.4.4]."""

from __future__ import annotations

from typing import Any

from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls._approximate_mll import _ApproximateMarginalLogLikelihood
from gpytorch.models import ApproximateGP, ExactGP
from torch import Tensor

from gpext.inference import require_augmentation
from gpext.likelihoods import AugmentedLikelihood
from gpext.models import LatentGP


class AugmentedELBO(_ApproximateMarginalLogLikelihood):
    r"""The bound :math:`\sum_i [\log C_i + g_i m_i + \log\varphi_i(E_q h_i^2)] - KL(q(u)\|p(u))`, divided by N.

    Drop it in where a script has `VariationalELBO`. Its natural-gradient step in q(u) is closed-form coordinate ascent:
    with gpytorch's NGD any rate in (0, 1] is safe, lr = 1 on the full batch included.

    Args:
        likelihood: any likelihood with an augmentation.
        model: the ApproximateGP.
        num_data: N.
        beta: factor of the KL term.
        combine_terms: whether to add the terms up.

    Raises:
        TypeError: the likelihood has no augmentation, or the model no q(u).

    Example:
        >>> mll = AugmentedELBO(likelihood, model, num_data=len(train_y))  # doctest: +SKIP
        >>> loss = -mll(model(train_x), train_y)  # doctest: +SKIP
    """

    def __init__(
        self,
        likelihood: AugmentedLikelihood,
        model: ApproximateGP,
        num_data: int,
        beta: float = 1.0,
        combine_terms: bool = True,
    ) -> None:
        if isinstance(model, ExactGP | LatentGP):
            raise TypeError(
                f"AugmentedELBO needs an ApproximateGP, with a q(u) to train; got {type(model).__qualname__}. The "
                "objective of a gpext.models.LatentGP is gpext.mlls.LatentMarginalLogLikelihood."
            )
        super().__init__(require_augmentation(likelihood), model, num_data, beta, combine_terms)

    def _log_likelihood_term(self, approximate_dist_f: MultivariateNormal, target: Tensor, **kwargs: Any) -> Tensor:
        return self.likelihood.augmented_bound(target, approximate_dist_f).sum(-1)
