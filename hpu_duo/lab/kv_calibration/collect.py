"""Attention weights of a text, one layer after the other and some queries at a time.

No layer's weights of all pairs of tokens are ever there: a layer's queries and keys are, and the weights of
one tile of queries.

Legend: H query heads, K KV heads, N measured queries, Q queries of a tile, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpu_duo.lab.identify import GatedModel
from hpu_duo.lab.identify.attention import Weighing, causal_weights
from hpu_duo.lab.identify.gated_model import attend_as_model, weighing_of
from hpu_duo.modeling.attention import AttentionCall, Trial

_QUERIES_AT_ONCE = 32


@dataclass(frozen=True)
class LayerAttention:
    """The measured queries of a layer and all its keys, from which weights are made as often as asked for.

    Attributes:
        q: ``[1, H, N, D]``, queries at ``positions``.
        k: ``[1, K, T, D]``.
        positions: int64 ``[N]``, ascending.
        weighing: the layer's rule.
    """

    q: Tensor
    k: Tensor
    positions: Tensor
    weighing: Weighing

    def tiles(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield weights of some queries, averaged over the query heads of a KV head, and their positions.

        Returns:
            float32 ``[K, Q, T]``, 0 where a token comes later, and int64 ``[Q]``.
        """
        num_heads, num_tokens = self.k.shape[1:3]
        for q, at in zip(
            self.q.split(_QUERIES_AT_ONCE, dim=2), self.positions.split(_QUERIES_AT_ONCE), strict=True
        ):
            seen = int(at[-1]) + 1
            weights = causal_weights(q, self.k[:, :, :seen], at, self.weighing)
            yield F.pad(weights[0].unflatten(0, (num_heads, -1)).mean(dim=1), (0, num_tokens - seen)), at

    def received(self) -> Tensor:
        """Mean weight that each token receives by KV head: float64 ``[K, T]`` on the CPU."""
        total = torch.zeros(self.k.shape[1:3], dtype=torch.float64)
        for weights, _ in self.tiles():
            # An HPU has no float64.
            total += weights.sum(dim=1).cpu().double()
        return total / len(self.positions)


Take = Callable[[int, LayerAttention], None]
"""Is given the number of a layer and its attention, which it must not keep."""


def collect(model: GatedModel, ids: Tensor, num_queries: int | None, take: Take) -> None:
    """Run the unchanged model over a text, and hand out the attention of each layer without a window.

    Args:
        ids: int64 ``[T]``.
        num_queries: last tokens whose attention is measured; None for all.
    """
    num_measured = len(ids) if num_queries is None else min(num_queries, len(ids))
    positions = torch.arange(len(ids) - num_measured, len(ids), device=model.device)
    numbers = {id(layer.attention): number for number, layer in enumerate(model.layers)}
    with torch.no_grad():
        model.hidden(ids, _Collecting(model.calls, numbers, positions, take))


class _Collecting(Trial):
    """The model's own attention, which is shown to a caller on the way."""

    def __init__(
        self, calls: Mapping[int, AttentionCall], numbers: Mapping[int, int], positions: Tensor, take: Take
    ) -> None:
        self._calls, self._numbers, self._positions, self._take = calls, numbers, positions, take

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        call = self._calls[id(module)]
        if call.sliding_window is None:
            measured = q[:, :, int(self._positions[0]) :]
            seen = LayerAttention(measured, k, self._positions, weighing_of(call, sinks))
            self._take(self._numbers[id(module)], seen)
        return attend_as_model(call, q, k, v, sinks).transpose(1, 2).contiguous()
