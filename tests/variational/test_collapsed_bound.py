"""The bound as a function of the hyperparameters alone, against the ELBO and finite differences."""

import pytest
import torch
from gpytorch.mlls import VariationalELBO

from gpext.likelihoods import StudentTLikelihood
from gpext.mlls import AugmentedELBO
from gpext.variational import CollapsedBound, collapsed_bound
from tests.members import F64, MEMBERS
from tests.sparse_models import SparseGP, inputs, randomise

N, M = 25, 6
BOUNDS = {"augmented": AugmentedELBO, "exact": VariationalELBO}


@pytest.fixture(params=MEMBERS)
def member(request):
    return MEMBERS[request.param]


@pytest.fixture(params=BOUNDS)
def kind(request):
    return request.param


def problem(member, *, start=0, **kwargs):
    model = randomise(SparseGP(inputs(M, 2), **kwargs), seed=start)
    return model, member.make(), inputs(N, 2, seed=1), member.targets(N)


def elbo(kind, model, likelihood, x, y):
    """The bound at the model's q(u), by gpytorch's own strategy code."""
    return N * BOUNDS[kind](likelihood, model.train(), num_data=N)(model(x), y)


def converge(bound, steps=400):
    value = bound.evaluate(gradient=False)
    for _ in range(steps):
        previous, value = value, bound.refresh()
        if bool(((value - previous).abs() < 1e-13 * value.abs()).all()):
            break
    return value


def test_value_is_the_elbo_of_the_committed_q_at_any_sites(member, kind):
    model, likelihood, x, y = problem(member)
    bound = CollapsedBound(model.base, likelihood, x, y, bound=kind)
    value = bound.evaluate(gradient=False)
    for _ in range(3):
        bound.commit()
        with torch.no_grad():
            torch.testing.assert_close(value, elbo(kind, model, likelihood, x, y), rtol=1e-8, atol=1e-8)
        value = bound.refresh()


def test_fixed_point_is_the_maximum_of_the_augmented_elbo_over_q(member):
    model, likelihood, x, y = problem(member)
    value = converge(CollapsedBound(model.base, likelihood, x, y))
    other, _, _, _ = problem(member, start=1)
    with torch.no_grad():
        for _ in range(400):
            assert elbo("augmented", other, likelihood, x, y) <= value + 1e-7
            before = other.natural[0].detach().clone()
            other.base.update(x, y, likelihood)
            if float((before - other.natural[0].detach()).abs().max()) < 1e-6:
                break
        torch.testing.assert_close(elbo("augmented", other, likelihood, x, y), value, rtol=1e-8, atol=1e-8)


def test_at_the_fixed_point_the_elbo_has_no_derivative_in_q(member, kind):
    """In the expectation parameters, which is the natural gradient in the natural ones."""
    model, likelihood, x, y = problem(member)
    bound = CollapsedBound(model.base, likelihood, x, y, bound=kind)
    converge(bound)
    bound.commit()
    gradients = torch.autograd.grad(elbo(kind, model, likelihood, x, y), model.natural)
    start = randomise(SparseGP(inputs(M, 2)))
    scale = torch.autograd.grad(elbo(kind, start, likelihood, x, y), start.natural)
    for gradient, first in zip(gradients, scale, strict=True):
        assert float(gradient.abs().max()) < 1e-4 * float(first.abs().max())


def test_refreshes_never_decrease_the_value(member, kind):
    model, likelihood, x, y = problem(member)
    bound = CollapsedBound(model.base, likelihood, x, y, bound=kind)
    start = bound.evaluate(gradient=False)
    values = torch.stack([start, *(bound.refresh() for _ in range(12))])
    assert bool((values.diff() >= -1e-12 * values.abs().max()).all())
    assert values[-1] > values[0]


@pytest.mark.parametrize("seed", range(20))
def test_a_step_that_would_fail_or_lower_the_bound_is_halved(seed):
    """Student-t noise far narrower than the residuals: sites of negative precision, and full steps that overshoot."""
    generator = torch.Generator().manual_seed(seed)
    model, x = SparseGP(inputs(M, 2, seed=seed)), inputs(N, 2, seed=seed + 1)
    y = 3 * torch.randn(N, generator=generator, dtype=F64)
    likelihood = StudentTLikelihood().double()
    likelihood.noise, likelihood.deg_free = 1e-2, 2.01
    bound = CollapsedBound(model.base, likelihood, x, y, bound="exact")
    values = [bound.evaluate(gradient=False)]
    values += [bound.refresh() for _ in range(30)]
    assert bool((torch.stack(values).diff() >= -1e-9).all())
    assert values[-1] > values[0]
    bound.commit()
    with torch.no_grad():
        torch.testing.assert_close(values[-1], elbo("exact", model, likelihood, x, y), rtol=1e-7, atol=1e-7)


def test_where_no_step_helps_everything_stays(kind, monkeypatch):
    model, likelihood, x, y = problem(MEMBERS["student_t"])
    bound = CollapsedBound(model.base, likelihood, x, y, bound=kind)
    value = bound.evaluate(gradient=False)

    def fail(vector, gram):
        raise torch.linalg.LinAlgError("not positive definite")

    with monkeypatch.context() as patch:
        patch.setattr(collapsed_bound, "_condition", fail)
        assert torch.equal(bound.refresh(), value)
    bound.commit()
    with torch.no_grad():
        torch.testing.assert_close(value, elbo(kind, model, likelihood, x, y), rtol=1e-8, atol=1e-8)


def test_sites_stay_between_evaluations(member, kind):
    model, likelihood, x, y = problem(member)
    bound = CollapsedBound(model.base, likelihood, x, y, bound=kind)
    first = bound.evaluate(gradient=False)
    assert torch.equal(bound.evaluate(gradient=False), first)
    assert bound.refresh() > first


