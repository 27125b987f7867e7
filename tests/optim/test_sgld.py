"""Langevin steps on Gaussians, whose stationary law is known at every step size."""

import copy
import pickle

import pytest
import scipy.linalg
import torch

from gpext.optim import SGLD, PolynomialDecay
from tests.statistics import block_means, misfit

F64 = torch.float64
SIGMA = torch.tensor([[2.0, 0.6, 0.0], [0.6, 0.5, 0.1], [0.0, 0.1, 0.2]], dtype=F64)


def chain(steps, *, lr, preconditioner=None, noise=0.0, seed=0, burn=100, **options):
    """Draws of N(0, SIGMA) from exact gradients, or noisy ones of covariance noise^2 SIGMA^-1."""
    theta = torch.zeros(3, dtype=F64, requires_grad=True)
    generator = torch.Generator().manual_seed(seed)
    optimizer = SGLD([theta], lr=lr, preconditioner=preconditioner, generator=generator, **options)
    precision, generator = torch.linalg.inv(SIGMA), torch.Generator().manual_seed(seed + 1)
    root, draws = torch.linalg.cholesky(precision), []
    for step in range(steps + burn):
        theta.grad = precision @ theta.detach() + noise * root @ torch.randn(3, dtype=F64, generator=generator)
        optimizer.step()
        if step >= burn:
            draws.append(theta.detach().clone())
    return torch.stack(draws), optimizer


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.7])
def test_the_stationary_covariance_is_the_one_of_the_recursion(noise):
    """M = SIGMA: theta' = (1 - eps / 2) theta + noise of covariance (eps + eps^2 noise^2 / 4) SIGMA."""
    eps = 0.5
    draws, _ = chain(40_000, lr=eps, preconditioner=SIGMA, noise=noise)
    shrink = 1 - eps / 2
    expected = SIGMA * (eps + eps**2 / 4 * noise**2) / (1 - shrink**2)
    whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(expected), draws.mT, upper=False)
    products = whitened.unsqueeze(0) * whitened.unsqueeze(1)  # each of mean 0 or 1
    variance = 1 + torch.eye(3, dtype=F64)  # of products of standard normal variables
    variance *= (1 + shrink**2) / (1 - shrink**2)  # inflated by the autocorrelation of an AR(1)
    assert misfit(products.movedim(-1, 0), torch.eye(3, dtype=F64), variance=variance) < 1


def stationary(optimizer, theta, precision, noise, monkeypatch):
    """The covariance of draws of N(0, precision^-1) with gradients of this noise, by the Lyapunov equation.

    theta' = F theta + A before xi + A now xi' + move of the noise; the columns of each come from single steps.
    """
    size, origin = len(theta), copy.deepcopy(optimizer.state_dict())
    now, before, drift = torch.zeros(3, size, size, dtype=F64).unbind()

    def moved(xi, gradient):
        with torch.no_grad():
            theta.zero_()
        theta.grad = gradient
        monkeypatch.setattr(torch, "randn", lambda *_, **__: xi.clone())
        optimizer.step()
        monkeypatch.undo()
        return theta.detach().clone()

    nothing = torch.zeros(size, dtype=F64)
    moved(nothing, nothing)  # resets earlier noise
    for k, unit in enumerate(torch.eye(size, dtype=F64)):
        now[:, k], before[:, k] = moved(unit, nothing), moved(nothing, nothing)
        drift[:, k] = moved(nothing, unit)
    optimizer.load_state_dict(origin)
    transition = torch.eye(size, dtype=F64) + drift @ precision
    zero = torch.zeros(size, size, dtype=F64)
    whole = torch.cat([torch.cat([transition, before], 1), torch.cat([zero, zero], 1)])
    injected = torch.cat([now, torch.eye(size, dtype=F64)])
    added = injected @ injected.mT
    added[:size, :size] += drift @ noise @ drift.mT
    return torch.tensor(scipy.linalg.solve_discrete_lyapunov(whole.numpy(), added.numpy()))[:size, :size]


OTHER = torch.tensor([[1.0, 0.2, 0.3], [0.2, 0.8, 0.0], [0.3, 0.0, 0.4]], dtype=F64)
NOISE = torch.tensor([[2.0, -0.5, 0.3], [-0.5, 1.5, 0.2], [0.3, 0.2, 3.0]], dtype=F64)


