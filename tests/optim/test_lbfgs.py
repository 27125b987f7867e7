"""L-BFGS: minima against SciPy's, and every outcome of a search."""

import math
import warnings

import pytest
import scipy.optimize
import torch

from gpext.callers import warn_caller
from gpext.optim import Curvature, Outcome, RobbinsMonro, minimize_lbfgs
from tests.members import F64, tensor


def rosenbrock(point):
    return (100 * (point[1:] - point[:-1].square()).square() + (1 - point[:-1]).square()).sum()


def minimise(start, function, **kwargs):
    parameters = [torch.nn.Parameter(s) for s in start]

    def objective():
        value = function(torch.cat([p.flatten() for p in parameters]))
        value.backward()
        return value.detach()

    given = {"max_steps": 500, "tolerance": 0.0, **kwargs}
    return parameters, minimize_lbfgs(objective, parameters, **given)


def test_finds_the_minimum_that_scipy_finds_over_parameters_of_any_shape():
    parameters, outcome = minimise([tensor(1.3, 0.7), torch.full((2, 2), 0.5, dtype=F64)], rosenbrock)
    assert outcome in (Outcome.CONVERGED, Outcome.STALLED)
    expected = scipy.optimize.minimize(scipy.optimize.rosen, [1.3, 0.7, 0.5, 0.5, 0.5, 0.5], tol=1e-12).x
    torch.testing.assert_close(
        torch.cat([p.detach().flatten() for p in parameters]), torch.from_numpy(expected), rtol=1e-4, atol=1e-4
    )


def test_a_restart_leaves_a_valley_that_a_tolerance_calls_flat():
    values = {}
    for restarts in (0, 20):
        parameters, _ = minimise([tensor(-1.2, 1.0)], rosenbrock, tolerance=0.1, max_restarts=restarts)
        values[restarts] = rosenbrock(parameters[0]).item()
    assert values[20] < 0.7 * values[0]


def test_the_first_step_of_a_restart_is_as_long_as_the_last_run_suggests():
    """A step of length one would leave the valley, and inner iterations begin from far away."""
    seen = {}
    for restarts in (0, 1):
        values = seen[restarts] = []

        def followed(point, values=values):
            values.append(rosenbrock(point))
            return values[-1]

        minimise([tensor(-0.5, 0.5)], followed, tolerance=0.1, max_restarts=restarts)
    again = seen[1][len(seen[0]) :]
    assert len(again) > 3
    assert max(again) < 1


@pytest.mark.parametrize("size", [1e2, 1e4, 1e6])
def test_large_parameters_move_in_proportion_to_themselves(size):
    seen = {}
    for start in (10.0, size):
        relative = seen[start] = []

        def function(p, start=start, relative=relative):
            relative.append(float(p.detach()) / start)
            return (p / start - 2).square().sum()

        parameters, _ = minimise([tensor(start)], function)
        torch.testing.assert_close(parameters[0].detach(), tensor(2 * start))
    assert seen[size] == pytest.approx(seen[10.0], rel=1e-9)


@pytest.mark.parametrize(("end", "most"), [(3.0, 12), (3e3, 20), (3e5, 25)])
def test_a_scale_grows_by_orders_of_magnitude_in_few_evaluations(end, most):
    """In steps of one length behind a softplus, more than a third more: 27 to 3000, and 37 to 300000."""
    calls = []

    def function(p):
        calls.append(p)
        return (torch.nn.functional.softplus(p) / end).log().square().sum()

    parameters, _ = minimise([tensor(0.0)], function, tolerance=1e-4, max_restarts=5)
    assert len(calls) <= most
    assert torch.nn.functional.softplus(parameters[0]).item() == pytest.approx(end, rel=0.05)


def test_the_callback_sees_the_parameters_of_the_iterate():
    seen = []
    parameter = torch.nn.Parameter(tensor(-1.2, 1.0))

    def objective():
        value = rosenbrock(parameter)
        value.backward()
        return value.detach()

    def check(value):
        seen.append(value)
        assert rosenbrock(parameter).item() == value

    minimize_lbfgs(objective, [parameter], max_steps=50, tolerance=0.0, callback=check)
    assert len(seen) > 10


def test_nothing_to_optimise_is_converged():
    assert minimise([], lambda point: point.sum())[1] is Outcome.CONVERGED


def test_stops_at_max_steps_and_by_the_callback():
    assert minimise([tensor(-1.2, 1.0)], rosenbrock, max_steps=3)[1] is Outcome.MAX_STEPS
    values = []
    outcome = minimise([tensor(-1.2, 1.0)], rosenbrock, callback=lambda v: values.append(v) or len(values) == 4)[1]
    assert outcome is Outcome.STOPPED
    assert len(values) == 4
    assert values == sorted(values, reverse=True)


