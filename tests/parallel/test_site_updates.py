"""The closed-form step of q(u) over several ranks, against that of one process that has all the data."""

import pytest
import torch

import gpext
from gpext.parallel import Ranks
from tests.members import F64
from tests.parallel.processes import run
from tests.sparse_models import SparseGP, inputs, randomise

pytestmark = pytest.mark.slow

SIZES = {2: (30, 13), 4: (5, 20, 1, 17)}  # of the shards
LIKELIHOODS = {
    "student_t": lambda: gpext.likelihoods.StudentTLikelihood(),
    "poisson": lambda: gpext.likelihoods.PoissonLikelihood(),
    "multinomial": lambda: gpext.likelihoods.MultinomialLogitLikelihood(3),
    "many points": lambda: gpext.likelihoods.StudentTLikelihood(),
}


def problem(name, dtype=F64):
    latents = torch.Size([3]) if name == "multinomial" else torch.Size()
    number = 150 if name == "many points" else 7
    Z = inputs(*latents, number, 2, seed=1, dtype=dtype)
    model = randomise(SparseGP(Z, num_tasks=3 if latents else None))
    x = inputs(43, 2, seed=2, dtype=dtype)
    y = (torch.arange(43) % 3).to(dtype)
    return model, LIKELIHOODS[name]().to(dtype), x, y


def stepped(name, gradient, bound, rows=None, ranks=None, dtype=F64):
    """The natural parameters, the value and all derivatives after two steps."""
    model, likelihood, x, y = problem(name, dtype)
    index = torch.arange(43) if rows is None else rows
    share = None if rows is None else len(rows)
    values = [
        model.base.update(
            x[index], y[index], likelihood, 0.7, 43, bound=bound, gradient=gradient, share=share, ranks=ranks
        )
        for _ in range(2)
    ]
    slopes = [p.grad for p in [*model.hyperparameters(), *likelihood.parameters()] if p.grad is not None]
    return [t.detach() for t in (*model.natural, *slopes, *(v for v in values if v is not None))]


def _of_rank(rank, size, *case):
    ranks = Ranks()
    rows = torch.arange(43).split(SIZES[size])[rank]
    found = stepped(*case, rows, ranks)
    model, likelihood, _, _ = problem(case[0])
    return found, ranks.traffic, sum(p.numel() for p in [*model.parameters(), *likelihood.parameters()])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "case",
    [
        ("student_t", "exact", None),
        ("student_t", "augmented", None),
        ("student_t", None, "exact"),
        ("poisson", "exact", None),
        ("multinomial", "exact", None),
        ("many points", "exact", None),
    ],
    ids=str,
)
def test_it_is_the_step_of_one_process(size, case):
    expected = stepped(*case)
    for found, traffic, numbers in (value for value, _ in run(_of_rank, size, size, *case)):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        # M^2 + O(M d) a step, and a number for each try of a line search
        assert traffic.numbers <= 2 * (numbers + 3) + 40


def _has_nan(rank):
    model, likelihood, x, y = problem("student_t")
    before = [p.clone() for p in model.parameters()]
    x = x.clone()
    x[3] = torch.nan if rank == 1 else 0.0
    try:
        model.base.update(x, y, likelihood, num_data=86, share=43, gradient="exact", ranks=Ranks())
    except Exception as error:
        unchanged = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        return f"{type(error).__name__}: {error}", unchanged, all(p.grad is None for p in model.parameters())
    return "", False, False


def test_nan_on_one_rank_moves_none():
    (first, *kept), (second, *also) = (value for value, _ in run(_has_nan, 2))
    assert first == second
    assert first.startswith("ValueError: inputs")
    assert all(kept + also)
