"""A phi that is not a scale mixture is rejected: complete monotonicity against mixtures known in closed form."""

import math
import re

import pytest
import torch

from gpext.augmentations import Augmentation, AutomaticRadial, ExponentialRadial, check_completely_monotone
from gpext.likelihoods import SuperGaussianLikelihood
from tests.members import MEMBERS, log_sech, tensor

WRONG = {
    "gaussian": lambda r: torch.exp(-r.square()),
    "exp_minus_r_to_1.5": lambda r: torch.exp(-(r**1.5)),
    "cauchy_in_r": lambda r: 1 / (1 + r.square()),
    "cosine": torch.cos,
    "corner": lambda r: torch.relu(1 - r),
    "signed_mixture": lambda r: 1.5 * torch.exp(-r) - 0.5 * torch.exp(-2 * r),
    "increasing": lambda r: 1 + r,
    "linear_start": lambda r: 1 / (1 + r + r**3),
}
RIGHT = {
    "student_t": lambda r: (1 + r / 3) ** -2,
    "laplace": lambda r: torch.exp(-torch.sqrt(r)),
    "laplace_narrow": lambda r: torch.exp(-torch.sqrt(r) / 0.01),
    "logistic": lambda r: 1 / torch.cosh(torch.sqrt(r)),
    "matern32": lambda r: (1 + torch.sqrt(3 * r)) * torch.exp(-torch.sqrt(3 * r)),
    "gaussian": lambda r: torch.exp(-r / 2),
    "mixture": lambda r: 0.3 * torch.exp(-5 * r) + 0.7 * torch.exp(-0.1 * r),
    "mixture_of_kinds": lambda r: 0.5 * torch.exp(-torch.sqrt(r)) + 0.5 / (1 + r),
    "power_0.1": lambda r: (1 + r) ** -0.1,
    "power_9": lambda r: (1 + r) ** -9,
    "pseudo_huber": lambda r: torch.exp(1 - torch.sqrt(1 + r)),
    "mittag_leffler": lambda r: 1 / (1 + torch.sqrt(r)),
    "stable": lambda r: torch.exp(-(r**0.7)),
}


@pytest.mark.parametrize("phi", WRONG.values(), ids=WRONG.keys())
def test_refuses_what_is_no_mixture_and_names_order_and_point(phi):
    with pytest.raises(ValueError, match=r"not completely monotone: at order k = [1-5], r = [\d.e+-]+") as error:
        check_completely_monotone(AutomaticRadial(phi).evaluate)
    order, point = re.search(r"k = (\d), r = ([\d.e+-]+),", str(error.value)).groups()
    assert 1 <= int(order) <= 5
    assert 1e-6 <= float(point) <= 1e6


@pytest.mark.parametrize("phi", RIGHT.values(), ids=RIGHT.keys())
def test_accepts_scale_mixtures(phi):
    check_completely_monotone(AutomaticRadial(phi).evaluate)


def test_refused_order_and_point_are_where_the_condition_fails():
    """(1 - 2 r^2 ...) of exp(-r^2): the second derivative, 4 r^2 - 2, is negative below r = 0.707."""
    with pytest.raises(ValueError, match="not completely monotone") as error:
        check_completely_monotone(lambda r: -r.square())
    order, point = re.search(r"k = (\d), r = ([\d.e+-]+),", str(error.value)).groups()
    assert (int(order), float(point) < 0.71) == (2, True)


def test_refuses_a_phi_that_does_not_start_at_one_and_says_what_to_do():
    with pytest.raises(ValueError, match=r"phi\(0\) must be 1; got 2.*log_constant"):
        SuperGaussianLikelihood(lambda r: 2 * torch.exp(-r))


@pytest.mark.parametrize("member", MEMBERS.values(), ids=MEMBERS.keys())
def test_every_likelihood_of_the_package_passes(member):
    augmentation = member.likelihood.augmentation(member.targets(1)[0])
    radial = augmentation.radial
    check_completely_monotone(radial.evaluate if isinstance(radial, AutomaticRadial) else radial.log_phi)


def test_a_phi_that_underflows_names_the_remedy():
    radial = AutomaticRadial(lambda r: torch.exp(-torch.sqrt(r)))
    with pytest.raises(ValueError, match="give log_phi instead of phi"):
        radial.log_phi(tensor(1e6))


