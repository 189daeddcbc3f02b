"""Prefixes that were evicted, to tell what a larger cache would have had."""

from __future__ import annotations

from collections.abc import Iterable


class EvictedPrefixes:
    """Remembers the last prefixes whose blocks were evicted.

    Only for counts: a prefix is known by ``PrefixNode.digest``, so two may be taken for one another.

    Args:
        capacity: prefixes that it remembers.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._digests: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, digest: int) -> None:
        """Remember a prefix that is evicted now, and forget the oldest one where there are too many."""
        self._digests.pop(digest, None)
        self._digests[digest] = None
        if len(self._digests) > self._capacity:
            del self._digests[next(iter(self._digests))]

    def discard(self, digest: int) -> None:
        """Forget a prefix that is cached again."""
        self._digests.pop(digest, None)

    def num_following(self, digest: int, keys: Iterable[bytes]) -> int:
        """Count the next blocks of a text that were evicted.

        Args:
            digest: of what is cached of the text.
            keys: of its blocks behind that.
        """
        number = 0
        for key in keys:
            digest = hash((digest, key))
            if digest not in self._digests:
                break
            number += 1
        return number
