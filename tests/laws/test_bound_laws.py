"""Laws of every bound: below the exact expectation, right derivatives, no loss in float32, any batch shape."""

import itertools

import numpy as np
import pytest
import torch

from gpext.bounds import Bohning, Jaakkola, LogSumExp, PiecewiseQuadratic, ProductOfSigmoids, Quadrature
from gpext.likelihoods import BernoulliLogitLikelihood, StudentTLikelihood

F64 = torch.float64
BINARY = {
    "quadrature": Quadrature(),
    "pieces_20": PiecewiseQuadratic(),
    "pieces_10": PiecewiseQuadratic(10),
    "pieces_5": PiecewiseQuadratic(5),
    "pieces_3": PiecewiseQuadratic(3),
    "jaakkola": Jaakkola(),
    "bohning": Bohning(),
}
MULTINOMIAL = {
    "log_sum_exp": LogSumExp(),
    "product_of_pieces": ProductOfSigmoids(),
    "product_of_pieces_3": ProductOfSigmoids(PiecewiseQuadratic(3)),
    "product_of_jaakkola": ProductOfSigmoids(Jaakkola()),
    "product_of_bohning": ProductOfSigmoids(Bohning()),
    "product_of_quadrature": ProductOfSigmoids(Quadrature()),
}


@pytest.fixture(params=BINARY)
def binary(request):
    return BINARY[request.param]


@pytest.fixture(params=MULTINOMIAL)
def multinomial(request):
    return MULTINOMIAL[request.param]


def grid(means, variances):
    pairs = torch.tensor(list(itertools.product(means, variances)), dtype=F64)
    return pairs[:, 0].contiguous(), pairs[:, 1].contiguous()


def exact_softplus(mean, variance):
    """E[log(1 + e^x)] by 20001 points of the trapezoidal rule: full precision up to a standard deviation of 200."""
    z = np.linspace(-9, 9, 20001)
    weights = np.exp(-0.5 * z**2)
    x = mean.numpy()[:, None] + np.sqrt(variance.numpy())[:, None] * z
    return torch.from_numpy(np.logaddexp(0, x) @ (weights / weights.sum()))


MEANS, VARIANCES = grid(
    [0.0, 0.4, -0.7, 1.76, -2.95, 6.0, -8.86, -15.0, 40.0, -200.0],
    [1e-10, 1e-4, 0.05, 0.5, 3.0, 15.0, 17.0, 250.0, 4e4],
)
EXACT = exact_softplus(MEANS, VARIANCES)


def classes(num_classes, n, seed=0, dtype=F64):
    """Random labels, means and variances."""
    generator = torch.Generator().manual_seed(seed)
    mean = 1.5 * torch.randn(num_classes, n, generator=generator, dtype=F64)
    variance = 0.05 + 2 * torch.rand(num_classes, n, generator=generator, dtype=F64).square()
    labels = torch.randint(num_classes, (n,), generator=generator)
    return labels, mean.to(dtype), variance.to(dtype)


def gradients(function, *inputs):
    inputs = [x.clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*inputs).sum(), inputs)


def finite_difference(function, inputs, i, step):
    """The derivative in every entry of input i, to fourth order; `function` has to act on the data separately."""

    def at(k):
        return function(*(x + k * step if j == i else x for j, x in enumerate(inputs)))

    return (at(-2) - 8 * at(-1) + 8 * at(1) - at(2)) / (12 * step)


# ---- below the expectation -----------------------------------------------------------------------------------------


def test_expected_softplus_is_above_the_exact_one(binary):
    ours = binary.expected_softplus(MEANS, VARIANCES)
    assert bool((ours >= EXACT - 1e-12 * EXACT - 1e-13 * MEANS.abs()).all())
    if isinstance(binary, Quadrature):
        torch.testing.assert_close(ours, EXACT, rtol=1e-11, atol=1e-11)
    else:
        assert bool((ours - EXACT).max() > 1e-4)  # a bound, not the expectation


@pytest.mark.parametrize("num_pieces", [3, 5, 10, 20])
def test_gap_of_the_pieces_is_at_most_the_one_stated(num_pieces):
    bound = PiecewiseQuadratic(num_pieces)
    mean = torch.linspace(-12, 12, 501, dtype=F64)
    for variance in (1e-8, 1e-2, 1.0, 20.0):
        v = torch.full_like(mean, variance)
        gap = bound.expected_softplus(mean, v) - exact_softplus(mean, v)
        assert float(gap.min()) > -1e-13
        assert float(gap.max()) <= bound.largest_gap + 1e-13
        if variance == 1e-8:
            assert float(gap.max()) > 0.98 * bound.largest_gap


