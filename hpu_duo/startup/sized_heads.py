"""Heads with a KV budget or plan of a model of which only the sizes are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hpu_duo.config import EngineConfig
from hpu_duo.cost import ModelSize
from hpu_duo.kv.plan import LayerKV, ring_slack
from hpu_duo.kv_plan import KVPlan
from hpu_duo.startup.heads import Kinds
from hpu_duo.startup.kv_budget import resolve_kv_budget
from hpu_duo.startup.kv_plan import check_shared, resolve_kv_plan


@dataclass(frozen=True)
class SizedHeads:
    """Keys and values of heads under an engine's options, by the rules that the engine goes by.

    Attributes:
        config: with a KV policy or a KV plan; the model's files are not read.
    """

    config: EngineConfig

    @property
    def is_plan(self) -> bool:
        """Whether each head is named, so that no share of them streams."""
        return self.config.cache.kv_plan is not None

    @property
    def name(self) -> str:
        """The policy and its budget, or the plan, for reports."""
        cache = self.config.cache
        if cache.kv_plan is not None:
            return f"what a plan says{'' if isinstance(cache.kv_plan, KVPlan) else f': {cache.kv_plan}'}"
        assert cache.kv_budget is not None
        if cache.kv_budget <= 1:
            return f"{cache.kv_budget:.3g} of the longest request under {cache.kv_policy}"
        return f"{int(cache.kv_budget):,} tokens under {cache.kv_policy}"

    def kv_layers(self, model: ModelSize, counts: Sequence[int], max_len: int) -> tuple[LayerKV, ...]:
        """Keys and values that each layer keeps.

        Args:
            counts: heads of each layer that see all tokens, if no plan names them.
            max_len: tokens of the longest request, of which a budget may be a share.

        Raises:
            ValueError: what the engine refuses.
        """
        config = self.config
        slack = ring_slack(config.scheduler.decode_len)
        num_kv_heads = [layer.num_kv_heads for layer in model.layers]
        planned = resolve_kv_plan(config, num_kv_heads, max_len, slack, torch.device("cpu"))
        kinds = Kinds(slack, resolve_kv_budget(config, max_len), planned=planned)
        kept = []
        for index, (layer, count) in enumerate(zip(model.layers, counts, strict=True)):
            sliding_window = layer.window if layer.has_window(max_len) else None
            streams = np.arange(layer.num_kv_heads) >= count
            kept.append(LayerKV(kinds.of(index, sliding_window, streams, None)[1], layer.head_dim))
        if planned is not None:
            check_shared(config.parallel, [each.groups for each in kept])
        return tuple(kept)
