"""The plan of an engine that follows from a model's layers and a configuration, before memory is taken."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from graphs import CaptureBackend
from hpu_duo.budget import DeviceBudget
from hpu_duo.config import CacheConfig, EngineConfig
from hpu_duo.heads import HeadPattern
from hpu_duo.kv.plan import MemoryPlan
from hpu_duo.kv.store import KVStore
from hpu_duo.modeling.live_rows import LiveRows
from hpu_duo.modeling.probe import DecoderLayer
from hpu_duo.modeling.rope import fix_frequencies
from hpu_duo.modeling.step_model import StepModel
from hpu_duo.startup.heads import ChosenHeads, HeadAssignment, choose_heads
from hpu_duo.startup.kernels import ChosenKernels, chunk_bounds
from hpu_duo.startup.memory import plan_memory
from hpu_duo.startup.rotary import request_len, with_frequencies
from hpu_duo.startup.tables import StepTables
from kernels_ref import HeadGroup, LayerSpec
from kernels_ref.chunks import ChunkBounds


@dataclass(frozen=True)
class Blueprint:
    """Heads, kernels and stores of a model; needs neither weights nor a device.

    Attributes:
        config: of the engine.
        text_config: transformers' configuration of the text part.
        layers: of the model, in its own order of heads.
        device: where steps run.
        dtype: of weights and stores.
        max_len: tokens of a request.
        pattern: the binarised head pattern; None if all heads retrieve.
        own_pattern: that of this rank's heads, which is the same where no others share them.
        heads: order and groups of the heads of each layer.
        specs: attention of each layer.
    """

    config: EngineConfig
    text_config: Any
    layers: tuple[DecoderLayer, ...]
    device: torch.device
    dtype: torch.dtype
    max_len: int
    pattern: HeadPattern | None
    own_pattern: HeadPattern | None
    heads: tuple[HeadAssignment, ...]
    specs: tuple[LayerSpec, ...]

    @classmethod
    def draw(
        cls,
        model: PreTrainedModel,
        layers: tuple[DecoderLayer, ...],
        config: EngineConfig,
        device: torch.device,
        kernels: ChosenKernels,
        chosen: ChosenHeads | None = None,
    ) -> Blueprint:
        """Choose the groups of heads of a model, and the kernels' parameters of its layers.

        Args:
            model: whose rotary frequencies are fixed, see ``fix_served_len``.
            layers: as probed, or as read without data.
            device: where steps will run.
            chosen: the groups, if they have been chosen.

        Raises:
            ValueError: the head pattern does not fit the model.
        """
        text_config = model.config.get_text_config()
        max_len = request_len(config, text_config)
        if chosen is None:
            chosen = choose_heads(config, layers, max_len, device)
        pattern, heads, own = chosen
        heads = with_frequencies(model, layers, heads)
        chunks = chunk_bounds(config.model.score_bytes, device, kernels.impl)
        specs = tuple(_layer_spec(layer, each.groups, kernels, chunks) for layer, each in zip(layers, heads))
        return cls(
            config, text_config, layers, device, model.dtype, max_len, pattern, own or pattern, heads, specs
        )

    def memory(
        self, budget: DeviceBudget, cache: CacheConfig | None = None, graph_bytes: int = 0
    ) -> MemoryPlan:
        """Plan the sizes of all stores.

        Args:
            budget: of the device.
            cache: what the stores may take; default: as the user has set it.
            graph_bytes: set aside for graphs first.

        Raises:
            ValueError: see ``plan_memory``.
        """
        cache = replace(cache or self.config.cache, block_size=self.config.block_size)
        sizes = (cache, self.config.scheduler, self.max_len, self.dtype)
        return plan_memory(self.layers, self.heads, *sizes, budget=budget, graph_bytes=graph_bytes)

    def tables(self, backend: CaptureBackend, *, is_padding: bool) -> StepTables:
        """Limits and buckets, as a function of the memory plan."""
        sizes = (self.text_config, self.max_len)
        return StepTables(self.config, self.specs, *sizes, backend, self.device, is_padding)

    def build(self, model: PreTrainedModel, memory: MemoryPlan, live: LiveRows) -> tuple[KVStore, StepModel]:
        """Allocate the stores, and put model and stores together; heads are in the order of their groups."""
        store = KVStore(memory, self.dtype, self.device)
        return store, StepModel(model, self.layers, self.specs, store.layers, live)


def fix_served_len(model: PreTrainedModel, config: EngineConfig) -> None:
    """Fix rotary frequencies that depend on a text's length to those of the longest request.

    Raises:
        ValueError: the model does not serve ``max_model_len``.
    """
    fix_frequencies(model, request_len(config, model.config.get_text_config()))


def _layer_spec(
    layer: DecoderLayer, groups: tuple[HeadGroup, ...], kernels: ChosenKernels, chunks: ChunkBounds
) -> LayerSpec:
    """The kernels' description of a layer whose heads are in groups."""
    return LayerSpec(
        groups=groups,
        group_size=layer.call.num_heads // layer.call.num_kv_heads,
        head_dim=layer.call.head_dim,
        scale=layer.call.scale,
        softcap=layer.call.softcap,
        impl=kernels.impl,
        softmax=kernels.softmax,
        operators=kernels.operators,
        chunks=chunks,
    )
