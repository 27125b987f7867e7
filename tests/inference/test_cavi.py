"""CAVI: fixed points and evidence against the equations of its updates, also for hard data."""

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator

from gpext.inference import CAVI, Status
from gpext.likelihoods import BernoulliLogitLikelihood, SuperGaussianLikelihood
from tests.members import F64, MEMBERS, rbf_prior, student_t, tensor


@pytest.fixture(params=MEMBERS)
def member(request):
    return MEMBERS[request.param]


def prior_at(n=12, seed=0, dtype=F64, batch=(), **kwargs):
    x = 3 * torch.rand(*batch, n, 1, generator=torch.Generator().manual_seed(seed), dtype=F64)
    prior = rbf_prior(x.to(dtype), dtype=dtype, **kwargs)[0]
    return MultivariateNormal(prior.mean.detach(), prior.covariance_matrix.detach())


def assert_finite(result):
    for value in (result.posterior.mean, result.posterior.variance, result.log_evidence, result.trace):
        assert bool(value.isfinite().all())
    assert bool((result.posterior.variance > 0).all())


def test_a_fixed_point_is_where_the_sites_reproduce_themselves(member):
    prior, y = prior_at(), member.targets(12)
    result = CAVI(max_steps=5000).infer(prior, member.likelihood, y)
    assert result.status is Status.CONVERGED
    precision = torch.linalg.inv(prior.covariance_matrix) + result.sites.precision.diag()
    V = torch.linalg.inv(precision)
    m = V @ (result.sites.shift + torch.linalg.solve(prior.covariance_matrix, prior.mean))
    torch.testing.assert_close(result.posterior.mean, m, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result.posterior.covariance_matrix, V, rtol=1e-6, atol=1e-6)
    augmentation = member.likelihood.augmentation(y)
    w = augmentation.radial.mean(augmentation.tilt(m, V.diagonal()))
    shift, tau = augmentation.site(w)
    torch.testing.assert_close(result.sites.precision, tau.expand(12), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result.sites.shift, shift.expand(12), rtol=1e-6, atol=1e-6)


