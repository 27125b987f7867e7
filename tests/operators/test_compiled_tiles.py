"""The compiled program: its exponential, products and derivatives against torch, and the inputs it does not support."""

import pytest
import torch

from gpext.operators import compiled_tiles, tiles
from gpext.operators.tiles import Factor

F64 = torch.float64


def factors_of(*profiles, n=300, m=None, dtype=F64, dimension=3):
    generator = torch.Generator().manual_seed(0)

    def randn(size):
        return torch.randn(size, dimension, generator=generator, dtype=F64).to(dtype)

    return [Factor(profile, randn(n), None if m is None else randn(m), None) for profile in profiles]


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_its_exponential_is_that_of_torch(dtype):
    """exp(-q / 2) between one point and points ever farther away, until it is a subnormal number."""
    last = 1400.0 if dtype == F64 else 170.0
    q = torch.cat([torch.zeros(1, dtype=F64), torch.logspace(-12, 0, 200, dtype=F64), torch.linspace(1, last, 3000)])
    points = q.sqrt().to(dtype).unsqueeze(-1)
    found = compiled_tiles.product([Factor("rbf", points, points[:1].repeat(64, 1), None)], torch.eye(64, 1).to(dtype))
    exact = (-0.5 * points.double().square()).exp()
    # in units of eps: 2 q from x / sqrt 2, half of q from its square, q from log2 e; 2 for the rest
    allowed = torch.finfo(dtype).eps * (2 + 3.5 * q.unsqueeze(-1) / 2) * exact
    assert bool(((found.double() - exact).abs() <= allowed).all())
    assert float(found[0]) == 1.0
    beyond = torch.tensor([[1e3 * last]], dtype=dtype).sqrt()
    far = [Factor("rbf", beyond, points[:1].repeat(64, 1), None)]
    assert float(compiled_tiles.product(far, torch.ones(64, 1, dtype=dtype))) == 0.0


@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize(("n", "m", "dimension", "columns"), [(1, 64, 1, 1), (5, 700, 17, 4), (1030, 513, 8, 7)])
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_any_size_is_that_of_torch(dtype, n, m, dimension, columns, square):
    names = ("matern52", "rbf", "matern12")
    factors = factors_of(*names, n=n, m=None if square else m, dtype=dtype, dimension=dimension)
    exact = [Factor(f.profile, f.x.double(), None if f.y is None else f.y.double(), None) for f in factors]
    generator = torch.Generator().manual_seed(1)
    u, v = (torch.randn(size, columns, generator=generator, dtype=F64).to(dtype) for size in (n, n if square else m))
    tolerance = {"rtol": 1e-10, "atol": 1e-11} if dtype == F64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(
        compiled_tiles.product(factors, v).double(), tiles.product(exact, v.double()), **tolerance
    )
    ours, theirs = compiled_tiles.derivatives(factors, u, v), tiles.derivatives(exact, u.double(), v.double())
    torch.testing.assert_close(ours.value.double(), theirs.value, **tolerance)
    for a, b in zip([*ours.x, *ours.y], [*theirs.x, *theirs.y], strict=True):
        if b is None:
            assert a is None
        else:
            torch.testing.assert_close(a.double(), b, **tolerance)


def test_inputs_may_lie_transposed_in_memory():
    (factor,) = factors_of("matern52", n=512, dimension=4)
    across = Factor(factor.profile, factor.x.mT.contiguous().mT, None, None)
    v = torch.randn(512, 2, generator=torch.Generator().manual_seed(1), dtype=F64)
    assert torch.equal(compiled_tiles.product([across], v), compiled_tiles.product([factor], v))


def test_no_columns():
    assert compiled_tiles.product(factors_of("rbf"), torch.zeros(300, 0, dtype=F64)).shape == (300, 0)


def by_threads(number, factors, v):
    """K v and its derivatives with this many of torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        found = compiled_tiles.derivatives(factors, v, v)
        return [compiled_tiles.product(factors, v), found.value, *found.x]
    finally:
        torch.set_num_threads(before)


def assert_threads_agree():
    factors = factors_of("rbf", "matern32", n=1500)
    v = torch.randn(1500, 3, generator=torch.Generator().manual_seed(1), dtype=F64)
    alone = by_threads(1, factors, v)
    for number in (2, 3, 40):  # more than there are rows of tiles
        together, again = by_threads(number, factors, v), by_threads(number, factors, v)
        torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-11)
        assert all(torch.equal(a, b) for a, b in zip(together, again, strict=True))


def test_threads_agree_and_repeat_themselves():
    assert_threads_agree()


def test_sums_in_float32_keep_their_digits():
    """The sum of 40000 numbers near one, for which a running sum would be off by more."""
    points = torch.linspace(0, 1e-3, 40_000).unsqueeze(-1)
    found = compiled_tiles.product([Factor("rbf", points, None, None)], torch.ones(40_000, 1))
    torch.testing.assert_close(found, torch.full_like(found, 40_000.0), rtol=2e-6, atol=0)


def test_nan_stays_where_it_is():
    factors = factors_of("matern32", n=100, m=80)
    factors[0].x[7, 1] = torch.nan
    found = compiled_tiles.product(factors, torch.ones(80, 2, dtype=F64))
    assert bool(found[7].isnan().all())
    assert int(found.isnan().sum()) == 2


@pytest.mark.parametrize(
    "factors",
    [
        factors_of("rbf", n=100, m=3),
        [Factor("rq", torch.zeros(100, 2), None, torch.tensor(1.0))],
        factors_of("rbf", dtype=torch.float16),
    ],
    ids=["few columns", "rq", "float16"],
)
def test_what_it_does_not_serve(factors):
    assert not compiled_tiles.serves(factors)
    assert compiled_tiles.serves(factors_of("rbf", "matern12"))
