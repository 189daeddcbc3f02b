"""Stop strings: find them in an output that grows, and hold back text that may begin one."""

from __future__ import annotations

import copy
from collections import deque
from typing import NamedTuple

from hpu_duo.sampling.params import SamplingParams


class StopMatch(NamedTuple):
    """A stop string found in the output.

    Attributes:
        stop: the string.
        start, end: its character range in the whole output text, special tokens included, also where it spans
            one that is not shown; ``start`` is negative if it began in the prompt.
        cut: length of the text to keep: ``end`` if the stop string is included, else ``start`` or 0.
    """

    stop: str
    start: int
    end: int
    cut: int


class Released(NamedTuple):
    """Text that may be shown now, and the stop string that ended the output, if one did."""

    text: str
    match: StopMatch | None


class StopChecker:
    """Find stop strings in text that comes in pieces, and hold back what could be the start of one.

    The stop string that is complete first wins; of those complete at the same character, the longest. So the
    result does not depend on how the text is split into tokens. A string that completes before
    ``min_tokens`` is reached is ordinary text, but one that only begins before it counts; transformers does
    not wait for ``min_tokens``. The text of special tokens counts too, also where it is not shown. A string
    is looked for in the shown text as well, where it may span such tokens, as for vLLM and unlike
    transformers.

    Each character costs amortised constant time per stop string.

    Source: Knuth, Morris and Pratt 1977 (doi:10.1137/0206024).

    Args:
        params: uses ``stop``, ``stop_like_transformers``, ``include_stop_str_in_output``, ``min_tokens``.
        before: text in which a stop string may begin that ends in the output, such as the prompt's. Strings
            that are complete in it do not count.
    """

    def __init__(self, params: SamplingParams, before: str = "") -> None:
        self._include = params.include_stop_str_in_output
        self._min_tokens = 0 if params.stop_like_transformers else params.min_tokens
        # Longest first, so that the first hit at a character is the longest.
        self._stops = tuple(sorted(set(params.stop), key=lambda stop: (-len(stop), stop)))
        self._borders = tuple(_find_borders(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)
        # The same in the shown text, once something is not shown, and the places of its last characters.
        self._shown: list[int] | None = None
        self._places: deque[int] = deque(maxlen=max(map(len, self._stops), default=0))
        self._spans_hidden = not params.stop_like_transformers
        # Text held back, and the ranges of it that are never shown.
        self._held = ""
        self._hidden: list[tuple[int, int]] = []
        self._num_released = 0
        self._is_finished = False
        for char in before:
            self._advance(char, self._matched)

    def push(self, text: str, num_output_tokens: int, *, is_hidden: bool = False) -> Released:
        """Add a piece of text.

        Args:
            text: the next characters of the output, possibly none.
            num_output_tokens: tokens generated so far, including the one that gave ``text``.
            is_hidden: the piece is matched and never shown, as that of a special token.

        Returns:
            The text to show and, if a stop string is complete, where. After a match the checker is
            finished and the rest of ``text`` is dropped.

        Raises:
            ValueError: called again after a match.
        """
        if self._is_finished:
            raise ValueError(f"expected no text after a stop string, got {text!r}")
        if not self._stops:
            return self._release("" if is_hidden else text, 0 if is_hidden else len(text))
        is_armed = num_output_tokens >= self._min_tokens
        pending = self._held + text
        if is_hidden and text:
            self._hidden.append((len(self._held), len(pending)))
            self._part()
        for at in range(len(self._held), len(pending)):
            found = self._follow(pending[at], at, is_hidden)
            if found is not None and is_armed:
                return self._finish(pending, *found, at + 1)
        # With the stop string included, its beginning is shown whatever follows.
        num_held = 0 if self._include else min(self._num_open(len(pending)), len(pending))
        return self._release(pending, len(pending) - num_held)

    def fork(self) -> StopChecker:
        """Return a checker that goes on from here, to try text that is not certain."""
        ahead = copy.copy(self)
        ahead._matched, ahead._hidden = [*self._matched], [*self._hidden]
        ahead._shown, ahead._places = copy.copy(self._shown), copy.copy(self._places)
        return ahead

    def flush(self) -> str:
        """Release the text still held back, for an output that ends for another reason (length, EOS)."""
        return self._release(self._held, len(self._held)).text

    def _num_open(self, num_pending: int) -> int:
        """Return the characters at the end of the pending text that could still become a stop string."""
        num_shown = max(self._shown) if self._shown is not None else 0
        behind = self._num_released + num_pending - self._places[-num_shown] if num_shown else 0
        return max(*self._matched, behind)

    def _part(self) -> None:
        """Tell the shown text from the whole from here on: up to here they end alike."""
        if self._spans_hidden and self._shown is None:
            self._shown = [*self._matched]
            end = self._num_released + len(self._held)
            self._places.extend(range(end - max(map(len, self._stops)), end))

    def _follow(self, char: str, at: int, is_hidden: bool) -> tuple[str, int] | None:
        """Follow a pending character; return the longest stop string that it completes, and its start."""
        whole, shown = self._advance(char, self._matched), None
        if self._shown is not None and not is_hidden:
            self._places.append(self._num_released + at)
            shown = self._advance(char, self._shown)
        if shown is not None and len(shown) >= len(whole or ""):
            return shown, self._places[-len(shown)] - self._num_released
        return None if whole is None else (whole, at + 1 - len(whole))

    def _advance(self, char: str, matched: list[int]) -> str | None:
        """Follow one character in every stop string; return the longest one that it completes."""
        completed = None
        for which, (stop, borders) in enumerate(zip(self._stops, self._borders)):
            length = matched[which]
            while length and stop[length] != char:
                length = borders[length]
            if stop[length] == char:
                length += 1
            if length == len(stop):
                completed = completed or stop
                length = borders[length]
            matched[which] = length
        return completed

    def _finish(self, pending: str, stop: str, start: int, end: int) -> Released:
        self._is_finished = True
        offset = self._num_released
        # What began in the prompt, or is shown already, lies before the pending text.
        kept = end if self._include else max(start, 0)
        match = StopMatch(stop, offset + start, offset + end, offset + kept)
        return Released(self._release(pending[:end], kept).text, match)

    def _release(self, pending: str, num_chars: int) -> Released:
        """Release the first characters, without the hidden ranges among them."""
        shown, at = "", 0
        for start, end in self._hidden:
            shown += pending[at : min(start, num_chars)]
            at = min(end, num_chars)
        shown += pending[at:num_chars]
        self._held = "" if self._is_finished else pending[num_chars:]
        self._hidden = [
            (max(start - num_chars, 0), end - num_chars) for start, end in self._hidden if end > num_chars
        ]
        self._num_released += num_chars
        return Released(shown, None)


def _find_borders(text: str) -> list[int]:
    """``borders[n]``: length of the longest proper prefix of ``text[:n]`` that is also its suffix."""
    borders = [0] * (len(text) + 1)
    length = 0
    for at in range(1, len(text)):
        while length and text[at] != text[length]:
            length = borders[length]
        if text[at] == text[length]:
            length += 1
        borders[at + 1] = length
    return borders
