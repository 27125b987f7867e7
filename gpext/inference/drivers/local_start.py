r"""Sites to start from where a datum has few others near it: the best ones under local posteriors.

    q_i(f_i) = int N(f_S | mu_S, K_SS) prod_{j in S} t_j(f_j) df_{S\i} / Z,    S the nearest of i, itself among them

gives marginals to every datum, these give sites, and a few rounds settle. That is O(N k^3) a round, beside the O(N^3)
of a look at the posterior of all. Where K reaches further than S, or the rounds do not draw together, as where prior
variances are large, the sites stay as they were.
"""

from __future__ import annotations

import torch

from gpext.inference.drivers.fixed_point import Terms
from gpext.inference.problem import Problem
from gpext.posteriors import DensePrior, condition_dense
from gpext.sites import GaussianSites

_NEAREST = 16  # of all data, k
_MOST_ROUNDS = 10
_FARTHEST, _NEAR = 0.3, 0.01  # steps, in standard deviations and parts of variances: the first, and one small enough
_SHARE = 0.9  # of the squared correlations of all data, a datum's own as two, in those with the nearest


@torch.no_grad()
def settle_locally(problem: Problem, terms: Terms, start: GaussianSites) -> GaussianSites:
    """Return sites near those of the posterior of one latent, or `start`.

    Args:
        problem: prior, likelihood and targets.
        terms: F_i and its derivatives at given marginals.
        start: sites that see no other datum.
    """
    prior = problem.prior
    if not isinstance(prior, DensePrior) or prior.mean.dim() > 1 or prior.mean.size(-1) <= _NEAREST:
        return start
    mean, covariance, scale = prior.mean.detach(), prior.covariance.detach(), prior.variance.detach().rsqrt()
    squared = (scale.unsqueeze(-1) * covariance * scale).square()
    squared.fill_diagonal_(2.0)  # a datum before all others, its duplicates too
    nearest, index = squared.topk(_NEAREST, -1)
    if not nearest.sum() > _SHARE * squared.sum():
        return start
    own_mean, own_covariance = mean[index], covariance[index.unsqueeze(-1), index.unsqueeze(-2)]
    sites, last = start.to(torch.float64), _FARTHEST
    for _ in range(_MOST_ROUNDS):
        local = condition_dense(own_mean, own_covariance, GaussianSites(sites.shift[index], sites.precision[index]))
        there = local.predict(own_mean[:, :1], own_covariance[..., :1], own_covariance[:, :1, :1])
        m, v = there.mean.squeeze(-1), there.lazy_covariance_matrix.diagonal(dim1=-2, dim2=-1).squeeze(-1)
        if not bool((local.positive_definite & (v > 0)).all()):
            return start
        found = terms(m, v).best_sites(m)
        step = float(sites.motion_to(found, m, v).max())
        if not step < last:
            return start
        sites, last = found, step
        if step < _NEAR:
            break
    return sites
