"""Loads of prefixes from host or disk, record by record."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hpu_duo.kv.prefix_tree import PrefixNode
from hpu_duo.kv.tiers.host import Record
from hpu_duo.kv.tiers.segments import StoredRecord
from hpu_duo.request import Request


@dataclass(eq=False)
class Load:
    """The records that bring a request's prefix back, in order; the first ones may have landed.

    Attributes:
        request: that waits for them.
        node: the deepest prefix on the device so far.
        start: tokens that the request can begin with without it.
        pieces: those that are not in the tree yet.
        num_read: of them, those that are on the host, or on their way there.
        num_begun: of these, those whose transfer has begun.
        is_abandoned: whether the others are not needed any more.
        num_waits: steps in which the next one waited for a unit that what it evicts is copied to.
    """

    request: Request
    node: PrefixNode
    start: int
    pieces: deque[Piece] = field(default_factory=deque)
    num_read: int = 0
    num_begun: int = 0
    is_abandoned: bool = False
    num_waits: int = 0


@dataclass(eq=False)
class Piece:
    """A record of a load.

    Attributes:
        source: its record on the host or on disk, as found.
        end: tokens of the prefix that it ends.
        load: it belongs to.
        record: on the host; None = it has not been read from the disk.
        unit: that it is copied to; None = its transfer has not begun.
        has_landed: whether the unit has it.
    """

    source: Record | StoredRecord
    end: int
    load: Load
    record: Record | None = None
    unit: int | None = None
    has_landed: bool = False

    @property
    def is_row(self) -> bool:
        """Whether it is a snapshot of a row."""
        return self.source.key.is_row