def test_a_tolerance_ends_it_early():
    steps = []
    outcome = minimise([tensor(-1.2, 1.0)], rosenbrock, tolerance=1e3, callback=lambda v: steps.append(v))[1]
    assert outcome is Outcome.CONVERGED
    assert len(steps) == 4


@pytest.mark.parametrize("seed", range(12))
def test_a_run_does_not_end_while_its_gains_grow(seed):
    # A first step across a narrow valley is cut short, and the first iterations gain little along the valley.
    generator = torch.Generator().manual_seed(seed)
    width = torch.logspace(-2, 2, 10, dtype=F64)
    turn, _ = torch.linalg.qr(torch.randn(10, 10, generator=generator, dtype=F64))
    start = turn @ (torch.randn(10, generator=generator, dtype=F64) / width.sqrt())
    values = []
    _, outcome = minimise(
        [start], lambda x: 0.01 * (width * (turn.mT @ x).square()).sum(), tolerance=1e-3, callback=values.append
    )
    assert outcome is Outcome.CONVERGED
    assert values[-2] - values[-1] <= values[-4] - values[-3]


def test_steps_back_from_points_where_the_objective_breaks_down():
    def walled(point):
        if point[0] > 1.5:
            raise torch.linalg.LinAlgError("not positive definite")
        return (point[0] - 1.4).square() + 1e-3 * torch.exp(-5 * point[0])

    parameters, _ = minimise([tensor(-3.0)], walled)
    assert parameters[0].item() == pytest.approx(1.4, abs=1e-3)


def test_steps_back_from_points_where_the_gradient_is_not_finite():
    parameter = torch.nn.Parameter(tensor(-3.0))

    def objective():
        value = (parameter[0] - 1.4).square() + 1e-3 * torch.exp(-5 * parameter[0])
        value.backward()
        if parameter[0] > 1.5:
            parameter.grad.fill_(float("nan"))
        return value.detach()

    minimize_lbfgs(objective, [parameter], max_steps=500, tolerance=0.0)
    assert parameter.item() == pytest.approx(1.4, abs=1e-3)


def test_a_start_without_a_gradient_is_an_error():
    with pytest.raises(FloatingPointError, match="its gradient is not finite at the starting point"):
        minimise([tensor(0.0)], lambda point: point.abs().sqrt().sum())


def test_breakdown_at_the_start_is_an_error():
    def broken(point):
        raise torch.linalg.LinAlgError("not positive definite")

    with pytest.raises(torch.linalg.LinAlgError):
        minimise([tensor(0.0)], broken)


def test_ends_at_the_best_point_seen_even_when_interrupted():
    parameter, seen = torch.nn.Parameter(tensor(-1.2, 1.0)), []

    def objective():
        value = rosenbrock(parameter)
        value.backward()
        seen.append((value.item(), parameter.detach().clone()))
        if len(seen) == 20:
            raise KeyboardInterrupt
        return value.detach()

    with pytest.raises(KeyboardInterrupt):
        minimize_lbfgs(objective, [parameter], max_steps=500, tolerance=0.0)
    assert torch.equal(parameter.detach(), min(seen[:-1], key=lambda pair: pair[0])[1])


def test_robbins_monro_steps_sum_to_infinity_and_their_squares_do_not():
    rate = RobbinsMonro(0.9, 2.0, 0.7)
    assert rate(0) == pytest.approx(0.9 * 2**-0.7)
    steps = torch.tensor([rate(t) for t in range(100000)], dtype=F64)
    assert bool((steps.diff() < 0).all())
    decades = [10, 100, 1000, 10000, 100000]
    total = [float(steps[:n].sum()) for n in decades]
    squares = [float(steps[:n].square().sum()) for n in decades]
    assert all(b - a > 1.5 * (d - c) for c, d, a, b in zip(total, total[1:], total[1:], total[2:], strict=False))
    assert all(
        b - a < 0.7 * (d - c) for c, d, a, b in zip(squares, squares[1:], squares[1:], squares[2:], strict=False)
    )


@pytest.mark.parametrize(
    "kwargs", [{"exponent": 0.5}, {"exponent": 1.1}, {"delay": 0.5}, {"scale": 2.0}, {"scale": 0.0}]
)
def test_schedules_that_do_not_converge_are_refused(kwargs):
    with pytest.raises(ValueError, match="must be"):
        RobbinsMonro(**kwargs)


