"""The place of the largest item of each row, in one pass."""

from __future__ import annotations

import torch

from kernels_ref.x86.library import is_available, require


def fits(rows_NV: torch.Tensor) -> bool:
    """Whether these are rows that the kernel reads, here."""
    return rows_NV.dtype == torch.bfloat16 and rows_NV.device.type == "cpu" and is_available()


def place_of_largest(rows_NV: torch.Tensor) -> torch.Tensor:
    """The place of the first of the largest items of each row, int32 ``[N]``.

    An item that is not a number is larger than any, as for ``torch.argmax``.

    Raises:
        ValueError: there are no two dimensions or no items, the dtype is another one, or there is no such
            kernel here.
    """
    require()
    return torch.ops.hpu_duo_x86.place_of_largest.default(rows_NV)
