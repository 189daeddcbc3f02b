"""Counts of what the ranks that share a model exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpu_duo.engine.executor import Executor


@dataclass(frozen=True)
class RankStats:
    """Counts of rank 0, those of a warm-up included among messages only.

    Attributes:
        num_messages: orders of rank 0, one a step.
        num_broadcasts: as many, and one more for each message that is longer than any before.
        broadcast_bytes: of all broadcasts, padding to the longest message included.
        reduced_bytes: that a rank has given to sums in steps, by the formula of
            ``hpu_duo.sharded.StepExchanges``.
        gathered_bytes: to gathers: candidates or logits, and by context keys, values, queries and partial
            results.
        scattered_bytes: to exchanges all to all, of which each rank gets its share.
    """

    num_messages: int
    num_broadcasts: int
    broadcast_bytes: int
    reduced_bytes: int
    gathered_bytes: int
    scattered_bytes: int

    @classmethod
    def of(cls, executor: Executor) -> RankStats | None:
        """Collect the counters; None without other ranks."""
        if executor.followers is None or executor.spread is None:
            return None
        reduced, gathered, scattered = executor.exchanged
        return cls(*executor.followers.sent, reduced, gathered + executor.spread.gathered_bytes, scattered)