def test_more_pieces_are_tighter_on_average():
    gaps = [float((PiecewiseQuadratic(r).expected_softplus(MEANS, VARIANCES) - EXACT).mean()) for r in (3, 5, 10, 20)]
    assert all(finer < 0.3 * coarser for coarser, finer in itertools.pairwise(gaps))
    assert gaps[-1] < 1e-3


def test_the_log_likelihood_bound_is_below(binary):
    likelihood = BernoulliLogitLikelihood()
    targets = (torch.arange(len(MEANS)) % 2).double()
    ours = binary.bind(likelihood, targets)(MEANS, VARIANCES)
    torch.testing.assert_close(ours, binary(targets, MEANS, VARIANCES), rtol=1e-11, atol=1e-9)
    exact = targets * MEANS - EXACT
    assert bool((ours <= exact + 1e-10 * (1 + MEANS.abs())).all())


def exact_log_sum_exp(mean, variance):
    """E[log sum_k exp(f_k)] over the full grid, by the trapezoidal rule in every direction."""
    z = torch.linspace(-8, 8, 81, dtype=F64)
    f = (mean[:, None] + variance.sqrt()[:, None] * z).unbind()
    weights = torch.softmax(-0.5 * z.square(), 0)
    value = torch.zeros((), dtype=F64)
    for values in f:
        value = torch.logaddexp(value.unsqueeze(-1), values) if value.dim() else values
    for _ in f:
        value = value @ weights
    return value


@pytest.mark.parametrize("num_classes", [2, 3])
def test_multinomial_bound_is_below(multinomial, num_classes):
    labels, mean, variance = classes(num_classes, 12)
    mean[:, :3], variance[:, :3] = 0, 1e-3
    exact = torch.stack([exact_log_sum_exp(m, v) for m, v in zip(mean.T, variance.T, strict=True)])
    bound = multinomial(labels, mean, variance)
    gap = mean.gather(0, labels.unsqueeze(0)).squeeze(0) - exact - bound
    assert bool((gap >= -1e-12).all())
    assert float(gap.max()) > 1e-3
    assert float(gap.max()) < 5


# ---- derivatives ---------------------------------------------------------------------------------------------------


def test_derivatives_agree_with_finite_differences(binary):
    mean, variance = grid([0.0, 0.3, -1.0, 1.7, -4.0, 9.0, -14.0], [0.05, 0.6, 4.0, 15.9, 16.2, 300.0])
    derivatives = gradients(binary.expected_softplus, mean, variance)
    for i, step in enumerate((1e-3, 1e-3)):
        expected = finite_difference(binary.expected_softplus, (mean, variance), i, step)
        torch.testing.assert_close(derivatives[i], expected, rtol=1e-6, atol=1e-6)


def test_multinomial_derivatives_agree_with_finite_differences(multinomial):
    labels, mean, variance = classes(3, 8)
    derivatives = gradients(lambda m, v: multinomial(labels, m, v), mean, variance)
    for k, i in itertools.product(range(3), range(2)):
        step = torch.zeros_like(mean)
        step[k] = 1e-3

        def moved(amount, i=i, step=step):
            return multinomial(labels, mean + (i == 0) * amount * step, variance + (i == 1) * amount * step)

        expected = (moved(-2) - 8 * moved(-1) + 8 * moved(1) - moved(2)) / 12e-3
        torch.testing.assert_close(derivatives[i][k], expected, rtol=1e-6, atol=1e-6)


def test_no_variance_leaves_finite_derivatives_off_the_knots(binary):
    if isinstance(binary, Quadrature):
        pytest.skip("the exact expectation has its own tests")
    mean = torch.tensor([-30.0, -3.1, 0.2, 2.2, 50.0], dtype=F64)
    slope, bend = gradients(binary.expected_softplus, mean, torch.zeros_like(mean))
    point = binary.expected_softplus(mean, torch.zeros_like(mean))
    nearby = binary.expected_softplus(mean + 1e-7, torch.zeros_like(mean))
    torch.testing.assert_close(slope, (nearby - point) / 1e-7, rtol=1e-6, atol=1e-6)
    assert bool((bend >= 0).all())
    assert bool((bend <= 0.1251).all())


@pytest.mark.parametrize("bound", [Jaakkola(), Bohning()])
def test_derivatives_at_the_origin(bound):
    zero = torch.zeros(1, dtype=F64)
    slope, bend = gradients(bound.expected_softplus, zero, zero)
    torch.testing.assert_close(slope, zero + 0.5)
    torch.testing.assert_close(bend, zero + 0.125, rtol=1e-6, atol=1e-7)