def test_a_start_that_cannot_be_evaluated_is_an_error():
    with pytest.raises(FloatingPointError, match="nan at the starting point"):
        minimise([tensor(1.0)], lambda point: (point * float("nan")).sum())


def test_a_restart_that_gains_nothing_has_converged_however_it_ends():
    def kinked(point):  # at its minimum no line search finds a better point
        return (point[0] - 0.3).abs() + 3 * (point[1] - point[0]).abs()

    for restarts, expected in ((0, Outcome.STALLED), (10, Outcome.CONVERGED)):
        assert minimise([tensor(-1.2, 1.0)], kinked, tolerance=1e-6, max_restarts=restarts)[1] is expected


def test_a_restart_that_a_breakdown_keeps_from_going_on_has_stalled():
    def walled(point):  # continues to fall behind the wall
        if point[0] > 1:
            raise torch.linalg.LinAlgError("not positive definite")
        return -1e3 * point[0]

    parameters, outcome = minimise([tensor(1.0)], walled, tolerance=1e-6, max_restarts=3)
    assert parameters[0].item() == 1.0
    assert outcome is Outcome.STALLED


@pytest.mark.parametrize(("edge", "slope"), [(0.3, 100.0), (0.5, 1e4)])
def test_a_restart_before_a_cliff_has_stalled(edge, slope):
    """Downhill to an edge behind which all is far worse: no step is short enough, and there is more to gain."""

    def cliff(x):
        return torch.where(x < edge, -slope * x, 1 + x).sum()

    (x,), outcome = minimise([tensor(0.0)], cliff, tolerance=1e-4, max_restarts=10)
    assert slope * (edge - x.item()) > 1e-4
    assert outcome is Outcome.STALLED


@pytest.mark.parametrize("max_steps", range(30))
def test_restarts_take_no_more_steps_than_there_are(max_steps):
    taken = []
    minimise([tensor(-1.2, 1.0)], rosenbrock, max_steps=max_steps, tolerance=1.0, max_restarts=5, callback=taken.append)
    assert len(taken) <= max_steps


def test_warnings_are_passed_on_from_points_that_count():
    x, seen = torch.tensor(3.0, dtype=F64, requires_grad=True), set()

    def objective():
        place = "far" if x.item() < 2.5 else "near"  # the first step goes to 2.2
        seen.add(place)
        warn_caller(place, RuntimeWarning)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            warn_caller("ignored", UserWarning)
        value = (x - 2.6).square()
        value.backward()
        return value.detach() if place == "near" else tensor(math.nan)

    with pytest.warns(Warning) as caught:  # noqa: PT030  of all kinds
        minimize_lbfgs(objective, [x], max_steps=20, tolerance=1e-9)
    assert seen == {"near", "far"}
    assert {str(each.message) for each in caught} == {"near"}
    assert {each.filename for each in caught} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="near"):
            minimize_lbfgs(objective, [x], max_steps=20, tolerance=1e-9)


def quadratic(optimum):
    root = torch.tensor([[3.0, 0.0, 0.0], [2.9, 0.5, 0.0], [0.0, 8.0, 0.4]], dtype=F64)  # of a Hessian, far from round
    return root, lambda p: 0.5 * (root @ (p - optimum)).square().sum()


def test_the_first_step_in_a_known_curvature_is_newtons():
    root, function = quadratic(tensor(0.2, -0.4, 0.6))
    known, values, start = Curvature(), [], tensor(0.1, -0.3, -0.2)
    known.root = torch.linalg.inv(root).numpy()
    minimise([start.clone()], function, curvature=known, callback=values.append)
    assert values[0] < 1e-20 * function(start).item()


def test_the_curvature_of_a_run_satisfies_the_secant_equation_of_its_last_step():
    known, points = Curvature(), []
    start = torch.nn.Parameter(tensor(-1.2, 1.0, 0.5))

    def objective():
        value = rosenbrock(start)
        value.backward()
        return value.detach()

    def keep(value):
        points.append((start.detach().clone(), start.grad.clone()))
        return len(points) == 13

    minimize_lbfgs(objective, [start], max_steps=50, tolerance=0.0, curvature=known, callback=keep)
    (x, g), (new_x, new_g) = points[-2:]
    inverse = torch.from_numpy(known.root @ known.root.T)
    torch.testing.assert_close(inverse @ (new_g - g), new_x - x, rtol=1e-8, atol=1e-12)


