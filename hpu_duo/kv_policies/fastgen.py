"""FastGen's sets of tokens: special ones, punctuation with them, heavy hitters with both."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch

from hpu_duo.kv_policies.positions import PolicyWithPositions
from kernels_ref import SlotView, TokenClass

_MARK = 1e9
"""Score of punctuation, half of that of special tokens: above what any token can receive."""
# A compiler takes a tensor for different from a member of an enumeration.
_SPECIAL, _PUNCTUATION = int(TokenClass.SPECIAL), int(TokenClass.PUNCTUATION)
_KINDS = ("special", "punctuation", "heavy")


@dataclass(frozen=True)
class FastGenSet(PolicyWithPositions):
    """Keeps special tokens first, then punctuation, then heavy hitters or the newest tokens.

    A set that is full of marked tokens evicts the oldest punctuation, then the oldest special tokens. Slots
    that marked tokens leave free hold the newest tokens, which is FastGen's window; with heavy hitters, a
    share of all slots does.

    Source: arXiv:2310.01801, which chooses such a set for each head and prompt. ``hpu-duo calibrate`` does
    for each head.

    Attributes:
        keep: ``special``; ``punctuation``, which is both; or ``heavy``, which is both and heavy hitters.
        recent: with heavy hitters, share of the slots for the newest tokens.
    """

    keep: str = "heavy"
    recent: float = 0.5
    name: ClassVar[str] = "fastgen"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep not in _KINDS:
            raise ValueError(f"expected keep of kv_policy 'fastgen' to be one of {_KINDS}, got {self.keep!r}")
        if not 0.0 <= self.recent < 1.0:
            raise ValueError(f"expected recent in [0, 1) for kv_policy {self.name!r}, got {self.recent}")

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Name, set, and share of recent tokens where it counts."""
        return self.key_of(self.keep, *((self.recent,) if self._is_heavy else ()))

    @property
    def num_observed(self) -> int | None:
        """All queries for heavy hitters, none for others."""
        return None if self._is_heavy else 0

    @property
    def marks_tokens(self) -> bool:
        """Return True: special tokens and punctuation have scores of their own."""
        return True

    @property
    def _is_heavy(self) -> bool:
        return self.keep == "heavy"

    def first_score(self, token_class: torch.Tensor) -> torch.Tensor:
        """Return a mark for tokens of the set's classes, else 0."""
        marks = torch.where(token_class == _SPECIAL, 2 * _MARK, 0.0)
        if self.keep == "special":
            return marks
        return torch.where(token_class == _PUNCTUATION, _MARK, marks)

    def observe(self, slots: SlotView, mass: torch.Tensor) -> torch.Tensor:
        """Add what each token has received, but to marks."""
        if not self._is_heavy:
            return slots.score
        return torch.where(slots.score < _MARK, slots.score + mass, slots.score)

    def protects(self, slots: SlotView) -> torch.Tensor | None:
        """The newest tokens, beside heavy hitters."""
        if not self._is_heavy:
            return None
        return slots.position >= slots.end - math.floor(self.recent * slots.num_slots)
