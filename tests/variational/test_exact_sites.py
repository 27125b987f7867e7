"""Sites of the exact expectation in a sparse GP, for one latent or several with independent q(u), against the ELBO."""

import copy

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import VariationalELBO
from gpytorch.variational import IndependentMultitaskVariationalStrategy, VariationalStrategy

import gpext
from gpext.inference import KL
from gpext.likelihoods import (
    BernoulliLogitLikelihood,
    DirichletLikelihood,
    MultinomialLogitLikelihood,
    MultivariatePoissonLikelihood,
    PoissonLikelihood,
    StickBreakingLikelihood,
    VonMisesLikelihood,
)
from gpext.mlls import AugmentedELBO
from gpext.variational import CollapsedBound
from tests.latent_cases import CASES
from tests.members import F64
from tests.sparse_models import SparseGP, inputs, randomise

N, M = 24, 5
NAMES = [
    "poisson",
    "ordinal_logit",
    "student_t",
    "multinomial",
    "trials",
    "stick_breaking",
    "several_counts",
    "von_mises",
    "family_gaussian",
    "dirichlet",
]


@pytest.fixture(params=NAMES)
def case(request):
    return CASES[request.param]


def data(case, size=N, seed=1):
    return inputs(size, 2, seed=seed), case.targets(torch.Generator().manual_seed(seed), size)


def sparse(case, **kwargs):
    latents = case.num_latents
    Z = inputs(M, 2) if latents is None else inputs(latents, M, 2)
    return SparseGP(Z, num_tasks=latents, **kwargs)


def elbo(model, likelihood, x, y, num_data=None):
    """The exact ELBO per datum, by gpytorch's own strategy and objective."""
    return VariationalELBO(likelihood, model.train(), num_data=num_data or x.size(-2))(model(x), y)


def natural(model):
    return [p.detach().clone() for p in model.natural]


# ---- the step ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_data", [N, 5 * N])
def test_update_is_the_natural_gradient_step_of_gpytorch_on_the_elbo(case, num_data):
    ours, theirs = randomise(sparse(case)), randomise(sparse(case, strategy=VariationalStrategy))
    (x, y), rate = data(case), 0.01
    ours.base.update(x, y, case.make(), rate, num_data, bound="exact")
    before = natural(theirs)
    optimizer = gpytorch.optim.NGD(theirs.natural, num_data=num_data, lr=rate)
    (-elbo(theirs, case.make(), x, y, num_data)).backward()
    optimizer.step()
    assert float((before[0] - theirs.natural[0].detach()).abs().max()) > 1e-3
    for a, b in zip(natural(ours), theirs.natural, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-7, atol=1e-7)


