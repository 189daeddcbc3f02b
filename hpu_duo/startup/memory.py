"""Memory of the stores of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hpu_duo.budget import DeviceBudget
from hpu_duo.config import CacheConfig, SchedulerConfig
from hpu_duo.kv.plan import LayerKV, MemoryPlan
from hpu_duo.kv.snapshots import default_snapshots, default_snapshots_within
from hpu_duo.modeling.probe import DecoderLayer
from hpu_duo.startup.heads import HeadAssignment


def plan_memory(
    layers: tuple[DecoderLayer, ...],
    heads: Sequence[HeadAssignment],
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    max_len: int,
    dtype: torch.dtype,
    *,
    budget: DeviceBudget,
    graph_bytes: int = 0,
) -> MemoryPlan:
    """Plan the sizes of all stores, within the engine's share of the device unless the user has set a size.

    Args:
        heads: of each layer.
        budget: of the device.
        graph_bytes: bytes that are set aside for graphs first.

    Raises:
        ValueError: the user's size does not fit into the free memory, or no useful size into the share.
    """
    free_bytes = budget.free_bytes - graph_bytes
    kv = tuple(LayerKV(each.groups, layer.call.head_dim) for layer, each in zip(layers, heads))
    sizes: dict[str, Any] = {
        "dtype_bytes": dtype.itemsize,
        "block_size": cache.block_size,
        "max_num_seqs": scheduler.max_num_seqs,
        "graph_bytes": graph_bytes,
        "max_chunk_rows": scheduler.max_chunk_rows,
    }
    wanted = scheduler.max_num_seqs * -(-max_len // cache.block_size)
    snapshots = _Snapshots(cache, MemoryPlan(kv, num_blocks=wanted, **sizes))
    if cache.num_blocks is not None:
        return _fitting(snapshots.beside(MemoryPlan(kv, num_blocks=cache.num_blocks, **sizes)), free_bytes)
    if cache.kv_cache_bytes is not None:
        sizes["num_snapshots"] = snapshots.within(cache.kv_cache_bytes)
        plan = MemoryPlan.from_budget(kv, kv_cache_bytes=cache.kv_cache_bytes, **sizes)
        return _fitting(replace(plan, num_blocks=min(plan.num_blocks, wanted)), free_bytes)
    plan = snapshots.beside(MemoryPlan(kv, num_blocks=wanted, **sizes))
    kv_bytes = budget.kv_bytes(graph_bytes)
    if plan.total_bytes <= kv_bytes:
        return plan
    sizes["num_snapshots"] = snapshots.within(kv_bytes)
    try:
        return MemoryPlan.from_budget(kv, kv_cache_bytes=kv_bytes, **sizes)
    except ValueError as error:
        raise ValueError(
            f"{error}: that is what device_memory_utilization={budget.utilization:g} of "
            f"{budget.total_bytes} bytes leaves beside {budget.held_bytes} in use by this process, with "
            f"{budget.free_bytes} bytes free"
        ) from None


class _Snapshots:
    """Answers how many snapshots of rings a plan has room for.

    Args:
        cache: what the user asks for.
        plan: of the same layers.
    """

    def __init__(self, cache: CacheConfig, plan: MemoryPlan) -> None:
        self._asked = cache.num_prefix_snapshots
        if not (cache.enable_prefix_caching and plan.uses_rows):
            self._asked = 0
        self._row_bytes, self._max_num_seqs = plan.row_bytes, plan.max_num_seqs

    def beside(self, plan: MemoryPlan) -> MemoryPlan:
        """Add snapshots to a plan of other stores."""
        if self._asked is not None:
            return replace(plan, num_snapshots=self._asked)
        num = default_snapshots(plan.total_bytes, self._row_bytes, self._max_num_seqs)
        return replace(plan, num_snapshots=num)

    def within(self, kv_bytes: int) -> int:
        """Return how many there are where all stores together take so many bytes."""
        if self._asked is not None:
            return self._asked
        return default_snapshots_within(kv_bytes, self._row_bytes, self._max_num_seqs)


def _fitting(plan: MemoryPlan, free_bytes: int) -> MemoryPlan:
    if plan.total_bytes > free_bytes:
        raise ValueError(
            f"the KV cache was asked to take {plan.total_bytes} bytes ({plan.num_blocks} blocks), "
            f"but only {max(0, free_bytes)} bytes are free"
            + (f" beside {plan.graph_bytes} bytes for graphs" if plan.graph_bytes else "")
        )
    return plan
