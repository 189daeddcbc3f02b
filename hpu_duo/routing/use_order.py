"""What a replica holds, in the order of the last use."""

from __future__ import annotations

from collections.abc import Iterator

from hpu_duo.routing.radix_tree import Use


class UseOrder:
    """Uses of one holder, the least recent one first. Every change takes constant time.

    Attributes:
        oldest, newest: the ends; None when there is no use.
        size: units of all nodes.
    """

    def __init__(self) -> None:
        self.oldest: Use | None = None
        self.newest: Use | None = None
        self.size = 0

    def __iter__(self) -> Iterator[Use]:
        use = self.oldest
        while use is not None:
            yield use
            use = use.newer

    def insert(self, new: Use, older: Use | None) -> None:
        """Put a use right behind an older one, or before all others."""
        newer = self.oldest if older is None else older.newer
        new.older, new.newer = older, newer
        if older is None:
            self.oldest = new
        else:
            older.newer = new
        if newer is None:
            self.newest = new
        else:
            newer.older = new

    def remove(self, use: Use) -> None:
        """Take a use out."""
        if use.older is None:
            self.oldest = use.newer
        else:
            use.older.newer = use.newer
        if use.newer is None:
            self.newest = use.older
        else:
            use.newer.older = use.older
        use.older = use.newer = None

    def renew(self, use: Use, now: float) -> None:
        """Make a use the most recent one."""
        use.used = max(now, use.used)
        if use.newer is not None:
            self.remove(use)
            self.insert(use, self.newest)
