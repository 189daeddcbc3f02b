"""Text to token ids, piece by piece, with any transformers tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

_PROBE = "a"
_MAX_REMEMBERED = 1 << 17


class Encoder:
    """Token ids of pieces of text that are put one after another.

    Each piece is encoded alone and remembered, so a token never spans two of them, and a tokenizer that marks
    the start of a text marks the start of every piece.

    Attributes:
        start: special tokens that the tokenizer puts before a text.
        end: the end-of-text token, or none.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: dict[str, tuple[int, ...]] = {}
        self.start = self._special_tokens_before()
        end = tokenizer.eos_token_id
        self.end: tuple[int, ...] = () if end is None else (int(end),)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids without special tokens."""
        known = self._ids.get(text)
        if known is None:
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"] if text else ()
            known = tuple(map(int, ids))
            if len(self._ids) < _MAX_REMEMBERED:
                self._ids[text] = known
        return known

    def check_words(self, words: Iterable[str]) -> None:
        """Raise ValueError unless each word, after a space, has tokens of its own.

        A word that becomes "unknown", nothing, or the same tokens as another one could not be asked for.
        """
        unknown = self._tokenizer.unk_token_id
        seen: dict[tuple[int, ...], str] = {}
        for word in words:
            ids = self.encode(" " + word)
            if not ids or (unknown is not None and unknown in ids):
                raise ValueError(f"expected a tokenizer that can encode the passkeys, got none for {word!r}")
            if ids in seen:
                raise ValueError(
                    f"expected a tokenizer that tells passkeys apart, got the same tokens for {word!r} "
                    f"and {seen[ids]!r}"
                )
            seen[ids] = word

    def fingerprint(self, words: Iterable[str]) -> str:
        """Return a digest of the special tokens, and of the tokens of these words."""
        tokens = [self.start, self.end, *(self.encode(" " + word) for word in words)]
        return hashlib.sha256(repr(tokens).encode()).hexdigest()

    def _special_tokens_before(self) -> tuple[int, ...]:
        bare = self.encode(_PROBE)
        whole = tuple(map(int, self._tokenizer(_PROBE)["input_ids"]))
        # Some tokenizers also put tokens behind a text, which here goes on.
        for place in range(len(whole) - len(bare) + 1):
            if bare and whole[place : place + len(bare)] == bare:
                return whole[:place]
        raise ValueError(
            f"expected special tokens around those of {_PROBE!r}, got {list(whole)} around {list(bare)}"
        )
