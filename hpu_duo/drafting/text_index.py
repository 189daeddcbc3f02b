"""Earlier occurrences of the end of a text, found by hash chains, as compressors of the LZ77 family do."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_MIX, _SPREAD, _BITS = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 64
_WORD = (1 << _BITS) - 1
_FEWEST_SLOTS = 1 << 10
_FEW = 16
"""Tokens that are indexed one by one rather than together."""


class Matches(NamedTuple):
    """Earlier occurrences of the last tokens of a text, the latest first.

    Attributes:
        places: positions of the tokens that followed them, int ``[C]``.
        lengths: equal tokens before these places, int ``[C]``.
    """

    places: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


class TextIndex:
    """Positions of a text by the ``gram`` tokens before them.

    Positions with the same hash are a chain, from the latest to the earliest one: 4 bytes of each token of
    the text and 4 to 8 bytes of each indexed one. The text may be a window of the last tokens,
    where position ``p`` has place ``p % T``; older positions are forgotten.

    Args:
        tokens: int32 ``[T]``, the text, which its owner extends in place.
        gram: fewest tokens of a match.
        num_coming: tokens that are known to come, whose chains are allocated at once.

    Attributes:
        num_indexed: tokens of the text that are indexed.
        oldest: first position that may be found.
    """

    def __init__(self, tokens: npt.NDArray[np.int32], gram: int, num_coming: int = 0) -> None:
        self._tokens, self.gram = tokens, gram
        self._size = len(tokens)
        self._previous = np.empty(self._size, np.int32)
        self._text_at, self._previous_at = tokens.data, self._previous.data
        self.num_indexed = self.oldest = 0
        self._allocate(max(_FEWEST_SLOTS, 1 << (num_coming - 1).bit_length()))

    @property
    def num_bytes(self) -> int:
        """Bytes of the index, without the text."""
        return self._previous.nbytes + self._head.nbytes

    def _allocate(self, num_slots: int) -> None:
        self._head = np.full(num_slots, -1, np.int32)
        self._head_at = self._head.data
        self._shift = _BITS - num_slots.bit_length() + 1
        self._num_linked = max(self.gram, self.oldest)

    def extend(self, num_tokens: int) -> None:
        """Index the text up to ``num_tokens``, its last token excluded, which nothing follows."""
        if min(num_tokens, self._size) > 2 * len(self._head):
            num_slots = len(self._head)
            while min(num_tokens, self._size) > num_slots:
                num_slots *= 2
            self._allocate(num_slots)
        self.num_indexed = num_tokens
        self.oldest = max(self.oldest, num_tokens - self._size)
        first = max(self._num_linked, self.oldest + self.gram)
        if num_tokens - first > _FEW:
            self._link_all(first, num_tokens)
        else:
            for place in range(first, num_tokens):
                slot = self._slot(place)
                self._previous_at[place % self._size] = self._head_at[slot]
                self._head_at[slot] = place
        self._num_linked = max(self._num_linked, num_tokens)

    def _slot(self, place: int) -> int:
        """The chain of the tokens before a position."""
        code, text, size = 0, self._text_at, self._size
        for each in range(place - self.gram, place):
            code = (code * _MIX + text[each % size] + 1) & _WORD
        return (code * _SPREAD & _WORD) >> self._shift

    def _link_all(self, first: int, last: int) -> None:
        places = np.arange(first, last)
        codes = np.zeros(last - first, np.uint64)
        for back in range(self.gram, 0, -1):
            each = self._tokens[(places - back) % self._size].astype(np.int64).astype(np.uint64)
            codes = codes * np.uint64(_MIX) + each + np.uint64(1)
        slots = (codes * np.uint64(_SPREAD) >> np.uint64(self._shift)).astype(np.int64)
        # Keys of slot and place are sorted several times faster than a stable order of the slots is found.
        num_bits = len(slots).bit_length()
        keys = slots << num_bits | np.arange(len(slots))
        keys.sort()
        slots, places = keys >> num_bits, first + (keys & ((1 << num_bits) - 1))
        begins = np.ones(len(slots), bool)
        begins[1:] = slots[1:] != slots[:-1]
        previous = np.empty(len(slots), np.int32)
        previous[1:] = places[:-1]
        previous[begins] = self._head[slots[begins]]
        self._previous[places % self._size] = previous
        ends = np.append(begins[1:], True)
        self._head[slots[ends]] = places[ends]

    def find(self, end: npt.NDArray[np.int32], most: int) -> Matches | None:
        """Find the latest occurrences of the last tokens of a text, of this one or of another.

        Args:
            end: the tokens, ``gram`` or more; no more than these are compared.
            most: occurrences to look at.

        Returns:
            None if there is none.
        """
        if len(end) < self.gram:
            return None
        code, last = 0, -1
        for token in end[len(end) - self.gram :].tolist():
            last = token
            code = (code * _MIX + token + 1) & _WORD
        place = self._head_at[(code * _SPREAD & _WORD) >> self._shift]
        found = list[int]()
        least, previous, size, text = self.oldest + self.gram, self._previous_at, self._size, self._text_at
        while place >= least and most > 0:
            most -= 1
            # A cheap check before arrays are compared: most hash collisions have another last token.
            if text[(place - 1) % size] == last:
                found.append(place)
            earlier = previous[place % size]
            # In a window, the entry may be that of a later position.
            if earlier >= place:
                break
            place = earlier
        if not found:
            return None
        places = np.array(found)
        depth = len(end)
        before = self._tokens[(places[:, None] - _ONWARDS[1 : depth + 1]) % size]
        differs = before != end[::-1]
        lengths = np.where(differs.any(1), differs.argmax(1), depth)
        lengths = np.minimum(lengths, places - self.oldest)
        # Hashes may be equal where tokens are not.
        if lengths.min() < self.gram:
            is_match = lengths >= self.gram
            places, lengths = places[is_match], lengths[is_match]
            if not len(places):
                return None
        return Matches(places, lengths)

    def following(self, places: npt.NDArray[np.int64], most: int) -> npt.NDArray[np.int32]:
        """Return the tokens from each position on, ``[C, most]``.

        A text that ends before goes on as it has from that position, over and over.
        """
        onwards = _ONWARDS[:most]
        left = self.num_indexed - places[:, None]
        return self._tokens[(places[:, None] + onwards % left) % self._size]


_ONWARDS = np.arange(256)
