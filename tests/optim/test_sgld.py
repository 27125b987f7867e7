"""Langevin steps on Gaussians, whose stationary law is known at every step size."""

import copy

import pytest
import torch

from gpext.optim import SGLD, PolynomialDecay

F64 = torch.float64
SIGMA = torch.tensor([[2.0, 0.6, 0.0], [0.6, 0.5, 0.1], [0.0, 0.1, 0.2]], dtype=F64)


def chain(steps, *, lr, preconditioner=None, noise=0.0, seed=0, burn=100):
    """Draws of N(0, SIGMA) from exact gradients, or noisy ones of covariance noise^2 SIGMA^-1."""
    theta = torch.zeros(3, dtype=F64, requires_grad=True)
    optimizer = SGLD([theta], lr=lr, preconditioner=preconditioner, generator=torch.Generator().manual_seed(seed))
    precision, generator = torch.linalg.inv(SIGMA), torch.Generator().manual_seed(seed + 1)
    root, draws = torch.linalg.cholesky(precision), []
    for step in range(steps + burn):
        theta.grad = precision @ theta.detach() + noise * root @ torch.randn(3, dtype=F64, generator=generator)
        optimizer.step()
        if step >= burn:
            draws.append(theta.detach().clone())
    return torch.stack(draws), optimizer


@pytest.mark.parametrize("noise", [0.0, 0.7])
def test_the_stationary_covariance_is_the_one_of_the_recursion(noise):
    """M = SIGMA: theta' = (1 - eps / 2) theta + noise of covariance (eps + eps^2 noise^2 / 4) SIGMA."""
    eps = 0.5
    draws, _ = chain(40_000, lr=eps, preconditioner=SIGMA, noise=noise)
    shrink = 1 - eps / 2
    expected = SIGMA * (eps + eps**2 / 4 * noise**2) / (1 - shrink**2)
    whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(expected), draws.mT, upper=False)
    products = whitened.unsqueeze(0) * whitened.unsqueeze(1)  # each of mean 0 or 1
    error = products.mean(-1) - torch.eye(3, dtype=F64)
    spread = products.var(-1) * (1 + shrink**2) / (1 - shrink**2) / len(draws)  # squares of an AR(1)
    assert float((error / spread.sqrt()).abs().max()) < 4.5


def test_a_diagonal_preconditioner_and_groups_with_rates_of_their_own():
    first, second = torch.zeros(2, dtype=F64, requires_grad=True), torch.zeros(1, dtype=F64, requires_grad=True)
    groups = [{"params": [first], "lr": 0.5}, {"params": [second], "lr": 0.1}]
    optimizer = SGLD(groups, lr=1.0, preconditioner=torch.tensor([2.0, 0.5, 1.0], dtype=F64))
    draws = []
    for _ in range(20_000):
        first.grad, second.grad = first.detach() / torch.tensor([2.0, 0.5], dtype=F64), second.detach()
        optimizer.step()
        draws.append(torch.cat([first, second]).detach().clone())
    variance = torch.stack(draws)[200:].var(0)
    expected = torch.tensor([2.0, 0.5, 1.0], dtype=F64) / (1 - torch.tensor([0.5, 0.5, 0.1], dtype=F64) / 4)
    torch.testing.assert_close(variance, expected, rtol=0.15, atol=0)


def test_resumes_bit_for_bit():
    def advance(theta, optimizer, scheduler, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            (0.5 * theta.square().sum()).backward()
            optimizer.step()
            scheduler.step()

    def fresh():
        theta = torch.ones(3, requires_grad=True)
        optimizer = SGLD([theta], lr=0.1, preconditioner=SIGMA)
        return theta, optimizer, PolynomialDecay(optimizer, 0.1, 10.0, 0.6, freeze_below=10.0)

    theta, optimizer, scheduler = fresh()
    advance(theta, optimizer, scheduler, 130)
    saved = copy.deepcopy((theta.detach(), optimizer.state_dict(), scheduler.state_dict()))
    advance(theta, optimizer, scheduler, 120)
    again, other, other_scheduler = fresh()
    with torch.no_grad():
        again.copy_(saved[0])
    other.load_state_dict(saved[1])
    other_scheduler.load_state_dict(saved[2])
    advance(again, other, other_scheduler, 120)
    assert torch.equal(theta, again)
    assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]


def test_the_step_size_falls_and_is_frozen():
    _, optimizer = chain(150, lr=0.1, preconditioner=SIGMA, noise=1.0, burn=0)
    # V is that of the gradient at fixed parameters, SIGMA^-1, and of the parameters' own motion
    ratio = optimizer.noise_ratio()
    assert 0.25 * 0.1 * 0.5 < ratio < 0.25 * 0.1 * 8
    scheduler = PolynomialDecay(optimizer, a=0.2, b=3.0, gamma=0.5)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2 * 3**-0.5)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2 * 4**-0.5)
    frozen = PolynomialDecay(optimizer, a=0.2, b=3.0, gamma=0.5, freeze_below=10.0)
    size = optimizer.param_groups[0]["lr"]
    optimizer.step()
    frozen.step()
    assert (frozen.frozen_at, optimizer.param_groups[0]["lr"]) == (0, size)


def test_a_closure_is_called_and_bad_gradients_move_nothing():
    theta = torch.ones(3, dtype=F64, requires_grad=True)
    optimizer = SGLD([theta], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = theta.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    before = theta.detach().clone()
    theta.grad = torch.tensor([0.0, torch.nan, 0.0], dtype=F64)
    with pytest.raises(FloatingPointError, match="no parameter has moved"):
        optimizer.step()
    assert torch.equal(theta, before)


def test_bad_options_are_refused():
    theta = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="lr must be positive"):
        SGLD([theta], lr=0.0)
    with pytest.raises(ValueError, match=r"\(3,\) or \(3, 3\)"):
        SGLD([theta], lr=0.1, preconditioner=torch.ones(2))
    with pytest.raises(ValueError, match="not positive definite"):
        SGLD([theta], lr=0.1, preconditioner=-SIGMA)
    with pytest.raises(ValueError, match="must be positive"):
        SGLD([theta], lr=0.1, preconditioner=torch.zeros(3))
    groups = [{"params": [theta], "lr": 0.1}, {"params": [torch.zeros(1, requires_grad=True)], "lr": 0.2}]
    with pytest.raises(ValueError, match="same lr"):
        SGLD(groups, lr=0.1, preconditioner=torch.eye(4))
    with pytest.raises(ValueError, match="gamma in"):
        PolynomialDecay(SGLD([theta], lr=0.1), 1.0, 1.0, 2.0)
