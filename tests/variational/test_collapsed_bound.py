import pytest
import torch

from gpext.mlls import AugmentedELBO
from gpext.posteriors import condition_dense
from gpext.sites import GaussianSites
from gpext.variational import CollapsedBound
from tests.members import F64, MEMBERS
from tests.models import SparseGP, inputs, randomise

N, M = 25, 6


@pytest.fixture(params=MEMBERS)
def member(request):
    return MEMBERS[request.param]


def problem(member, *, start=0, **kwargs):
    model = randomise(SparseGP(inputs(M, 2), **kwargs), seed=start)
    return model, member.make(), inputs(N, 2, seed=1), member.targets(N)


def elbo(model, likelihood, x, y):
    """The augmented bound at the model's q(u), by gpytorch's own strategy code."""
    with torch.no_grad():
        return N * AugmentedELBO(likelihood, model.train(), num_data=N)(model(x), y)


def converge(bound, steps=400):
    value = None
    for _ in range(steps):
        previous, value = value, bound.evaluate(gradient=False)
        if previous is not None and bool(((value - previous).abs() < 1e-12 * value.abs()).all()):
            break
    return value


def test_value_at_given_w_is_the_formula_with_pseudo_targets(member):
    """L = log int N(g|mu,Q) prod exp(nu g - tau g^2/2) dg - sum tau (k - q)/2 + sum c, all dense."""
    model, likelihood, x, y = problem(member)
    with torch.no_grad():
        at_start = model.train()(x)  # q(f) where w is taken
        bound = CollapsedBound(model.base, likelihood, x, y, num_refreshes=0)
        value = bound.evaluate(gradient=False)
        joint = model.forward(torch.cat([model.base.inducing_points, x]))
        K, mu = joint.covariance_matrix, joint.mean[M:]
        cross = K[:M, M:]
        Q = cross.mT @ torch.linalg.inv(K[:M, :M] + 1e-6 * torch.eye(M, dtype=F64)) @ cross
        augmentation = likelihood.augmentation(y)
        tilt = augmentation.tilt(at_start.mean, at_start.variance)
        w = augmentation.radial.mean(tilt)
        shift, tau = augmentation.site(w)
        alpha = augmentation.offset + augmentation.curvature * augmentation.center.square()
        c = augmentation.log_constant - alpha * w + tilt * w + augmentation.radial.log_phi(tilt)
        dense = condition_dense(mu, Q, GaussianSites(shift.expand(N), tau.expand(N))).log_normalizer
        k = K.diagonal()[M:] + 1e-6
        expected = dense - 0.5 * (tau * (k - Q.diagonal())).sum() + c.expand(N).sum()
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)


def test_value_is_below_the_augmented_elbo_of_the_committed_q_and_meets_it_at_the_fixed_point(member):
    model, likelihood, x, y = problem(member)
    bound = CollapsedBound(model.base, likelihood, x, y)
    first = bound.evaluate(gradient=False)
    bound.commit()
    assert first <= elbo(model, likelihood, x, y) + 1e-9
    value = converge(bound)
    bound.commit()
    torch.testing.assert_close(value, elbo(model, likelihood, x, y), rtol=1e-9, atol=1e-9)


def test_fixed_point_is_the_maximum_of_the_augmented_elbo_over_q(member):
    model, likelihood, x, y = problem(member)
    value = converge(CollapsedBound(model.base, likelihood, x, y))
    other, _, _, _ = problem(member, start=1)
    for _ in range(400):
        assert elbo(other, likelihood, x, y) <= value + 1e-7
        before = other.natural[0].detach().clone()
        other.base.update(x, y, likelihood)
        if float((before - other.natural[0].detach()).abs().max()) < 1e-6:
            break
    torch.testing.assert_close(elbo(other, likelihood, x, y), value, rtol=1e-8, atol=1e-8)


def test_refreshes_never_decrease_the_value(member):
    model, likelihood, x, y = problem(member)
    bound = CollapsedBound(model.base, likelihood, x, y)
    values = torch.stack([bound.evaluate(gradient=False) for _ in range(12)])
    assert bool((values.diff() >= -1e-12 * values.abs().max()).all())
    assert values[-1] > values[0]
    many = CollapsedBound(problem(member)[0].base, likelihood, x, y, num_refreshes=5).evaluate(gradient=False)
    assert many >= values[0]


def test_a_fixed_w_stays_fixed(member):
    model, likelihood, x, y = problem(member)
    bound = CollapsedBound(model.base, likelihood, x, y)
    bound.evaluate(gradient=False)
    first = bound.evaluate(gradient=False, refresh=False)
    assert torch.equal(bound.evaluate(gradient=False, refresh=False), first)
    assert bound.evaluate(gradient=False) > first - 1e-12 * first.abs()


@pytest.mark.parametrize("converged", [True, False])
def test_gradient_agrees_with_finite_differences(member, converged):
    """At any w in the hyperparameters; in the parameters of phi, which moves w = -phi'/phi(c^2), at the best w."""
    model, likelihood, x, y = problem(member)
    bound = CollapsedBound(model.base, likelihood, x, y, block_size=10)
    bound.evaluate(gradient=False)
    if converged:
        converge(bound)
    bound.evaluate(refresh=False)
    parameters = dict([*model.named_hyperparameters(), *(likelihood.named_parameters() if converged else ())])
    assert all(p.grad is None for p in model.natural)
    for name, parameter in parameters.items():
        flat = parameter.data.view(-1)
        start = flat[0].item()
        values = []
        for step in (-2e-3, -1e-3, 1e-3, 2e-3):
            flat[0] = start + step
            values.append(bound.evaluate(gradient=False, refresh=False).item())
        flat[0] = start
        loss = -(values[0] - 8 * values[1] + 8 * values[2] - values[3]) / 12e-3 / N
        assert parameter.grad.view(-1)[0].item() == pytest.approx(loss, rel=1e-5, abs=1e-8), name


@pytest.mark.parametrize("block_size", [1, 7, N, 1000])
def test_blocks_of_any_size_give_one_value_and_gradient(block_size):
    results = []
    for size in (block_size, 4):
        model, likelihood, x, y = problem(MEMBERS["student_t"])
        bound = CollapsedBound(model.base, likelihood, x, y, block_size=size)
        value = [bound.evaluate() for _ in range(3)][-1]
        results.append([value, *[p.grad for p in [*model.hyperparameters(), *likelihood.parameters()]]])
        bound.commit()
        results[-1] += [p.detach().clone() for p in model.natural]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_batch_of_gps_is_a_loop():
    member = MEMBERS["student_t"]
    x, y, likelihood = inputs(3, N, 2, seed=1), member.targets(3, N), member.make()
    together = SparseGP(inputs(3, M, 2))
    value = CollapsedBound(together.base, likelihood, x, y).evaluate()
    assert value.shape == (3,)
    total = torch.zeros((), dtype=F64)
    for i in range(3):
        alone = SparseGP(inputs(3, M, 2)[i])
        single = CollapsedBound(alone.base, member.make(), x[i], y[i]).evaluate()
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


def test_coincident_inducing_points_are_refused():
    member = MEMBERS["student_t"]
    model = SparseGP(torch.zeros(M, 2, dtype=F64), jitter_val=0.0)
    with pytest.raises(torch.linalg.LinAlgError, match="jitter_val"):
        CollapsedBound(model.base, member.make(), inputs(N, 2), member.targets(N)).evaluate()
