"""An error that belongs to one row of a batch."""

from __future__ import annotations


class RowError(ValueError):
    """One row cannot be sampled; the others can.

    Args:
        row: index of the row in the batch.
        cause: the error, also the ``__cause__``.
    """

    def __init__(self, row: int, cause: Exception) -> None:
        super().__init__(f"row {row}: {cause}")
        self.row, self.cause = row, cause
