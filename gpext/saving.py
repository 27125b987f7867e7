"""Trained models in one file: parameters, buffers and the data that predictions need, as tensors and words alone.

A file holds the state dict of a model (or of an objective, with its likelihood), and for each LatentGP or ExactGP in it
the training data; for a LatentGP also the sites at which its inference has ended, so that a loaded model continues from
the same posterior. Models with inducing points under a variational strategy predict without their training data, which
are not saved. Files are written completely or not at all, and end with a checksum (:mod:`gpext.files`); reading them
runs no code of theirs.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import gpytorch
import torch
from gpytorch.models import ExactGP
from torch import Tensor
from torch.nn import Module

from gpext import files
from gpext._version import __version__
from gpext.designs import Design
from gpext.inference import Status
from gpext.models import LatentGP
from gpext.sites import BlockSites, CoupledSites, GaussianSites, JointSites

_FORMAT = 1
_KEYS = ("format", "gpext", "content")
_SITES = {kind.__name__: kind for kind in (GaussianSites, CoupledSites, BlockSites)}
_Model = TypeVar("_Model", bound=Module)


@torch.no_grad()
def save(model: Module, path: str | Path) -> None:
    """Write a model to one file that :func:`load` reads.

    Args:
        model: any model of gpext or gpytorch; with a likelihood that is not a part of it, the objective of both. The
            inference of a LatentGP runs first, if its parameters have moved.
        path: of the file; an existing one is replaced once the new one is complete.

    Raises:
        TypeError: not a module.
        OSError: the file could not be written.

    Example:
        >>> gpext.save(model, "model.gpext")  # doctest: +SKIP
        >>> model = gpext.load("model.gpext", Model(train_x[:1], train_y[:1], likelihood))  # doctest: +SKIP
    """
    _require_module(model)
    write_content(content_of(model), path)


@torch.no_grad()
def load(path: str | Path, model: _Model) -> _Model:
    """Read a file into a model of the same class and structure, and return that model, in eval mode.

    It then predicts what the saved model did, and its training can go on. A LatentGP or ExactGP takes the training data
    of the file, whatever it was made with: one datum is enough.

    Args:
        path: of the file, written by :func:`save`.
        model: made as the saved one was: the same classes, kernels, rule, number of inducing points and dtype.

    Raises:
        TypeError: not a module.
        ValueError: the file is damaged, was written in a later format or by something else, or is of another model,
            whose differences are named; the model has not changed then.
        OSError: the file cannot be read.

    Example:
        >>> import tempfile, torch
        >>> from gpext.likelihoods import StudentTLikelihood
        >>> from gpext.saving import save
        >>> likelihood, other = StudentTLikelihood(), StudentTLikelihood()
        >>> likelihood.noise = 0.5
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(likelihood, f"{folder}/likelihood")
        ...     other = load(f"{folder}/likelihood", other)
        >>> float(other.noise.detach())
        0.5
    """
    _require_module(model)
    return restore(Path(path), read_content(path), model)


def write_content(content: dict[str, Any], path: str | Path) -> None:
    """Write tensors and plain values, nested, to a file of this format.

    Raises:
        OSError: it could not be written.
    """
    buffer, path = io.BytesIO(), Path(path)
    torch.save({"format": _FORMAT, "gpext": __version__, "content": content}, buffer)
    files.write(path, buffer.getvalue(), partial=path.with_name(f"{path.name}.{os.getpid()}.part"))


def read_content(path: str | Path) -> dict[str, Any]:
    """Return what :func:`write_content` has written.

    Raises:
        ValueError: the file is damaged, or was written in a later format or by something else.
        OSError: it cannot be read.
    """
    stored = files.load(Path(path), _KEYS)[0]
    if stored["format"] != _FORMAT:
        raise ValueError(
            f"{path} is in format {stored['format']!r}, of gpext {stored['gpext']}; gpext {__version__} reads format "
            f"{_FORMAT}. Install the version that wrote it."
        )
    return stored["content"]


@torch.no_grad()
def content_of(model: Module) -> dict[str, Any]:
    """Return what is stored of a model: tensors and plain values, nested."""
    return {
        "model": type(model).__qualname__,
        "data": {name: _data_of(part) for name, part in _with_data(model)},
        "state": {name: value.detach().cpu() for name, value in model.state_dict().items()},
        "constraints": _constraints(model),
    }


@torch.no_grad()
def restore(path: Path, content: dict[str, Any], model: _Model) -> _Model:
    """Give a model what :func:`content_of` has returned of another one, and return it in eval mode.

    Raises:
        ValueError: it is of another model; the message names the file and the differences, and nothing has changed.
    """
    _check(path, content, model)
    parts = dict(_with_data(model))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    earlier = {name: _inputs_and_targets(part) for name, part in parts.items()}
    try:
        for name, part in parts.items():
            _set_data(part, *_restored(content["data"][name], part))
        found = _constraints(model)
        if found != content["constraints"]:
            _differ(path, "constraints", content["constraints"], found)
        model.load_state_dict(content["state"])
        for name, part in parts.items():
            if isinstance(part, LatentGP):
                _continue_from(part, content["data"][name])
    except BaseException:
        for name, part in parts.items():
            _set_data(part, *earlier[name])
        model.load_state_dict(before)
        raise
    return model.eval()


# ---- what is stored of a model with data ----------------------------------------------------------------------------


def _with_data(model: Module) -> Iterator[tuple[str, LatentGP | ExactGP]]:
    for name, part in model.named_modules():
        if isinstance(part, LatentGP) or (isinstance(part, ExactGP) and part.train_inputs is not None):
            yield name, part


def _inputs_and_targets(part: LatentGP | ExactGP) -> tuple[list[Tensor], Tensor, Design | None]:
    return list(part.train_inputs), part.train_targets, part.design if isinstance(part, LatentGP) else None


def _data_of(part: LatentGP | ExactGP) -> dict[str, Any]:
    inputs, targets, design = _inputs_and_targets(part)
    data: dict[str, Any] = {
        "kind": type(part).__qualname__,
        "inputs": [x.detach().cpu() for x in inputs],
        "targets": targets.detach().cpu(),
    }
    if design is not None:
        entries = [design.rows.cpu(), design.columns.cpu(), design.weights.cpu()]
        data["design"] = {"entries": entries, "shape": list(design.shape)}
    if isinstance(part, LatentGP):
        result = part.result
        sites = result.conditioned.sites  # float64, whatever the model's dtype
        data["rule"] = type(part.inference).__qualname__
        data["sites"] = {each.name: getattr(sites, each.name).detach().cpu() for each in fields(sites)}
        data["of_sites"] = type(sites).__name__
        data["log_evidence"], data["trace"] = result.log_evidence.detach().cpu(), result.trace.detach().cpu()
        data["status"], data["message"] = result.status.name, result.message
    return data


def _restored(data: dict[str, Any], part: Module) -> tuple[list[Tensor], Tensor, Design | None]:
    like = next(part.parameters(), torch.empty(0))
    design = None
    if "design" in data:
        rows, columns, weights = data["design"]["entries"]
        design = Design(rows, columns, weights, tuple(data["design"]["shape"])).to(like.device)
    return [x.to(like.device) for x in data["inputs"]], data["targets"].to(like.device), design


def _set_data(part: LatentGP | ExactGP, inputs: list[Tensor], targets: Tensor, design: Design | None) -> None:
    if isinstance(part, ExactGP):
        part.set_train_data(inputs, targets, strict=False)
    else:
        part.set_train_data(inputs, targets, strict=False, design=design)


def _continue_from(part: LatentGP, data: dict[str, Any]) -> None:
    """Make the result of a LatentGP that of the file."""
    device = part.train_targets.device
    kind = _SITES[data["of_sites"]]
    sites: GaussianSites | JointSites = kind(**{name: value.to(device) for name, value in data["sites"].items()})
    evidence, trace = data["log_evidence"].to(device), data["trace"].to(device)
    part.variational_strategy.restore(sites, evidence, Status[data["status"]], trace, data["message"])


# ---- checks ---------------------------------------------------------------------------------------------------------


def _require_module(model: Any) -> None:
    if not isinstance(model, Module):
        raise TypeError(f"expected a model or an objective of gpext or gpytorch; got {type(model).__qualname__}.")


def _constraints(model: Module) -> dict[str, str]:
    """Return the classes of constraints by name: they are not a part of a state dict, as their bounds are."""
    if not isinstance(model, gpytorch.Module):
        return {}
    return {name: type(constraint).__qualname__ for name, constraint in model.named_constraints()}


def _check(path: Path, content: dict[str, Any], model: Module) -> None:
    """Raise ValueError unless a file is of a model of this class, with the same parts and parameters."""
    if content["model"] != type(model).__qualname__:
        raise ValueError(f"{path} is of a {content['model']}; got a {type(model).__qualname__} to load it into.")
    parts = dict(_with_data(model))
    kinds = {name: type(part).__qualname__ for name, part in parts.items()}
    stored = {name: data["kind"] for name, data in content["data"].items()}
    if kinds != stored:
        _differ(path, "models with data", stored, kinds)
    rules = {n: type(part.inference).__qualname__ for n, part in parts.items() if isinstance(part, LatentGP)}
    stored = {name: data["rule"] for name, data in content["data"].items() if "rule" in data}
    if rules != stored:
        _differ(path, "rules of inference", stored, rules)
    sizes_of_data = [f"{n}.variational_strategy._variational_distribution.".lstrip(".") for n in rules]

    def described(state: dict[str, Tensor]) -> dict[str, str]:
        kept = {n: t for n, t in state.items() if not n.startswith(tuple(sizes_of_data))}
        return {n: f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for n, t in kept.items()}

    found, own = described(content["state"]), described(model.state_dict())
    if found != own:
        _differ(path, "parameters and buffers", found, own)


def _differ(path: Path, what: str, stored: dict[str, str], found: dict[str, str]) -> None:
    names = [name for name in sorted({*stored, *found}) if stored.get(name) != found.get(name)]
    each = [f"{n or 'the model'} is {stored.get(n, 'missing')} there, {found.get(n, 'missing')} here" for n in names]
    more = f" and {len(each) - 4} more" if len(each) > 4 else ""
    raise ValueError(
        f"{path} is of another model: its {what} differ, {'; '.join(each[:4])}{more}. Make the model as the saved one "
        "was made."
    )