@pytest.mark.parametrize("eps", [0.1, 1.0, 1.9])
@pytest.mark.parametrize("M", [None, SIGMA.diagonal(), OTHER, SIGMA])
def test_with_averaged_noise_the_draws_of_a_gaussian_have_its_covariance_at_any_step(eps, M, monkeypatch):
    theta, precision = torch.zeros(3, dtype=F64, requires_grad=True), torch.linalg.inv(SIGMA)
    largest = torch.linalg.eigvals(precision @ (SIGMA if M is None else torch.eye(3, dtype=F64))).real.max()
    eps = eps / float(largest) if M is None else eps * 0.5
    optimizer = SGLD([theta], lr=eps, preconditioner=M, averaged=True)
    found = stationary(optimizer, theta, precision, torch.zeros(3, 3, dtype=F64), monkeypatch)
    torch.testing.assert_close(found, SIGMA, rtol=0, atol=1e-12)


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("eps", [0.05, 0.3, 0.6])
def test_compensated_noise_leaves_what_exact_gradients_would(averaged, eps, monkeypatch):
    theta, precision = torch.zeros(3, dtype=F64, requires_grad=True), torch.linalg.inv(SIGMA)
    optimizer = SGLD([theta], lr=eps, preconditioner=SIGMA, averaged=averaged, gradient_noise=NOISE)
    exact = SIGMA if averaged else SIGMA / (1 - eps / 4)
    assert eps < optimizer.largest_lr()
    found = stationary(optimizer, theta, precision, NOISE, monkeypatch)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-12)
    optimizer.set_gradient_noise(None)
    wider = stationary(optimizer, theta, precision, NOISE, monkeypatch)
    assert float(torch.linalg.eigvalsh(wider - exact)[0]) > 0.01 * eps**2
    assert float((wider - exact).trace()) > 0.2 * eps


def test_noise_is_compensated_in_eq_5_for_any_preconditioner(monkeypatch):
    theta, precision = torch.zeros(3, dtype=F64, requires_grad=True), torch.linalg.inv(SIGMA)
    optimizer = SGLD([theta], lr=0.2, preconditioner=OTHER, gradient_noise=NOISE)
    exact = stationary(SGLD([theta], lr=0.2, preconditioner=OTHER), theta, precision, 0 * NOISE, monkeypatch)
    found = stationary(optimizer, theta, precision, NOISE, monkeypatch)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("averaged", [False, True])
def test_noise_is_compensated_with_rates_of_their_own(averaged, monkeypatch):
    """A posterior of independent parameters with M = S diagonal: each contracts at its own rate."""
    variance, rates = torch.tensor([2.0, 0.5, 0.2], dtype=F64), torch.tensor([0.3, 0.3, 0.1], dtype=F64)
    theta = torch.zeros(3, dtype=F64, requires_grad=True)
    parts = [{"params": [part], "lr": lr} for part, lr in zip(theta.detach().split([2, 1]), (0.3, 0.1), strict=True)]

    class Joined(SGLD):  # one tensor over both groups, for `stationary`
        def step(self, closure=None):
            for group, grad in zip(self.param_groups, theta.grad.split([2, 1]), strict=True):
                group["params"][0].grad = grad.clone()
            return super().step(closure)

    optimizer = Joined(parts, 1.0, variance, averaged=averaged, gradient_noise=NOISE)
    found = stationary(optimizer, theta, (1 / variance).diag(), NOISE, monkeypatch)
    exact = variance if averaged else variance / (1 - rates / 4)
    torch.testing.assert_close(found, exact.diag(), rtol=0, atol=1e-12)


def test_noise_that_is_too_much_to_compensate_stays(monkeypatch):
    theta, precision = torch.zeros(3, dtype=F64, requires_grad=True), torch.linalg.inv(SIGMA)
    optimizer = SGLD([theta], lr=1.0, preconditioner=SIGMA, averaged=True, gradient_noise=NOISE)
    largest = optimizer.largest_lr()
    assert optimizer.largest_lr(0.5) < largest < 1.0
    found = stationary(optimizer, theta, precision, NOISE, monkeypatch)
    excess = torch.linalg.eigvalsh(found - SIGMA)
    assert float(excess[-1]) > 0.1
    assert float(excess[0]) > -1e-12
    optimizer.param_groups[0]["lr"] = largest
    found = stationary(optimizer, theta, precision, NOISE, monkeypatch)
    torch.testing.assert_close(found, SIGMA, rtol=0, atol=1e-12)
    optimizer.set_gradient_noise(torch.zeros(3, 3))
    assert optimizer.largest_lr() == float("inf")