def test_evidence_is_the_bound_minus_the_divergence(member):
    prior, y = prior_at(mean=0.4), member.targets(12)
    result = CAVI(max_steps=5000).infer(prior, member.likelihood, y)
    divergence = torch.distributions.kl_divergence(
        torch.distributions.MultivariateNormal(result.posterior.mean, result.posterior.covariance_matrix),
        torch.distributions.MultivariateNormal(prior.mean, prior.covariance_matrix),
    )
    expected = member.likelihood.augmented_bound(y, result.posterior).sum() - divergence
    torch.testing.assert_close(result.log_evidence, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.slow
def test_a_batch_of_targets_and_priors_is_a_loop(member):
    prior, y = prior_at(batch=(2, 3)), member.targets(2, 3, 12)
    rule = CAVI(max_steps=20, tolerance=0.0)  # equally many steps for all
    together = rule.infer(prior, member.likelihood, y)
    assert together.log_evidence.shape == (2, 3)
    assert together.trace.shape == (20, 2, 3)
    assert together.posterior.batch_shape == (2, 3)
    for i in range(2):
        for j in range(3):
            alone = MultivariateNormal(prior.mean[i, j], prior.covariance_matrix[i, j])
            alone = rule.infer(alone, member.likelihood, y[i, j])
            torch.testing.assert_close(together.trace[:, i, j], alone.trace, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(together.posterior.mean[i, j], alone.posterior.mean, rtol=1e-10, atol=1e-10)


def test_targets_in_a_batch_share_one_prior(member):
    prior, y = prior_at(), member.targets(3, 12)
    rule = CAVI(max_steps=20, tolerance=0.0)
    together, alone = rule.infer(prior, member.likelihood, y), rule.infer(prior, member.likelihood, y[1])
    torch.testing.assert_close(together.log_evidence[1], alone.log_evidence, rtol=1e-10, atol=1e-10)


def test_float32_agrees_with_float64_and_keeps_its_dtype(member):
    y = member.targets(12)
    exact = CAVI().infer(prior_at(), member.likelihood, y)
    likelihood = member.make().float().requires_grad_(False)
    single = CAVI(tolerance=1e-4).infer(prior_at(dtype=torch.float32), likelihood, y.float())
    assert single.status is Status.CONVERGED
    for value in (single.posterior.mean, single.sites.shift, single.log_evidence):
        assert value.dtype == torch.float32
    torch.testing.assert_close(single.posterior.mean.double(), exact.posterior.mean, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(single.log_evidence.double(), exact.log_evidence, rtol=1e-4, atol=1e-4)


def test_one_datum(member):
    result = CAVI(max_steps=5000).infer(prior_at(1), member.likelihood, member.targets(1))
    assert result.status is Status.CONVERGED
    assert_finite(result)


def test_duplicate_inputs_make_a_singular_prior(member):
    x = torch.tensor([[0.0], [0.0], [1.0], [1.0], [1.0]], dtype=F64)
    _, kernel, mean = rbf_prior(x)
    prior = MultivariateNormal(mean(x), kernel(x))
    assert torch.linalg.matrix_rank(prior.covariance_matrix) == 2
    result = CAVI(max_steps=5000).infer(prior, member.likelihood, member.targets(5))
    assert result.status is Status.CONVERGED
    assert_finite(result)
    torch.testing.assert_close(result.posterior.mean[0], result.posterior.mean[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("label", [0.0, 1.0])
@pytest.mark.parametrize("name", ["bernoulli_logit", "bayesian_svm", "negative_binomial", "logit_by_hand"])
def test_one_class_only(name, label):
    y = torch.full((30,), label, dtype=F64)
    result = CAVI(max_steps=5000, tolerance=1e-5).infer(prior_at(30), MEMBERS[name].likelihood, y)
    assert result.status is Status.CONVERGED
    assert_finite(result)
    if name != "negative_binomial":
        assert bool(((result.posterior.mean > 0) == bool(label)).all())


REAL = ["student_t", "laplace", "matern32", "pseudo_huber", "learnable"]


@pytest.mark.parametrize("name", REAL[:3])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_targets_of_a_million(name, dtype):
    y = 1e6 * MEMBERS[name].targets(12).to(dtype)
    result = CAVI(max_steps=3000).infer(prior_at(dtype=dtype), MEMBERS[name].make().to(dtype).requires_grad_(False), y)
    assert result.status in (Status.CONVERGED, Status.MAX_STEPS)
    assert_finite(result)


@pytest.mark.parametrize("name", REAL[:3])
def test_one_outlier_at_a_million_moves_redescending_noise_little(name):
    y = MEMBERS[name].targets(12)
    y[4] = 1e6
    result = CAVI(max_steps=5000).infer(prior_at(), MEMBERS[name].likelihood, y)
    assert result.status is Status.CONVERGED
    assert_finite(result)
    if name == "student_t":
        keep = torch.arange(12) != 4
        prior = prior_at()
        clean = MultivariateNormal(prior.mean[keep], prior.covariance_matrix[keep][:, keep])
        expected = CAVI(max_steps=5000).infer(clean, MEMBERS[name].likelihood, y[keep]).posterior.mean
        torch.testing.assert_close(result.posterior.mean[keep], expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "likelihood",
    [
        gpytorch.likelihoods.PoissonLikelihood(),
        gpytorch.likelihoods.GaussianLikelihood(),
        gpytorch.likelihoods.StudentTLikelihood(),
        object(),
    ],
)
def test_a_likelihood_without_augmentation_is_a_type_error_that_names_the_alternatives(likelihood):
    with pytest.raises(TypeError, match=rf"got .*{type(likelihood).__name__}.*VariationalELBO"):
        CAVI().infer(prior_at(), likelihood, torch.zeros(12, dtype=F64))


@pytest.mark.parametrize("name", ["bernoulli_logit", "bayesian_svm"])
def test_labels_of_minus_one_and_one_are_refused_with_the_remedy(name):
    y = torch.where(torch.arange(12) % 3 == 0, 1.0, -1.0).double()
    with pytest.raises(
        ValueError, match=r"must be in \{0, 1\}; got \{-1\}, first at index 1\. Convert with \(y \+ 1\)"
    ):
        CAVI().infer(prior_at(), MEMBERS[name].likelihood, y)


def test_counts_are_counts():
    for wrong in (-1.0, 2.5):
        y = torch.ones(12, dtype=F64).index_fill(0, torch.tensor(7), wrong)
        with pytest.raises(ValueError, match=rf"counts 0, 1, 2, ...; got {wrong:g} at index 7"):
            CAVI().infer(prior_at(), MEMBERS["negative_binomial"].likelihood, y)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_targets_that_are_not_finite_are_refused_with_their_index(member, value):
    y = member.targets(12)
    y[5] = value
    with pytest.raises(ValueError, match=rf"finite; got {value} at index 5"):
        CAVI().infer(prior_at(), member.likelihood, y)
    with pytest.raises(ValueError, match=r"at index \(1, 5\)"):
        CAVI().infer(prior_at(), member.likelihood, torch.stack([member.targets(12), y]))


def test_a_prior_that_is_not_finite_is_refused():
    prior = prior_at()
    with pytest.raises(ValueError, match="prior has NaN or infinite"):
        CAVI().infer(MultivariateNormal(prior.mean * torch.nan, prior.covariance_matrix), student_t(), prior.mean)


@pytest.mark.parametrize("shape", [(11,), (12, 1), (3, 13), ()])
def test_targets_of_another_shape_are_refused_with_both_shapes(shape):
    with pytest.raises(ValueError, match=r"shape \(\.\.\., 12\) like the prior; got"):
        CAVI().infer(prior_at(), student_t(), torch.zeros(shape, dtype=F64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused_with_the_remedy(dtype):
    with pytest.raises(TypeError, match=r"y\.float\(\) or y\.double\(\)"):
        CAVI().infer(prior_at(), student_t(), torch.zeros(12, dtype=dtype))
    half = MultivariateNormal(torch.zeros(12, dtype=dtype), to_linear_operator(torch.eye(12, dtype=dtype)))
    with pytest.raises(TypeError, match="use float32 or float64"):
        CAVI().infer(half, student_t(), torch.zeros(12, dtype=F64))


def test_integer_labels_are_labels():
    y = torch.arange(12) % 2
    integers = CAVI().infer(prior_at(), BernoulliLogitLikelihood(), y).log_evidence
    torch.testing.assert_close(integers, CAVI().infer(prior_at(), BernoulliLogitLikelihood(), y.double()).log_evidence)


def test_jitter_is_added_and_reported():
    prior, y = prior_at(), MEMBERS["student_t"].targets(12)
    result = CAVI(jitter=0.1).infer(prior, student_t(), y)
    assert "jitter 0.1" in result.message
    added = MultivariateNormal(prior.mean, prior.covariance_matrix + 0.1 * torch.eye(12, dtype=F64))
    expected = CAVI().infer(added, student_t(), y)
    torch.testing.assert_close(result.log_evidence, expected.log_evidence)
    assert "jitter" not in expected.message


def test_running_out_of_steps_is_reported():
    result = CAVI(max_steps=1).infer(prior_at(), student_t(), MEMBERS["student_t"].targets(12))
    assert result.status is Status.MAX_STEPS
    assert (result.num_steps, result.trace.shape) == (1, (1,))
    assert "1 steps" in result.message
    assert "increase max_steps" in result.message
    assert_finite(result)


def test_an_indefinite_prior_gives_a_status_and_a_finite_posterior():
    K = torch.tensor([[1.0, 3.0], [3.0, 1.0]], dtype=F64)
    prior = MultivariateNormal(torch.zeros(2, dtype=F64), to_linear_operator(K))
    result = CAVI().infer(prior, student_t(), tensor(1.0, -1.0))
    assert result.status is Status.NOT_POSITIVE_DEFINITE
    assert "raise jitter" in result.message
    assert bool(result.posterior.mean.isfinite().all())
    assert bool(result.posterior.covariance_matrix.isfinite().all())
    assert bool(result.log_evidence.isfinite().all())


def test_a_gaussian_phi_is_gaussian_regression_in_one_step():
    """phi(r) = e^(-r/2) is a mixture by a point mass: the bound is exact, and so is the evidence."""
    prior, y = prior_at(mean=0.3), MEMBERS["student_t"].targets(12)
    result = CAVI().infer(prior, SuperGaussianLikelihood(log_phi=lambda r: -0.5 * r), y)
    exact = torch.distributions.MultivariateNormal(prior.mean, prior.covariance_matrix + torch.eye(12, dtype=F64))
    torch.testing.assert_close(result.log_evidence, exact.log_prob(y), rtol=1e-10, atol=1e-10)
    assert result.num_steps <= 2


def test_inference_leaves_no_graph_behind_in_the_posterior():
    x = torch.linspace(0, 1, 5, dtype=F64).unsqueeze(-1)
    result = CAVI().infer(rbf_prior(x)[0], student_t(), MEMBERS["student_t"].targets(5))
    assert not result.posterior.mean.requires_grad
    assert not result.sites.shift.requires_grad
    assert result.log_evidence.requires_grad
