"""Reads and writes by index, in the forms that every device takes natively.

A store is ``[X, K, S, D]``: X blocks (or ring rows), K heads, S slots. Heads come before slots,
so that the keys of one head of one block lie side by side and a batched product reads them
without a copy.
"""

from __future__ import annotations

from collections.abc import Collection

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


def write_indices(
    unit: torch.Tensor, slot: torch.Tensor, head_counts: Collection[int], num_slots: int
) -> dict[int, torch.Tensor]:
    """Flat index, on a ``[X * K * S, D]`` view, of every (token, head), for stores of each ``K``.

    Args:
        unit: block (or ring row) of each token, int32 ``[Q]``.
        slot: slot inside it, int32 ``[Q]``.
        head_counts: every ``K`` wanted.
        num_slots: ``S``.
    Returns:
        ``[Q * K]`` by ``K``, tokens outermost, of ``index_dtype``.
    """
    # What all share comes first: a step on a CPU waits for every operator.
    head_start = torch.arange(
        0,
        max(head_counts, default=0) * num_slots,
        num_slots,
        dtype=index_dtype(unit.device),
        device=unit.device,
    )
    start, unit = slot[:, None] + head_start, unit[:, None]
    # Each sum has the wider of both types, which saves a conversion.
    return {k: torch.add(start[:, :k], unit, alpha=k * num_slots).view(-1) for k in head_counts}


def write(store: torch.Tensor, flat_index: torch.Tensor, new: torch.Tensor) -> None:
    """Put one vector per token and head in place.

    Args:
        store: ``[X, K, S, D]``, contiguous; changed in place by one ``index_copy_``.
        flat_index: one of ``write_indices``, ``[Q * K]``. Only entries in trash may repeat.
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
