"""StreamingLLM: the first tokens and the newest ones."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch

from kernels_ref import KVPolicy, SlotView


@dataclass(frozen=True)
class StreamingLLM(KVPolicy):
    """Keeps ``sink`` first tokens and fills the other slots with the newest ones, at their true positions.

    Scores stay 0, so the oldest token goes that is no sink. The streaming heads of a head pattern, which keep
    rings, see the same tokens in decodes; in a prompt their rule holds for each token, not for each chunk.

    Source: arXiv:2309.17453, without its renumbering of positions by place in the cache.

    Attributes:
        sink: leading tokens that stay.
    """

    sink: int = 4
    name: ClassVar[str] = "streaming-llm"

    def __post_init__(self) -> None:
        if self.sink < 0:
            raise ValueError(f"expected sink >= 0 for kv_policy {self.name!r}, got {self.sink}")

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Name and sinks."""
        return self.name, self.sink

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
