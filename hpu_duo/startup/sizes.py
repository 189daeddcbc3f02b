"""Bytes of device memory that a step needs beside weights and stores, from its sizes alone.

Q query tokens, N rows, NS shared and NU unique blocks of B slots; H query and K key/value heads of D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from graphs import BatchShape
from hpu_duo.engine.batch import RowCounts
from hpu_duo.modeling.experts import EXPERTS_PER_TOKEN, HELD, NUM_EXPERTS, copies_weights, experts_at_a_time
from kernels_ref import GroupKind, HeadGroup, LayerSpec, StepParts
from kernels_ref.chunks import DEFAULT_BOUNDS, ChunkBounds
from kernels_ref.groups import HeadSizes, PartSizes

_FLOAT32 = 4
_PARTIAL_COPIES = 4
"""Copies of a partial sum: it is merged with the next one into a third, and then normalised."""


class LayerHeads(NamedTuple):
    """Heads of a layer, as far as sizes follow from them.

    Attributes:
        groups: its key/value heads.
        group_size: query heads of each.
        head_dim: of keys and values.
    """

    groups: tuple[HeadGroup, ...]
    group_size: int
    head_dim: int

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of all groups."""
        return sum(group.num_heads for group in self.groups)


@dataclass(frozen=True)
class StepSizes:
    """The sizes of a model that decide the memory of a step's intermediates.

    Attributes:
        hidden_size, vocab_size: of the model.
        intermediate_size: widest activation between two layers' norms, for all experts of a token together.
        num_heads, num_kv_heads, head_dim: of the layer with most heads.
        groups: the distinct groups of heads of all layers, with their sizes.
        block_size: slots of a block.
        dtype_bytes: of an activation.
        decode_len: most tokens of a decode row.
        num_experts, experts_per_token, expert_size: of a mixture of experts and of one of them, 0 without.
        chunks: bounds of chunks of context.
    """

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    groups: frozenset[tuple[GroupKind, HeadSizes]]
    block_size: int
    dtype_bytes: int
    decode_len: int = 1
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    chunks: ChunkBounds = DEFAULT_BOUNDS

    @classmethod
    def of(
        cls,
        specs: Sequence[LayerSpec],
        config: Any,
        block_size: int,
        dtype_bytes: int,
        *,
        decode_len: int = 1,
    ) -> StepSizes:
        """Return the sizes of an engine's model.

        Args:
            specs: of its layers.
            config: transformers' configuration of its text part.
            decode_len: most tokens of a decode row.
        """
        heads = [LayerHeads(spec.groups, spec.group_size, spec.head_dim) for spec in specs]
        return cls.of_heads(
            heads, config, block_size, dtype_bytes, decode_len=decode_len, chunks=specs[0].chunks
        )

    @classmethod
    def of_heads(
        cls,
        layers: Sequence[LayerHeads],
        config: Any,
        block_size: int,
        dtype_bytes: int,
        *,
        decode_len: int,
        chunks: ChunkBounds,
    ) -> StepSizes:
        """Return the sizes of a model of which only heads and configuration are known.

        Args:
            layers: heads of each layer.
            config, decode_len: see ``of``.
            chunks: bounds of chunks of context.
        """
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=_intermediate_size(config),
            vocab_size=config.vocab_size,
            num_heads=max(layer.num_kv_heads * layer.group_size for layer in layers),
            num_kv_heads=max(layer.num_kv_heads for layer in layers),
            head_dim=max(layer.head_dim for layer in layers),
            groups=frozenset(
                (group.kind, HeadSizes(group.num_heads, layer.group_size, layer.head_dim, dtype_bytes))
                for layer in layers
                for group in layer.groups
            ),
            block_size=block_size,
            dtype_bytes=dtype_bytes,
            decode_len=decode_len,
            chunks=chunks,
            **_experts(config),
        )

    def transient_bytes(self, shape: BatchShape) -> int:
        """The most that intermediates of one step take at any moment.

        A layer holds its residual stream, and then either the activations of its MLP or those of its
        attention; attention holds queries, keys, values and partial sums, and one bounded block of scores
        with the keys and values gathered for it. After the last layer the logits are there instead.
        """
        query_len, num_logits = shape.query_len, RowCounts.of(shape, self.decode_len).logits
        stream = query_len * self.hidden_size * (3 * self.dtype_bytes + _FLOAT32)
        mlp = max(3 * query_len * self.intermediate_size * self.dtype_bytes, self._expert_bytes(query_len))
        logits = num_logits * self.vocab_size * (self.dtype_bytes + _FLOAT32)
        return stream + max(mlp, self._attention_bytes(shape), logits)

    def output_bytes(self, shape: BatchShape) -> int:
        """The logits, which a captured step keeps at their address."""
        return RowCounts.of(shape, self.decode_len).logits * self.vocab_size * self.dtype_bytes

    def _expert_bytes(self, query_len: int) -> int:
        if not self.num_experts:
            return 0
        hidden, inner = self.hidden_size, 2 * self.expert_size
        # Both projections, and their product with what is left of one of them.
        gates = 2 * inner * self.dtype_bytes
        num_chosen = query_len * self.experts_per_token
        if copies_weights(num_chosen, self.num_experts):
            return num_chosen * (inner * hidden * self.dtype_bytes + gates)
        group = min(self.num_experts, experts_at_a_time(query_len * (inner + hidden) * self.dtype_bytes))
        # The results, weighed and selected, and in float32.
        results = (self.expert_size + 3 * hidden) * self.dtype_bytes + hidden * _FLOAT32
        return group * query_len * max(gates, results)

    def _attention_bytes(self, shape: BatchShape) -> int:
        query_len, heads, dim = shape.query_len, self.num_heads, self.head_dim
        projected = 2 * query_len * (heads + 2 * self.num_kv_heads) * dim * self.dtype_bytes
        partials = _PARTIAL_COPIES * query_len * heads * (dim + 2) * _FLOAT32
        # Heads of one group are done before those of the next begin.
        sizes = PartSizes(
            StepParts(shape.phase.causal, shape.phase.shared, shape.phase.unique),
            query_len,
            shape.num_shared_blocks,
            shape.num_unique_blocks,
            RowCounts.of(shape, self.decode_len).ring_rows,
            self.decode_len,
            self.block_size,
            self.chunks,
        )
        return projected + partials + max(kind.transient_bytes(each, sizes) for kind, each in self.groups)


def _experts(config: Any) -> dict[str, int]:
    num_experts, per_token = (_first(config, names) for names in (NUM_EXPERTS, EXPERTS_PER_TOKEN))
    if not (num_experts and per_token):
        return {}
    held = getattr(config, HELD, num_experts)
    size = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    # Fewer whole experts are stored than a share of the width suggests.
    size = size * num_experts // held
    return {"num_experts": held, "experts_per_token": per_token, "expert_size": size}


def _first(config: Any, names: Sequence[str]) -> int:
    """The first number of these names in a configuration, 0 without."""
    return next((n for n in (getattr(config, name, None) for name in names) if n), 0)


def _intermediate_size(config: Any) -> int:
    dense = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    if isinstance(dense, list | tuple):
        dense = max(dense)
    if dense is None:
        dense = 4 * config.hidden_size
    expert = getattr(config, "moe_intermediate_size", None) or dense
    num_experts = _first(config, EXPERTS_PER_TOKEN)
    return int(max(dense, num_experts * expert)) if num_experts else int(dense)
