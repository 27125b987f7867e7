"""Docstrings for Sphinx: plain prose with roles, doctests and indented formulas becomes reStructuredText."""

import inspect
import re

import public

_QUOTED = re.compile(r"(:[a-z]+:`[^`]*`|`[^`]*`)")  # roles and code: left as they are


def _escaped(line: str) -> str:
    """Return a line of prose whose stars, bars and final underscores are characters, not markup."""
    bullet = re.match(r" *\* |", line).group()
    parts = _QUOTED.split(line.removeprefix(bullet))
    parts[::2] = [re.sub(r"([*|]|_(?!\w))", r"\\\1", part) for part in parts[::2]]
    return bullet + "".join(parts)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def to_rst(lines: list[str]) -> list[str]:
    """Return the lines with prose escaped, and blocks that are indented after a blank line marked as literal."""
    result: list[str] = []
    margin = 0  # of the prose around a literal block, or before it
    literal = doctest = False
    for previous, line in zip(["", *lines], lines, strict=False):
        if not line.strip():
            doctest = False
        elif not previous.strip() and result and _indent(line) > margin and not literal:
            literal = True
            result += [" " * margin + "::", ""]
        elif _indent(line) <= margin or not literal:
            literal, margin = False, _indent(line)
        doctest = doctest or line.lstrip().startswith(">>>")
        result.append(line if literal or doctest else _escaped(line))
    return result


def process(app, what, name, obj, options, lines) -> None:
    """Prepare a docstring; that of a room ends with a table of its public names, and entries of those without one."""
    lines[:] = to_rst(lines)
    own = {each: value for (room, each), value in public.by_room() if room == name} if what == "module" else {}
    if own:
        lines += ["", ".. autosummary::", "   :nosignatures:", "", *(f"   {each}" for each in own)]
    for each, value in own.items():
        if not inspect.isclass(value) and not inspect.isroutine(value):  # a type alias or a constant
            lines += ["", f".. py:data:: {each}", f"   :value: {value!r}"]


def skip(app, what, name, obj, skipped, options) -> bool | None:
    """Leave out what scikit-learn generates for its metadata routing: its docstrings refer to pages of its own."""
    return True if re.fullmatch(r"set_\w+_request", name) else None
