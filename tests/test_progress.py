"""Progress of long runs: a bar on a terminal, lines in the log elsewhere."""

import io
import logging
import re
import sys

import pytest
import torch
from pyro.infer.mcmc import NUTS

from gpext import progress
from gpext.likelihoods import StudentTLikelihood
from gpext.ppl import latent_model, sample_posterior
from gpext.progress import Progress
from gpext.samplers import GibbsSampler
from tests.members import F64, rbf_prior


@pytest.fixture
def lines(caplog, monkeypatch):
    """The lines of the log so far; one is written after each step."""
    monkeypatch.setattr(progress, "_INTERVAL", 0.0)
    caplog.set_level(logging.INFO, logger="gpext")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "gpext"]


def test_lines_in_the_log_without_a_terminal(lines):
    with Progress("fit", 3) as bar:
        for step in range(3):
            bar.update(numbers={"objective": str(step)})
    assert len(lines()) == 3
    assert re.match(r"fit:\s+67%.* 2/3 .*objective=1", lines()[1])


def test_steps_without_an_end_are_counted(lines):
    with Progress("fit") as bar:
        bar.update(5)
    assert re.match(r"fit: 5it ", lines()[0])


def test_nothing_is_written_before_half_a_minute_or_where_it_is_not_wanted(lines, monkeypatch):
    with Progress("fit", 3, shown=False) as bar:
        bar.update()
    monkeypatch.setattr(progress, "_INTERVAL", 30.0)
    with Progress("fit", 3) as bar:
        bar.update()
    assert lines() == []


def test_a_bar_and_no_line_on_a_terminal(lines, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress("fit", 3) as bar:
        bar.update(numbers={"objective": "1"})
    assert "fit:" in terminal.getvalue()
    assert lines() == []


@pytest.mark.parametrize("wanted", [True, False])
def test_chains_say_how_far_they_are(lines, wanted):
    x = torch.linspace(0, 3, 5, dtype=F64).unsqueeze(-1)
    prior, y = rbf_prior(x)[0], torch.sin(x[:, 0])
    prior = type(prior)(prior.mean.detach(), prior.covariance_matrix.detach())
    likelihood = StudentTLikelihood().double().requires_grad_(False)
    GibbsSampler(prior, likelihood, y).run(4, num_chains=1, warmup=0, progress=wanted)
    kernel = NUTS(latent_model(prior, likelihood, y))
    sample_posterior(kernel, num_samples=2, warmup=1, num_chains=2, progress=wanted, generator=torch.Generator())
    found = {line.partition(":")[0] for line in lines()}
    assert found == ({"Gibbs", "NUTS"} if wanted else set())
    if wanted:
        assert re.search(r" 6/6 .*stage=Sample, step size=", lines()[-1])
