"""Text of a growing token sequence, a piece per token, and the stop strings in it."""

from __future__ import annotations

import codecs
import copy
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from hpu_duo.sampling.params import SamplingParams

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# A UTF-8 character has at most four bytes.
_MAX_CHAR_TOKENS = 4

# Tokens that still end in a broken character after this many are not waiting for the rest of one.
_MAX_HELD_TOKENS = 16

# Tokens to retain when garbage is cut: enough for any unfinished character.
_TAIL_TOKENS = 8


class Tokenizer(Protocol):
    """The part of a transformers tokenizer, fast or slow, that is used."""

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of tokens that are no text."""
        ...

    # Any, because transformers declares str | list[str]: batches go through the same method.
    def decode(self, token_ids: list[int], skip_special_tokens: bool = ..., **kwargs: Any) -> Any:
        """Return the text of the tokens."""
        ...


def special_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that ``skip_special_tokens`` leaves out of the text.

    Some tokenizers rebuild a table in each call, so an engine calls this once for all requests.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    flagged = {token_id for token_id, token in added.items() if getattr(token, "special", False)}
    return frozenset(tokenizer.all_special_ids) | flagged


def byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    """The byte of each token ``<0xE2>`` of a tokenizer that spells unknown characters with such tokens."""
    if not hasattr(tokenizer, "convert_tokens_to_ids"):
        return {}
    ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
    missing = (None, getattr(tokenizer, "unk_token_id", None))
    return {token_id: byte for byte, token_id in enumerate(ids) if token_id not in missing}


class IncrementalDetokenizer:
    """Decode token ids incrementally, returning only text that later tokens cannot change.

    The pieces, with ``flush`` at the end, concatenate to the decoding of all tokens at once (without the
    clean-up of spaces, which rewrites earlier text). A character split over tokens is returned with its last
    token. Tokenizers with byte fallback turn a whole run of byte tokens into replacement characters when any
    byte of it is wrong, so a run is returned with the token after it.

    Each token costs two decodings of a window, a byte token none. The window reaches back one released piece,
    because decoding depends on the left neighbour (the space of a word-start token is dropped at the
    beginning of a text). It is at most a few dozen tokens, or a run of byte tokens, whatever the length of
    the output.

    Attributes:
        coming: characters that the last token completes in a run of byte tokens that is not decoded yet;
            valid unless a wrong byte follows.

    Args:
        tokenizer: a transformers tokenizer.
        skip_special_tokens: leave special tokens out.
        context_ids: the end of the prompt that the output continues. With it a first word-start token has its
            space; without it the output is decoded as the beginning of a text.
        special_ids: ``special_token_ids(tokenizer)`` if already computed.
        byte_of: ``byte_tokens(tokenizer)`` if already computed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        context_ids: Sequence[int] = (),
        special_ids: frozenset[int] | None = None,
        byte_of: Mapping[int, int] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        if not skip_special_tokens:
            special_ids = frozenset()
        self._skipped = special_token_ids(tokenizer) if special_ids is None else special_ids
        self._byte_of = byte_tokens(tokenizer) if byte_of is None else byte_of
        self._new_run()
        # _window = _num_settled tokens of the last released piece, then held tokens
        # _released = characters of decode(_window) that are out
        self._window: list[int] = []
        self._num_settled = self._released = self._num_unfinished = 0
        for token_id in self._tail(list(context_ids[-_TAIL_TOKENS - _MAX_CHAR_TOKENS :])):
            self.push(token_id)
        self._release_context()

    def _tail(self, context_ids: list[int]) -> list[int]:
        """The last tokens of the context, from the beginning of a character on."""
        shortest = max(0, len(context_ids) - _TAIL_TOKENS)
        for start in range(shortest, -1, -1):
            firsts = (context_ids[start : start + n] for n in range(1, _MAX_CHAR_TOKENS + 1))
            if any(not self._decode(first).startswith(REPLACEMENT) for first in firsts):
                return context_ids[start:]
        return context_ids[shortest:]

    def _release_context(self) -> None:
        """Count the prompt's text as released, except an unfinished character that the output may finish."""
        text = self._decode(self._window)
        complete = text.rstrip(REPLACEMENT)
        if self._window and self._window[-1] in self._byte_of:
            # A run with an unfinished character has none that is whole.
            ends = range(len(self._window), max(len(self._window) - _MAX_CHAR_TOKENS, 0), -1)
            wholes = (self._decode(self._window[:end]) for end in ends)
            complete = next((whole for whole in wholes if not whole.endswith(REPLACEMENT)), complete)
        self._released = max(self._released, len(complete))
        self._num_unfinished = len(text) - self._released

    def _new_run(self) -> None:
        """Forget the run of byte tokens."""
        self.coming = ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._is_valid_run = True

    def _add_byte(self, byte: int) -> None:
        self.coming = ""
        try:
            if self._is_valid_run:
                self.coming = self._utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            self._is_valid_run = False

    def push(self, token_id: int) -> str:
        """Add one token and return the text that it settles, often one piece, sometimes none."""
        # A skipped token must not separate its neighbours: decoding the whole drops it first.
        if token_id in self._skipped:
            self.coming = ""
            return ""
        self._window.append(token_id)
        if token_id in self._byte_of:
            self._add_byte(self._byte_of[token_id])
            return ""
        self.coming = ""
        if len(self._window) > 1 and self._window[-2] in self._byte_of:
            self._new_run()
        text = self._decode(self._window)
        is_broken = text.endswith(REPLACEMENT) and not self._byte_of
        is_overdue = len(self._window) - self._num_settled > _MAX_HELD_TOKENS
        if is_broken and not is_overdue:
            return ""
        # Of garbage, only the last character can still become something else.
        piece = text[self._released : len(text) - is_broken]
        if self._num_unfinished:
            piece = self._drop_unfinished(piece)
        if is_broken:
            self._cut(len(self._window) - _TAIL_TOKENS)
            self._num_settled = 0
        elif piece:
            self._cut(self._num_settled)
            self._num_settled = len(self._window)
        elif is_overdue:
            del self._window[self._num_settled :]
        return piece

    def fork(self) -> IncrementalDetokenizer:
        """Return a detokenizer that goes on from here, to try tokens that are not certain."""
        ahead = copy.copy(self)
        ahead._window = [*self._window]
        ahead._utf8 = codecs.getincrementaldecoder("utf-8")()
        ahead._utf8.setstate(self._utf8.getstate())
        return ahead

    def skipped_text(self, token_id: int) -> str:
        """Return the text of a token that ``push`` leaves out, and nothing for any other."""
        if token_id not in self._skipped:
            return ""
        text: str = self._tokenizer.decode(
            [token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def flush(self) -> str:
        """Return buffered text, a broken character included; call it once, at the end."""
        text = self._decode(self._window)
        piece = self._drop_unfinished(text[self._released :])
        self._released = len(text)
        return piece

    def _drop_unfinished(self, piece: str) -> str:
        """Leave out the replacement characters that the prompt's text already ends in."""
        if not piece or not self._num_unfinished:
            return piece
        at = 0
        while at < min(self._num_unfinished, len(piece)) and piece[at] == REPLACEMENT:
            at += 1
        self._num_unfinished = 0
        return piece[at:]

    def _cut(self, num_tokens: int) -> None:
        """Forget the oldest tokens. The rest is released, but for a broken last character."""
        del self._window[:num_tokens]
        text = self._decode(self._window)
        self._released = len(text) - text.endswith(REPLACEMENT)

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids,
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text


class StopMatch(NamedTuple):
    """A stop string found in the output.

    Attributes:
        stop: the string.
        start, end: its character range in the whole output text, special tokens included, also where it spans
            one that is not shown; ``start`` is negative if it began in the prompt.
        cut: length of the final text: ``end`` if the stop string is included, else ``start`` or 0.
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
    """Incremental search for stop strings, which buffers text that could be the start of one.

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
        # Buffered text, and ranges of it that are hidden.
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
            num_output_tokens: number of generated tokens, including that of ``text``.
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
        """Return a copy of the checker, to test text that is not final."""
        ahead = copy.copy(self)
        ahead._matched, ahead._hidden = [*self._matched], [*self._hidden]
        ahead._shown, ahead._places = copy.copy(self._shown), copy.copy(self._places)
        return ahead

    def flush(self) -> str:
        """Return buffered text, for an output that ends for another reason (length, EOS)."""
        return self._release(self._held, len(self._held)).text

    def _num_open(self, num_pending: int) -> int:
        """Return the characters at the end of the pending text that could still become a stop string."""
        num_shown = max(self._shown) if self._shown is not None else 0
        behind = self._num_released + num_pending - self._places[-num_shown] if num_shown else 0
        return max(*self._matched, behind)

    def _part(self) -> None:
        """Track the shown text separately from the whole from here on: up to here they end equally."""
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
        # A match that begins in the prompt, or in shown text, starts before the pending text.
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
