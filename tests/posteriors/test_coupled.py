"""The structured algebra against the dense system of all latents of all data."""

import mpmath
import pytest
import torch

from gpext.posteriors import condition_coupled
from gpext.sites import CoupledSites

F64 = torch.float64


def problem(latents, size, *batch, kind="multinomial", seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*batch, *shape, dtype=F64, generator=generator)

    x = torch.linspace(0, 4, size, dtype=F64)
    lengthscales = 0.5 + torch.rand(latents, dtype=F64, generator=generator).view(-1, 1, 1)
    covariance = torch.exp(-0.5 * ((x.unsqueeze(-1) - x) / lengthscales) ** 2) + 0.1 * torch.eye(size, dtype=F64)
    covariance = covariance.expand(*batch, latents, size, size)
    w = torch.softmax(normal(latents, size), -2)
    precision, coupling = 3 * w, torch.full((*batch, size), -3.0, dtype=F64)
    if kind == "positive":
        coupling = -coupling
    elif kind == "mixed":  # couplings of either sign, and none; precisions that are zero, and below
        coupling = 0.2 * normal(size)
        coupling[..., 0] = 0
        precision = 0.5 + 0.2 * normal(latents, size)
        precision[..., 0, :3] = torch.tensor([0.0, -0.1, 0.5], dtype=F64)
    sites = CoupledSites(normal(latents, size), precision, coupling, w)
    return normal(latents, size), covariance, sites


def dense(mean, covariance, sites):
    """Mean, covariance and evidence of all latents, latent by latent, by explicit inverses."""
    latents, size = mean.shape[-2:]
    K = torch.block_diag(*covariance)
    blocks = torch.diag_embed(sites.precision.mT) + torch.einsum(
        "n,dn,en->nde", sites.coupling, sites.direction, sites.direction
    )
    U = torch.zeros_like(K)
    for i in range(size):
        index = torch.arange(latents) * size + i
        U = U.index_put((index.unsqueeze(-1), index), blocks[i])
    mu, nu = mean.flatten(), sites.shift.flatten()
    V = torch.linalg.inv(torch.linalg.inv(K) + U)
    e = nu - U @ mu
    log_det = torch.linalg.slogdet(torch.eye(len(K), dtype=F64) + K @ U).logabsdet
    evidence = nu @ mu - 0.5 * mu @ U @ mu + 0.5 * e @ V @ e - 0.5 * log_det
    return mu + V @ e, V, log_det, evidence


