"""Zeros that take memory only where they have been written."""

from __future__ import annotations

import math
import mmap

import torch


def reserved_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros of a shape; on a CPU in a mapping of their own, whose pages are taken as they are first written.

    ``torch.zeros`` writes, and so takes, every page at once.

    Raises:
        MemoryError: the system does not give such a range of addresses.
    """
    count = math.prod(shape)
    if device.type != "cpu" or not count:
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = count * dtype.itemsize
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"expected room for {num_bytes:,} bytes of keys or values: {error}") from error
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