@pytest.mark.parametrize("given", [{}, {"phi": torch.exp, "log_phi": torch.exp}])
def test_exactly_one_of_phi_and_log_phi(given):
    with pytest.raises(ValueError, match="exactly one"):
        AutomaticRadial(given.get("phi"), log_phi=given.get("log_phi"))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"alpha": torch.zeros_like}, "belong together"),
        ({"potential": torch.zeros_like}, "give log_constant"),
    ],
)
def test_incomplete_terms_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        SuperGaussianLikelihood(log_phi=log_sech, **kwargs)


def test_a_noise_density_without_an_integral_is_refused():
    with pytest.raises(ValueError, match="diverges"):
        SuperGaussianLikelihood(lambda r: (1 + r) ** -0.4)


def test_square_is_completed():
    alpha, beta, gamma, f = tensor(5.0), tensor(-3.0), tensor(0.7), tensor(-1.0, 0.0, 2.0)
    augmentation = Augmentation.from_quadratic(ExponentialRadial(), tensor(0.0), tensor(0.0), alpha, beta, gamma)
    torch.testing.assert_close(augmentation.squared_distance(f), alpha - beta * f + gamma * f.square())


def test_perfect_squares_have_no_offset_however_large_the_target():
    y = torch.tensor([1e-3, 3.0, 1e4, 1e6])
    one = torch.ones(())
    augmentation = Augmentation.from_quadratic(ExponentialRadial(), 0 * y, 0 * y, y.square(), 2 * y, one)
    assert bool((augmentation.offset == 0).all())
    torch.testing.assert_close(augmentation.squared_distance(y + 0.5), torch.full((4,), 0.25), rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    ("terms", "message"), [((1.0, 2.1, 1.0), "4 alpha gamma >= beta"), ((1.0, 0.0, 0.0), "gamma must be positive")]
)
def test_quadratics_that_are_no_squares_are_refused(terms, message):
    with pytest.raises(ValueError, match=message):
        Augmentation.from_quadratic(ExponentialRadial(), tensor(0.0), tensor(0.0), *(tensor(t) for t in terms))


def test_parameters_inside_phi_are_learned_through_the_bound():
    likelihood = MEMBERS["learnable"].make()
    y, mean, variance = tensor(0.3, -1.0), tensor(0.0, 1.0), tensor(0.5, 0.1)
    parameter = likelihood.phi.raw_power

    def total():
        augmentation = likelihood.augmentation(y)
        return (augmentation.bound(mean, variance) + augmentation.log_marginal(mean, variance)).sum()

    (gradient,) = torch.autograd.grad(total(), [parameter])
    start = parameter.item()
    parameter.data.fill_(start + 1e-4)
    above = total().item()
    parameter.data.fill_(start - 1e-4)
    assert math.isclose(gradient.item(), (above - total().item()) / 2e-4, rel_tol=1e-6)


@pytest.mark.parametrize("phi", [torch.ones_like, lambda r: torch.exp(-r.detach())], ids=["constant", "detached"])
def test_phi_without_a_derivative_is_refused(phi):
    with pytest.raises(ValueError, match="phi must depend on r by torch functions"):
        check_completely_monotone(lambda r: phi(r).log())


@pytest.mark.parametrize(
    ("phi", "error", "message"),
    [
        (
            lambda r: math.exp(-r.flatten()[0]),
            TypeError,
            "phi must map tensors to tensors, elementwise; it returned float",
        ),
        (lambda r: torch.ones(()), ValueError, r"elementwise; it made \(\) of a tensor of \(121, 1, 1\)"),
        (lambda r: torch.exp(-r).flatten(), ValueError, r"elementwise; it made \(121,\) of"),
    ],
    ids=["a number", "a scalar", "flat"],
)
def test_phi_that_is_not_elementwise_is_refused(phi, error, message):
    with pytest.raises(error, match=message):
        SuperGaussianLikelihood(phi)


def test_a_derivative_that_autograd_loses_is_no_sign_of_the_wrong_monotonicity():
    def log_phi(r):
        return torch.logaddexp(math.log(0.8) - r / 2, math.log(0.2) - r / 200)

    with pytest.raises(ValueError, match=r"is not finite at r = .* torch.logsumexp in place of torch.logaddexp"):
        check_completely_monotone(log_phi)
