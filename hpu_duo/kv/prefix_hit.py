"""Values of the prefix cache: what it finds, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass

from hpu_duo.kv.prefix_tree import PrefixNode


@dataclass(frozen=True)
class PrefixHit:
    """Cached blocks that a request begins with.

    Attributes:
        path: the cached blocks that the request begins with, the first one first.
        num_usable: leading ones of them behind which a request can go on: all of them where no head keeps a
            ring, else those up to the last one with a snapshot.
    """

    path: tuple[PrefixNode, ...] = ()
    num_usable: int = 0

    @property
    def is_limited_by_snapshots(self) -> bool:
        """Whether some cached blocks lie behind the last snapshot, and so cannot be used."""
        return self.num_usable < len(self.path)


@dataclass
class PrefixCounters:
    """Totals of the prefix cache.

    Attributes:
        num_queried_tokens: known tokens of requests when they got a row.
        num_hit_tokens: those of them that were taken up from the cache.
        num_lost_to_snapshots: those that lay in cached blocks, but behind the last snapshot.
        num_lost_to_blocks: those that had been in cached blocks, which were evicted.
        num_evicted_blocks, num_evicted_snapshots: evicted to make room.
    """

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_lost_to_snapshots: int = 0
    num_lost_to_blocks: int = 0
    num_evicted_blocks: int = 0
    num_evicted_snapshots: int = 0
