"""Text of a growing token sequence, a piece per token, without decoding all of it again."""

from __future__ import annotations

import codecs
import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# A UTF-8 character has at most four bytes.
_MAX_CHAR_TOKENS = 4

# Tokens that still end in a broken character after this many are not waiting for the rest of one.
_MAX_HELD_TOKENS = 16

# Enough tokens to contain any unfinished character, kept when garbage is cut.
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
    """Turn token ids into text as they come, releasing only text that later tokens cannot change.

    The pieces, with ``flush`` at the end, join to the decoding of all tokens at once (without the clean-up of
    spaces, which rewrites earlier text). A character split over tokens comes with its last token. Tokenizers
    with byte fallback turn a whole run of byte tokens into replacement characters when any byte of it is
    wrong, so a run comes with the token behind it.

    Each token costs two decodings of a window, a byte token none. The window reaches back one released piece,
    because decoding depends on the left neighbour (the space of a word-start token is dropped at the
    beginning of a text). It is at most a few dozen tokens, or a run of byte tokens, whatever the length of
    the output.

    Attributes:
        coming: characters that the last token completes in a run of byte tokens, which is not decoded
            yet; they come unless a wrong byte follows.

    Args:
        tokenizer: a transformers tokenizer.
        skip_special_tokens: leave special tokens out.
        context_ids: the end of the prompt that the output continues. With it a first word-start token keeps
            its space; without it the output reads as the beginning of a text.
        special_ids: ``special_token_ids(tokenizer)`` if already at hand.
        byte_of: ``byte_tokens(tokenizer)`` if already at hand.
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
        """Return what is still held, a broken character included; call it once, at the end."""
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
