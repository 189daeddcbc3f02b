"""StreamingLLM: the first tokens and the newest ones."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch

from hpu_duo.kv_policies.positions import PolicyWithPositions
from kernels_ref import SlotView


@dataclass(frozen=True)
class StreamingLLM(PolicyWithPositions):
    """Keeps ``sink`` first tokens and fills the other slots with the newest ones.

    Scores stay 0, so the oldest token goes that is no sink. The streaming heads of a head pattern, which keep
    rings, see the same tokens in decodes; in a prompt their rule holds for each token, not for each chunk.

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
        """Refuse a budget that sinks fill."""
        if self.sink >= num_slots:
            raise ValueError(
                f"kv_policy {self.name!r} with sink={self.sink} needs a budget above {self.sink} slots, "
                f"got {num_slots}"
            )

    def protects(self, slots: SlotView) -> torch.Tensor:
        """Sinks."""
        return slots.position < self.sink
