"""Fewer calls for the same step: no views of views, nothing twice, nothing that nobody reads."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphs.backends.written import Line, Value, values_in

_AS_STRIDED = torch.ops.aten.as_strided.default


def fewer_lines(lines: Sequence[Line], outputs: Any) -> tuple[list[Line], Any]:
    """The same step, and what it returns.

    Args:
        outputs: the nest of values that it returns.
    """
    written = _written_memory(lines)
    renamed: dict[Value, Value] = {}
    known: dict[Hashable, tuple[Value, ...]] = {}
    kept: list[Line] = []
    for original in lines:
        line = _with_values(original, renamed)
        renamed.update((old, new) for old, new in zip(original.results, line.results) if old is not new)
        if line.is_view and len(line.results) == 1 and _is_whole(line.results[0]):
            renamed[original.results[0]] = _base(line.results[0])
            continue
        key = _key(line, written)
        if key is not None and key in known:
            renamed.update(zip(original.results, known[key]))
            continue
        if key is not None:
            known[key] = line.results
        kept.append(line)
    returned = _renamed(outputs, renamed)
    return _without_chains(kept, returned), returned


def _with_values(line: Line, renamed: Mapping[Value, Value]) -> Line:
    if not any(value in renamed for value in line.read):
        return line
    kwargs = {name: _renamed(item, renamed) for name, item in line.kwargs.items()}
    args = _renamed(line.args, renamed)
    # What a view shows has another name as well.
    results = tuple(
        x if x.base is None else replace(x, base=renamed.get(x.base, x.base)) for x in line.results
    )
    return replace(line, args=args, kwargs=kwargs, results=results)


def _renamed(item: Any, renamed: Mapping[Value, Value]) -> Any:
    if isinstance(item, Value):
        return renamed.get(item, item)
    if type(item) in (tuple, list):
        return type(item)(_renamed(part, renamed) for part in item)
    return item


def _base(value: Value) -> Value:
    """The first of the values of which each shows the one before it whole and as it is."""
    while value.base is not None and _is_whole(value):
        value = value.base
    return value


def _is_whole(value: Value) -> bool:
    base = value.base
    if base is None or len(value.stride) != len(value.shape):
        return False
    return all(
        mine == its
        for mine, its in zip(
            (value.shape, value.stride, value.offset, value.dtype),
            (base.shape, base.stride, base.offset, base.dtype),
        )
    )


def _written_memory(lines: Sequence[Line]) -> set[Value] | None:
    """The owners of memory that the step writes to; None if that is not known."""
    written: set[Value] = set()
    for line in lines:
        schema = getattr(line.func, "_schema", None)
        if schema is None:
            return None
        if schema.is_mutable:
            written.update(value.owner for value in (*line.read, *line.results))
    return written


def _key(line: Line, written: set[Value] | None) -> Hashable | None:
    """Equal for lines that make the same; None if that cannot be said."""
    schema = getattr(line.func, "_schema", None)
    if written is None or schema is None or schema.is_mutable or not line.results:
        return None
    if torch.Tag.nondeterministic_seeded in line.func.tags:  # type: ignore[attr-defined]
        return None
    if any(value.owner in written for value in (*line.read, *line.results)):
        return None
    key = (line.func, _frozen(line.args), tuple((name, _frozen(x)) for name, x in line.kwargs.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _frozen(item: Any) -> Hashable:
    if type(item) in (tuple, list):
        return tuple(map(_frozen, item))
    # 1, 1.0 and True are equal and not the same.
    return item if isinstance(item, Value) else (type(item), item)


def _without_chains(lines: Sequence[Line], outputs: Any) -> list[Line]:
    """Views of views are taken from the memory itself, and views that nobody reads are left out."""
    needed = set(values_in(outputs))
    kept = []
    for line in reversed(lines):
        if line.is_view:
            if not needed.intersection(line.results):
                continue
            line = _from_memory(line)
        needed.update(line.read)
        kept.append(line)
    return kept[::-1]


def _from_memory(line: Line) -> Line:
    result = line.results[0]
    owner = result.owner
    is_chain = len(line.results) == 1 and result.base is not None and result.base.base is not None
    # Only memory of the step itself begins at the same place in each run.
    if not is_chain or not owner.is_variable or len(result.stride) != len(result.shape) or not owner.stride:
        return line
    if result.dtype != owner.dtype:
        return line
    return Line(_AS_STRIDED, (owner, [*result.shape], [*result.stride], result.offset), {}, (result,))
