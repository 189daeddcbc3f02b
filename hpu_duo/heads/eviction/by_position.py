"""Eviction by position alone: the newest tokens, StreamingLLM, patterns of the Sparse Transformer.

Their option ``positions`` chooses rotary positions in the text or in the cache.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch

from kernels_ref import KVPolicy, SlotView


@dataclass(frozen=True, kw_only=True)
class PolicyWithPositions(KVPolicy):
    """A policy that works with either kind of rotary positions.

    Attributes:
        positions: ``"text"``: a token has its position in the text. ``"cache"``: its rank among the tokens
            that its head stores.
    """

    positions: str = "text"

    def __post_init__(self) -> None:
        if self.positions not in ("text", "cache"):
            raise ValueError(
                f"expected positions=text or positions=cache for kv_policy {self.name!r}, "
                f"got {self.positions!r}"
            )

    @property
    def positions_in_cache(self) -> bool:
        """Whether positions are ranks."""
        return self.positions == "cache"

    def key_of(self, *numbers: Hashable) -> tuple[Hashable, ...]:
        """Return the key of a policy with these additional options."""
        return (self.name, *numbers) if self.positions == "text" else (self.name, *numbers, self.positions)


@dataclass(frozen=True)
class Local(PolicyWithPositions):
    """Keeps the newest tokens: all scores stay 0, so the oldest one is evicted.

    Source: the baseline "Local" of H2O (arXiv:2306.14048).
    """

    name: ClassVar[str] = "local"

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Name and positions."""
        return self.key_of()


@dataclass(frozen=True)
class StreamingLLM(PolicyWithPositions):
    """Keeps ``sink`` first tokens and fills the other slots with the newest ones.

    Scores stay 0, so the oldest token that is no sink is evicted. The streaming heads of a head pattern,
    which store rings, see the same tokens in decodes; in a prompt their rule holds for each token, not for
    each chunk.

    Source: arXiv:2309.17453, whose positions are those in the cache.

    Attributes:
        sink: leading tokens that stay.
    """

    sink: int = 4
    name: ClassVar[str] = "streaming-llm"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sink < 0:
            raise ValueError(f"expected sink >= 0 for kv_policy {self.name!r}, got {self.sink}")

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Name and options."""
        return self.key_of(self.sink)

    def check(self, num_slots: int) -> None:
        """Raise ValueError for a budget that sinks fill."""
        if self.sink >= num_slots:
            raise ValueError(
                f"kv_policy {self.name!r} with sink={self.sink} needs a budget above {self.sink} slots, "
                f"got {num_slots}"
            )

    def protects(self, slots: SlotView) -> torch.Tensor:
        """Sinks."""
        return slots.position < self.sink


@dataclass(frozen=True)
class Fixed(KVPolicy):
    """Keeps the tokens of the newest one's block, and the last ``columns`` of each block before.

    Blocks have ``stride`` tokens. These are the tokens that the published pattern lets the newest query see:
    ``j // stride == i // stride or j % stride >= stride - columns``. While there are more slots, the newest
    of the others stay too. All scores stay 0.

    Source: "fixed" attention of the Sparse Transformer, arXiv:1904.10509, section 4.2.

    Attributes:
        stride: tokens of a block.
        columns: last tokens of each block that stay.
    """

    stride: int = 128
    columns: int = 8
    name: ClassVar[str] = "fixed"

    def __post_init__(self) -> None:
        if not 1 <= self.columns <= self.stride:
            raise ValueError(
                f"expected 1 <= columns <= stride for kv_policy {self.name!r}, "
                f"got columns={self.columns} stride={self.stride}"
            )

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Name, stride and columns."""
        return self.name, self.stride, self.columns

    def num_needed(self, max_len: int) -> int:
        """Columns of whole blocks, and the tokens of the current block, or of the last whole one."""
        num_whole, rest = divmod(max_len, self.stride)
        under_way = num_whole * self.columns + rest
        return max(under_way, (num_whole - 1) * self.columns + self.stride) if num_whole else under_way

    def protects(self, slots: SlotView) -> torch.Tensor:
        """Tokens that the pattern lets the newest one see."""
        newest = slots.end - 1
        begin = newest - newest % self.stride
        return (slots.position >= begin) | (slots.position % self.stride >= self.stride - self.columns)


@dataclass(frozen=True)
class Strided(KVPolicy):
    """Keeps the newest ``stride`` tokens, and each token at a multiple of ``stride``.

    The published pattern lets token ``i`` see ``j`` where ``i - j < stride or (i - j) % stride == 0``: every
    token is seen by some later one, so nothing could be evicted. Here the columns do not move along with the
    query. They are those of the last query at a multiple of ``stride``, for which the pattern is the
    published one; the first token is among them. While there are more slots, the newest of the others stay
    too. All scores stay 0.

    Source: "strided" attention of the Sparse Transformer, arXiv:1904.10509, section 4.2, with fixed columns.

    Attributes:
        stride: newest tokens that stay, and distance of the older ones.
    """

    stride: int = 128
    name: ClassVar[str] = "strided"

    def __post_init__(self) -> None:
        if self.stride < 1:
            raise ValueError(f"expected stride >= 1 for kv_policy {self.name!r}, got {self.stride}")

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Name and stride."""
        return self.name, self.stride

    def num_needed(self, max_len: int) -> int:
        """Columns before the newest tokens, and those."""
        return min(max_len, self.stride) + -(-max(0, max_len - self.stride) // self.stride)

    def protects(self, slots: SlotView) -> torch.Tensor:
        """The newest tokens and the columns."""
        return (slots.position >= slots.end - self.stride) | (slots.position % self.stride == 0)
