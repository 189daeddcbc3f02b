"""Use of stores by a graph, operator by operator: what a compiler would write in place, and what not.

The same conditions as those of ``store_copies``, for code that runs without being compiled.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import NamedTuple

from hpu_duo.rules.operators import Operator


class _Use(Enum):
    READ = auto()
    WRITTEN = auto()


class StoreOperand(NamedTuple):
    """A store among the operands of an operator.

    Attributes:
        memory: of the store, as a number.
        is_view: whether the operand is a view of it.
    """

    memory: int
    is_view: bool


class StoreUse:
    """Follows the stores through one graph after the other."""

    def __init__(self) -> None:
        self._uses: dict[int, _Use] = {}

    def begin_graph(self) -> None:
        """Begin a graph of its own, such as a layer."""
        self._uses.clear()

    def problem(self, operator: Operator, operands: Iterable[StoreOperand | None]) -> str | None:
        """Note an operator.

        Args:
            operator: about to run.
            operands: its tensors, in order; None for those that are no store.

        Returns:
            Why a store would be copied, or None.
        """
        if operator.is_view:
            return None
        found = None
        for place, operand in enumerate(operands):
            if operand is None:
                continue
            memory, is_view = operand
            if place not in operator.written:
                self._uses.setdefault(memory, _Use.READ)
                continue
            before = self._uses.get(memory)
            if is_view:
                found = "writes a view of a store, where the store itself is expected"
            elif before is not None:
                what = "written" if before is _Use.WRITTEN else "read"
                found = f"writes a store that the same graph has {what} before"
            self._uses[memory] = _Use.WRITTEN
        return found
