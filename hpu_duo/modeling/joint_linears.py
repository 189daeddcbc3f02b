"""Join products of a traced step that have the same inputs, which are then laid out once for all of them.

Projections to queries, keys and values are such products, and so are a gate and what it gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphs.backends.trace import Call, Value
from kernels_ref.x86 import linear

_Key = tuple[Any, ...]


def join_linears(calls: Sequence[Call]) -> list[Call]:
    """Return the same step with one call of our kernel for all its products with the same inputs.

    Results come where the first of them was. Between the first and the last nothing writes to memory.

    Args:
        calls: the trace.
    """
    joined: list[list[Call]] = []
    open_groups: dict[_Key, list[Call]] = {}
    for call in calls:
        key = _key(call)
        if key is None:
            joined.append([call])
            if call.writes is not False:
                open_groups.clear()
        elif key in open_groups:
            open_groups[key].append(call)
        else:
            open_groups[key] = [call]
            joined.append(open_groups[key])
    return [group[0] if len(group) == 1 else _joint(group) for group in joined]


def _key(call: Call) -> _Key | None:
    """Return what products that can be joined have in common; None if this call is no such product."""
    if str(call.func) != linear.NAME or call.kwargs:
        return None
    x, packed, bias, _, *others = call.args
    made_in_step = (value for value in (packed, bias) if isinstance(value, Value) and value.is_variable)
    return None if any(made_in_step) else (x, *others)


def _joint(group: Sequence[Call]) -> Call:
    x, _, _, _, *others = group[0].args
    packed, biases, sizes = ([call.args[place] for call in group] for place in (1, 2, 3))
    results = tuple(result for call in group for result in call.results)
    return Call(linear.each_operator(), (x, packed, biases, sizes, *others), {}, results, is_one=False)
