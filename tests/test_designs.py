"""Data that depend on linear functions of f: an identity design changes nothing, others agree with dense algebra."""

from __future__ import annotations

import copy
import pickle

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator

import gpext
from gpext import designs
from gpext.inference import CAVI, EP, KL, Laplace, Taylor
from gpext.likelihoods import (
    BernoulliLogitLikelihood,
    MultinomialLogitLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from gpext.samplers import AugmentedSGLDSampler, GibbsSampler
from tests.members import F64
from tests.statistics import block_means, misfit

GENERATOR = torch.Generator().manual_seed(0)
X = torch.linspace(0, 3, 7, dtype=F64).unsqueeze(-1)
NEW = torch.linspace(-0.5, 3.5, 4, dtype=F64).unsqueeze(-1)
PAIRS = torch.tensor([[0, 3], [1, 5], [6, 2], [3, 4], [4, 0], [2, 6], [5, 3], [0, 6], [1, 2]])
MONTHS = torch.tensor([0, 0, 1, 2, 1, 2, 2])


class Model(gpext.models.LatentGP):
    def __init__(self, y, likelihood, rule=None, *, x=X, latents=(), **options):
        super().__init__(x, y, likelihood, rule, **options)
        batch = torch.Size(latents)
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.RBFKernel(batch_shape=batch), batch_shape=batch
        )
        self.to(x)
        self.mean_module.initialize(constant=0.3)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def evidence_and_gradient(model):
    mll = gpext.mlls.LatentMarginalLogLikelihood(model.likelihood, model)
    value = mll(model.train()(X), model.train_targets).sum()
    return value, torch.autograd.grad(value, list(model.parameters()))


def random_design(num_data=5):
    dense = torch.randn(num_data, len(X), dtype=F64, generator=GENERATOR)
    dense = dense * (torch.rand(dense.shape, generator=GENERATOR) < 0.5)
    dense[:, 0] = 1.0
    return dense


