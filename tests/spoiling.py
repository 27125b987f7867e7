"""Everything that can be wrong with one entry of what was stored: it is gone, or of another type, shape or value."""

import copy

import torch


def paths(content, at=()):
    """The places of all entries."""
    items = content.items() if isinstance(content, dict) else ()
    for key, value in enumerate(content) if isinstance(content, list | tuple) else items:
        yield (*at, key)
        yield from paths(value, (*at, key))


def spoilt(content):
    """Pairs (what was done, a copy of the content in which it was done) for every entry and every fault."""
    for path in paths(content):
        value = content
        for key in path:
            value = value[key]
        for fault, replacement in faults(value):
            yield f"{fault} {path}", replaced(content, path, replacement)


def faults(value):
    """What an entry may be instead: nothing at all, or something else."""
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
    """A copy of the content with another value at a place, or, with _GONE, without it."""
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
