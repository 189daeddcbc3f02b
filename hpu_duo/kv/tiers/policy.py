"""Policies of a tier: the moment of a store, and the choice between loading and computing a prefix."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple


class WritePolicy(Enum):
    """The moment at which a block, or a snapshot, is copied to the host; in the words of SGLang's HiCache."""

    WRITE_BACK = "write_back"
    """As it is evicted from the device."""
    WRITE_THROUGH = "write_through"
    """As it is cached."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """As a second request uses it."""
    WRITE_THROUGH_COST = "write_through_cost"
    """As it is cached in a text of many tokens; what is in shorter ones only is not copied."""


_SMOOTHING = 0.2
"""Weight of the newest measurement."""


RETRY_AFTER = 16
"""Prefixes of which one is loaded although computing it is predicted to be faster."""


class LoadPiece(NamedTuple):
    """A record of a prefix, as ``LoadPolicy`` sees it.

    Attributes:
        num_tokens: that need not be computed if it and all before it are loaded.
        num_bytes: of the record.
        is_on_disk: whether it is read from the disk first.
        is_end: whether a request can begin behind it.
    """

    num_tokens: int
    num_bytes: int
    is_on_disk: bool
    is_end: bool


class LoadPolicy:
    """Decides whether to load a prefix: where the link is predicted to be faster than computing it.

    All rates are measured, as moving means. Before there is one of each, every prefix is loaded. Of those
    that are predicted to lose, one in ``RETRY_AFTER`` is loaded too, since only loads measure the rates.

    Attributes:
        prefill_s: seconds of a prompt token in a step; None = no prompt has been computed.
        byte_s: seconds of a byte from the host to the device; None = nothing has been loaded.
        disk_byte_s: seconds of a byte from the disk to the host; None = nothing has been read.
    """

    def __init__(self, prefill_s: float | None = None, byte_s: float | None = None) -> None:
        self.prefill_s, self.byte_s = prefill_s, byte_s
        self.disk_byte_s: float | None = None
        self._num_declined = 0

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Record a step with prompts."""
        self.prefill_s = _mean(self.prefill_s, seconds / num_tokens)

    def loaded(self, num_bytes: int, seconds: float) -> None:
        """Record a load."""
        self.byte_s = _mean(self.byte_s, seconds / num_bytes)

    def read(self, num_bytes: int, seconds: float) -> None:
        """Record a read from the disk."""
        self.disk_byte_s = _mean(self.disk_byte_s, seconds / num_bytes)

    def front(self, pieces: Sequence[LoadPiece], num_bytes_ahead: int) -> int:
        """Return how many of the first records of a prefix to load, those which save the most time.

        What is behind them is computed: records on disk may lose where those before them, on the host, win.

        Args:
            num_bytes_ahead: see ``loads``.
        """
        has_unknown = self.disk_byte_s is None and any(piece.is_on_disk for piece in pieces)
        if self.prefill_s is None or self.byte_s is None or has_unknown:
            return len(pieces)
        best, number, seconds = 0.0, 0, num_bytes_ahead * self.byte_s
        for place, piece in enumerate(pieces, 1):
            of_disk = (self.disk_byte_s or 0.0) * piece.is_on_disk
            seconds += piece.num_bytes * (self.byte_s + of_disk)
            saved = piece.num_tokens * self.prefill_s - seconds
            if piece.is_end and saved > best:
                best, number = saved, place
        if number == len(pieces) or self._is_tried_anyway():
            return len(pieces)
        return number

    def loads(self, num_tokens: int, num_bytes: int, num_bytes_ahead: int, num_on_disk: int = 0) -> bool:
        """Whether to load a prefix.

        Args:
            num_tokens: that need not be computed then.
            num_bytes: of their records.
            num_bytes_ahead: of loads that have begun.
            num_on_disk: of the records, those that are read from the disk first.
        """
        if self.prefill_s is None or self.byte_s is None or (num_on_disk and self.disk_byte_s is None):
            return True
        seconds = (num_bytes + num_bytes_ahead) * self.byte_s + num_on_disk * (self.disk_byte_s or 0.0)
        if seconds < num_tokens * self.prefill_s:
            return True
        return self._is_tried_anyway()

    def _is_tried_anyway(self) -> bool:
        """Count a prefix of which not all is predicted to win; whether it is the one in ``RETRY_AFTER``."""
        self._num_declined += 1
        return self._num_declined % RETRY_AFTER == 0


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _SMOOTHING * (value - mean)
