"""Attention during identification: once as in the unchanged model, once with gates.

Both replace the step in the attention call that the engine uses, so every model that the engine can serve
can be identified.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import torch
from torch import Tensor, nn

from hpu_duo.lab.identify.attention import Band, Weighing, banded_attention, full_attention
from hpu_duo.modeling.attention import AttentionCall, Trial


class FullFrom(str, Enum):
    """The model whose full attention a gate mixes in."""

    TEACHER = "teacher"
    """The unchanged model, as in the published code: no backward pass through full attention."""
    OWN = "own"
    """The gated model on its own hidden states, as in the paper's formula."""


def weighing_of(call: AttentionCall, sinks: Tensor | None) -> Weighing:
    """Return the rule by which the layer of this call weighs keys."""
    return Weighing(call.scale, call.softcap, sinks)


def attend_as_model(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """The model's own attention: causal, and in the layer's window if it has one. ``[B, H, T, D]``."""
    weighing = weighing_of(call, sinks)
    if call.sliding_window is None:
        return full_attention(q, k, v, weighing)
    return banded_attention(q, k, v, weighing, Band(0, call.sliding_window))


class TeacherAttention(Trial):
    """The model's own attention; keeps the outputs of the layers named.

    Attributes:
        outputs: ``[B, T, H, D]`` by identity of the attention module.
    """

    def __init__(self, calls: Mapping[int, AttentionCall], kept: frozenset[int]) -> None:
        self._calls, self._kept = calls, kept
        self.outputs: dict[int, Tensor] = {}

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Full attention of one layer: ``[B, heads, T, D]`` each to ``[B, T, H, D]``."""
        out = attend_as_model(self._calls[id(module)], q, k, v, sinks).transpose(1, 2).contiguous()
        if id(module) in self._kept:
            self.outputs[id(module)] = out
        return out


class GatedAttention(Trial):
    """``gate * full + (1 - gate) * streaming`` for each KV head, and its query heads with it.

    Args:
        calls: the recorded attention call of each layer.
        gates: ``[K]`` in [0, 1] by identity of the attention module; layers without gates attend as the
            model does.
        band: keys that streaming heads see.
        teacher: outputs of ``TeacherAttention`` on the same text; None mixes in the gated model's own.
    """

    def __init__(
        self,
        calls: Mapping[int, AttentionCall],
        gates: Mapping[int, Tensor],
        band: Band,
        teacher: Mapping[int, Tensor] | None,
    ) -> None:
        self._calls, self._gates, self._band, self._teacher = calls, gates, band, teacher

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Mixed attention of one layer: ``[B, heads, T, D]`` each to ``[B, T, H, D]``."""
        call = self._calls[id(module)]
        gates = self._gates.get(id(module))
        if gates is None:
            return attend_as_model(call, q, k, v, sinks).transpose(1, 2).contiguous()
        streaming = banded_attention(q, k, v, weighing_of(call, sinks), self._band).transpose(1, 2)
        if self._teacher is None:
            full = attend_as_model(call, q, k, v, sinks).transpose(1, 2)
        else:
            full = self._teacher[id(module)]
        gate_H1 = gates.repeat_interleave(call.num_heads // call.num_kv_heads).unsqueeze(-1).to(q.dtype)
        return torch.lerp(streaming, full, gate_H1).contiguous()
