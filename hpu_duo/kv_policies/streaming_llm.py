"""StreamingLLM: the first tokens and the newest ones."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch

from kernels_ref import KVPolicy, SlotView


@dataclass(frozen=True)
class StreamingLLM(KVPolicy):
    """Keeps ``sink`` first tokens and fills the other slots with the newest ones.

    Scores stay 0, so the oldest token goes that is no sink. The streaming heads of a head pattern, which keep
    rings, see the same tokens in decodes; in a prompt their rule holds for each token, not for each chunk.

    Source: arXiv:2309.17453, whose positions are those in the cache.

    Attributes:
        sink: leading tokens that stay.
        positions: ``"text"``: queries see all tokens at their distance in the text. ``"cache"``: at their
            distance among the kept tokens, which only differs for sinks.
    """

    sink: int = 4
    positions: str = "text"
    name: ClassVar[str] = "streaming-llm"

    def __post_init__(self) -> None:
        if self.sink < 0:
            raise ValueError(f"expected sink >= 0 for kv_policy {self.name!r}, got {self.sink}")
        if self.positions not in ("text", "cache"):
            raise ValueError(
                f"expected positions=text or positions=cache for kv_policy {self.name!r}, "
                f"got {self.positions!r}"
            )

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Name and options."""
        return (self.name, self.sink) if self.positions == "text" else (self.name, self.sink, self.positions)

    @property
    def num_placed(self) -> int:
        """Sinks, unless positions are those of the text."""
        return self.sink if self.positions == "cache" else 0

    def check(self, num_slots: int) -> None:
        """Refuse a budget that sinks fill."""
        if self.sink >= num_slots:
            raise ValueError(
                f"kv_policy {self.name!r} with sink={self.sink} needs a budget above {self.sink} slots, "
                f"got {num_slots}"
            )

    def protects(self, slots: SlotView) -> torch.Tensor:
        """Sinks."""
        return slots.position < self.sink
