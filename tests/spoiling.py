"""All faults of one entry of a stored value: it is missing, or of another type, shape or value."""

import copy

import torch


def paths(content, at=()):
    """The paths of all entries."""
    items = content.items() if isinstance(content, dict) else ()
    for key, value in enumerate(content) if isinstance(content, list | tuple) else items:
        yield (*at, key)
        yield from paths(value, (*at, key))


def spoilt(content):
    """Pairs (description, faulty copy of the content) for every entry and every fault."""
    for path in paths(content):
        value = content
        for key in path:
            value = value[key]
        for fault, replacement in faults(value):
            yield f"{fault} {path}", replaced(content, path, replacement)


def faults(value):
    """The faulty values of an entry: none at all, or another one."""
    yield "remove", _GONE
    yield "type", "wrong" if not isinstance(value, str) else 3.5
    if isinstance(value, torch.Tensor):
        yield "shape", torch.zeros((*value.shape, 3), dtype=value.dtype)
        yield "dtype", value.to(torch.float16 if value.is_floating_point() else torch.float32)
        if value.is_floating_point() and value.numel():
            yield "nan", torch.full_like(value, torch.nan)
    else:
        yield "tensor", torch.zeros(7, 5, dtype=torch.float64)
        yield "nan", float("nan")
        yield "list", [1, 2, 3, 4, 5]


_GONE = object()


def replaced(content, path, replacement):
    """A copy of the content with another value at a path, or, with _GONE, without it."""
    if not path:
        return replacement
    key, rest = path[0], path[1:]
    if isinstance(content, tuple):
        return tuple(replaced(list(content), path, replacement))
    found = copy.copy(content)
    if not rest and replacement is _GONE:
        del found[key]
    else:
        found[key] = replaced(content[key], rest, replacement)
    return found
