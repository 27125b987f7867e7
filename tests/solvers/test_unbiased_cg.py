"""Unbiased solves: by enumeration of every truncation, and by draws."""

from dataclasses import dataclass

import pytest
import torch

from gpext.solvers import Geometric, NoSurvival, SolveStatus, Survival, Ulisse, unbiased_cg
from tests.solvers.test_conjugate_gradients import system

F64 = torch.float64
MOST = 36  # truncations; the published P_j is the smallest number there is soon after


@dataclass(frozen=True)
class Enumerated(Survival):
    """Another law whose draws are 0, 1, 2, ..., one an estimate."""

    law: Survival

    def log_probability(self, j):
        return self.law.log_probability(j)

    def draw(self, shape, generator=None):
        return torch.arange(shape[0]).view(-1, *(1,) * (len(shape) - 1)).expand(shape)


def jacobi(A):
    diagonal = A.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * torch.linspace(0.5, 2, A.size(-1), dtype=A.dtype).unsqueeze(
        -1
    )
    return lambda r: r / diagonal


LAWS = {
    "geometric": Geometric(0.05),
    "of a cost": Geometric.of_cost(10),
    "published": Ulisse(1.0),
    "slow": Ulisse(1e-3),
}


@pytest.mark.parametrize("preconditioned", [False, True])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", LAWS)
def test_the_mean_over_all_truncations_is_the_solution(name, warm, preconditioned):
    law = LAWS[name]
    A, b = system(20, 2, noise=0.1)
    exact = torch.linalg.solve(A, b)
    start = exact + 0.3 * b if warm else None
    found = unbiased_cg(
        lambda v: A @ v,
        b,
        num_estimates=MOST,
        start=start,
        precondition=jacobi(A) if preconditioned else None,
        tolerance=0.3,
        survival=Enumerated(law),
    )
    assert found.num_steps < MOST  # the run has ended before the largest truncation: later ones change nothing
    reached = torch.tensor([law.log_probability(j) for j in range(MOST)], dtype=F64).exp()
    weights = reached - torch.cat([reached[1:], torch.zeros(1, dtype=F64)])  # P(J = j), all the rest for the last
    mean = (weights.view(-1, 1, 1) * found.estimates).sum(0)
    torch.testing.assert_close(mean, exact, rtol=1e-10, atol=1e-10)


def test_draws_of_the_default_show_the_mean():
    A, b = system(60, 2, noise=0.1)
    generator = torch.Generator().manual_seed(0)
    found = unbiased_cg(lambda v: A @ v, b, num_estimates=4000, tolerance=0.3, generator=generator)
    assert found.status is SolveStatus.CONVERGED
    x = found.estimates
    z = (x.mean(0) - torch.linalg.solve(A, b)) / (x.std(0) / 4000**0.5)
    assert float(z.abs().max()) < 4.5
    quadratic = (x[:2000] * (A @ x[2000:])).sum(1)  # two independent truncations
    expected = (b * torch.linalg.solve(A, b)).sum(0)
    z = (quadratic.mean(0) - expected) / (quadratic.std(0) / 2000**0.5)
    assert float(z.abs().max()) < 4.5


def test_one_truncation_in_both_factors_is_biased_and_early_stopping_too():
    A, b = system(60, 1, noise=0.1)
    generator = torch.Generator().manual_seed(0)
    exact = torch.linalg.solve(A, b)
    x = unbiased_cg(lambda v: A @ v, b, num_estimates=4000, tolerance=0.3, generator=generator).estimates
    shared = (x * (A @ x)).sum(1)
    expected = (b * exact).sum(0)
    assert float(((shared.mean(0) - expected) / (shared.std(0) / 4000**0.5)).max()) > 6
    stopped = unbiased_cg(lambda v: A @ v, b, tolerance=0.3, survival=NoSurvival()).estimates[0]
    assert float((stopped - exact).norm() / exact.norm()) > 0.02


def test_truncations_are_independent_by_column_and_estimate():
    A, b = system(60, 400, noise=0.1)
    generator = torch.Generator().manual_seed(0)
    found = unbiased_cg(lambda v: A @ v, b, num_estimates=2, survival=Geometric(0.1), generator=generator)
    J = found.truncations.double()
    assert J.shape == (2, 400)
    assert abs(float(torch.corrcoef(J)[0, 1])) < 4.5 / 20
    again = torch.Generator().manual_seed(0)
    same = unbiased_cg(lambda v: A @ v, b, num_estimates=2, survival=Geometric(0.1), generator=again)
    assert torch.equal(found.estimates, same.estimates)


@pytest.mark.parametrize("law", [Geometric(0.3), Ulisse(1.0), Ulisse(0.01)])
def test_draws_of_the_truncation_follow_their_law(law):
    J = law.draw(torch.Size([100_000]), torch.Generator().manual_seed(0))
    for j in (1, 2, 5):
        p = torch.tensor(law.log_probability(j), dtype=F64).exp()
        error = (p * (1 - p) / 100_000).sqrt() + 1e-9
        assert abs(float(((j <= J).double().mean() - p) / error)) < 4.5
    steps = (J + 1).double()
    assert abs(float((steps.mean() - law.expected_steps()) / (steps.std() / 100_000**0.5))) < 4.5


def test_a_cost_is_kept():
    assert Geometric.of_cost(20).expected_steps() == pytest.approx(20)


def test_what_ends_the_run_is_said():
    A, b = system(60, 1, noise=1e-3)
    cut = unbiased_cg(lambda v: A @ v, b, survival=Geometric(1e-3), max_steps=5)
    assert (cut.status, cut.num_steps) == (SolveStatus.MAX_STEPS, 5)
    assert unbiased_cg(lambda v: A @ v - 0.5 * v, b).status is SolveStatus.NOT_POSITIVE_DEFINITE
    with pytest.raises(ValueError, match="num_estimates"):
        unbiased_cg(lambda v: A @ v, b, num_estimates=0)
    for bad in (lambda: Geometric(0.0), lambda: Ulisse(-1.0), lambda: Geometric.of_cost(1.0)):
        with pytest.raises(ValueError, match="must be"):
            bad()
