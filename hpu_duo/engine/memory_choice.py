"""How much memory the stores of an engine take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from bias_builders import Window
from hpu_duo.config import CacheConfig, SchedulerConfig
from hpu_duo.heads import HeadLayout
from hpu_duo.kv.plan import LayerKV, MemoryPlan
from hpu_duo.modeling.probe import DecoderLayer


def plan_memory(
    layers: tuple[DecoderLayer, ...],
    layouts: list[HeadLayout],
    windows: list[Window | None],
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    max_len: int,
    dtype: torch.dtype,
    *,
    free_bytes: int,
    graph_bytes: int = 0,
) -> MemoryPlan:
    """The sizes of all stores, in up to two fifths of the free memory unless the user has said otherwise.

    Args:
        free_bytes: memory that nobody uses.
        graph_bytes: how much of it is set aside for graphs before anything else.

    Raises:
        ValueError: what the user has said does not fit into the rest.
    """
    free_bytes -= graph_bytes
    kv = tuple(
        LayerKV(layout.num_retrieval, layout.num_streaming, layer.call.head_dim, window.size if window else 0)
        for layer, layout, window in zip(layers, layouts, windows)
    )
    sizes: dict[str, Any] = {
        "dtype_bytes": dtype.itemsize,
        "block_size": cache.block_size,
        "max_num_seqs": scheduler.max_num_seqs,
        "graph_bytes": graph_bytes,
    }
    wanted = scheduler.max_num_seqs * -(-max_len // cache.block_size)
    if cache.num_blocks is not None:
        return _fitting(MemoryPlan(kv, num_blocks=cache.num_blocks, **sizes), free_bytes)
    if cache.kv_cache_bytes is not None:
        plan = MemoryPlan.from_budget(kv, kv_cache_bytes=cache.kv_cache_bytes, **sizes)
        return _fitting(replace(plan, num_blocks=min(plan.num_blocks, wanted)), free_bytes)
    plan = MemoryPlan(kv, num_blocks=wanted, **sizes)
    budget = free_bytes * 2 // 5
    if plan.total_bytes <= budget:
        return plan
    return MemoryPlan.from_budget(kv, kv_cache_bytes=budget, **sizes)


def _fitting(plan: MemoryPlan, free_bytes: int) -> MemoryPlan:
    if plan.total_bytes > free_bytes:
        raise ValueError(
            f"the KV cache was asked to take {plan.total_bytes} bytes ({plan.num_blocks} blocks), "
            f"but only {max(0, free_bytes)} bytes are free"
            + (f" beside {plan.graph_bytes} bytes for graphs" if plan.graph_bytes else "")
        )
    return plan
