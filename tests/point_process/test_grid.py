"""Areas of cells inside a polygon against clipping cell by cell; points are counted once, those outside are refused."""

import math

import pytest
import torch

from gpext.point_process import Grid, polygon_fractions

L_SHAPE = torch.tensor([[0.2, 0.1], [2.9, 0.1], [2.9, 1.2], [1.1, 1.3], [1.0, 3.7], [0.2, 3.9]], dtype=torch.float64)


def clipped_area(polygon, low, high):
    """The area of a polygon within a box, by Sutherland and Hodgman's clipping and the shoelace formula."""
    points = [tuple(p) for p in polygon.tolist()]
    for axis in (0, 1):
        for limit, sign in ((low[axis], 1), (high[axis], -1)):
            kept = []
            for p, q in zip(points, points[1:] + points[:1], strict=True):
                inside, next_inside = (sign * (each[axis] - limit) >= 0 for each in (p, q))
                if inside:
                    kept.append(p)
                if inside != next_inside:
                    share = (limit - p[axis]) / (q[axis] - p[axis])
                    kept.append(tuple(a + share * (b - a) for a, b in zip(p, q, strict=True)))
            points = kept
    pairs = zip(points, points[1:] + points[:1], strict=True)
    return abs(sum(p[0] * q[1] - q[0] * p[1] for p, q in pairs)) / 2


@pytest.mark.parametrize("shift", [0.0, 5e5])
@pytest.mark.parametrize("turned", [False, True])
def test_fractions_are_those_of_clipped_cells(shift, turned):
    generator = torch.Generator().manual_seed(0)
    angle = torch.rand(9, generator=generator, dtype=torch.float64).sort().values * 2 * math.pi
    radius = 0.5 + 1.5 * torch.rand(9, generator=generator, dtype=torch.float64)
    star = torch.stack([1.5 + radius * angle.cos(), 2 + radius * angle.sin()], -1)
    x, y = torch.linspace(-0.2, 3, 8, dtype=torch.float64), torch.tensor([0.0, 0.5, 1.2, 2.5, 3.8, 4.0]).double()
    for polygon in (L_SHAPE, star, L_SHAPE[:3]):
        polygon = polygon.flip(0) if turned else polygon
        found = polygon_fractions(polygon + shift, x + shift, y + shift)
        for i in range(7):
            for j in range(5):
                low, high = [float(x[i]), float(y[j])], [float(x[i + 1]), float(y[j + 1])]
                expected = clipped_area(polygon, low, high) / ((high[0] - low[0]) * (high[1] - low[1]))
                assert float(found[i, j]) == pytest.approx(expected, abs=1e-9 if shift else 1e-12)


def test_masks_drop_cells_and_scale_exposures():
    grid = Grid.regular([(0, 4), (0, 2)], (4, 2), mask=torch.tensor([[1, 1], [0, 1], [0, 0], [1, 1]]) > 0)
    assert grid.inputs.tolist() == [[0.5, 0.5], [0.5, 1.5], [1.5, 1.5], [3.5, 0.5], [3.5, 1.5]]
    assert grid.exposure.tolist() == [1] * 5
    counts = grid.count(torch.tensor([[0.0, 0.0], [1.0, 1.0], [4.0, 2.0], [0.5, 1.0]]))
    assert counts.tolist() == [1, 1, 1, 0, 1]
    placed = grid.place(counts)
    assert placed.isnan().tolist() == [[False, False], [True, False], [True, True], [False, False]]
    assert torch.equal(grid.take(placed), counts)
    half = Grid.regular([(0, 4), (0, 2)], (4, 2), mask=torch.full((4, 2), 0.5))
    assert half.exposure.tolist() == [0.5] * 8
    maps = grid.place(torch.stack([counts, 2 * counts]))
    assert maps.shape == (2, 4, 2)


def test_a_polygon_is_a_window():
    x = torch.linspace(0, 4, 9, dtype=torch.float64)
    grid = Grid.of_edges([x, x], polygon=L_SHAPE)
    assert float(grid.exposure.sum()) == pytest.approx(clipped_area(L_SHAPE, (0, 0), (4, 4)))
    assert float(grid.exposure.min()) > 0
    assert grid.count(L_SHAPE).sum() == len(L_SHAPE)  # on the boundary
    with pytest.raises(ValueError, match=r"2 are not, the first at index 1: \(1.2, 1.4\)"):
        grid.count(torch.tensor([[0.5, 0.5], [1.2, 1.4], [3.8, 3.8]]))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_counts_in_any_dimension(dims):
    generator = torch.Generator().manual_seed(dims)
    points = torch.rand(200, dims, generator=generator)
    shape = (3, 4, 2)[:dims]
    grid = Grid.regular([(0, 1)] * dims, shape)
    counts = grid.place(grid.count(points))
    for index in torch.cartesian_prod(*(torch.arange(n) for n in shape)).reshape(-1, dims):
        cell = (points * torch.tensor(shape)).floor() == index
        assert counts[tuple(index)] == cell.all(-1).sum()
    assert float(grid.exposure.sum()) == pytest.approx(1)
    assert grid.inputs.shape == (math.prod(shape), dims)


