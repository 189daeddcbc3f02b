"""Use of stores by a layer, operator by operator: what a compiler would write in place, and what not.

The same conditions as those of ``store_copies``, for code that runs without being compiled.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto

from hpu_duo.rules.operators import Operator


class _Use(Enum):
    READ = auto()
    WRITTEN = auto()


class StoreUse:
    """Follows the stores through one layer after the other.

    Args:
        stores: memory of the stores, as numbers.
    """

    def __init__(self, stores: Iterable[int]) -> None:
        self._stores = frozenset(stores)
        self._uses: dict[int, _Use] = {}

    def begin_layer(self) -> None:
        """Begin a layer, which is a graph of its own."""
        self._uses.clear()

    def problem(self, operator: Operator, operands: Iterable[tuple[int, bool]]) -> str | None:
        """Note an operator.

        Args:
            operator: about to run.
            operands: memory of its tensors, in order, and whether each is a view.

        Returns:
            Why a store would be copied, or None.
        """
        if operator.is_view:
            return None
        found = None
        for place, (memory, is_view) in enumerate(operands):
            if memory not in self._stores:
                continue
            if place not in operator.written:
                self._uses.setdefault(memory, _Use.READ)
                continue
            before = self._uses.get(memory)
            if is_view:
                found = "writes a view of a store, where the store itself is expected"
            elif before is not None:
                what = "written" if before is _Use.WRITTEN else "read"
                found = f"writes a store that the same layer has {what} before"
            self._uses[memory] = _Use.WRITTEN
        return found