@pytest.mark.parametrize("kind", ["multinomial", "positive", "mixed"])
@pytest.mark.parametrize("latents", [2, 3, 6])
def test_agrees_with_the_dense_system(latents, kind):
    mean, covariance, sites = problem(latents, 40, kind=kind)
    posterior = condition_coupled(mean, covariance, sites)
    assert bool(posterior.positive_definite)
    m, V, log_det, evidence = dense(mean, covariance, sites)
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(posterior.mean, m.view(latents, 40), **close)
    torch.testing.assert_close(posterior.log_det, log_det, **close)
    torch.testing.assert_close(posterior.log_normalizer, evidence, **close)
    by_datum = V.view(latents, 40, latents, 40).diagonal(dim1=1, dim2=3)
    torch.testing.assert_close(posterior.blocks, by_datum, **close)
    torch.testing.assert_close(posterior.variance, V.diagonal().view(latents, 40), **close)
    x = torch.randn(latents, 40, dtype=F64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(posterior.covariance_times(x), (V @ x.flatten()).view(latents, 40), **close)
    product, turned = posterior.solve(x)
    torch.testing.assert_close(product, (V @ x.flatten()).view(latents, 40), **close)
    torch.testing.assert_close((covariance @ turned.unsqueeze(-1)).squeeze(-1), product, **close)
    weights = torch.linalg.solve(torch.block_diag(*covariance), m - mean.flatten())
    torch.testing.assert_close(posterior.weights, weights.view(latents, 40), rtol=1e-9, atol=1e-9)
    expected = sites.expected_log(posterior.mean, posterior.blocks)
    second = posterior.blocks + torch.einsum("dn,en->den", posterior.mean, posterior.mean)
    quadratic = (sites.precision * second.diagonal(dim1=0, dim2=1).mT).sum(0)
    quadratic = quadratic + sites.coupling * torch.einsum("dn,den,en->n", sites.direction, second, sites.direction)
    torch.testing.assert_close(expected, (sites.shift * posterior.mean).sum(0) - 0.5 * quadratic, **close)


@pytest.mark.parametrize("kind", ["multinomial", "mixed"])
def test_gradient_of_the_evidence(kind):
    mean, covariance, sites = problem(3, 12, kind=kind)
    mean, covariance = mean.requires_grad_(), covariance.clone().requires_grad_()
    by_mean, by_covariance = torch.autograd.grad(dense(mean, covariance, sites)[-1], [mean, covariance])
    ours = condition_coupled(mean.detach(), covariance.detach(), sites).gradient
    torch.testing.assert_close(ours[0], by_mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours[1], 0.5 * (by_covariance + by_covariance.mT), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("kind", ["multinomial", "positive", "mixed"])
def test_the_gradient_in_a_shared_covariance_is_the_sum_of_all(kind, batch):
    mean, covariance, sites = problem(3, 30, *batch, kind=kind)
    covariance = covariance[..., 0, :, :] if not batch else covariance[0, 0]
    posterior = condition_coupled(mean, covariance, sites)
    w = torch.randn(*batch, 3, 30, dtype=F64, generator=torch.Generator().manual_seed(1))
    by_mean, by_covariance = posterior.gradient
    turned = 0.5 * (w.unsqueeze(-1) * by_mean.unsqueeze(-2) + by_mean.unsqueeze(-1) * w.unsqueeze(-2))
    for response, expected in ((None, by_covariance), (w, by_covariance + turned)):
        torch.testing.assert_close(posterior.gradient_of_shared(response), expected.sum(-3), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["multinomial", "mixed"])
def test_predictions_couple_the_latents(kind):
    mean, covariance, sites = problem(3, 10, kind=kind)
    train = slice(0, 8)
    some = CoupledSites(*(t[..., train] for t in (sites.shift, sites.precision, sites.coupling, sites.direction)))
    posterior = condition_coupled(mean[:, train], covariance[:, train, train], some)
    none = CoupledSites(  # the new values are uninformative data
        *(torch.cat([t[..., train], torch.zeros_like(t[..., 8:])], -1) for t in (sites.shift, sites.precision)),
        torch.cat([sites.coupling[..., train], torch.zeros(2, dtype=F64)], -1),
        sites.direction,
    )
    m, V, *_ = dense(mean, covariance, none)
    predicted = posterior.predict(mean[:, 8:], covariance[:, train, 8:], covariance[:, 8:, 8:])
    torch.testing.assert_close(predicted.mean, m.view(3, 10)[:, 8:].mT, rtol=1e-9, atol=1e-9)
    expected = V.view(3, 10, 3, 10)[:, 8:, :, 8:].reshape(6, 6)  # latent by latent
    torch.testing.assert_close(predicted.covariance_matrix, expected, rtol=1e-9, atol=1e-9)


def test_batches_are_what_their_members_are():
    mean, covariance, sites = problem(2, 9, 3)
    posterior = condition_coupled(mean, covariance, sites)
    for b in range(3):
        one = CoupledSites(sites.shift[b], sites.precision[b], sites.coupling[b], sites.direction[b])
        alone = condition_coupled(mean[b], covariance[b], one)
        for name in ("mean", "blocks", "log_normalizer", "weights"):
            torch.testing.assert_close(getattr(posterior, name)[b], getattr(alone, name))


def test_says_so_if_there_is_no_posterior():
    mean, covariance, sites = problem(2, 9)
    bad = CoupledSites(sites.shift, sites.precision, 4 * sites.coupling, sites.direction)
    assert not bool(condition_coupled(mean, covariance, bad).positive_definite)


def test_shapes_are_checked():
    _, _, sites = problem(2, 9)
    with pytest.raises(ValueError, match=r"coupling \(\.\.\., N\); got \(2, 9\)"):
        CoupledSites(sites.shift, sites.precision, sites.direction, sites.direction)


def test_cavities_are_the_posterior_without_a_site():
    mean, covariance, sites = problem(3, 8)
    m, V = condition_coupled(mean, covariance, sites).leave_one_out
    keep = torch.ones(8, dtype=F64)
    keep[2] = 0
    rest = CoupledSites(sites.shift * keep, sites.precision * keep, sites.coupling * keep, sites.direction)
    without = condition_coupled(mean, covariance, rest)
    torch.testing.assert_close(m[:, 2], without.mean[:, 2], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(V[:, :, 2], without.blocks[:, :, 2], rtol=1e-9, atol=1e-9)


def test_the_joint_distribution_of_all_latents():
    mean, covariance, sites = problem(2, 7)
    joint = condition_coupled(mean, covariance, sites).distribution(F64)
    m, V, *_ = dense(mean, covariance, sites)
    torch.testing.assert_close(joint.mean, m.view(2, 7).mT)
    torch.testing.assert_close(joint.covariance_matrix, V, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dirichlet", "classes"])
@pytest.mark.parametrize("scale", [1e4, 1e7, 1e10, 1e13])
def test_variances_far_below_the_prior_keep_their_digits(kind, scale):
    latents, size, new = 3, 8, 2
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.linspace(0, 4, size, dtype=F64), torch.tensor([0.7, 5.0], dtype=F64)])
    lengthscales = torch.tensor([0.6, 1.0, 1.5], dtype=F64).view(-1, 1, 1)
    K = scale * torch.exp(-0.5 * ((x.unsqueeze(-1) - x) / lengthscales) ** 2)
    total = torch.tensor(500.0, dtype=F64)  # sum of a Dirichlet's parameters: its curvature is singular to a thousandth
    theta = total * torch.softmax(torch.randn(latents, size, dtype=F64, generator=generator), 0)
    if kind == "dirichlet":
        coupling = -torch.polygamma(1, total).expand(size)
        sites = CoupledSites(0 * theta, torch.polygamma(1, theta), coupling, torch.ones_like(theta))
    else:  # singular
        coupling = -(1 / total).expand(size)
        sites = CoupledSites(0 * theta, theta, coupling, theta)
    prior = K[:, :size, :size]
    posterior = condition_coupled(0 * theta, prior, sites)
    mean = torch.zeros(latents, new, dtype=F64)
    there = posterior.predict(mean, K[:, :size, size:], K[:, size:, size:]).variance.mT
    again = posterior.predict(0 * theta, prior, prior).variance.mT

    with mpmath.workdps(60):
        joint = mpmath.matrix(torch.block_diag(*K).tolist())
        blocks = torch.diag_embed(torch.nn.functional.pad(sites.precision, (0, new)))
        precision = mpmath.matrix(torch.block_diag(*blocks).tolist())
        for i in range(size):
            # a w w' in these digits, too, so that the matrix is singular where it should be
            w = [mpmath.mpf(float(v)) for v in sites.direction[:, i]]
            a = -1 / sum(w) if kind == "classes" else mpmath.mpf(float(coupling[i]))
            for d in range(latents):
                for e in range(latents):
                    precision[d * len(x) + i, e * len(x) + i] += a * w[d] * w[e]
        V = (mpmath.eye(len(joint)) + joint * precision) ** -1 * joint
        exact = torch.tensor([float(V[i, i]) for i in range(len(joint))], dtype=F64).view(latents, -1)

    for found in (posterior.variance, posterior.distribution(F64).variance.mT):
        torch.testing.assert_close(found, exact[:, :size], rtol=1e-9, atol=0)
    # a prediction is the prior's minus the data's share: its rounding is that of the prior
    rounding = latents * size * torch.finfo(F64).eps * scale
    torch.testing.assert_close(again, exact[:, :size], rtol=1e-9, atol=rounding)
    torch.testing.assert_close(there, exact[:, size:], rtol=1e-9, atol=rounding)


@pytest.mark.parametrize("contrast", [1e6, 1e11, 1e17, 1e30])
def test_a_cavity_beside_a_far_sharper_site_has_digits_or_is_nan(contrast):
    """The single datum's cavity is its prior, of which V^-1 - U has no digits."""
    one = torch.ones(1, 1, dtype=F64)
    sites = CoupledSites(contrast * one, contrast * one, torch.zeros(1, dtype=F64), 0 * one)
    mean, covariance = condition_coupled(0.3 * one, one.unsqueeze(-1), sites).leave_one_out
    if contrast < 1e12:
        torch.testing.assert_close(covariance.flatten(), one.flatten(), rtol=1e-2, atol=0)
    else:
        assert bool(covariance.isnan().all() and mean.isnan().all())
