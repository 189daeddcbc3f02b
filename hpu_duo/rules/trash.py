"""Memory that may be written twice in one operator: the trash that padding points at."""

from __future__ import annotations

import torch


def mark_trash(store: torch.Tensor, begin: int, end: int, *, is_state: bool = False) -> None:
    """Let entries ``[begin, end)`` of a store be written twice where a device checks writes.

    Args:
        store: its entries are those of dimension 0.
        is_state: it is small beside keys and values, so that a compiler may copy it to write it.
    """
    mark = getattr(store, "mark_trash", None)
    if mark is not None:
        mark(begin, end, is_state)