def test_no_matrix_is_made_of_many_parameters_whose_curvature_a_run_does_not_tell():
    start = torch.zeros(10**6, dtype=F64)  # of which a matrix has 8 TB
    known, values = Curvature(), []
    scale = torch.linspace(1, 3, len(start), dtype=F64)
    minimise([start], lambda p: (scale * (p - 1).square()).mean(), max_steps=3, curvature=known, callback=values.append)
    assert values[-1] < 1
    assert known.root is None


def test_a_run_whose_gain_its_curvature_foretold_is_not_restarted():
    counts = {}
    for name in ("known", "unknown"):
        known, steps = Curvature(), []
        if name == "known":
            minimise([tensor(-1.2, 1.0)], rosenbrock, tolerance=1e-3, curvature=known)
        minimise(
            [tensor(0.9, 0.8)], rosenbrock, tolerance=1e-3, max_restarts=20, curvature=known, callback=steps.append
        )
        counts[name] = len(steps)
    assert counts["known"] < counts["unknown"]


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
@pytest.mark.parametrize("tolerance", [1.01, 0.99])
def test_the_first_step_in_a_known_curvature_is_the_last_if_there_is_less_than_the_tolerance_to_gain(share, tolerance):
    root, function = quadratic(tensor(0.2, -0.4, 0.6))
    start = tensor(0.1, -0.3, 0.5)
    known, steps, to_gain = Curvature(), [], function(start).item()
    known.root = share**0.5 * torch.linalg.inv(root).numpy()  # a step of this share of Newton's
    minimise([start], function, tolerance=tolerance * to_gain, curvature=known, callback=steps.append)
    assert (len(steps) == 1) == (tolerance > 1)


def test_a_step_in_a_known_curvature_that_leaves_more_to_gain_elsewhere_is_not_the_last():
    def function(p):  # the slope along y is zero at (1, 0), and is 0.1 at (0, 0), where the first step leads
        x, y = p
        return 0.5 * x.square() + 0.5e-3 * y.square() + 0.1 * (1 - x) * y + 1e-6 * y.pow(4)

    known, steps = Curvature(), []
    known.root = tensor(1.0, 1e-3**-0.5).diag().numpy()
    minimise([tensor(1.0, 0.0)], function, tolerance=0.6, curvature=known, callback=steps.append)
    assert abs(steps[0]) < 1e-12
    assert steps[-1] < -0.6


@pytest.mark.parametrize("seed", range(8))
def test_what_a_short_step_in_a_known_curvature_leaves_to_gain_is_told_by_slopes_not_by_inexact_values(seed):
    root, function = quadratic(tensor(0.2, -0.4, 0.6))
    start, generator = tensor(0.1, -0.3, 0.5), torch.Generator().manual_seed(seed)
    known, steps, to_gain = Curvature(), [], function(start).item()
    known.root = 0.2**0.5 * torch.linalg.inv(root).numpy()  # the step bends what it gains by 0.04 of `to_gain`

    def inexact(p):
        return function(p) + 0.02 * to_gain * torch.rand((), generator=generator, dtype=F64)

    minimise([start], inexact, tolerance=1.05 * to_gain, curvature=known, callback=steps.append)
    assert len(steps) == 1


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_the_very_first_step_suits_an_objective_a_datum_and_is_no_longer_than_one(scale):
    tried = []

    def bowl(p):
        tried.append(p.detach().clone())
        return scale * 0.2 * (p - 0.5).square().sum()

    minimise([tensor(0.1, 0.4, 0.7)], bowl)
    step = tried[1] - tried[0]
    expected = 0.5 - tried[0] if scale == 1 else (0.5 - tried[0]) / (0.5 - tried[0]).norm()
    torch.testing.assert_close(step, expected, rtol=1e-12, atol=1e-12)


def test_the_first_step_is_as_long_as_the_last_one_of_an_earlier_minimisation_suggests():
    known, values = Curvature(), []

    def round_bowl(p):
        value = 25 * (p - 0.5).square().sum()
        values.append(value.item())
        return value

    minimise([tensor(0.1, 0.9, -0.3)], round_bowl, curvature=known, max_steps=1)
    assert known.root is None
    assert values[1] > 1e-3  # the very first step has length one
    values.clear()
    minimise([tensor(0.5, 0.51, 0.5)], round_bowl, curvature=known)
    assert values[1] < 1e-20


@pytest.mark.parametrize(("steps", "is_known"), [(5, False), (6, True)])
def test_a_run_of_fewer_than_two_steps_a_parameter_leaves_no_curvature(steps, is_known):
    known = Curvature()
    minimise([tensor(-1.2, 1.0, 0.5)], rosenbrock, curvature=known, max_steps=steps)
    assert (known.root is not None) == is_known


