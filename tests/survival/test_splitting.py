"""A split table has the likelihood of the data that were split, whatever the hazard; and finds Cox's estimates."""

import pytest
import torch

from gpext.likelihoods import Offset, PoissonLikelihood
from gpext.survival import event_breaks, split
from tests.survival.cases import generated, log_likelihood

BREAKS = torch.tensor([0.0, 0.3, 0.7, 1.0, 2.5, 20.0], dtype=torch.float64)


def poisson(table, log_hazard):
    """The table's log likelihood, without the factors E^d of its counts."""
    likelihood = Offset(PoissonLikelihood(), table.exposure.log())
    return (likelihood.log_prob(table.counts, log_hazard) - table.counts * table.exposure.log()).sum()


@pytest.mark.parametrize("late", [False, True])
def test_likelihood_is_that_of_the_unsplit_data(late):
    time, event, x, entry = generated(late=late)
    assert bool((time.unsqueeze(-1) == BREAKS).any())  # some times are breaks
    log_hazard = torch.randn(len(time), 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    table = split(time, event, BREAKS, covariates=x, entry=entry if late else None)
    expected = log_likelihood(time, event, entry, BREAKS, log_hazard)
    torch.testing.assert_close(poisson(table, log_hazard[table.subject, table.interval]), expected)
    torch.testing.assert_close(table.inputs, torch.cat([table.coordinates[table.interval, None], x[table.subject]], 1))


def test_splitting_finer_changes_nothing_where_the_hazard_is_the_same():
    time, event, x, entry = generated(late=True)
    log_hazard = x.sum(-1)
    finer = torch.cat([BREAKS, torch.linspace(0.01, 5, 40, dtype=torch.float64)]).unique()
    values = []
    for breaks in (BREAKS, finer, BREAKS[[0, -1]]):
        table = split(time, event, breaks, covariates=x, entry=entry)
        values.append(poisson(table, log_hazard[table.subject]))
        torch.testing.assert_close(table.exposure.sum(), (time - entry).sum())
        assert table.counts.sum() == event.sum()
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(values[0], values[2])


def test_a_covariate_that_changes_is_several_data():
    """A subject until 2, with another covariate from 0.7 on, is as two subjects, of whom the second enters at 0.7."""
    whole = split(torch.tensor([2.0]), torch.tensor([1]), torch.tensor([0.0, 0.7, 3.0]))
    parts = split(
        torch.tensor([0.7, 2.0]),
        torch.tensor([0, 1]),
        torch.tensor([0.0, 0.7, 3.0]),
        entry=torch.tensor([0.0, 0.7]),
        covariates=torch.tensor([5.0, 6.0]),
    )
    assert torch.equal(whole.exposure, parts.exposure)
    assert torch.equal(whole.counts, parts.counts)
    assert parts.inputs[:, 1].tolist() == [5, 6]


def partial_log_likelihood(beta, time, event, x, entry):
    """Cox's, with Breslow's handling of ties."""
    score = x @ beta
    total = score.new_zeros(())
    for t in time[event == 1].unique():
        at_risk = (entry < t) & (time >= t)
        died = (time == t) & (event == 1)
        total = total + score[died].sum() - died.sum() * score[at_risk].logsumexp(0)
    return total


def maximum(function, start):
    """The maximiser of a concave function, by Newton steps, and minus the inverse of its Hessian."""
    value = start
    for _ in range(30):
        gradient = torch.autograd.functional.jacobian(function, value)
        hessian = torch.autograd.functional.hessian(function, value)
        step = torch.linalg.solve(hessian, gradient)
        value = value - step / max(1.0, float(step.abs().max()))
    assert float(step.abs().max()) < 1e-9
    return value, -torch.linalg.inv(hessian)


@pytest.mark.parametrize("late", [False, True])
def test_breaks_at_all_events_and_linear_effects_give_cox_estimates(late):
    time, event, x, entry = generated(number=40, late=late)
    events = time[event == 1].unique()
    breaks = torch.cat([time.new_zeros(1), events[:-1], time.max().unsqueeze(0)])  # the last interval has an event, too
    beta, covariance = maximum(lambda b: partial_log_likelihood(b, time, event, x, entry), x.new_zeros(2))
    # Subjects are at risk at an event, not in the interval before it: who leaves or enters between two events spends
    # none of it. Times are moved accordingly, which Cox's likelihood does not notice.
    grid = torch.cat([breaks[:1], events])
    moved = torch.where(event == 1, time, grid[torch.searchsorted(grid, time, right=True) - 1])
    begun = grid[(torch.searchsorted(grid, entry, right=True) - 1)]
    kept = moved > begun
    table = split(moved[kept], event[kept], breaks, covariates=x[kept], entry=begun[kept])
    baseline = torch.zeros(len(breaks) - 1, dtype=torch.float64)
    size = len(baseline)

    def function(both):
        return poisson(table, both[:size][table.interval] + table.inputs[:, 1:] @ both[size:])

    both, joint = maximum(function, torch.cat([baseline - 1, x.new_zeros(2)]))
    torch.testing.assert_close(both[size:], beta)
    torch.testing.assert_close(joint[size:, size:], covariance)  # standard errors, too


def test_breaks_have_as_many_events_each():
    time, event, _, _ = generated(number=400, seed=3)
    breaks = event_breaks(time, event, 8)
    table = split(time, event, breaks)
    counts = torch.zeros(len(breaks) - 1, dtype=torch.float64).index_add(0, table.interval, table.counts)
    assert breaks[0] == 0
    assert breaks[-1] == time.max()
    most_tied = time[event == 1].unique(return_counts=True)[1].max()
    assert bool((counts - event.sum() / 8).abs().max() <= most_tied + 1)
    assert bool(torch.isin(breaks[1:-1], time[event == 1]).all())


def test_breaks_of_few_or_equal_events():
    assert event_breaks(torch.tensor([3.0]), torch.tensor([1]), 5).tolist() == [0, 3]
    assert event_breaks(torch.full((9,), 2.0), torch.ones(9), 4).tolist() == [0, 2]
    with pytest.raises(ValueError, match="expected at least one event"):
        event_breaks(torch.ones(3), torch.zeros(3), 4)
    with pytest.raises(TypeError, match="num_intervals must be a whole number"):
        event_breaks(torch.ones(3), torch.ones(3), 1.5)


def test_dtypes():
    table = split(torch.tensor([1, 3]), torch.tensor([True, False]), torch.tensor([0, 2, 4]))
    assert table.exposure.dtype == table.counts.dtype == table.inputs.dtype == torch.float32
    assert table.exposure.tolist() == [1, 2, 1]
    table = split(
        torch.tensor([1.0]), torch.tensor([1]), torch.tensor([0.0, 2.0]), covariates=torch.ones(1, 1).double()
    )
    assert (table.exposure.dtype, table.inputs.dtype) == (torch.float32, torch.float64)
    assert table.inputs_at(torch.tensor([[2]])).tolist() == [[[1.0, 2.0]]]


ONE = torch.tensor([1.0, 2.0])
YES = torch.tensor([1, 0])
ENDS = torch.tensor([0.0, 2.0])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((torch.tensor([1.0, -2.0]), YES, ENDS), {}, r"times must be positive; got -2 at index 1\. Add half"),
        ((torch.tensor([0.0, 2.0]), YES, ENDS), {}, "times must be positive; got 0 at index 0"),
        ((torch.tensor([1.0, torch.nan]), YES, ENDS), {}, "time must be finite; got nan at index 1"),
        ((ONE, torch.tensor([1, 2]), ENDS), {}, "events must be 1, or 0 where censored; got 2 at index 1"),
        ((ONE, torch.ones(3), ENDS), {}, r"expected vectors of one length, at least 1; got time \(2,\), event \(3,\)"),
        ((ONE[:0], YES[:0], ENDS), {}, "at least 1"),
        ((ONE, YES, torch.tensor([0.0, 3.0, 2.0])), {}, r"breaks must begin at 0 or later and increase"),
        ((ONE, YES, torch.tensor([0.0, 1.0, 1.0, 2.0])), {}, r"leave out duplicates"),
        ((ONE, YES, torch.tensor([-1.0, 2.0])), {}, r"breaks must begin at 0"),
        ((ONE, YES, torch.tensor([2.0])), {}, r"breaks must be a vector \(J \+ 1,\)"),
        ((ONE, YES, torch.tensor([0.0, 1.5])), {}, "breaks must reach the longest time, 2; the last one is 1.5"),
        ((ONE, YES, torch.tensor([0.5, 2.0])), {}, "breaks must begin at or before the first time at risk, 0"),
        ((ONE, YES, ENDS), {"entry": torch.tensor([1.0, 0.0])}, "before its time; got an entry of 1 at index 0"),
        ((ONE, YES, ENDS), {"entry": torch.tensor([0.0, -1.0])}, "entry must not be negative; got -1 at index 1"),
        ((ONE, YES, ENDS), {"covariates": torch.ones(3, 1)}, r"expected covariates \(2, d\); got shape \(3, 1\)"),
        ((ONE, YES, ENDS), {"covariates": torch.tensor([1, torch.inf])}, "covariates must be finite; got inf at"),
        ((ONE, YES, ENDS), {"coordinates": torch.ones(2)}, "coordinates must be 1 increasing numbers"),
    ],
)
def test_bad_data_are_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        split(*arguments, **options)


def test_arrays_are_refused():
    with pytest.raises(TypeError, match=r"time must be a torch\.Tensor"):
        split([1.0], YES, ENDS)
    table = split(ONE, YES, ENDS, covariates=ONE)
    with pytest.raises(ValueError, match=r"expected covariates \(S, 1\), as the table has them; got \(3, 2\)"):
        table.inputs_at(torch.ones(3, 2))
