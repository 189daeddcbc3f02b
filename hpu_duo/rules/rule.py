"""Rules for steps on an HPU, and the error that names the operator that broke one."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path

import torch

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


class Rule(str, Enum):
    """The rules; the value of each is its name in reports.

    ``DYNAMIC_SHAPE``: the size of a result depends on values, so the host must wait for it and every
    size is compiled anew. ``BOOLEAN_INDEX``: the same, hidden in an index. ``MIXED_DEVICES``: a tensor
    in host memory meets one on the device. ``WIDE_DTYPE``: an int64 or float64 tensor, which the device
    narrows silently. ``BAD_INDEX``: an index below zero or past the end, undefined on the device.
    ``VIEW_WRITE``: a write through a view of a part of a tensor, which graphs cannot hold. ``SCATTER``:
    ``index_put`` and ``scatter``, slow or not native. ``HOST_IN_GRAPH``: a transfer or a wait inside a
    captured graph. ``HOST_WAIT``: the host waits for a value outside of one. ``GRAPH_CHANGED``: a replay that
    computes something else than was captured. ``GRAPH_SIZE``: more operators than compile in reasonable time.
    ``STORE_COPY``: a graph that copies a whole store to write a few vectors. ``REPEATED_INDEX``: a write to
    the same place twice, of which either may win, outside of trash. ``AS_STRIDED``: a view by strides, which
    says nothing of what it shows of its base. ``UNKNOWN_OPERATOR``: one that public sources do not show on
    HPU. ``FLOAT_TYPE``: a product with a weight in another float type than the weight's own, or float16 in a
    model of another type. ``RANDOM_IN_GRAPH``: random numbers inside a captured graph, the same in each
    replay. ``NAN``: NaN made of numbers that are none.
    """

    DYNAMIC_SHAPE = "data-dependent output shape"
    BOOLEAN_INDEX = "index that is a boolean mask"
    MIXED_DEVICES = "operands on two devices"
    WIDE_DTYPE = "64-bit tensor"
    BAD_INDEX = "index out of range"
    VIEW_WRITE = "write through a partial view"
    SCATTER = "scattered write"
    HOST_IN_GRAPH = "host transfer inside a graph"
    HOST_WAIT = "host waits for a value"
    GRAPH_CHANGED = "replay differs from capture"
    GRAPH_SIZE = "graph above the limit"
    STORE_COPY = "copy of a whole store"
    REPEATED_INDEX = "write to a place twice"
    AS_STRIDED = "view by strides"
    UNKNOWN_OPERATOR = "operator that sources do not show"
    FLOAT_TYPE = "float type other than the model's"
    RANDOM_IN_GRAPH = "random numbers inside a graph"
    NAN = "NaN made of numbers"


class HpuRuleViolation(RuntimeError):
    """A step did what an HPU does badly, wrongly or not at all.

    Attributes:
        rule: the broken rule.
        operator: the torch operator, for example ``aten.nonzero.default``.
        source: file, line and function that called it, see ``calling_line``.
    """

    def __init__(self, rule: Rule, operator: str, source: str, detail: str) -> None:
        self.rule, self.operator, self.source = rule, operator, source
        super().__init__(f"{rule.value}: {operator} at {self.source}: {detail}")


def calling_line(*skipped: str) -> str:
    """Return the innermost line of Python outside torch and the checks, as ``path:line in function``.

    Args:
        skipped: directories of the checks, as beginnings of paths.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, _HERE, "<", *skipped)):
        frame = frame.f_back
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