@pytest.mark.parametrize("scale", [1e-3, 1e-5])
def test_a_run_that_gains_more_than_its_curvature_foretold_goes_on_or_is_restarted(scale):
    known = Curvature()
    known.root = scale * torch.eye(2, dtype=F64).numpy()
    parameters, outcome = minimise([tensor(-1.2, 1.0)], rosenbrock, tolerance=1e-3, max_restarts=20, curvature=known)
    assert outcome is Outcome.CONVERGED
    assert rosenbrock(parameters[0]).item() < 0.01


def test_a_curvature_that_misleads_is_stepped_back_from():
    known = Curvature()
    known.root = torch.tensor([[1e4, 0.0], [0.0, 1e-3]], dtype=F64).numpy()
    parameters, outcome = minimise([tensor(-1.2, 1.0)], rosenbrock, curvature=known, max_restarts=9)
    assert outcome in (Outcome.CONVERGED, Outcome.STALLED)
    torch.testing.assert_close(parameters[0].detach(), tensor(1.0, 1.0), rtol=1e-4, atol=1e-4)


def measured(parameters, function):
    known, calls = Curvature(), []
    leaves = [torch.nn.Parameter(p) for p in parameters]

    def objective():
        calls.append([p.detach().clone() for p in leaves])
        value = function(*leaves)
        value.backward()
        return value.detach()

    known.measure(objective, leaves)
    assert all(torch.equal(now, then) for now, then in zip(leaves, parameters, strict=True))
    return known, calls


def test_the_curvature_measured_by_gradients_is_that_of_a_quadratic_function():
    root, _ = quadratic(tensor(0.2, -0.4, 0.6))
    root = root * tensor(1.0, 1.0, 30.0)
    known, calls = measured(
        [tensor(0.1), tensor(-0.3, 0.9)], lambda a, b: 0.5 * (root @ (torch.cat([a, b]) - 0.2)).square().sum()
    )
    assert len(calls) == 4  # P + 1
    inverse = torch.from_numpy(known.root @ known.root.T)
    torch.testing.assert_close(inverse @ (root.mT @ root), torch.eye(3, dtype=F64), rtol=1e-9, atol=1e-9)


def test_where_the_function_is_concave_steps_lead_downhill_too():
    known, _ = measured([tensor(0.5, 0.2)], lambda p: 2 * p[0].square() - 0.5 * p[1].square() + p.sum())
    inverse = torch.from_numpy(known.root @ known.root.T)
    torch.testing.assert_close(inverse, tensor(0.25, 1.0).diag(), rtol=1e-9, atol=1e-9)


def test_a_curvature_is_not_known_where_the_objective_breaks_down_nearby():
    def function(p):
        if p[1] > 0:
            raise torch.linalg.LinAlgError("not positive definite")
        return p.square().sum()

    known, _ = measured([tensor(0.5, -0.01)], function)
    assert known.root is None
    with pytest.raises(torch.linalg.LinAlgError):
        measured([tensor(0.5, 0.01)], function)


@pytest.mark.parametrize("distance", [0.5, 30.0])
def test_the_first_step_in_a_known_curvature_is_no_longer_than_one(distance):
    known, tried = Curvature(), []
    known.root = 100 * torch.eye(2, dtype=F64).numpy()

    def bowl(p):
        tried.append(p.detach().clone())
        return 0.5e-4 * (p - tensor(distance, 0.0)).square().sum()

    minimise([tensor(0.0, 0.0)], bowl, curvature=known, tolerance=1e-12)
    torch.testing.assert_close(tried[1], tensor(min(distance, 1.0), 0.0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [0.9, 1.1])
def test_eight_evaluations_that_differ_by_less_than_a_tenth_of_the_tolerance_are_enough(size):
    """A slope that no value bears out, as rounding leaves one: else the line search tries again and again."""
    calls = []
    x = torch.nn.Parameter(tensor(0.0, 0.0))

    def objective():
        calls.append(x.detach().clone())
        x.grad = tensor(1e-3, -1e-3)
        return torch.tensor(size * 1e-5 * (len(calls) % 2), dtype=F64)

    outcome = minimize_lbfgs(objective, [x], max_steps=50, tolerance=1e-4)
    assert (len(calls) == 8) == (size < 1)
    assert size > 1 or outcome is Outcome.CONVERGED
    torch.testing.assert_close(x.detach(), calls[1], rtol=0, atol=0)  # the first of the lower values
