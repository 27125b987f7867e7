"""The site is complete: public names have a page, likelihoods a row, and code blocks are run or say why not."""

import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
from matplotlib import pyplot

import gpext
from gpext import likelihoods
from tests.neutral_settings import kept_settings

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
NOT_RUN = re.compile(r"<!-- not run by the tests: .+ -->\s*\Z")


def _module(name, monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module(name)


@pytest.fixture
def public(monkeypatch):
    return _module("public", monkeypatch)


@pytest.fixture
def docstrings(monkeypatch):
    return _module("docstrings", monkeypatch)


def reference(directive):
    return {name for page in PAGES for name in re.findall(rf"^\.\. {directive}:: (\S+)", page.read_text(), flags=re.M)}


def test_every_public_name_is_on_a_page(public):
    rooms = reference("automodule")
    alone = {f"gpext.{name}".replace("gpext.gpext", "gpext") for name in reference("auto(?:class|function)")}
    named = {name for name in public.exports() if name.rpartition(".")[0] in rooms}
    assert set(public.exports()) - named - alone == set()
    assert rooms - {f"gpext.{room}" for room in public.ROOMS} == {"gpext.training"}


def test_every_public_class_and_function_has_an_example(public):
    """tests/test_doctests.py runs them."""
    named = {name: each for name, each in public.exports().items() if inspect.isclass(each) or inspect.isroutine(each)}
    assert [name for name, each in named.items() if ">>> " not in (each.__doc__ or "")] == []


def test_every_status_is_explained():
    page = (DOCS / "faq.md").read_text()
    fits, rules = (part.partition("\n## ")[0] for part in page.split("| status |")[1:])
    for statuses, part in ((gpext.FitStatus, fits), (gpext.inference.Status, rules)):
        assert [status.name for status in statuses if f"`{status.name}`" not in part] == []


def test_every_room_of_the_package_is_public(public):
    assert {name for name in gpext.__all__ if name.islower()} - {
        "fit",
        "fit_grid",
        "load",
        "save",
        "__version__",
    } <= set(public.ROOMS)


def test_every_likelihood_is_in_the_table():
    abstract = {"AugmentedLikelihood", "ComposedLikelihood", "JointLikelihood", "LatentLikelihood", "NoiseFloor"}
    table = (DOCS / "api/likelihoods.md").read_text()
    named = set(re.findall(r"{py:class}`(?:~|[^`]* <)gpext\.likelihoods\.(\w+)>?`", table))
    assert named == set(likelihoods.__all__) - abstract


def test_names_in_the_readme_exist():
    table = (DOCS.parent / "README.md").read_text()
    named = re.findall(r"`(\w+Likelihood|GP\w+)\b", table)
    from gpext import estimators

    known = {*likelihoods.__all__, *estimators.__all__}
    assert named
    assert [name for name in named if name not in known] == []


def unexplained(page):
    """Return the beginnings of Python blocks of a page that are no cells and do not say why they are not run."""
    text = page.read_text()
    starts = [match.start() for match in re.finditer(r"^ *```(?:python|diff)$", text, flags=re.M)]
    return [text[start : start + 60] for start in starts if not NOT_RUN.search(text[:start])]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_code_is_run_or_says_why_not(page):
    blocks = unexplained(page)
    if page.name == "tour.md":
        assert all(block.startswith("```python") for block in blocks)
    elif page == DOCS / "index.md":
        assert len(blocks) == 1  # one line of the diff of the README, which is run there
    else:
        assert blocks == []


CELL = re.compile(r"^```\{code-cell\} python\n(?::[^\n]*\n)*(?:---\n.*?---\n)?(.*?)^```$", flags=re.M | re.S)
EXECUTED = [page for page in PAGES if CELL.search(page.read_text())]


@pytest.mark.slow
@pytest.mark.parametrize("page", EXECUTED, ids=lambda page: str(page.relative_to(DOCS)))
def test_the_cells_of_a_page_run(page, monkeypatch, tmp_path):
    """`make docs` runs them, too, and keeps their output."""
    monkeypatch.chdir(tmp_path)
    pyplot.switch_backend("Agg")
    namespace, dtype = {"__name__": "__main__"}, torch.get_default_dtype()
    try:
        with kept_settings(), torch.random.fork_rng():
            for number, code in enumerate(CELL.findall(page.read_text())):
                exec(compile(code, f"{page.name}, cell {number}", "exec"), namespace)
    finally:
        torch.set_default_dtype(dtype)
        pyplot.close("all")


def test_docstrings_become_text(docstrings):
    lines = [
        "p(y | f) of y_ * `a*b`:",
        "",
        "    t(f) = exp(a * b_)",
        "",
        "* a point",
        "",
        "Example:",
        "    >>> 2 * 3",
        "    6",
    ]
    assert docstrings.to_rst(lines) == [r"p(y \| f) of y\_ \* `a*b`:", "", "::", *lines[1:]]


def test_a_broken_link_is_found(monkeypatch, tmp_path, capsys):
    links = _module("links", monkeypatch)
    (tmp_path / "a.html").write_text('<a href="b.html#here">to b</a> <a href="https://example.org/">elsewhere</a>')
    (tmp_path / "b.html").write_text('<p id="here"><a href="a.html">back</a>')
    assert links.main(str(tmp_path)) == 0
    (tmp_path / "b.html").write_text('<p id="there"><a href="c.html">lost</a>')
    assert links.main(str(tmp_path)) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == ["a.html: b.html#here", "b.html: c.html"]
