"""Layers of retrieval and streaming heads, as memory plans see them."""

from __future__ import annotations

from bias_builders import Window
from hpu_duo.kv.plan import LayerKV, head_groups


def layer_kv(
    num_retrieval: int,
    num_streaming: int,
    head_dim: int,
    ring_size: int,
    value_head_dim: int | None = None,
    ring_slack: int = 0,
) -> LayerKV:
    """A layer whose rings hold so many tokens, and the slack."""
    groups = head_groups(num_retrieval, num_streaming, Window(0, ring_size), ring_slack)
    return LayerKV(groups, head_dim, value_head_dim)
