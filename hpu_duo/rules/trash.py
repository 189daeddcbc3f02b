"""Memory that may be written twice in one operator: the trash that padding points at."""

from __future__ import annotations

import torch


def mark_trash(store: torch.Tensor, begin: int, end: int) -> None:
    """Let entries ``[begin, end)`` of a store be written twice where a device checks writes.

    Args:
        store: its entries are those of dimension 0.
    """
    mark = getattr(store, "mark_trash", None)
    if mark is not None:
        mark(begin, end)
