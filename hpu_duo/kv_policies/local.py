"""The newest tokens and nothing else: the baseline that papers on budgets compare with."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from hpu_duo.kv_policies.positions import PolicyWithPositions


@dataclass(frozen=True)
class Local(PolicyWithPositions):
    """Keeps the newest tokens: all scores stay 0, so the oldest one goes.

    Source: the baseline "Local" of H2O (arXiv:2306.14048).
    """

    name: ClassVar[str] = "local"

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Name and positions."""
        return self.key_of()
