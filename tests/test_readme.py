"""The README and the tour are correct: both sides of the diffs and all Python blocks run, and linked files exist."""

import re
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
README, TOUR = ((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/tour.md"))


def blocks(language, page=README):
    return re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)


def side(diff, sign):
    lines = [line for line in diff.splitlines() if line[:1] in ("", " ", sign)]
    return "\n".join(line[1:] for line in lines).replace("range(1000)", "range(3)")


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(80, 2, generator=generator)
    y = torch.sin(5 * x[:, 0]) + 0.1 * torch.randn(80, generator=generator)
    y[::20] += 4
    return {"train_x": x, "train_y": y, "test_x": torch.rand(30, 2, generator=generator)}


@pytest.mark.parametrize("sign", ["-", "+"])
def test_both_sides_of_the_diff_run(data, sign):
    diff, _ = blocks("diff")
    torch.manual_seed(0)
    exec(compile(side(diff, sign), f"README diff {sign}", "exec"), data)
    assert data["predictive"].mean.shape[-1] == 30
    if sign == "+":
        x, predicted = data["test_x"], data["predictive"].mean
        assert (predicted - torch.sin(5 * x[:, 0])).square().mean().sqrt() < 0.15  # in spite of outliers
        assert data["result"].status.name == "CONVERGED"


@pytest.mark.parametrize("sign", ["-", "+"])
def test_both_sides_of_the_full_data_diff_run(data, sign, capsys):
    _, diff = blocks("diff")
    exec(compile(side(diff, sign), f"README diff {sign}", "exec"), data)
    assert data["predictive"].mean.shape[-1] == 30
    if sign == "-":
        return
    assert (data["predictive"].mean - torch.sin(5 * data["test_x"][:, 0])).square().mean().sqrt() < 0.1
    assert data["result"].status.name == "CONVERGED"
    (sequel,) = [block for block in blocks("python", TOUR) if continues(block)]
    exec(compile(sequel, "sequel of the tour", "exec"), data)
    printed = capsys.readouterr().out
    assert "log evidence" in printed
    assert re.search(r"^Laplace, \d+ steps: converged", printed, flags=re.MULTILINE)


def continues(block):
    """Return whether a block needs the names of the diff above it."""
    return "import" not in block


def test_python_blocks_run(capsys):
    code = [block for page in (README, TOUR) for block in blocks("python", page) if not continues(block)]
    assert code
    names = {}  # a later block continues an earlier one
    torch.manual_seed(0)
    for block in code:
        exec(compile(block, "Python block", "exec"), names)
    printed = capsys.readouterr().out
    assert "converged" in printed
    assert "the chains agree" in printed


def test_the_readme_is_short():
    assert len(README.encode()) <= 8192


def test_links_lead_somewhere():
    targets = [t for t in re.findall(r"\]\(([^)#]+)[^)]*\)", README) if not t.startswith("http")]
    assert targets
    assert [t for t in targets if not (ROOT / t).exists()] == []