@pytest.mark.slow
def test_the_simulated_covariance_is_the_target_with_both():
    """M = SIGMA and gradients of covariance 3 SIGMA^-1: phi = 1 - eps / 2 in every direction."""
    eps, noise = 0.5, 3**0.5
    V = noise**2 * torch.linalg.inv(SIGMA)
    draws, _ = chain(16_000, lr=eps, preconditioner=SIGMA, noise=noise, averaged=True, gradient_noise=0.5 * (V + V.mT))
    whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(SIGMA), draws.mT, upper=False)
    products = (whitened.unsqueeze(0) * whitened.unsqueeze(1)).movedim(-1, 0)
    assert misfit(block_means(products.unsqueeze(0), 160), torch.eye(3, dtype=F64)) < 1


@pytest.mark.slow
def test_a_diagonal_preconditioner_and_groups_with_rates_of_their_own():
    first, second = torch.zeros(2, dtype=F64, requires_grad=True), torch.zeros(1, dtype=F64, requires_grad=True)
    groups = [{"params": [first], "lr": 0.5}, {"params": [second], "lr": 0.1}]
    optimizer = SGLD(groups, lr=1.0, preconditioner=torch.tensor([2.0, 0.5, 1.0], dtype=F64))
    draws = []
    for _ in range(20_000):
        first.grad, second.grad = first.detach() / torch.tensor([2.0, 0.5], dtype=F64), second.detach()
        optimizer.step()
        draws.append(torch.cat([first, second]).detach().clone())
    lr = torch.tensor([0.5, 0.5, 0.1], dtype=F64)
    expected = torch.tensor([2.0, 0.5, 1.0], dtype=F64) / (1 - lr / 4)
    square = (1 - lr / 2).square()  # the correlation of the squares of neighbours
    of_one = 2 * expected.square() * (1 + square) / (1 - square)
    assert misfit(torch.stack(draws)[200:].square(), expected, variance=of_one) < 1


@pytest.mark.parametrize("averaged", [False, True])
def test_resumes_bit_for_bit(averaged):
    def advance(theta, optimizer, scheduler, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            (0.5 * theta.square().sum()).backward()
            optimizer.step()
            scheduler.step()

    def fresh():
        theta = torch.ones(3, requires_grad=True)
        optimizer = SGLD([theta], 0.1, SIGMA, averaged=averaged, gradient_noise=NOISE if averaged else None)
        return theta, optimizer, PolynomialDecay(optimizer, 0.1, 10.0, 0.6, freeze_below=10.0)

    theta, optimizer, scheduler = fresh()
    advance(theta, optimizer, scheduler, 130)
    saved = copy.deepcopy((theta.detach(), optimizer.state_dict(), scheduler.state_dict()))
    advance(theta, optimizer, scheduler, 120)
    again, other, other_scheduler = fresh()
    other.set_gradient_noise(None)
    with torch.no_grad():
        again.copy_(saved[0])
    other.load_state_dict(saved[1])
    other_scheduler.load_state_dict(saved[2])
    advance(again, other, other_scheduler, 120)
    assert torch.equal(theta, again)
    assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]


def test_the_step_size_falls_and_is_frozen():
    _, optimizer = chain(150, lr=0.1, preconditioner=SIGMA, noise=1.0, burn=0)
    # V is the covariance of the gradient at fixed parameters, SIGMA^-1, plus that of the parameters' motion
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
    optimizer.set_gradient_noise(2.0 * torch.linalg.inv(SIGMA).round(decimals=12))  # M^1/2 V M^1/2 = 2 I
    assert optimizer.noise_ratio() == pytest.approx(0.5 * size)


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
    with pytest.raises(ValueError, match=r"gradient_noise \(3, 3\)"):
        SGLD([theta], lr=0.1, gradient_noise=torch.ones(3))
    with pytest.raises(ValueError, match="not symmetric"):
        SGLD([theta], lr=0.1, gradient_noise=torch.ones(3, 3).triu())
    with pytest.raises(ValueError, match="not known"):
        SGLD([theta], lr=0.1).largest_lr()
    groups = [{"params": [theta], "lr": 0.1}, {"params": [torch.zeros(1, requires_grad=True)], "lr": 0.2}]
    with pytest.raises(ValueError, match="same lr"):
        SGLD(groups, lr=0.1, preconditioner=torch.eye(4))
    with pytest.raises(ValueError, match="gamma in"):
        PolynomialDecay(SGLD([theta], lr=0.1), 1.0, 1.0, 2.0)
    with pytest.raises(ValueError, match="symmetric"):
        SGLD([theta], lr=0.1, preconditioner=torch.eye(3) + 0.1 * torch.ones(3, 3).triu(1))
    with pytest.raises(ValueError, match="finite"):
        SGLD([theta], lr=0.1, preconditioner=torch.full((3,), torch.inf))
    with pytest.raises(TypeError, match=r"must be a torch\.Tensor; got list"):
        SGLD([theta], lr=0.1, preconditioner=[1.0, 1.0, 1.0])
    with pytest.raises(TypeError, match="Generator; got 3"):
        SGLD([theta], lr=0.1, generator=3)
    for lr in (-1.0, torch.inf, torch.nan):
        with pytest.raises(ValueError, match="positive and finite"):
            SGLD([{"params": [theta], "lr": lr}], lr=0.1)


