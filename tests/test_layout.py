"""The layout: imports follow the order of subpackages, docstrings open correctly, and importing gpext stays light."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import gpext

PACKAGE = Path(__file__).parent.parent / "gpext"
ROOMS = [
    "_version",
    "datasets",
    "checks",
    "callers",
    "progress",
    "threads",
    "parallel",
    "schema",
    "linalg",
    "special",
    "files",
    "quadrature",
    "distributions",
    "designs",
    "augmentations",
    "bounds",
    "likelihoods",
    "sites",
    "solvers",
]
ROOMS += ["operators", "kernels", "posteriors", "inference", "variational", "models", "mlls", "optim", "samplers"]
ROOMS += ["training", "saving", "priors", "botorch", "ppl", "survival", "point_process", "estimators", "plots"]
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def imported_rooms(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names = [f"{node.module}.{a.name}" for a in node.names] if node.module == "gpext" else [node.module]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("gpext."))


def misplaced(room, source):
    return [other for other in imported_rooms(source) if ROOMS.index(other) > ROOMS.index(room)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_upwards(path):
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert misplaced(room, path.read_text()) == []


def test_rooms_exist():
    assert [room for room in ROOMS if not ((PACKAGE / room).is_dir() or (PACKAGE / f"{room}.py").exists())] == []


@pytest.mark.parametrize("room", ["solvers", "operators", "kernels", "optim"])
def test_matrices_and_optimisers_know_no_likelihood(room):
    for path in (PACKAGE / room).rglob("*.py"):
        assert not set(imported_rooms(path.read_text())) & {"likelihoods", "bounds", "augmentations"}, path


def docstrings(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_docstrings_say_what_something_is_or_does(path):
    openings = ("What ", "Where ", "Who ", "How ", "When ", "Which ")
    assert [each.split("\n")[0] for each in docstrings(path) if each.startswith(openings)] == []


def test_every_test_file_opens_with_its_law():
    tests = sorted(Path(__file__).parent.rglob("test_*.py"))
    assert [str(path) for path in tests if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_every_public_name_is_there():
    assert all(hasattr(gpext, name) for name in gpext.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        gpext.nothing  # noqa: B018


def test_a_downward_import_is_found():
    assert misplaced("sites", "from gpext.inference import CAVI\nfrom gpext import mlls, sites") == [
        "inference",
        "mlls",
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_pyro_is_imported_by_ppl_alone(path):
    names = set()
    for node in ast.parse(path.read_text()).body:  # at the top of the module
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
            assert path.parent.name == "ppl" or node.module != "gpext.ppl"
    assert "pyro" not in names or path.parent.name == "ppl"


@pytest.mark.slow
def test_importing_gpext_imports_nothing_heavy_that_gpytorch_does_not():
    """SciPy, scikit-learn, matplotlib and others are imported by the first function that needs them.

    The import raises no warning.
    """
    code = """
import json, sys
import gpytorch, torch.utils.checkpoint  # of torch 2.4 the latter imports SymPy
before = set(sys.modules)
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("error")
    import gpext
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    added = set(json.loads(output.stdout.splitlines()[-1])) - set(sys.stdlib_module_names)
    assert added - {"gpext", "numpy", "tqdm"} == set()
