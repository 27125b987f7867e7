"""The public rooms of gpext and the names they export, for the reference and the tests of its completeness."""

import functools
import importlib
import inspect

ROOMS = [
    *("estimators", "models", "likelihoods", "inference", "mlls", "variational", "priors", "designs"),
    *("samplers", "kernels", "kernels.keops", "operators", "solvers", "optim", "plots", "survival", "point_process"),
    *("distributions", "bounds", "augmentations", "sites", "posteriors", "quadrature", "parallel", "datasets"),
    *("botorch", "ppl"),
]


@functools.cache
def exports() -> dict[str, object]:
    """Return every public object of gpext under the name by which users import it."""
    found = {}
    for room in ("gpext", *(f"gpext.{each}" for each in ROOMS)):
        module = importlib.import_module(room)
        for name in module.__all__:
            if name != "__version__" and not inspect.ismodule(getattr(module, name)):
                found[f"{room}.{name}"] = getattr(module, name)
    return found


def by_room() -> list[tuple[tuple[str, str], object]]:
    """Return ((room, name), object) of every public object."""
    return [((name.rpartition(".")[0], name.rpartition(".")[2]), value) for name, value in exports().items()]


@functools.cache
def names() -> dict[str, str]:
    """Return the public name of each class or function by the name under which it is defined."""
    return {
        f"{each.__module__}.{each.__qualname__}": name
        for name, each in exports().items()
        if inspect.isclass(each) or inspect.isroutine(each)
    }
