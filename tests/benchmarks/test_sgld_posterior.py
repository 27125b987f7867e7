"""The benchmark of Langevin draws at its smallest size: it runs, is not run twice, and resumes from checkpoints."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks import sgld_posterior
from gpext.samplers import MetropolisHastings

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def data(monkeypatch):
    def load(name, *, max_train, test_fraction):
        x = torch.rand(max_train, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        return SimpleNamespace(train_x=x, train_y=(4 * x.sum(-1)).sin())

    monkeypatch.setattr(sgld_posterior, "load", load)
    monkeypatch.setattr(sgld_posterior, "TIMED_STEPS", 2)


def test_every_method_has_its_rows_and_none_is_run_twice(tmp_path, capsys, monkeypatch):
    arguments = ["--quick", "--output", str(tmp_path / "rows.jsonl")]
    assert sgld_posterior.main(arguments) == 0
    printed = capsys.readouterr().out
    assert all(printed.count(f"| 20 | {method} |") == 4 for method in sgld_posterior.METHODS)
    monkeypatch.setattr(sgld_posterior, "sampler_of", None)  # nothing is sampled now
    sgld_posterior.main(arguments)
    assert capsys.readouterr().out == printed


def test_goes_on_from_a_checkpoint(tmp_path):
    data = sgld_posterior.load("concrete", max_train=10, test_fraction=0.0)
    sampler = sgld_posterior.sampler_of("Metropolis-Hastings", sgld_posterior.Model(data.train_x, data.train_y))
    assert isinstance(sampler, MetropolisHastings)
    first = sgld_posterior.sample(sampler, tmp_path, draws=4, chains=2, warmup=2)
    more = sgld_posterior.sample(sampler, tmp_path, draws=9, chains=2, warmup=2)
    assert more.raw.shape == (2, 9, 3)
    assert torch.equal(more.raw[:, :4], first.raw)
    again = sgld_posterior.sample(sampler, tmp_path, draws=9, chains=2, warmup=2)
    assert torch.equal(again.raw, more.raw)
