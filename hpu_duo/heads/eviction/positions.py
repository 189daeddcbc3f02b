"""The option ``positions`` of policies: rotary positions in the text or in the cache."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from kernels_ref import KVPolicy


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