def test_parameters_are_added():
    theta, other = (torch.zeros(2, dtype=F64, requires_grad=True) for _ in range(2))
    optimizer = SGLD([theta], lr=0.1, averaged=True, generator=torch.Generator().manual_seed(0))
    for _ in range(60):
        theta.square().sum().backward()
        optimizer.step()
    optimizer.add_param_group({"params": [other], "lr": 0.4})
    for _ in range(120):
        (theta.square().sum() + other.square().sum()).backward()
        optimizer.step()
    assert bool((other != 0).all())
    assert optimizer.noise_ratio() < torch.inf
    with pytest.raises(ValueError, match="must be positive"):
        optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)], "lr": 0.0})
    optimizer.set_preconditioner(torch.ones(4))
    with pytest.raises(ValueError, match="over all parameters"):
        optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    optimizer.param_groups[0]["lr"] = 0.4
    optimizer.set_preconditioner(torch.eye(4))
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(ValueError, match="same lr"):
        optimizer.step()


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_go_on_as_the_original(clone):
    theta = torch.zeros(3, dtype=F64, requires_grad=True)
    optimizer = SGLD([theta], 0.1, SIGMA, averaged=True, gradient_noise=NOISE)
    for _ in range(3):
        theta.grad = theta.detach().clone()
        optimizer.step()
    other = clone(optimizer)
    (its,) = other.param_groups[0]["params"]
    for each, of in ((theta, optimizer), (its, other)):
        each.grad = torch.ones_like(each)
        of.step()
    assert torch.equal(theta, its)


def test_a_state_brings_its_options_and_another_one_changes_nothing():
    theta, other = (torch.zeros(3, dtype=F64, requires_grad=True) for _ in range(2))
    optimizer, twin = SGLD([theta], 0.1, averaged=True, compensated=False), SGLD([other], 0.7)
    twin.load_state_dict(optimizer.state_dict())
    for each, of in ((theta, optimizer), (other, twin)):
        each.grad = torch.ones_like(each)
        of.step()
    assert torch.equal(theta, other)
    smaller = SGLD([torch.zeros(2, requires_grad=True)], 0.3)
    for bad, match in ((torch.optim.SGD([theta], 0.2), "langevin"), (smaller, "state of 3 numbers; got that of 2")):
        with pytest.raises(ValueError, match=match):
            twin.load_state_dict(bad.state_dict())
    assert twin.param_groups[0]["lr"] == 0.1


def test_noise_is_of_the_global_seed_and_differs_between_chains():
    def first():
        theta = torch.zeros(3, dtype=F64, requires_grad=True)
        optimizer = SGLD([theta], lr=0.1)
        optimizer.step()
        return theta.detach()

    torch.manual_seed(1)
    one, two = first(), first()
    torch.manual_seed(1)
    assert torch.equal(one, first())
    assert not torch.equal(one, two)


@pytest.mark.parametrize("M", [None, torch.eye(4, dtype=torch.float64) + 0.3])
def test_a_parameter_that_requires_no_gradient_stays(M):
    moving, fixed = torch.zeros(2, requires_grad=True), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = SGLD([moving, fixed], lr=0.1, preconditioner=M)
    moving.square().sum().backward()
    optimizer.step()
    assert bool((moving != 0).all())
    assert torch.equal(fixed, torch.ones(2))


def test_noise_that_is_no_covariance_and_parameters_that_are_not_real_are_refused():
    theta = torch.zeros(2, requires_grad=True)
    with pytest.raises(ValueError, match="must be a covariance; got one with an eigenvalue of -1"):
        SGLD([theta], lr=0.1, gradient_noise=torch.diag(torch.tensor([1.0, -1.0])))
    for dtype in (torch.long, torch.cfloat):
        with pytest.raises(TypeError, match="expected parameters of real floating dtypes"):
            SGLD([torch.zeros(2, dtype=dtype)], lr=0.1)
