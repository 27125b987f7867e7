"""The smallest benchmark of Langevin draws given scales; its reference against an independently known posterior."""

import numpy as np
import pytest
import torch

from benchmarks import augmented_sgld
from tests.statistics import block_means, misfit

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def data(monkeypatch):
    def load(name, *, max_train, test_fraction):
        x = torch.rand(max_train, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        return type("Data", (), {"train_x": x, "train_y": (x.sum(-1) > 1).double()})

    monkeypatch.setattr(augmented_sgld, "load", load)


def test_every_method_has_its_rows_and_none_is_run_twice(tmp_path, capsys, monkeypatch):
    arguments = ["--quick", "--output", str(tmp_path / "rows.jsonl"), "--rows", "8"]
    methods = ["--methods", *augmented_sgld.METHODS[:3]]
    assert augmented_sgld.main(arguments + methods) == 0
    printed = capsys.readouterr().out
    assert all(printed.count(f"| student_t | {method} |") == 5 for method in augmented_sgld.METHODS[:3])
    assert printed.count(f"| ionosphere | {augmented_sgld.METHODS[1]} |") == 3
    monkeypatch.setattr(augmented_sgld, "model_of", None)  # nothing is sampled now
    augmented_sgld.main(arguments + methods)
    assert capsys.readouterr().out == printed


def test_goes_on_from_its_draws(tmp_path):
    model = augmented_sgld.model_of("student_t", 6)
    sampler = augmented_sgld.sampler_of("SGLD, exact gradients", model, None)
    counts = {"chains": 2, "warmup": 1}
    first = augmented_sgld.sample(sampler, tmp_path, draws=2, **counts)
    more = augmented_sgld.sample(sampler, tmp_path, draws=4, **counts)
    assert torch.equal(more.latent[:, :2], first.latent)
    assert more.num_draws == 4


def test_the_reference_draws_its_priors_where_data_say_nothing():
    """With one uninformative datum, the noise and nu have their prior distributions."""
    mixture = augmented_sgld.ScaleMixture(np.zeros((1, 1)), np.zeros(1), np.random.default_rng(0))
    mixture.log_density = lambda logs, scales: augmented_sgld.log_normal_prior(logs[:3], ("s", "l", "noise"))
    logs = np.array([mixture.sweep(adapt=k < 500) for k in range(4500)])[500:]
    for j, name in enumerate(("s", "l", "noise")):
        mean, sd = augmented_sgld.PRIORS[name]
        moments = torch.tensor(np.stack([logs[:, j], (logs[:, j] - mean) ** 2], -1)).unsqueeze(0)
        assert misfit(block_means(moments, 40), torch.tensor([mean, sd**2])) < 1
    assert logs[:, 3].min() > np.log(augmented_sgld.LOWEST_NU)
