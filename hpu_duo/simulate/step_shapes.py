"""Exact shapes of a run of steps, most of which are those of the step before."""

from __future__ import annotations

from collections.abc import Hashable

from graphs.shape import BatchShape
from hpu_duo.engine.batch import exact_shape
from hpu_duo.engine.step_plan import StepPlan


class StepShapes:
    """Shapes of the steps of a scheduler, in their order.

    The shape of decodes that go on within their blocks is that of the step before, so it is computed anew
    only when somebody comes, ends, or gets to another block.

    Args:
        block_size: tokens of a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._key: Hashable = None
        self._shape: BatchShape | None = None

    def of(self, plan: StepPlan) -> BatchShape:
        """Return the shape of the next step; every step has to be shown."""
        size = self._block_size
        # What a decode reads follows from its row and from where it is in its blocks, while these stay.
        key = None
        if not plan.moves and all(row.num_new_tokens == 1 for row in plan.rows):
            key = tuple(
                (row.request, row.ring_row, row.start // size, (row.start + 1) // size) for row in plan.rows
            )
        if key is None or key != self._key or self._shape is None:
            self._shape = exact_shape(plan, size)
        self._key = key
        return self._shape
