"""Simplify a trace: no views of views, nothing computed twice, no view that nobody reads."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphs.backends.dispatch import is_random
from graphs.backends.trace import Call, Value, values_in

_AS_STRIDED = torch.ops.aten.as_strided.default


def simplify(calls: Sequence[Call], outputs: Any) -> tuple[list[Call], Any]:
    """Return fewer calls that do the same, and the nest of values that the step now returns.

    Args:
        calls: the trace.
        outputs: the nest of values that the step returns.
    """
    written = _written_memory(calls)
    renamed: dict[Value, Value] = {}
    known: dict[Hashable, tuple[Value, ...]] = {}
    kept: list[Call] = []
    for original in calls:
        call = _with_values(original, renamed)
        renamed.update((old, new) for old, new in zip(original.results, call.results) if old is not new)
        if call.is_view and len(call.results) == 1 and _is_whole(call.results[0]):
            renamed[original.results[0]] = _base(call.results[0])
            continue
        key = _key(call, written)
        if key is not None and key in known:
            renamed.update(zip(original.results, known[key]))
            continue
        if key is not None:
            known[key] = call.results
        kept.append(call)
    returned = _renamed(outputs, renamed)
    return _without_chains(kept, returned), returned


def _with_values(call: Call, renamed: Mapping[Value, Value]) -> Call:
    if renamed.keys().isdisjoint(call.read):
        return call
    kwargs = {name: _renamed(item, renamed) for name, item in call.kwargs.items()}
    args = _renamed(call.args, renamed)
    # The base of a view may have been renamed as well.
    results = tuple(
        x if x.base is None else replace(x, base=renamed.get(x.base, x.base)) for x in call.results
    )
    return replace(call, args=args, kwargs=kwargs, results=results)


def _renamed(item: Any, renamed: Mapping[Value, Value]) -> Any:
    if isinstance(item, Value):
        return renamed.get(item, item)
    if type(item) in (tuple, list):
        return type(item)(_renamed(part, renamed) for part in item)
    return item


def _base(value: Value) -> Value:
    """Follow views that show their base whole and as it is to the first value."""
    while value.base is not None and _is_whole(value):
        value = value.base
    return value


def _is_whole(value: Value) -> bool:
    base = value.base
    if base is None or len(value.stride) != len(value.shape):
        return False
    mine = value.shape, value.stride, value.offset, value.dtype
    return mine == (base.shape, base.stride, base.offset, base.dtype)


def _written_memory(calls: Sequence[Call]) -> set[Value] | None:
    """The owners of memory that the step writes to; None if that is not known."""
    written: set[Value] = set()
    for call in calls:
        if call.writes is None:
            return None
        if call.writes:
            written.update(value.owner for value in (*call.read, *call.results))
    return written


def _key(call: Call, written: set[Value] | None) -> Hashable | None:
    """Return a key that is equal for calls with equal results; None if that cannot be said of this call."""
    if written is None or call.writes is not False or not call.results:
        return None
    if is_random(call.func):
        return None
    if written and any(value.owner in written for value in (*call.read, *call.results)):
        return None
    key = (call.func, _frozen(call.args), tuple((name, _frozen(x)) for name, x in call.kwargs.items()))
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


def _without_chains(calls: Sequence[Call], outputs: Any) -> list[Call]:
    """Take views of views from the memory itself, and leave out views that nobody reads."""
    needed = set(values_in(outputs))
    kept = []
    for call in reversed(calls):
        if call.is_view:
            if not needed.intersection(call.results):
                continue
            call = _from_memory(call)
        needed.update(call.read)
        kept.append(call)
    return kept[::-1]


def _from_memory(call: Call) -> Call:
    result = call.results[0]
    owner = result.owner
    is_chain = len(call.results) == 1 and result.base is not None and result.base.base is not None
    # Only memory of the step itself begins at the same place in each run.
    if not is_chain or not owner.is_variable or len(result.stride) != len(result.shape) or not owner.stride:
        return call
    if result.dtype != owner.dtype:
        return call
    return Call(_AS_STRIDED, (owner, [*result.shape], [*result.stride], result.offset), {}, (result,))
