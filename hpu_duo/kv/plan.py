"""How many bytes the KV stores take, computed before any tensor exists."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

_GIB = 1 << 30


@dataclass(frozen=True)
class LayerKV:
    """What one layer keeps per token.

    Attributes:
        num_retrieval_heads: KV heads that keep every token, in blocks.
        num_streaming_heads: KV heads that keep ``ring_slots`` tokens, in a ring row per request.
        head_dim: elements of a key.
        ring_size: sink + recent of this layer, in tokens; a sliding-window layer has its window here.
        value_head_dim: elements of a value; None means ``head_dim``.
        ring_slack: tokens that a ring holds besides, because they can be taken back.
    """

    num_retrieval_heads: int
    num_streaming_heads: int
    head_dim: int
    ring_size: int
    value_head_dim: int | None = None
    ring_slack: int = 0

    def __post_init__(self) -> None:
        for name in ("num_retrieval_heads", "num_streaming_heads", "ring_size", "ring_slack"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.num_retrieval_heads + self.num_streaming_heads < 1:
            raise ValueError("a layer must have at least one KV head, got 0 retrieval and 0 streaming heads")
        if self.num_streaming_heads and self.ring_size < 1:
            raise ValueError(f"{self.num_streaming_heads} streaming heads need ring_size >= 1, got 0")
        if self.head_dim < 1 or (self.value_head_dim is not None and self.value_head_dim < 1):
            raise ValueError(
                f"head_dim and value_head_dim must be 1 or more, "
                f"got {self.head_dim} and {self.value_head_dim}"
            )

    @property
    def ring_slots(self) -> int:
        """Tokens that a ring holds."""
        return self.ring_size + self.ring_slack

    @property
    def elements_per_head(self) -> int:
        """Elements of one token's key and value in one head."""
        return self.head_dim + (self.head_dim if self.value_head_dim is None else self.value_head_dim)


@dataclass(frozen=True)
class MemoryPlan:
    """The size of every KV tensor, and what it holds.

    Per layer the block store is ``[num_blocks + 1, Kr, block_size, D]`` and the ring store is
    ``[max_num_seqs + 1, Ks, ring_slots, D]``, each once for keys and once for values; the one block and
    the one row extra are the trash that padding points at. All figures are whole bytes, without rounding.

    Attributes:
        layers: one entry per decoder layer.
        dtype_bytes: bytes of one element.
        block_size: tokens per block.
        max_num_seqs: ring rows that can be leased.
        num_blocks: blocks that can be leased; irrelevant when no layer has a retrieval head.
        graph_bytes: device memory that is left free for captured graphs; no store is in it.
    """

    layers: tuple[LayerKV, ...]
    dtype_bytes: int
    block_size: int
    max_num_seqs: int
    num_blocks: int
    graph_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers must name at least one layer, got none")
        for name in ("dtype_bytes", "block_size", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.graph_bytes < 0:
            raise ValueError(f"graph_bytes must be 0 or more, got {self.graph_bytes}")
        if self.num_blocks < (1 if self.uses_blocks else 0):
            raise ValueError(
                f"num_blocks is too small for layers with retrieval heads: got {self.num_blocks}"
            )

    @classmethod
    def from_budget(
        cls,
        layers: tuple[LayerKV, ...],
        *,
        dtype_bytes: int,
        block_size: int,
        max_num_seqs: int,
        kv_cache_bytes: int,
        graph_bytes: int = 0,
    ) -> MemoryPlan:
        """The plan with the most blocks whose ``total_bytes`` is at most ``kv_cache_bytes``.

        Every ring row is paid for first, then blocks take the rest. Without retrieval heads there are
        no blocks.

        Raises:
            ValueError: the budget does not hold all rows and one block per row (and the trash of both).
        """
        plan = cls(layers, dtype_bytes, block_size, max_num_seqs, max_num_seqs, graph_bytes)
        if kv_cache_bytes < plan.total_bytes:
            raise ValueError(
                f"the KV cache needs at least {_show(plan.total_bytes)} for {max_num_seqs} requests with one "
                f"block of {block_size} tokens each, got {_show(kv_cache_bytes)}"
            )
        if not plan.uses_blocks:
            return replace(plan, num_blocks=0)
        spare = (kv_cache_bytes - plan.total_bytes) // plan.block_bytes
        return replace(plan, num_blocks=max_num_seqs + spare)

    @cached_property
    def uses_blocks(self) -> bool:
        """Whether any layer has a retrieval head."""
        return any(layer.num_retrieval_heads for layer in self.layers)

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in the blocks of all layers."""
        return self.dtype_bytes * sum(
            layer.num_retrieval_heads * layer.elements_per_head for layer in self.layers
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.block_size * self.bytes_per_token

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one ring row in all layers."""
        return self.dtype_bytes * sum(
            layer.num_streaming_heads * layer.ring_slots * layer.elements_per_head for layer in self.layers
        )

    @property
    def without_slack(self) -> MemoryPlan:
        """The same for rings that hold what their windows show, and no more."""
        return replace(self, layers=tuple(replace(layer, ring_slack=0) for layer in self.layers))

    @property
    def total_bytes(self) -> int:
        """Bytes of all KV tensors, the trash block and the trash row included."""
        return (self.num_blocks + 1) * self.block_bytes + (self.max_num_seqs + 1) * self.row_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of all KV tensors and of what is left free for graphs."""
        return self.total_bytes + self.graph_bytes

    @property
    def max_tokens(self) -> int | None:
        """Tokens that all blocks together hold; None when no head needs blocks, so nothing bounds them."""
        return self.num_blocks * self.block_size if self.uses_blocks else None

    def bytes_per_request(self, num_tokens: int) -> int:
        """Bytes a request with ``num_tokens`` tokens in the cache keeps leased: whole blocks and its row."""
        return -(-num_tokens // self.block_size) * self.block_bytes + self.row_bytes

    def full_attention_bytes(self, num_tokens: int) -> int:
        """Bytes ``num_tokens`` tokens would take if every head of every layer kept all of them.

        Not rounded to blocks: the smallest possible full cache, so that ratios to it flatter nobody.
        """
        return (
            num_tokens
            * self.dtype_bytes
            * sum(
                (layer.num_retrieval_heads + layer.num_streaming_heads) * layer.elements_per_head
                for layer in self.layers
            )
        )


def _show(num_bytes: int) -> str:
    return f"{num_bytes} bytes ({num_bytes / _GIB:.3f} GiB)"