CASES = {
    "student-t": (StudentTLikelihood, torch.tensor([0.1, 0.9, 1.2, -0.5, 0.2, 4.0, 0.3], dtype=F64)),
    "logit": (BernoulliLogitLikelihood, torch.tensor([0, 1, 1, 0, 1, 1, 0], dtype=F64)),
    "poisson": (PoissonLikelihood, torch.tensor([0, 2, 1, 5, 0, 1, 3], dtype=F64)),
}
RULES = {"CAVI": CAVI(), "EP": EP(), "KL": KL(), "Laplace": Laplace(), "Taylor": Taylor()}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", CASES)
def test_the_identity_changes_nothing(case, rule):
    if (case, rule) == ("poisson", "CAVI"):
        pytest.skip("Poisson has no augmentation")
    make, y = CASES[case]
    identity = designs.rows_of(torch.eye(len(X), dtype=F64))
    plain, designed = (Model(y, make().to(y), RULES[rule], **options) for options in ({}, {"design": identity}))
    expected, found = evidence_and_gradient(plain), evidence_and_gradient(designed)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        one, other = plain.eval()(NEW), designed.eval()(NEW)
    torch.testing.assert_close(other.mean, one.mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(other.covariance_matrix, one.covariance_matrix, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rule", ["EP", "KL", "Laplace"])
def test_gaussian_noise_on_linear_functions_is_conjugate(rule):
    A, y = random_design(), torch.randn(5, dtype=F64, generator=GENERATOR)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    model = Model(y, likelihood, RULES[rule], design=designs.rows_of(A))
    joint = model.forward(torch.cat([X, NEW]))
    n, mu, K = len(X), joint.mean, joint.covariance_matrix
    S = A @ K[:n, :n] @ A.T + likelihood.noise * torch.eye(5, dtype=F64)
    exact = torch.distributions.MultivariateNormal(A @ mu[:n], S).log_prob(y)
    value, gradient = evidence_and_gradient(model)
    torch.testing.assert_close(value * 5, exact, rtol=1e-8, atol=1e-8)
    expected = torch.autograd.grad(exact / 5, list(model.parameters()))
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-7)
    gain = K[n:, :n] @ A.T @ torch.linalg.inv(S)
    with torch.no_grad():
        posterior = model.eval()(NEW)
        torch.testing.assert_close(posterior.mean, mu[n:] + gain @ (y - A @ mu[:n]), rtol=1e-7, atol=1e-8)
        torch.testing.assert_close(posterior.covariance_matrix, K[n:, n:] - gain @ A @ K[:n, n:], rtol=1e-7, atol=1e-8)


def test_a_comparison_by_probit_is_exact_under_ep():
    """EP is exact for one datum: P(1) = Phi(mean / sqrt(1 + variance)) of the difference."""
    y = torch.ones(1, dtype=F64)
    design = designs.pairs(torch.tensor([[0, 6]]), len(X))
    model = Model(y, gpytorch.likelihoods.BernoulliLikelihood(), EP(), design=design)
    with torch.no_grad():
        difference = model.train()(X)
        score = difference.mean / (1 + difference.variance).sqrt()
        torch.testing.assert_close(model.result.log_evidence, torch.special.log_ndtr(score)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("latents", [(), (3,)])
@pytest.mark.parametrize("A", [designs.pairs(PAIRS, len(X)), designs.sums(MONTHS)], ids=["pairs", "sums"])
def test_inducing_inputs_at_all_inputs_give_the_exact_prior(A, latents):
    if latents:
        likelihood, y = MultinomialLogitLikelihood(3).double(), torch.arange(A.num_data) % 3
    else:
        likelihood, y = BernoulliLogitLikelihood().double(), (torch.arange(A.num_data) % 2).double()
    exact = Model(y, likelihood, KL(), latents=latents, design=A)
    sparse = Model(y, likelihood, KL(), latents=latents, design=A, inducing_inputs=X)
    with torch.no_grad():
        torch.testing.assert_close(sparse.result.log_evidence, exact.result.log_evidence, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(sparse.eval()(NEW).mean, exact.eval()(NEW).mean, rtol=1e-3, atol=1e-3)


def test_the_variances_of_rows_are_those_of_the_congruence():
    A = designs.rows_of(random_design())
    y = torch.ones(5, dtype=F64)
    for latents, likelihood in (((), PoissonLikelihood()), ((2,), MultinomialLogitLikelihood(2, total_count=1))):
        model = Model(y.long() if latents else y, likelihood.double(), KL(), latents=latents, design=A)
        with torch.no_grad():
            expected = A.congruence(model.forward(X).covariance_matrix).diagonal(dim1=-2, dim2=-1)
            found = model.variational_strategy._variance_of_rows(A)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_its_products_are_those_of_the_dense_matrix():
    dense = random_design()
    A = designs.rows_of(dense)
    M = torch.randn(2, len(X), 3, dtype=F64, generator=GENERATOR, requires_grad=True)
    torch.testing.assert_close(A.times_matrix(M), dense @ M, rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(A.times_matrix, M)
    torch.testing.assert_close(A.dense(), dense)
    index = torch.tensor([3, 1, 0])
    torch.testing.assert_close(A.take(index).dense(), dense[index])
    torch.testing.assert_close(A.take(slice(1, 3)).dense(), dense[1:3])
    columns, weights = A.padded()
    found = torch.zeros_like(dense).scatter_add_(1, columns, weights)
    torch.testing.assert_close(found, dense)


def test_pairs_sums_and_averages():
    f = torch.arange(7, dtype=F64).square()
    torch.testing.assert_close(designs.pairs(PAIRS, 7).times(f), f[PAIRS[:, 0]] - f[PAIRS[:, 1]])
    torch.testing.assert_close(designs.sums(MONTHS).times(f), torch.tensor([1.0, 20.0, 70.0], dtype=F64))
    area = torch.tensor([1.0, 3.0, 1.0, 1.0, 1.0, 2.0, 1.0], dtype=F64)
    torch.testing.assert_close(designs.averages(MONTHS, area).times(f)[0], torch.tensor(0.75, dtype=F64))


def test_a_model_with_a_design_is_trained_copied_saved_and_given_new_data():
    y = (torch.arange(len(PAIRS)) % 2).double()
    A = designs.pairs(PAIRS, len(X))
    model = Model(y, BernoulliLogitLikelihood().double(), design=A)
    mll = gpext.mlls.LatentMarginalLogLikelihood(model.likelihood, model)
    before = evidence_and_gradient(model)[0].item()
    result = gpext.fit(mll, X, y, progress=False, max_steps=20)
    assert result.objective > before
    model.eval()
    with torch.no_grad():
        mean = model(NEW).mean
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            torch.testing.assert_close(twin(NEW).mean, mean)
        fresh = Model(y, BernoulliLogitLikelihood().double(), design=designs.pairs(PAIRS, len(X))).eval()
        fresh.load_state_dict(model.state_dict())
        torch.testing.assert_close(fresh(NEW).mean, mean, rtol=1e-5, atol=1e-6)
        preference = model.likelihood(designs.pairs(torch.tensor([[0, 3]]), len(NEW))(model(NEW)))
        assert preference.probs.shape == (1,)
    model.set_train_data(targets=y[:4], strict=False, design=A.take(slice(4)))
    assert model.train()(X).event_shape == (4,)
    with pytest.raises(NotImplementedError, match="set_train_data"):
        model.get_fantasy_model(NEW, y[:4])


def test_float32():
    y = (torch.arange(len(PAIRS)) % 2).float()
    single = Model(y, BernoulliLogitLikelihood(), x=X.float(), design=designs.pairs(PAIRS, len(X)))
    double = Model(y.double(), BernoulliLogitLikelihood().double(), design=designs.pairs(PAIRS, len(X)))
    assert single.result.log_evidence.dtype == torch.float32
    torch.testing.assert_close(single.result.log_evidence.double(), double.result.log_evidence, rtol=1e-4, atol=1e-4)


def test_more_comparisons_than_items():
    """A covariance of rank P < N is singular, and inference must not fail."""
    index = torch.randint(len(X), (60, 2), generator=GENERATOR)
    index = index[index[:, 0] != index[:, 1]]
    y = (X[index[:, 0], 0] > X[index[:, 1], 0]).double()
    for rule in (CAVI(), EP(), KL(), Laplace()):
        model = Model(y, BernoulliLogitLikelihood().double(), rule, design=designs.pairs(index, len(X))).eval()
        with torch.no_grad():
            mean = model(X).mean
        assert model.result.status.name == "CONVERGED"
        assert bool((mean.diff() > 0).all())


def test_bad_designs_are_refused():
    one = torch.ones(1)
    with pytest.raises(ValueError, match="columns must be from 0 to 2; got 3 at index 0"):
        designs.Design(torch.tensor([0]), torch.tensor([3]), one, (1, 3))
    with pytest.raises(TypeError, match="rows must be whole numbers"):
        designs.Design(torch.tensor([0.0]), torch.tensor([1]), one, (1, 3))
    with pytest.raises(ValueError, match="row 1 of the design has no entry"):
        designs.Design(torch.tensor([0]), torch.tensor([1]), one, (2, 3))
    with pytest.raises(ValueError, match="row 0 of the design has no entry"):
        designs.rows_of(torch.zeros(1, 3))
    with pytest.raises(ValueError, match="weights must be finite; got nan"):
        designs.Design(torch.tensor([0]), torch.tensor([1]), one * torch.nan, (1, 3))
    with pytest.raises(ValueError, match="row 1 compares 2 with itself"):
        designs.pairs(torch.tensor([[0, 1], [2, 2]]), 3)
    with pytest.raises(ValueError, match="row 1 of the design has no entry"):
        designs.sums(torch.tensor([0, 2, 2]))
    with pytest.raises(ValueError, match="must be positive"):
        designs.averages(torch.tensor([0, 0]), torch.tensor([1.0, -1.0]))
    y = torch.ones(2, dtype=F64)
    with pytest.raises(ValueError, match=r"expected a design of a row a target and a column an input, \(2, 7\)"):
        Model(y, BernoulliLogitLikelihood(), design=designs.pairs(PAIRS, len(X)))
    with pytest.raises(TypeError, match=r"expected a gpext\.designs\.Design; got Tensor"):
        Model(y, BernoulliLogitLikelihood(), design=torch.eye(2))


SEVERAL = torch.randint(len(X), (40, 2), generator=GENERATOR)
SEVERAL = SEVERAL[SEVERAL[:, 0] != SEVERAL[:, 1]]
MORE = designs.pairs(SEVERAL, len(X))  # more comparisons than items
COUNTS = torch.arange(MORE.num_data) % 3
MORE_CASES = {
    "logit": (BernoulliLogitLikelihood, (COUNTS > 0).double(), ()),
    "student-t": (StudentTLikelihood, (COUNTS - 1.0).double(), ()),
    "softmax": (lambda: MultinomialLogitLikelihood(3), COUNTS, (3,)),
}


@pytest.mark.parametrize("rule", ["EP", "KL", "Laplace"])
@pytest.mark.parametrize("case", MORE_CASES)
def test_more_data_than_inputs_are_inferred_in_the_space_of_the_inputs(case, rule):
    """The dense covariance A K A' under the same rule gives the same evidence, derivatives and predictions of f."""
    if (case, rule) == ("softmax", "EP"):
        pytest.skip("integrals over three latents take long")
    make, y, latents = MORE_CASES[case]
    model = Model(y, make().double(), RULES[rule], latents=latents, design=MORE)
    value, gradient = evidence_and_gradient(model)
    joint = model.forward(torch.cat([X, NEW]))
    mu, K, n = joint.mean, joint.covariance_matrix, len(X)
    prior = MultivariateNormal(MORE.times(mu[..., :n]), to_linear_operator(MORE.congruence(K[..., :n, :n])))
    dense = RULES[rule].infer(prior, model.likelihood, y)
    torch.testing.assert_close(value * MORE.num_data, dense.log_evidence, rtol=1e-10, atol=1e-10)
    expected = torch.autograd.grad(dense.log_evidence / MORE.num_data, list(model.parameters()), retain_graph=True)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)
    cross = MORE.times_matrix(K[..., :n, n:])
    with torch.no_grad():
        exact = dense.conditioned.predict(mu[..., n:], cross, to_linear_operator(K[..., n:, n:]))
        found = model.eval()(NEW)
    torch.testing.assert_close(found.mean, exact.mean, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.covariance_matrix, exact.covariance_matrix, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("sd", [1.0, 100.0])
def test_predictions_keep_their_digits_under_a_prior_far_wider_than_the_posterior(sd):
    """A linear function of two weights, observed 400 times: their posterior in closed form at the sites."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2, generator=generator, dtype=F64)
    A = torch.nn.functional.one_hot(torch.randint(6, (400,), generator=generator), 6).to(F64)
    y = torch.poisson(torch.full((400,), 3.0, dtype=F64), generator=generator)

    class Linear(gpext.models.LatentGP):
        def forward(self, x):
            return MultivariateNormal(torch.zeros_like(x[..., 0]), to_linear_operator(sd**2 * x @ x.mT))

    model = Linear(x, y, PoissonLikelihood(), Laplace(), design=designs.rows_of(A)).eval()
    sites, B = model.result.sites, A @ x
    V = torch.linalg.inv(torch.eye(2, dtype=F64) / sd**2 + B.mT @ (sites.precision.unsqueeze(-1) * B))
    with torch.no_grad():
        found = model(torch.eye(2, dtype=F64))
    torch.testing.assert_close(found.variance, V.diagonal(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found.mean, V @ B.mT @ sites.shift, rtol=1e-9, atol=1e-9)


def test_the_covariance_of_more_data_than_inputs_is_lazy():
    """Products, diagonal and dense form of A K A' agree with dense algebra."""
    K = torch.randn(2, len(X), len(X), dtype=F64, generator=GENERATOR)
    K = K @ K.mT
    operator = designs.DesignLinearOperator(K, design=MORE)
    dense = MORE.dense() @ K @ MORE.dense().mT
    right = torch.randn(2, MORE.num_data, 3, dtype=F64, generator=GENERATOR)
    torch.testing.assert_close(operator.to_dense(), dense)
    torch.testing.assert_close(operator @ right, dense @ right)
    torch.testing.assert_close(operator.mT @ right[0, :, 0], dense @ right[0, :, 0])
    torch.testing.assert_close(operator.diagonal(dim1=-2, dim2=-1), dense.diagonal(dim1=-2, dim2=-1))
    t = torch.randn(2, MORE.num_data, dtype=F64, generator=GENERATOR)
    torch.testing.assert_close(MORE.gram(t), MORE.dense().mT @ (t.unsqueeze(-1) * MORE.dense()))
    torch.testing.assert_close(MORE.transposed_times(t), t @ MORE.dense())


@pytest.mark.parametrize("A", [designs.averages(MONTHS), MORE], ids=["averages", "more"])
def test_gibbs_draws_from_the_posterior_of_a_design(A):
    """Moments of f by Gibbs sampling and by EP, which is nearly exact for a Student-t of many degrees of freedom."""
    y = torch.randn(A.num_data, dtype=F64, generator=GENERATOR)
    likelihood = StudentTLikelihood().double()
    likelihood.initialize(deg_free=1e6, noise=0.5)
    model = Model(y, likelihood, EP(), design=A).eval()
    draws = GibbsSampler(model).run(1000, 4, 100, progress=False, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact, seen = model(NEW), model.result.posterior
        K = model.forward(torch.cat([X, NEW])).covariance_matrix
        inner, cross = A.congruence(K[: len(X), : len(X)]), A.times_matrix(K[: len(X), len(X) :])
        gain = torch.linalg.pinv(inner, rtol=1e-12) @ cross
    means = block_means(draws.latent, 25)
    assert misfit(means, seen.mean, rounding=1e-5) < 1
    given = model.mean_module.constant.item() + (means - A.times(torch.full_like(X[:, 0], 0.3))) @ gain
    assert misfit(given, exact.mean, rounding=1e-5) < 1
    assert misfit(block_means((draws.latent - seen.mean).square(), 25), seen.variance, rounding=1e-5) < 1
    predicted = draws.predict(NEW, num_draws=4000)
    torch.testing.assert_close(predicted.mean, given.mean(0).to(predicted.mean), rtol=1e-6, atol=1e-6)


def test_a_design_is_refused_where_data_have_to_be_at_inputs():
    y = (COUNTS - 1.0).double()
    model = Model(y, StudentTLikelihood().double(), design=MORE)
    with pytest.raises(TypeError, match="serves a design"):
        AugmentedSGLDSampler(model, hyperparameters=["covar_module.raw_outputscale"])
    with pytest.raises(TypeError, match="are at no input"):
        gpext.plots.fitted(model)
    assert len(gpext.plots.fitted_outliers(model).get_lines()) + 1 > 0


def test_hyperparameters_are_integrated_out_with_a_design():
    """The weights of a grid are those of evidences of all N data, not of P inputs."""
    y = (COUNTS - 1.0).double()
    model = Model(y, StudentTLikelihood().double(), Laplace(), design=MORE)
    mll = gpext.mlls.LatentMarginalLogLikelihood(model.likelihood, model)
    grid = gpext.fit_grid(mll, X, y, parameter="likelihood.deg_free", values=[3.0, 30.0], max_steps=3, progress=False)
    evidence = torch.stack([copy.result.log_evidence for copy in grid.models])
    torch.testing.assert_close(grid.log_evidence, evidence.to(grid.log_evidence), rtol=1e-6, atol=1e-6)


def test_rows_are_taken_in_any_order_and_repeatedly():
    """With empty columns left out, and for designs whose rows have different numbers of entries."""
    for A in (MORE, designs.sums(MONTHS), designs.rows_of(random_design())):
        index = torch.randint(A.num_data, (11,), generator=GENERATOR)
        torch.testing.assert_close(A.take(index).dense(), A.dense()[index])
        torch.testing.assert_close(A.take(slice(1, 3)).dense(), A.dense()[1:3])
        columns, few = A.take(index[:2]).occupied()
        assert len(columns) == few.shape[1] <= 2 * int(A.sizes.max())
        torch.testing.assert_close(few.dense(), A.dense()[index[:2]][:, columns])
        torch.testing.assert_close(A.squared_norms(), A.dense().square().sum(-1))
