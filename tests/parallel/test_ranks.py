"""Sums over ranks, and errors that reach all of them."""

import copy
import os
import pickle
import signal

import pytest
import torch

from gpext.parallel import Ranks, fingerprint
from tests.parallel.processes import run

pytestmark = pytest.mark.slow


def _sums(rank):
    ranks = Ranks()
    a = torch.full((2, 3), float(rank + 1))
    b = torch.tensor(10.0**rank, dtype=torch.float64)
    found = ranks.sum(lambda: [a, b], [a, b])
    ranks.broadcast_([a])
    return found, a, ranks.any(rank == 1), ranks.any(False), vars(ranks.traffic)


def test_sums_are_over_ranks_and_counted():
    results = [value for value, _ in run(_sums, 3)]
    for (total, powers), a, some, none, traffic in results:
        assert torch.equal(total, torch.full((2, 3), 6.0))
        assert total.dtype == torch.float32
        assert float(powers) == 111
        assert torch.equal(a, torch.ones(2, 3))
        assert some
        assert not none
        assert traffic["numbers"] == (4 + 7 + 1) + (4 + 6) + 4 + 4  # of which four, each time, to synchronise


def _copied(rank):
    ranks = Ranks(torch.distributed.new_group([0, 1]))
    return copy.deepcopy(ranks) is ranks, pickle.loads(pickle.dumps(ranks)).size


def test_copies_of_models_stay_with_their_ranks():
    assert [value for value, _ in run(_copied, 2)] == [(True, 2)] * 2
    assert pickle.loads(pickle.dumps(Ranks.alone())).size == 1


def _fails_on_one(rank, how):
    ranks = Ranks()

    def work():
        if rank == 1:
            raise ValueError("no data here")
        return [torch.ones(2)]

    if how == "sum":
        ranks.sum(work, [torch.ones(2)])
    else:
        ranks.together(work)


@pytest.mark.parametrize("how", ["sum", "together"])
def test_an_error_on_one_rank_is_raised_on_all(how):
    errors = [error for _, error in run(_fails_on_one, 3, how)]
    said = "this failed on rank 1 of 3, and no rank goes on without it"
    assert errors == [f"ValueError: no data here, from RankError: {said}"] * 3


def _is_killed(rank):
    ranks = Ranks()
    ranks.any(False)  # all have found each other
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.sum(lambda: [torch.ones(2)], [torch.ones(2)])


def test_a_killed_rank_is_missed():
    first, killed, third = run(_is_killed, 3, timeout=10.0)
    assert killed is None
    for _, error in (first, third):
        assert "RankError: rank" in error
        assert "from the last checkpoint" in error


def _disagrees(rank):
    Ranks().require_same("dtype", "float32" if rank == 2 else "float64")


def _goes_another_way(rank, way):
    ranks = Ranks()
    ones = torch.ones(300)
    if rank == 1 and way == "operation":
        return ranks.any(True)
    if rank == 1 and way == "size":
        return ranks.sum(lambda: [ones[:200]], [ones[:200]])
    if rank == 1 and way == "error":
        return ranks.together(lambda: ones.view(7))
    if rank == 1 and way == "ends":
        return None
    return ranks.together(lambda: ranks.sum(lambda: [ones], [ones]))


@pytest.mark.parametrize("way", ["operation", "size", "error", "ends"])
def test_ranks_that_have_lost_their_common_way_are_told_so(way):
    outcomes = run(_goes_another_way, 3, way, timeout=6.0 if way == "ends" else 20.0)
    errors = [error for _, error in outcomes]
    expected = {"error": "RuntimeError: shape", "ends": "RankError: rank"}.get(
        way, "RankError: rank 0 of 3 was about to"
    )
    assert errors[0].startswith(expected)
    assert errors[1] is None if way == "ends" else errors[1].startswith(expected[:12])
    assert errors[2].startswith(expected[:12])


def _shared_out(rank):
    ranks = Ranks()
    own = ranks.own(range(7))
    return own, ranks.everyones([10 * each for each in own])


def test_items_are_shared_out_and_come_back_in_their_order():
    outcomes = [value for value, _ in run(_shared_out, 3)]
    assert [own for own, _ in outcomes] == [[0, 3, 6], [1, 4], [2, 5]]
    assert all(whole == list(range(0, 70, 10)) for _, whole in outcomes)


def _alike(rank, other):
    v = torch.linspace(-1, 1, 200, dtype=torch.float64).square()
    changed = {
        "nan": v.where(v < 0.999, torch.nan),
        "sign": -v,
        "scale": 1.001 * v,
        "rounding": v * (1 + 1e-14),
        "zero": 0 * v,
        "order": v.roll(1),
        "two": v[[1, 0, *range(2, 200)]],
    }
    v = changed[other] if rank == 1 else v
    Ranks().sum(lambda: [v], [v], alike=[v])


@pytest.mark.parametrize("other", ["nan", "sign", "scale", "rounding", "zero", "order", "two"])
def test_vectors_that_are_not_the_same_on_all_ranks_are_refused(other):
    for _, error in run(_alike, 2, other):
        assert error is None if other == "rounding" else error.startswith("ValueError: expected the same inputs and")


def test_ranks_that_disagree_are_told_so():
    for _, error in run(_disagrees, 3):
        assert error == "ValueError: expected the same dtype on every rank; rank 0 has float64, rank 2 float32."


def _says_parts(rank):
    Ranks().require_same("model", "a kernel", f"nu = {rank}.5", *["a prior"] * (rank == 2))


def test_only_what_differs_is_shown():
    for _, error in run(_says_parts, 3):
        assert error == "ValueError: expected the same model on every rank; rank 0 has nu = 0.5, rank 1 nu = 1.5."


def test_a_mark_tells_tensors_apart():
    t = torch.linspace(-1, 2, 150_000, dtype=torch.float64)
    assert fingerprint([t]) == fingerprint([t.clone()])
    others = [-t, t.flip(0), torch.cat([t[65536:], t[:65536]]), 1.001 * t, t.clone().index_fill_(0, torch.tensor(7), 0)]
    for other in others:
        assert abs(fingerprint([other]) - fingerprint([t])) > 1e-7
    assert fingerprint([t, 2 * t]) != fingerprint([2 * t, t])
    assert (fingerprint([]), fingerprint([0 * t]), fingerprint([t / 0])) == (0.0, 0.0, torch.inf)


def test_without_a_group_everything_is_trivial():
    ranks = Ranks()
    assert (ranks.size, ranks.rank) == (1, 0)
    t = torch.ones(3)
    assert ranks.sum(lambda: [t], [t])[0] is t
    assert ranks.together(lambda: 5) == 5
    assert ranks.any(True)
    ranks.require_same("dtype", "float64")
    ranks.broadcast_([t])
    assert ranks.traffic.operations == 0