def test_one_dimension_takes_vectors_and_no_points():
    grid = Grid.of_edges([torch.tensor([0, 1, 5])])
    assert grid.count(torch.tensor([0.5, 3.0, 5.0])).tolist() == [1, 2]
    assert grid.count(torch.zeros(0)).tolist() == [0, 0]
    assert grid.exposure.tolist() == [1, 4]


def test_dtypes_meet_at_the_boundary():
    for points, dtype in ((torch.float64, torch.float32), (torch.float32, torch.float64)):
        grid = Grid.regular([(0.1, 0.7)], (3,), dtype=dtype)
        assert grid.count(torch.tensor([0.1, 0.7], dtype=points)).tolist() == [1, 0, 1]
        assert grid.exposure.dtype == grid.inputs.dtype == dtype


SQUARE = [(0, 1), (0, 1)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grid.regular(SQUARE, (2,)), "a number of cells for each of 2 coordinates; got 1"),
        (lambda: Grid.regular(SQUARE, (2, 0)), "a number of cells must be at least 1; got 0"),
        (lambda: Grid.regular([(1, 1)], (2,)), "edges must be increasing vectors"),
        (lambda: Grid.of_edges([]), "expected the edges of the cells"),
        (lambda: Grid.of_edges([torch.tensor([0.0, torch.nan])]), "edges must be finite; got nan at index 1"),
        (lambda: Grid.regular(SQUARE, (2, 2), mask=torch.ones(3, 2)), r"expected a mask \(2, 2\).* got \(3, 2\)"),
        (lambda: Grid.regular(SQUARE, (2, 2), mask=2 * torch.ones(2, 2)), "from 0 to 1; got 2 to 2"),
        (lambda: Grid.regular(SQUARE, (2, 2), mask=torch.zeros(2, 2)), "no cell has a part inside"),
        (lambda: Grid.regular(SQUARE, (2, 2), polygon=torch.ones(2, 2)), r"expected a polygon \(V, 2\)"),
        (lambda: Grid.regular(SQUARE, (2, 2), polygon=5 + L_SHAPE), "no cell has a part inside"),
        (lambda: Grid.regular(SQUARE, (2, 2), polygon=L_SHAPE, mask=torch.ones(2, 2)), "a polygon or a mask"),
        (lambda: Grid.regular(SQUARE[:1], (2,), polygon=L_SHAPE), "a polygon needs a grid in two dimensions"),
        (
            lambda: Grid.regular(SQUARE, (2, 2), polygon=torch.tensor([[0.0, 0], [1, 1], [1, 0], [0, 0.9]])),
            "the polygon crosses itself",
        ),
        (lambda: Grid.regular(SQUARE, (2, 2)).count(torch.ones(3)), r"expected points \(N, 2\); got shape \(3,\)"),
        (lambda: Grid.regular(SQUARE, (2, 2)).count(torch.tensor([[0, torch.nan]])), r"nan at index \(0, 1\)"),
        (lambda: Grid.regular(SQUARE, (2, 2)).count(torch.tensor([[0, 1.5]])), r"index 0: \(0, 1.5\)"),
        (lambda: Grid.regular(SQUARE, (2, 2)).place(torch.ones(3)), r"a value of each of 4 cells"),
        (lambda: Grid.regular(SQUARE, (2, 2)).take(torch.ones(4)), r"expected a map \(..., 2, 2\)"),
    ],
)
def test_bad_windows_and_points_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_arrays_are_refused():
    with pytest.raises(TypeError, match=r"edges must be a torch\.Tensor"):
        Grid.of_edges([[0, 1]])
    with pytest.raises(TypeError, match=r"points must be a torch\.Tensor"):
        Grid.regular(SQUARE, (2, 2)).count([[0, 1]])
    with pytest.raises(TypeError, match=r"mask must be a torch\.Tensor"):
        Grid.regular(SQUARE, (2, 2), mask=[[0, 1]])
