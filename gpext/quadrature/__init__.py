"""Integrals against a Gaussian: one-dimensional, adaptive for all data at once or fixed; and of softmax and softplus.

    expectation:      E[g] = int g(f) N(f | m, v) df
    log_expectation:  log E[e^l] = log int exp(l(f)) N(f | m, v) df,   wholly in log space

The adaptive rule is Gauss-Kronrod 7-15 on panels, in the standardised coordinate z = (f - m) / sqrt(v). Every datum has
its own panels but all data have equally many, so `function` sees f of shape (Q, *shape) and broadcasts against its
targets. Panels start graded geometrically towards the knots (a likelihood 1e-9 times as wide as the Gaussian is still
seen, at its target) and towards the mean; each round a datum bisects its worst panels, and its range grows while an end
panel carries mass. The error of a panel is QUADPACK's [Piessens et al. 1983, QUADPACK, section 2.2.3.1]; the tolerance
is relative to int |g| N.

Likelihoods that are analytic in a strip about the real line of known width take a fixed rule instead, some 40 nodes,
as long as the Gaussian is not much wider (`analytic_expectation`, `analytic_tilted_moments`).

Derivatives: nodes are placed without autograd and then frozen in f; the frozen sum is evaluated once more with
autograd, where N(f | m, v) alone carries the derivative in m and v. A kink in g is therefore harmless. In float64 the
derivative in m (in v) carries rounding noise of about 1e-16 |g| / sd (1e-16 |g| / v): 1e-6 relative at v = 1e-10.

Memory: some 180 nodes a datum without knots, 500 to 1000 with one knot, times N, in float64, a few times over. Slice
the data to bound it.
"""

from gpext.quadrature.adaptive import (
    QuadratureResult,
    QuadratureStatus,
    QuadratureWarning,
    expectation,
    integrate,
    log_expectation,
)
from gpext.quadrature.analytic import Part, analytic_expectation, analytic_tilted_moments
from gpext.quadrature.closed_tilted import gaussian_tilted_moments, laplace_tilted_moments, probit_tilted_moments
from gpext.quadrature.gauss_kronrod import Function
from gpext.quadrature.joint import (
    SecondOrder,
    in_parts,
    independent_expectation,
    joint_expectation,
    log_joint_expectation,
)
from gpext.quadrature.location_scale import (
    GivenScale,
    JointMoments,
    ScaleNoise,
    expected_log_square_sum,
    location_scale_moments,
    log_location_scale_density,
)
from gpext.quadrature.log_square import expected_log1p_square
from gpext.quadrature.rules import gauss_hermite, gauss_legendre
from gpext.quadrature.smooth import Jet, Rule, smooth_expectation, trapezoid, trapezoid_nodes
from gpext.quadrature.softmax.gamma_sum import expected_log_gamma_of_sum
from gpext.quadrature.softmax.multinomial import log_multinomial_density, log_multinomial_marginal
from gpext.quadrature.softmax.softmax import expected_log_sum_exp, expected_softmax
from gpext.quadrature.softmax.softplus import softplus_expectation
from gpext.quadrature.tilted import (
    TiltedMoments,
    student_t_log_normalizer,
    student_t_tilted_moments,
    tilted_moments,
)

__all__ = [
    "Function",
    "GivenScale",
    "Jet",
    "JointMoments",
    "Part",
    "QuadratureResult",
    "QuadratureStatus",
    "QuadratureWarning",
    "Rule",
    "ScaleNoise",
    "SecondOrder",
    "TiltedMoments",
    "analytic_expectation",
    "analytic_tilted_moments",
    "expectation",
    "expected_log1p_square",
    "expected_log_gamma_of_sum",
    "expected_log_square_sum",
    "expected_log_sum_exp",
    "expected_softmax",
    "gauss_hermite",
    "gauss_legendre",
    "gaussian_tilted_moments",
    "in_parts",
    "independent_expectation",
    "integrate",
    "joint_expectation",
    "laplace_tilted_moments",
    "location_scale_moments",
    "log_expectation",
    "log_joint_expectation",
    "log_location_scale_density",
    "log_multinomial_density",
    "log_multinomial_marginal",
    "probit_tilted_moments",
    "smooth_expectation",
    "softplus_expectation",
    "student_t_log_normalizer",
    "student_t_tilted_moments",
    "tilted_moments",
    "trapezoid",
    "trapezoid_nodes",
]
