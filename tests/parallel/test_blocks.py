"""Training by blocks over ranks: the mean of the ranks' gradients, on all of them, and one ending for all."""

import pytest
import torch
from linear_operator.utils.errors import NotPSDError

import gpext
from gpext.parallel import Ranks
from gpext.training.blocks import Blocks, BlockStepper
from gpext.training.minibatch import Minibatches
from tests.members import F64
from tests.parallel.processes import run
from tests.training.test_blocks import N, data, problem

pytestmark = pytest.mark.slow


def fitted(mll, **options):
    result = gpext.fit(mll, *data(mll), batch_size=26, max_steps=6, progress=False, **options)
    return result, [p.detach().clone() for p in mll.parameters()]


def _of_rank(rank):
    return fitted(problem())


def by_one_process():
    """The trace and the parameters of steps that two blocks of 13 take in turn, with the mean of their gradients."""
    mll, trace = problem(), []
    parameters = [p for p in mll.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(0)
    stepper = BlockStepper(mll, 0.05)
    for half in range(2):
        blocks = Blocks(mll, 13, 10.0, generator)
        order = Minibatches(len(blocks), 1, generator)
        for number in range(3 * half, 3 * half + 3):
            found = []
            for _ in range(2):
                value = stepper.differentiate(blocks, int(order.draw()))
                found.append([torch.tensor(value, dtype=F64), *(p.grad.clone() for p in parameters)])
            value, *gradient = ((a + b) / 2 for a, b in zip(*found, strict=True))
            trace.append(float(value))
            for parameter, each in zip(parameters, gradient, strict=True):
                parameter.grad = each
            stepper._adam.param_groups[0]["lr"] = 0.05 * min(1.0, 3 / (number + 1))
            stepper._adam.step()
    return torch.tensor(trace, dtype=F64), [p.detach() for p in mll.parameters()]


def test_a_step_is_the_mean_over_a_block_of_each_rank():
    trace, parameters = by_one_process()
    outcomes = run(_of_rank, 2)
    for (result, found), error in outcomes:
        assert error is None
        torch.testing.assert_close(result.trace, trace, rtol=1e-9, atol=1e-9)
        for a, b in zip(found, parameters, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    for a, b in zip(outcomes[0][0][1], outcomes[1][0][1], strict=True):
        assert torch.equal(a, b)


def _alone(rank):
    return fitted(problem(), ranks=Ranks.alone())


def test_each_by_itself_is_one_process():
    expected, parameters = fitted(problem())
    for (result, found), error in run(_alone, 2):
        assert error is None
        assert torch.equal(result.trace, expected.trace)
        assert all(torch.equal(a, b) for a, b in zip(found, parameters, strict=True))


def _with_other_data(rank):
    mll = problem(n=N + rank)
    return fitted(mll)


def test_all_ranks_have_all_data():
    for found, error in run(_with_other_data, 2):
        assert found is None
        assert "same inputs and vectors on every rank" in error


def _one_breaks_down(rank):
    mll = problem()
    if rank == 1:
        infer = mll.model.variational_strategy.infer
        calls = []

        def failing(*arguments):
            calls.append(1)
            if len(calls) > 4:
                raise NotPSDError("no posterior there")
            return infer(*arguments)

        mll.model.variational_strategy.infer = failing
    return fitted(mll)


def test_a_breakdown_of_one_rank_ends_all_at_the_same_parameters():
    (first, error), (second, other_error) = run(_one_breaks_down, 2)
    assert error is other_error is None
    for result, _ in (first, second):
        assert result.status is gpext.FitStatus.BREAKDOWN
        assert 0 < result.num_steps < 6
        assert "no posterior there" in result.message
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


def _one_stops(rank):
    return fitted(problem(), callback=lambda step, value: rank == 1 and step == 2)


def test_a_callback_of_one_rank_stops_all():
    for (result, _), error in run(_one_stops, 2):
        assert error is None
        assert result.status is gpext.FitStatus.STOPPED
        assert result.num_steps == 2
