"""The fields and formulas of the nearest-neighbour benchmark, and that its quick run ends."""

import numpy as np
import pytest
import torch

from benchmarks.nearest_neighbours import main
from benchmarks.neighbour_accuracy import kl_divergence
from benchmarks.neighbour_problems import FIELDS, data_of_field, random_field
from gpext.bounds import conditional_log_prob


def test_fields_have_the_covariance_of_their_kernel():
    # Products f f' by distance; the spread over independent fields gives the standard errors of their means.
    lengthscale, edges = 0.05, np.linspace(0, 0.5, 11)
    products = []
    for seed in range(300):
        x, f = random_field(300, lengthscale, seed, cells=64)
        i, j = np.triu_indices(300, 1)
        r = np.linalg.norm(x[i] - x[j], axis=-1)
        scaled = 3**0.5 * r / lengthscale
        surplus = f[i] * f[j] - (1 + scaled) * np.exp(-scaled)
        place = np.digitize(r, edges)
        own = [np.mean(f**2) - 1]
        products.append(own + [surplus[place == b].mean() for b in range(1, len(edges))])
    products = np.array(products)
    z = products.mean(0) / (products.std(0, ddof=1) / len(products) ** 0.5)
    assert np.abs(z).max() < 6  # 11 of Student t with 299 degrees of freedom: by chance once in ten million


@pytest.mark.parametrize("name", FIELDS)
def test_the_formulas_are_those_of_gpext(name):
    field = FIELDS[name]
    data = data_of_field(field, 40, 10, 0.1, 0)
    assert data.x.shape == (40, 2)
    assert data.x_test.shape == (10, 2)
    likelihood, y, read = field.family.ours(data.y)
    likelihood.initialize(**field.parameters)
    f = np.linspace(-1, 1, 40)
    with torch.no_grad():
        found = conditional_log_prob(likelihood, y, torch.from_numpy(f)).numpy()
        np.testing.assert_allclose(found, field.family.log_prob(data.y, f, read()), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", FIELDS)
def test_drawn_observations_have_the_mean_of_the_formula(name):
    field, size = FIELDS[name], 100_000
    parameters = {"df": 4.0, "scale": 0.3, "shape": 2.0}
    mean = field.family.response_mean(np.array([0.3]), np.array([0.0]), parameters)[0]
    y = field.family.draw(np.random.default_rng(0), np.full(size, 0.3), np.zeros(size))
    assert mean == pytest.approx(y.mean(), abs=5 * y.std() / size**0.5)  # by chance once in a million


def test_the_divergence_is_that_of_torch():
    generator = torch.Generator().manual_seed(0)
    pair = []
    for _ in range(2):
        root = torch.randn(6, 9, dtype=torch.float64, generator=generator)
        pair += [torch.randn(6, dtype=torch.float64, generator=generator), root @ root.mT]
    normal = torch.distributions.MultivariateNormal
    expected = torch.distributions.kl_divergence(normal(pair[0], pair[1]), normal(pair[2], pair[3])).item()
    assert kl_divergence(*pair) == pytest.approx(expected, rel=1e-10)
    assert kl_divergence(*pair[:2], *pair[:2]) == pytest.approx(0, abs=1e-10)


@pytest.mark.slow
def test_the_quick_run_ends_and_reports_what_it_has(capsys, tmp_path):
    output = tmp_path / "rows.jsonl"
    assert main(["--quick", "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("gpext, Laplace |") == 4
    assert "GPBoost |" not in shown
    assert shown.count("| coordinate |") == 2
    assert main(["--report-only", "--output", str(output)]) == 0
    assert capsys.readouterr().out == shown
