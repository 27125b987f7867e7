"""The benchmark of kernel products runs on a tiny problem, without KeOps, which would have to compile."""

import json

import pytest
import torch

from benchmarks import kernel_matvec

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _same_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_it_compares_equals_and_goes_on_where_it_stopped(tmp_path, capsys, monkeypatch):
    output = tmp_path / "rows.jsonl"
    arguments = ["--quick", "--contestants", "stored", "--output", str(output)]
    assert kernel_matvec.main(arguments) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()[1:]]
    assert len(rows) == 4
    for row in rows:
        assert row["differences"]["product"] < (1e-10 if row["dtype"] == "float64" else 1e-4)
        assert set(row["seconds"]["product"]) == {"tiles", "stored"}
    first = capsys.readouterr().out
    assert "| matern32 | float32 | 2 | 700 | 1 | 1 | default |" in first
    monkeypatch.setattr(kernel_matvec, "measure", None)
    assert kernel_matvec.main(arguments) == 0
    assert capsys.readouterr().out == first


def test_derivatives_are_those_of_a_stored_matrix():
    x, u, v = torch.randn(3, 50, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kernel = kernel_matvec.PROFILES["matern52"](kernel_matvec.keops, 2).double()
    value, found = kernel_matvec.product_and_derivatives(kernel, x, u, v)
    plain = kernel_matvec.PROFILES["matern52"](kernel_matvec.gpytorch.kernels, 2).double()
    expected = plain(x).to_dense() @ v
    torch.testing.assert_close(value, expected.detach(), rtol=1e-8, atol=1e-8)
    (derivatives,) = torch.autograd.grad((u * expected).sum(), [plain.raw_lengthscale])
    torch.testing.assert_close(found, derivatives, rtol=1e-7, atol=1e-7)
    form, found = kernel_matvec.form_and_derivatives(kernel, x, u, v)
    torch.testing.assert_close(form, (u * expected).sum().detach(), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found, derivatives, rtol=1e-7, atol=1e-7)
