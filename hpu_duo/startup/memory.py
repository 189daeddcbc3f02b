"""Memory of the stores of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hpu_duo.budget import DeviceBudget
from hpu_duo.config import CacheConfig, SchedulerConfig
from hpu_duo.kv.plan import LayerKV, MemoryPlan
from hpu_duo.modeling.probe import DecoderLayer
from hpu_duo.startup.heads import HeadAssignment
from kernels_ref import Owner


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
        "num_snapshots": _num_snapshots(kv, cache, scheduler),
    }
    wanted = scheduler.max_num_seqs * -(-max_len // cache.block_size)
    if cache.num_blocks is not None:
        return _fitting(MemoryPlan(kv, num_blocks=cache.num_blocks, **sizes), free_bytes)
    if cache.kv_cache_bytes is not None:
        plan = MemoryPlan.from_budget(kv, kv_cache_bytes=cache.kv_cache_bytes, **sizes)
        return _fitting(replace(plan, num_blocks=min(plan.num_blocks, wanted)), free_bytes)
    plan = MemoryPlan(kv, num_blocks=wanted, **sizes)
    kv_bytes = budget.kv_bytes(graph_bytes)
    if plan.total_bytes <= kv_bytes:
        return plan
    try:
        return MemoryPlan.from_budget(kv, kv_cache_bytes=kv_bytes, **sizes)
    except ValueError as error:
        raise ValueError(
            f"{error}: that is what device_memory_utilization={budget.utilization:g} of "
            f"{budget.total_bytes} bytes leaves beside {budget.held_bytes} in use by this process, with "
            f"{budget.free_bytes} bytes free"
        ) from None


def _num_snapshots(layers: tuple[LayerKV, ...], cache: CacheConfig, scheduler: SchedulerConfig) -> int:
    keeps_rings = any(group.kind.owner is Owner.ROW for layer in layers for group in layer.groups)
    if not (cache.enable_prefix_caching and keeps_rings):
        return 0
    return scheduler.max_num_seqs if cache.num_prefix_snapshots is None else cache.num_prefix_snapshots


def _fitting(plan: MemoryPlan, free_bytes: int) -> MemoryPlan:
    if plan.total_bytes > free_bytes:
        raise ValueError(
            f"the KV cache was asked to take {plan.total_bytes} bytes ({plan.num_blocks} blocks), "
            f"but only {max(0, free_bytes)} bytes are free"
            + (f" beside {plan.graph_bytes} bytes for graphs" if plan.graph_bytes else "")
        )
    return plan
