"""An error that belongs to one row of a batch."""

from __future__ import annotations


class RowError(ValueError):
    """One row cannot be sampled; the others can. What went wrong is the ``__cause__``.

    Args:
        row: its index in the batch.
        cause: what was raised.
    """

    def __init__(self, row: int, cause: Exception) -> None:
        super().__init__(f"row {row}: {cause}")
        self.row, self.cause = row, cause
