"""The simplex benchmarks run at their smallest size, and parts with a known answer reproduce it."""

import gzip

import numpy as np
import pytest
import torch

from benchmarks import annotation, compositions, simplex_recovery
from benchmarks.datasets import Dataset
from benchmarks.simplex_models import smoothed

pytestmark = pytest.mark.slow

F64 = torch.float64


def test_quantised_probabilities_are_what_they_say():
    probs = torch.tensor([[0.1, 0.3, 0.6], [0.9, 0.05, 0.05]], dtype=F64)
    expected = torch.tensor([[0, 0.5, 0.5], [1, 0, 0]], dtype=F64)
    torch.testing.assert_close(simplex_recovery.quantised(probs, "binary"), expected)
    kept = torch.tensor([[0, 1 / 3, 2 / 3], [1, 0, 0]], dtype=F64)
    torch.testing.assert_close(simplex_recovery.quantised(probs, "kept"), kept)
    y = smoothed(kept)
    torch.testing.assert_close(y[1], torch.tensor([4 / 6, 1 / 6, 1 / 6], dtype=F64))
    middle = simplex_recovery.probabilities(torch.zeros(1, 2, dtype=F64), 1.5)
    torch.testing.assert_close(middle, torch.full((1, 3), 1 / 3, dtype=F64))


@pytest.mark.parametrize("ratio", compositions.RATIOS)
def test_log_ratio_densities_are_densities_on_the_simplex(ratio):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 1, generator=generator, dtype=F64)
    noise = 0.5 * torch.randn(30, 3, generator=generator, dtype=F64)
    y = torch.softmax(torch.cat([x, -x, 0 * x], -1) + noise, -1)
    line = (torch.arange(70, dtype=F64) + 0.5) / 70
    grid = torch.cartesian_prod(line, line)
    grid = grid[grid.sum(-1) < 1 - 1e-9]
    new = torch.cat([grid, 1 - grid.sum(-1, keepdim=True)], -1)
    data = Dataset("made up", "composition", x, y, torch.zeros(len(new), 1, dtype=F64), new, 0.0, 1.0)
    log_p, _ = compositions.by_log_ratios(ratio, data, max_steps=5)
    assert float(log_p.exp().sum()) / 70**2 == pytest.approx(1, abs=2e-3)


def test_scores_against_counts_by_hand():
    predicted = np.array([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1]])
    present = np.array([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    f, precise = annotation.scores(predicted, present, 1)
    assert f == pytest.approx((2 * 1 / (2 + 1) + 0 + 0) / 3)
    assert precise == 0.5
    f, precise = annotation.scores(predicted, present, 2)
    assert f == pytest.approx((2 * 1 / (2 + 1) + 2 * 1 / (2 + 1) + 0) / 3)
    assert precise == 0.5


def test_pictures_show_the_digits_they_are_labelled_with():
    composed, present = annotation.pictures(True, 50, np.random.default_rng(0))
    assert composed.shape == (50, 16, 16)
    assert ((present.sum(1) >= 1) & (present.sum(1) <= 4)).all()
    assert present.mean(0)[0] > present.mean(0)[9]
    from sklearn.datasets import load_digits

    images, classes = load_digits(return_X_y=True)
    classes_of = {image.tobytes(): label for image, label in zip(images, classes, strict=True)}
    tiles = composed.reshape(50, 2, 8, 2, 8).transpose(0, 1, 3, 2, 4).reshape(50, 4, 64)
    for picture, labels in zip(tiles, present, strict=True):
        assert {classes_of[tile.tobytes()] for tile in picture} == set(np.flatnonzero(labels))


def test_runs_and_resumes(tmp_path, capsys, monkeypatch):
    from benchmarks import multivariate_efd

    rows = "\n".join(f"{k % 7},{k % 5},{k % 3},{k % 4},0.{k % 3 + 1},0.4,0.{5 - k % 3}" for k in range(40))
    for name in ("arctic_lake", "gemas_soil_texture"):
        content = f"a,b,c,d,y_sand,y_silt,y_clay\n{rows}\n"
        (tmp_path / f"{name}.csv.gz").write_bytes(gzip.compress(content.encode()))
    monkeypatch.setenv("GPEXT_DATA", str(tmp_path))
    parts = ["simplex", "compositions", "annotation"]
    arguments = [*parts, "--quick", "--output", str(tmp_path / "rows.jsonl")]
    assert multivariate_efd.main(arguments) == 0
    table = capsys.readouterr().out
    for section in parts:
        assert f"## {section}" in table
    assert table.count("| Dirichlet, Laplace |") == 3
    lines = (tmp_path / "rows.jsonl").read_text()
    assert multivariate_efd.main(arguments) == 0
    assert capsys.readouterr().out == table
    assert (tmp_path / "rows.jsonl").read_text() == lines