@pytest.mark.slow
@pytest.mark.parametrize("converged", [True, False])
def test_gradient_agrees_with_finite_differences(member, kind, converged):
    """At any sites: through q as well as at the marginals."""
    model, likelihood, x, y = problem(member)
    bound = CollapsedBound(model.base, likelihood, x, y, bound=kind, block_size=10)
    bound.evaluate(gradient=False)
    if converged:
        converge(bound)
    bound.evaluate()
    parameters = dict([*model.named_hyperparameters(), *likelihood.named_parameters()])
    assert all(p.grad is None for p in model.natural)
    for name, parameter in parameters.items():
        flat = parameter.data.view(-1)
        start = flat[0].item()
        values = []
        for step in (-2e-3, -1e-3, 1e-3, 2e-3):
            flat[0] = start + step
            values.append(bound.evaluate(gradient=False).item())
        flat[0] = start
        loss = -(values[0] - 8 * values[1] + 8 * values[2] - values[3]) / 12e-3 / N
        assert parameter.grad.view(-1)[0].item() == pytest.approx(loss, rel=1e-5, abs=1e-8), name


@pytest.mark.parametrize("block_size", [1, 7, N, 1000])
def test_blocks_of_any_size_give_one_value_and_gradient(block_size, kind):
    results = []
    for size in (block_size, 4):
        model, likelihood, x, y = problem(MEMBERS["student_t"])
        bound = CollapsedBound(model.base, likelihood, x, y, bound=kind, block_size=size)
        bound.evaluate(gradient=False)
        bound.refresh()
        value = bound.evaluate()
        results.append([value, *[p.grad for p in [*model.hyperparameters(), *likelihood.parameters()]]])
        bound.commit()
        results[-1] += [p.detach().clone() for p in model.natural]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_batch_of_gps_is_a_loop(kind):
    member = MEMBERS["student_t"]
    x, y, likelihood = inputs(3, N, 2, seed=1), member.targets(3, N), member.make()
    together = SparseGP(inputs(3, M, 2))
    value = CollapsedBound(together.base, likelihood, x, y, bound=kind).evaluate()
    assert value.shape == (3,)
    total = torch.zeros((), dtype=F64)
    for i in range(3):
        alone = SparseGP(inputs(3, M, 2)[i])
        single = CollapsedBound(alone.base, member.make(), x[i], y[i], bound=kind).evaluate()
        torch.testing.assert_close(value[i], single, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(together.base.inducing_points.grad[i], alone.base.inducing_points.grad)
        total = total + alone.covar_module.raw_outputscale.grad
    torch.testing.assert_close(together.covar_module.raw_outputscale.grad, total)


def test_evaluation_leaves_q_alone_until_committed():
    model, likelihood, x, y = problem(MEMBERS["student_t"])
    before = [p.detach().clone() for p in model.natural]
    bound = CollapsedBound(model.base, likelihood, x, y)
    bound.evaluate()
    assert all(torch.equal(a, b) for a, b in zip(before, model.natural, strict=True))
    bound.commit()
    assert not torch.equal(before[0], model.natural[0])


def test_settling_ends_where_refreshing_no_longer_helps(kind):
    model, likelihood, x, y = problem(MEMBERS["laplace"])
    value = CollapsedBound(model.base, likelihood, x, y, bound=kind).settle(tolerance=1e-12)
    again, _, _, _ = problem(MEMBERS["laplace"])
    torch.testing.assert_close(value, converge(CollapsedBound(again.base, likelihood, x, y, bound=kind)))


def test_coincident_inducing_points_are_refused():
    member = MEMBERS["student_t"]
    model = SparseGP(torch.zeros(M, 2, dtype=F64), jitter_val=0.0)
    with pytest.raises(torch.linalg.LinAlgError, match="jitter_val"):
        CollapsedBound(model.base, member.make(), inputs(N, 2), member.targets(N)).evaluate()


@pytest.mark.parametrize("name", ["bernoulli_logit", "student_t"])
def test_terms_kept_from_a_refreshment_serve_the_next_gradient(name, kind):
    """Writing equal values to every parameter, as an optimiser does, changes nothing either."""
    gradients = []
    for again in (False, True):
        model, likelihood, x, y = problem(MEMBERS[name])
        bound = CollapsedBound(model.base, likelihood, x, y, bound=kind)
        bound.evaluate(gradient=False)
        bound.refresh()
        parameters = [p for p in (*model.hyperparameters(), *likelihood.parameters()) if p.requires_grad]
        with torch.no_grad():
            for parameter in parameters:
                parameter.copy_(parameter.clone())
        if again:  # recomputed, not kept
            bound._local.forget()
        bound.evaluate()
        gradients.append([p.grad for p in parameters if p.grad is not None])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-14)


def test_an_error_half_way_leaves_nothing_to_be_taken_for_the_last_parameters(kind, monkeypatch):
    model, likelihood, x, y = problem(MEMBERS["bernoulli_logit"])
    bound = CollapsedBound(model.base, likelihood, x, y, bound=kind)
    before = bound.evaluate(gradient=False)
    parameter = next(model.hyperparameters())

    def fail(*natural):
        raise torch.linalg.LinAlgError("not positive definite")

    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(collapsed_bound, "_condition", fail)
        parameter.add_(0.5)
        with pytest.raises(torch.linalg.LinAlgError):
            bound.evaluate(gradient=False)
        parameter.sub_(0.5)
    torch.testing.assert_close(bound.evaluate(gradient=False), before, rtol=1e-9, atol=0.0)
