"""The benchmark of angles: densities integrate to one, its peers are as described, and every part runs and resumes."""

import gzip
import math
from functools import partial

import pytest
import torch
from scipy.integrate import quad

from benchmarks import multivariate_efd
from benchmarks.angle_methods import (
    absolute_error,
    constant,
    least_squares,
    linear,
    matern,
    nearest_neighbour,
    on_the_angle,
    on_the_coordinates,
    on_the_products,
    projected_normal_log_density,
    rbf,
    von_mises,
    wrapped_normal_log_density,
)
from benchmarks.angles import best_errors, triangles
from benchmarks.datasets import load
from gpext.inference import Laplace, Taylor

pytestmark = pytest.mark.slow

F64 = torch.float64
CIRCLE = torch.arange(4000, dtype=F64) * 2 * math.pi / 4000 - math.pi
PLANES = [([0.0, 0.0], [1.0, 1.0]), ([2.0, -1.0], [0.5, 2.0]), ([30.0, -100.0], [1.0, 0.2]), ([0.1, 3.0], [0.01, 0.04])]


def everywhere(values):
    return torch.tensor(values, dtype=F64).unsqueeze(-1).expand(2, len(CIRCLE))


@pytest.mark.parametrize(("mean", "variance"), PLANES)
def test_densities_integrate_to_one(mean, variance):
    m, v = everywhere(mean), everywhere(variance)
    for log_p in (projected_normal_log_density(CIRCLE, m, v), wrapped_normal_log_density(CIRCLE, m[0], v[0])):
        assert float(log_p.exp().mean()) * 2 * math.pi == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize(("mean", "variance"), PLANES[:2])
@pytest.mark.parametrize("y", [-2.0, 0.3, 2.5])
def test_the_projected_normal_against_quadrature(mean, variance, y):
    def along(r):
        z = [(r * u - m) / math.sqrt(v) for u, m, v in zip((math.cos(y), math.sin(y)), mean, variance, strict=True)]
        return r * math.exp(-0.5 * (z[0] ** 2 + z[1] ** 2)) / (2 * math.pi * math.sqrt(variance[0] * variance[1]))

    m, v = (torch.tensor(values, dtype=F64).unsqueeze(-1) for values in (mean, variance))
    found = projected_normal_log_density(torch.tensor([y], dtype=F64), m, v).exp().item()
    assert found == pytest.approx(quad(along, 0, 30, epsabs=1e-13, epsrel=1e-10)[0], rel=1e-7)


def test_errors_go_the_short_way_round():
    y, direction = torch.tensor([3.0, -3.0, 0.0]), torch.tensor([-3.0, 3.0, 3.5])
    torch.testing.assert_close(
        absolute_error(direction, y), torch.tensor([2 * math.pi - 6, 2 * math.pi - 6, 2 * math.pi - 3.5])
    )


def test_smaller_training_sets_are_parts_of_larger_ones():
    small, large = triangles(3, num_train=4, num_test=7), triangles(3, num_train=16, num_test=7)
    assert torch.equal(small.train_x, large.train_x[:4])
    assert torch.equal(small.test_y, large.test_y)
    # a turn by the difference of two headings carries one triangle to another, but for the noise
    points = torch.view_as_complex(large.train_x.unflatten(-1, (3, 2)))
    back = points * torch.polar(torch.ones(16, dtype=F64), -large.train_y).unsqueeze(-1)
    spread = (back - back.mean(0)).abs().square().mean().sqrt()
    assert 0.08 < float(spread) / math.sqrt(2) < 0.12


@pytest.mark.parametrize(
    "method",
    [
        partial(von_mises, rule=Laplace()),
        partial(von_mises, rule=Taylor()),
        on_the_angle,
        on_the_coordinates,
        on_the_products,
    ],
)
def test_methods_learn_a_turning_shape(method):
    data = triangles(0, num_train=30, num_test=20)
    by_chance = math.pi / 2
    for starts in ((linear,), (rbf, matern)):
        found = method(data, starts)
        assert found.seconds > 0
        assert (found.direction.abs() <= math.pi).all()
        assert found.log_density is None or found.log_density.isfinite().all()
        # neither the angle itself nor the products are linear in the shape
        limit = by_chance if starts == (linear,) and method in (on_the_angle, on_the_products) else 0.5
        assert float(absolute_error(found.direction, data.test_y).mean()) < limit


def test_methods_without_a_kernel():
    data = triangles(0, num_train=48, num_test=50)
    error = {
        f.__name__: float(absolute_error(f(data).direction, data.test_y).mean())
        for f in (nearest_neighbour, least_squares)
    }
    assert error["least_squares"] < 0.05 < error["nearest_neighbour"] < 0.15
    assert constant(data).log_density.mean() < -1.5  # headings are uniform


def test_the_better_kernel_is_taken():
    rows = [{"error": {"A/linear": 1.0, "A/RBF": e, "B/": 2.0}} for e in (0.5, 0.7)]
    errors, kernels = best_errors(rows)
    assert errors["A"].tolist() == [0.5, 0.7]
    assert kernels == {"A": "RBF", "B": ""}


def test_synthetic_angles_are_angles():
    data = load("synthetic_angles", fold=(0, 10))
    assert data.task == "angles"
    assert data.train_y.abs().max() <= math.pi
    assert data.train_y.std() > 1  # not standardised


def test_winds_are_read_and_prepared(tmp_path, monkeypatch):
    columns = {
        "wind_col_de_la_roa": "day,minute,t_days,y",
        "wind_texas_hourly": "t_hours,hour,y",
        "wind_nyc13_hourly": "station,t_hours,month,hour,temp_f,dewpoint_f,humidity,wind_speed_mph,y",
    }
    for file, names in columns.items():
        rows = [
            ",".join(str((k * (j + 1)) % (2 if j == 0 else 24)) for j in range(names.count(","))) for k in range(40)
        ]
        lines = "\n".join(f"{row},{k % 6}" for k, row in enumerate(rows))
        (tmp_path / f"{file}.csv.gz").write_bytes(gzip.compress(f"{names}\n{lines}\n".encode()))
    monkeypatch.setenv("GPEXT_DATA", str(tmp_path))
    for name, features, rows in (("wind_col_de_la_roa", 1, 40), ("wind_texas", 3, 40), ("wind_jfk", 8, 20)):
        data = load(name, fold=(1, 10))
        assert data.train_x.shape[1] <= features  # constant ones are dropped
        assert len(data.train_y) + len(data.test_y) == rows  # one station of two
        assert data.target_scale == 1
    texas = load("wind_texas", test_fraction=0.0)
    hour = torch.arange(40, dtype=F64) * 2 % 24
    expected = torch.cos(hour * math.pi / 12)
    found = texas.train_x[:, 1] * expected.std(correction=0) + expected.mean()
    torch.testing.assert_close(found.sort().values, expected.sort().values)


def test_parts_run_and_resume(tmp_path, capsys):
    arguments = ["--quick", "--output", str(tmp_path / "rows.jsonl"), "--figure", str(tmp_path / "headings.png")]
    assert multivariate_efd.main([*arguments, "headings", "wind"]) == 0
    report = capsys.readouterr().out
    assert "## headings" in report
    assert report.count("| constant von Mises |") == 1
    assert (tmp_path / "headings.png").stat().st_size > 1000
    assert multivariate_efd.main([*arguments, "headings", "wind", "--report-only"]) == 0
    assert capsys.readouterr().out == report


def test_times_are_reported(capsys):
    assert multivariate_efd.main(["--quick", "time"]) == 0
    assert "Time grows as structured D^" in capsys.readouterr().out