def test_gradients_are_those_of_autograd_through_the_elbo(case):
    ours, theirs = randomise(sparse(case)), randomise(sparse(case, strategy=VariationalStrategy))
    x, y = data(case)
    likelihood, other = case.make(), case.make()
    value = ours.base.update(x, y, likelihood, 0.1, num_data=3 * N, bound="exact", gradient="exact")
    expected = elbo(theirs, other, x, y, 3 * N)
    (-expected).backward()
    torch.testing.assert_close(value, expected.detach(), rtol=1e-8, atol=1e-8)
    for name, parameter in ours.named_hyperparameters():
        theirs_too = dict(theirs.named_hyperparameters())[name]
        torch.testing.assert_close(parameter.grad, theirs_too.grad, rtol=1e-6, atol=1e-7)
    for a, b in zip(likelihood.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_a_full_step_never_lowers_the_bound(case):
    likelihood = case.make()
    x, y = data(case)
    model = sparse(case)
    values = [float(elbo(model, likelihood, x, y).detach())]
    for _ in range(12):
        model.base.update(x, y, likelihood, bound="exact")
        values.append(float(elbo(model, likelihood, x, y).detach()))
    values = torch.tensor(values, dtype=F64)
    assert bool((values.diff() >= -1e-9 * values.abs().max()).all())
    assert values[-1] > values[0] + 1e-2


@pytest.mark.parametrize("largest", [50.0, 1e6])
def test_a_step_that_would_overflow_is_halved(largest):
    x, y = inputs(N, 2, seed=1), torch.full((N,), largest, dtype=F64)
    model, likelihood = SparseGP(x.clone()), PoissonLikelihood()
    for _ in range(100):
        model.base.update(x, y, likelihood)
        assert all(bool(p.isfinite().all()) for p in model.natural)
    with torch.no_grad():
        fitted = model.eval()(x)
    assert (fitted.mean - y.log()).abs().max() < 0.1


def test_with_the_training_inputs_as_inducing_points_it_is_the_full_kl_method():
    case = CASES["multinomial"]
    x, y = data(case, 15)
    model = SparseGP(x.expand(3, 15, 2).clone(), num_tasks=3, jitter_val=1e-9)
    likelihood = case.make()
    for _ in range(40):
        model.base.update(x, y, likelihood)
    with torch.no_grad():
        value = 15 * elbo(model, likelihood, x, y)
        prior = model.base.model.forward(x)
        prior = MultivariateNormal(prior.mean, prior.covariance_matrix + 1e-9 * torch.eye(15, dtype=F64))
    full = KL(tolerance=1e-9).infer(prior, likelihood, y)
    torch.testing.assert_close(value, full.log_evidence, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model.eval()(x).mean.detach().mT, full.conditioned.mean, rtol=1e-4, atol=1e-4)


# ---- the collapsed bound -------------------------------------------------------------------------------------------


def test_the_collapsed_bound_is_the_elbo_of_the_q_it_commits(case):
    model, likelihood = randomise(sparse(case)), case.make()
    x, y = data(case)
    bound = CollapsedBound(model.base, likelihood, x, y, bound="exact", block_size=10)
    values = [bound.evaluate(gradient=False)]
    for _ in range(4):
        values.append(bound.refresh())
        bound.commit()
        with torch.no_grad():
            torch.testing.assert_close(values[-1], N * elbo(model, likelihood, x, y), rtol=1e-7, atol=1e-7)
    assert values[0].shape == ()
    assert bool((torch.stack(values).diff() >= -1e-9).all())


def test_its_gradients_are_finite_differences_at_fixed_sites():
    case = CASES["von_mises"]
    model, likelihood = randomise(sparse(case)), case.make()
    x, y = data(case)
    bound = CollapsedBound(model.base, likelihood, x, y, bound="exact")
    bound.evaluate(gradient=False)
    bound.refresh()
    bound.evaluate()
    raw = model.covar_module.base_kernel.raw_lengthscale
    analytic = -N * raw.grad[1, 0, 0]
    step, ends = 1e-5, []
    for sign in (1, -1):
        with torch.no_grad():
            raw[1, 0, 0] += sign * step
        ends.append(bound.evaluate(gradient=False))
        with torch.no_grad():
            raw[1, 0, 0] -= sign * step
    torch.testing.assert_close(analytic, (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-7)


# ---- training ------------------------------------------------------------------------------------------------------

TRAINED = {
    "von_mises": (VonMisesLikelihood, 2),
    "multinomial": (lambda: MultinomialLogitLikelihood(3), 3),
    "stick_breaking": (lambda: StickBreakingLikelihood(4), 3),
    "several_counts": (lambda: MultivariatePoissonLikelihood(2), 2),
    "dirichlet": (lambda: DirichletLikelihood(2), 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [None, 30])
@pytest.mark.parametrize("name", TRAINED)
def test_fit_trains_several_latents(name, batch_size):
    make, latents = TRAINED[name]
    likelihood = make()
    x = torch.linspace(0, 5, 60, dtype=F64).unsqueeze(-1)
    f = torch.stack([2 * (x[:, 0] + j).sin() for j in range(latents)])
    torch.manual_seed(0)
    y = likelihood(f).sample()
    model = SparseGP(x[::8].expand(latents, -1, 1).clone(), num_tasks=latents)
    before = float(elbo(model, likelihood, x, y).detach())
    mll = VariationalELBO(likelihood, model, num_data=60)
    found = gpext.fit(mll, x, y, batch_size=batch_size, max_steps=15 if batch_size is None else 40, progress=False)
    after = float(elbo(model, likelihood, x, y).detach())
    assert after > before + 0.03
    if batch_size is None:
        assert found.objective == pytest.approx(after, abs=1e-6)
    with torch.no_grad():
        assert likelihood.log_marginal(y, model.eval()(x)).shape == (60,)


def test_fit_takes_a_batch_of_latents_without_a_wrapper():
    x, y = data(CASES["multinomial"])
    one = SparseGP(inputs(3, M, 2), num_tasks=3)
    mll = VariationalELBO(MultinomialLogitLikelihood(3), one, num_data=N)
    wrapped = gpext.fit(mll, x, y, max_steps=4, progress=False)
    two = SparseGP(inputs(3, M, 2), num_tasks=3)
    two.variational_strategy = two.base
    bare = gpext.fit(VariationalELBO(MultinomialLogitLikelihood(3), two, num_data=N), x, y, max_steps=4, progress=False)
    assert bare.objective == pytest.approx(wrapped.objective, abs=1e-10)


@pytest.mark.parametrize("batch_size", [None, 10])
def test_fit_refuses_an_objective_that_counts_the_data_once_a_latent(batch_size):
    x, y = data(CASES["multinomial"])
    model = SparseGP(inputs(3, M, 2), num_tasks=3)
    model.variational_strategy = VariationalStrategy(model, inputs(3, M, 2), model.base._variational_distribution)
    mll = VariationalELBO(MultinomialLogitLikelihood(3), model, num_data=N)
    assert mll(model(x), y).shape == (3,)
    with pytest.raises(ValueError, match=r"IndependentMultitaskVariationalStrategy\(VariationalStrategy.*num_tasks=3"):
        gpext.fit(mll, x, y, batch_size=batch_size, progress=False)
    model.variational_strategy = IndependentMultitaskVariationalStrategy(model.variational_strategy, num_tasks=3)
    assert gpext.fit(mll, x, y, batch_size=batch_size, max_steps=2, progress=False).num_steps == 2


def test_minibatches_of_a_batch_of_gps_of_several_latents():
    x, y = data(CASES["several_counts"])
    model = SparseGP(inputs(2, 3, M, 2), num_tasks=3)
    stock = VariationalStrategy(model, inputs(2, 3, M, 2), model.base._variational_distribution)
    model.variational_strategy = IndependentMultitaskVariationalStrategy(stock, num_tasks=3)
    mll = VariationalELBO(MultivariatePoissonLikelihood(3), model, num_data=N)
    targets = torch.stack([y, y.flip(0)])
    assert gpext.fit(mll, x, targets, batch_size=N // 2, max_steps=2, progress=False).num_steps == 2


def test_minibatch_training_resumes_with_targets_of_several_columns():
    x, y = data(CASES["several_counts"], 40)

    def run(steps, state=None, model=None):
        model = model or SparseGP(inputs(3, M, 2), num_tasks=3)
        mll = VariationalELBO(MultivariatePoissonLikelihood(3), model, num_data=40)
        return model, gpext.fit(mll, x, y, batch_size=10, max_steps=steps, state=state, progress=False)

    straight, _ = run(10)
    halfway, first = run(5)
    resumed, _ = run(5, first.state_dict, halfway)
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_the_exact_sites_of_an_augmented_likelihood_reach_the_better_bound():
    likelihood = BernoulliLogitLikelihood()
    x, y = inputs(N, 2, seed=1), (torch.arange(N) % 3 == 0).double()
    exact, augmented = SparseGP(inputs(M, 2)), SparseGP(inputs(M, 2))
    for _ in range(60):
        exact.base.update(x, y, likelihood, bound="exact")
        augmented.base.update(x, y, likelihood)
    with torch.no_grad():
        assert elbo(exact, likelihood, x, y) >= elbo(augmented, likelihood, x, y)


# ---- errors --------------------------------------------------------------------------------------------------------


def test_errors_name_what_was_expected_and_change_nothing():
    x, y = data(CASES["several_counts"])
    model, likelihood = randomise(SparseGP(inputs(3, M, 2), num_tasks=3)), MultivariatePoissonLikelihood(3)
    before = copy.deepcopy(model.state_dict())
    for kwargs, error, message in (
        ({"bound": "tight"}, ValueError, "bound must be None, 'augmented' or 'exact'; got 'tight'"),
        ({"bound": "augmented"}, TypeError, "augmentation"),
        ({"gradient": "augmented"}, TypeError, "augmentation"),
        ({"y": y[:5]}, ValueError, r"got \(24, 2\) and \(5,\) targets"),
        ({"y": -y - 1}, ValueError, "counts"),
    ):
        given = {"x": x, "y": y, **kwargs}
        with pytest.raises(error, match=message):
            model.base.update(given.pop("x"), given.pop("y"), likelihood, **given)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    with pytest.raises(ValueError, match="take an AugmentedELBO"):
        gpext.fit(VariationalELBO(likelihood, model, num_data=N), x, y, hyperparameters="augmented", progress=False)
    with pytest.raises(TypeError, match="augmentation"):
        AugmentedELBO(likelihood, model, num_data=N)
