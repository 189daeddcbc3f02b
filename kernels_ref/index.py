"""Reads and writes by index, in the forms that every device takes natively.

A store is ``[X, K, S, D]``: X blocks (or ring rows), K heads, S slots. Heads come before slots,
so that the keys of one head of one block lie side by side and a batched product reads them
without a copy.
"""

from __future__ import annotations

import torch


def index_dtype(device: torch.device) -> torch.dtype:
    """The integers that a device takes as indices: int64 on CPU and CUDA, int32 elsewhere.

    Plans are int32 because a Gaudi has no native int64; torch's CPU and CUDA kernels accept
    only int64 in ``index_copy_``.
    """
    return torch.int64 if device.type in ("cpu", "cuda") else torch.int32


def gather(source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Entries of dimension 0: ``[len(index), ...]``."""
    return source.index_select(0, index)


def write_index(unit: torch.Tensor, slot: torch.Tensor, num_heads: int, num_slots: int) -> torch.Tensor:
    """Flat index, on a ``[X * K * S, D]`` view, of every (token, head).

    Args:
        unit: block (or ring row) of each token, int32 ``[Q]``.
        slot: slot inside it, int32 ``[Q]``.
    Returns:
        ``[Q * K]``, tokens outermost, of ``index_dtype``.
    """
    unit_size = num_heads * num_slots
    # The sum has the wider of both types, which saves a conversion.
    head_start = torch.arange(0, unit_size, num_slots, dtype=index_dtype(unit.device), device=unit.device)
    return ((unit * unit_size + slot)[:, None] + head_start).reshape(-1)


def write(store: torch.Tensor, flat_index: torch.Tensor, new: torch.Tensor) -> None:
    """Put one vector per token and head in place.

    Args:
        store: ``[X, K, S, D]``, contiguous; changed in place by one ``index_copy_``.
        flat_index: from ``write_index``, ``[Q * K]``. Only entries in trash may repeat.
        new: ``[Q, K, D]``.
    """
    head_dim = store.shape[-1]
    store.view(-1, head_dim).index_copy_(0, flat_index, new.reshape(-1, head_dim))


def write_kv(
    k_store: torch.Tensor,
    v_store: torch.Tensor,
    flat_index: torch.Tensor,
    k_QKD: torch.Tensor,
    v_QKD: torch.Tensor,
) -> None:
    """Put the keys and the values of new tokens in place; see ``write``."""
    write(k_store, flat_index, k_QKD)
    write(v_store, flat_index, v_QKD)