# ---- precision, shapes ---------------------------------------------------------------------------------------------


def test_float32_agrees_with_float64(binary):
    mean, variance = MEANS.float(), VARIANCES.float()
    keep = variance > 1e-3  # below that, float32 limits the resolution of the knots
    single = binary.expected_softplus(mean, variance)
    double = binary.expected_softplus(mean.double(), variance.double())
    assert single.dtype == torch.float32
    atol = 1e-5 if isinstance(binary, Quadrature) else 2e-6  # Quadrature subtracts m / 2
    torch.testing.assert_close(single[keep].double(), double[keep], rtol=1e-5, atol=atol)
    ours, theirs = (gradients(binary.expected_softplus, *pair) for pair in ((mean, variance), (MEANS, VARIANCES)))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a[keep].double(), b[keep], rtol=1e-4, atol=1e-5)


def test_multinomial_float32_agrees_with_float64(multinomial):
    labels, mean, variance = classes(4, 20, dtype=torch.float32)
    single = multinomial(labels, mean, variance)
    assert single.dtype == torch.float32
    double = multinomial(labels, mean.double(), variance.double())
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-5)


def test_batches_are_the_same_as_one_by_one(binary, multinomial):
    mean, variance = MEANS[:24].view(2, 3, 4), VARIANCES[:24].view(2, 3, 4)
    batch = binary.expected_softplus(mean, variance[:1])
    torch.testing.assert_close(
        batch[1, 2], binary.expected_softplus(mean[1, 2], variance[0, 2]), rtol=1e-12, atol=1e-13
    )
    labels = torch.tensor([2, 0, 1, 1])
    batch = multinomial(labels.expand(2, 4), mean, variance)
    assert batch.shape == (2, 4)
    torch.testing.assert_close(batch[1], multinomial(labels, mean[1], variance[1]), rtol=1e-10, atol=1e-10)


# ---- concavity -----------------------------------------------------------------------------------------------------


def hessian(function, x):
    return torch.autograd.functional.hessian(function, x)


def test_log_sum_exp_bound_is_jointly_concave():
    for seed in range(20):
        _, mean, variance = classes(4, 1, seed=seed)
        point = torch.cat([mean, variance]).squeeze(-1)
        curvature = hessian(lambda x: LogSumExp()(torch.tensor([1]), x[:4, None], x[4:, None]).sum(), point)
        eigenvalues = torch.linalg.eigvalsh(curvature)
        assert float(eigenvalues[-1]) < 1e-12
        assert float(eigenvalues[0]) < -1e-2


def curvature_of_softplus(mean, second, to_variance):
    """The Hessian of E[log(1 + e^x)] in (m, second), by differences of the derivatives of Quadrature."""

    def gradient(point):
        return torch.stack(gradients(lambda p: Quadrature().expected_softplus(p[0], to_variance(p[1])), point))[0]

    point, step = torch.tensor([mean, second], dtype=F64), 1e-4 * torch.eye(2, dtype=F64)
    rows = torch.stack([(gradient(point + d) - gradient(point - d)) / 2e-4 for d in step])
    return 0.5 * (rows + rows.mT)


def test_exact_expectation_is_jointly_convex_in_mean_and_standard_deviation_but_not_variance():
    for mean, variance in itertools.product([-3.0, -0.5, 0.0, 2.0], [0.1, 0.5, 2.0, 9.0]):
        in_deviation = curvature_of_softplus(mean, variance**0.5, torch.square)
        assert float(torch.linalg.eigvalsh(in_deviation)[0]) > 0
    in_variance = curvature_of_softplus(0.0, 0.5, lambda v: v)
    assert float(torch.linalg.eigvalsh(in_variance)[0]) == pytest.approx(-0.021, abs=1e-3)


# ---- one bound, two routes -----------------------------------------------------------------------------------------


def test_jaakkola_is_the_augmented_bound():
    targets = (torch.arange(len(MEANS)) % 2).double()
    augmentation = BernoulliLogitLikelihood().augmentation(targets)
    torch.testing.assert_close(
        Jaakkola()(targets, MEANS, VARIANCES), augmentation.bound(MEANS, VARIANCES), rtol=1e-13, atol=1e-13
    )


def test_a_likelihood_without_softplus_terms_is_refused():
    with pytest.raises(TypeError, match=r"PiecewiseQuadratic.*for StudentTLikelihood use gpext\.bounds\.Quadrature"):
        PiecewiseQuadratic().bind(StudentTLikelihood(), torch.zeros(3))
