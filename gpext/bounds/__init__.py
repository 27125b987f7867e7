"""Lower bounds on E_q[log p(y | f)] for `KL(bound=...)`, from the exact expectation to the cheapest."""

from gpext.bounds.bound import Bound, LocalBound, MultinomialTerms, SoftplusBound, SoftplusTerms
from gpext.bounds.conditional import conditional_log_prob
from gpext.bounds.quadrature import Quadrature

__all__ = [
    "Bound",
    "LocalBound",
    "MultinomialTerms",
    "Quadrature",
    "SoftplusBound",
    "SoftplusTerms",
    "conditional_log_prob",
]
