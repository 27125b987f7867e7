"""Lower bounds on E_q[log p(y | f)] for `KL(bound=...)`, from the exact expectation to the cheapest."""

from gpext.bounds.bohning import Bohning
from gpext.bounds.bound import Bound, LocalBound, MultinomialTerms, SoftplusBound, SoftplusTerms
from gpext.bounds.conditional import conditional_log_prob, has_density_of, num_latents, serves_density
from gpext.bounds.jaakkola import Jaakkola
from gpext.bounds.log_sum_exp import LogSumExp
from gpext.bounds.multinomial import MultinomialBound
from gpext.bounds.piecewise import PiecewiseQuadratic
from gpext.bounds.product_of_sigmoids import ProductOfSigmoids
from gpext.bounds.quadrature import Quadrature

__all__ = [
    "Bohning",
    "Bound",
    "Jaakkola",
    "LocalBound",
    "LogSumExp",
    "MultinomialBound",
    "MultinomialTerms",
    "PiecewiseQuadratic",
    "ProductOfSigmoids",
    "Quadrature",
    "SoftplusBound",
    "SoftplusTerms",
    "conditional_log_prob",
    "has_density_of",
    "num_latents",
    "serves_density",
]
