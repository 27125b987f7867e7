"""The README is correct: both sides of its diff and its Python blocks run, and the files it links to exist."""

import re
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


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
    diff, *_ = blocks("diff")
    torch.manual_seed(0)
    exec(compile(side(diff, sign), f"README diff {sign}", "exec"), data)
    assert data["predictive"].mean.shape[-1] == 30
    if sign == "+":
        x, predicted = data["test_x"], data["predictive"].mean
        assert (predicted - torch.sin(5 * x[:, 0])).square().mean().sqrt() < 0.15  # in spite of outliers
        assert data["result"].status.name == "CONVERGED"


@pytest.mark.parametrize("sign", ["-", "+"])
def test_both_sides_of_the_full_data_diff_run(data, sign, capsys):
    _, diff, _ = blocks("diff")
    exec(compile(side(diff, sign), f"README diff {sign}", "exec"), data)
    assert data["predictive"].mean.shape[-1] == 30
    if sign == "-":
        return
    assert (data["predictive"].mean - torch.sin(5 * data["test_x"][:, 0])).square().mean().sqrt() < 0.1
    assert data["result"].status.name == "CONVERGED"
    (sequel,) = [block for block in blocks("python") if continues(block)]
    exec(compile(sequel, "README sequel", "exec"), data)
    printed = capsys.readouterr().out
    assert "log evidence" in printed
    assert re.search(r"^Laplace, \d+ steps: converged", printed, flags=re.MULTILINE)


def continues(block):
    """Return whether a block needs the names of the diff above it."""
    return "import" not in block


def test_python_blocks_run(capsys):
    code = [block for block in blocks("python") if not continues(block)]
    assert code
    names = {}  # a later block continues an earlier one
    torch.manual_seed(0)
    for block in code:
        exec(compile(block, "README python", "exec"), names)
    printed = capsys.readouterr().out
    assert "converged" in printed
    assert "the chains agree" in printed


def test_links_lead_somewhere():
    targets = [t for t in re.findall(r"\]\(([^)]+)\)", README) if not t.startswith("http")]
    assert targets
    assert [t for t in targets if not (ROOT / t).exists()] == []


def test_every_likelihood_is_in_the_table():
    import gpext.likelihoods

    abstract = {"AugmentedLikelihood", "ComposedLikelihood", "JointLikelihood", "LatentLikelihood"}
    named = set(re.findall(r"^\| `(\w+)(?:\([^`]*\))?`", README, flags=re.MULTILINE))
    named |= set(re.findall(r"^\| `\w+\([^`]*\)`, `(\w+)\(", README, flags=re.MULTILINE))
    wanted = set(gpext.likelihoods.__all__) - abstract - {"NoiseFloor"}
    assert wanted - named == set()
    assert {name for name in named if name.endswith("Likelihood")} <= wanted
