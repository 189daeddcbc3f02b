"""The text around the passkeys of a document, and the words of the passkeys."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING

from hpu_duo.lab.tasks.haystack import BuiltinHaystack, Haystack
from hpu_duo.lab.tasks.passkeys import NEEDLE, QUESTION
from hpu_duo.lab.tasks.words import NAMES, PASSKEY_WORDS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BUILTIN = BuiltinHaystack()
_MOST_WORDS = 2000
"""Most words taken from a tokenizer: tokens of low ids are the frequent ones."""
_WORD = re.compile(r"[^a-z]?([a-z]{4,12})")
"""A token with its mark of a word's beginning: one character, whichever it is."""


class WordSource(str, Enum):
    """Source of the words of passkeys."""

    BUILTIN = "builtin"
    """The list that the built-in model was trained on."""
    TOKENIZER = "tokenizer"
    """Frequent whole words among the tokens of the model, so that any model has seen them often."""
    VOCABULARY = "vocabulary"
    """All whole words among the tokens of the model, each as likely as any other (order zero)."""


@dataclass(frozen=True)
class PasskeyText:
    """Text and words of passkey documents.

    Attributes:
        haystack: the text around passkeys.
        source: of the words.
    """

    haystack: Haystack = _BUILTIN
    source: WordSource = WordSource.BUILTIN

    def words(self, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
        """The words, no two of them alike and, if they are the tokenizer's, none in the haystack."""
        if self.source is WordSource.BUILTIN:
            return PASSKEY_WORDS
        most = _MOST_WORDS if self.source is WordSource.TOKENIZER else None
        return whole_words(tokenizer, self.haystack.words, most)

    def check(self, words: Sequence[str], num_needed: int) -> None:
        """Refuse words of a tokenizer that are too few for a document.

        Raises:
            ValueError: there are fewer than needed.
        """
        if self.source is not WordSource.BUILTIN and len(words) < num_needed:
            raise ValueError(
                f"expected at least {num_needed} whole words among the model's tokens, got {len(words)}; "
                "give --words builtin, or fewer or shorter passkeys (--num-passkeys, --passkey-words)"
            )


BUILTIN_TEXT = PasskeyText()
"""Text and words that the built-in model was trained on."""


@lru_cache(maxsize=1)  # Looking through a vocabulary takes a while, and each cell of a grid asks for it.
def whole_words(
    tokenizer: PreTrainedTokenizerBase, avoided: frozenset[str], most: int | None = _MOST_WORDS
) -> tuple[str, ...]:
    """Words of 4 to 12 small letters that are single tokens between a word and a full stop, by token id.

    Args:
        avoided: words to leave out, beside those around passkeys.
        most: number of words after which to stop, None for all.
    """
    around = _words_around()
    before = tokenizer.encode("is", add_special_tokens=False)
    words: dict[str, None] = {}
    for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        match = _WORD.fullmatch(token)
        word = match[1] if match else ""
        if not word or word in avoided or word in around or word in words:
            continue
        ids = tokenizer.encode(f"is {word}.", add_special_tokens=False)
        # One more token at least: the full stop is none of the word's.
        if ids[: len(before) + 1] == [*before, token_id] and len(ids) > len(before) + 1:
            words[word] = None
            if len(words) == most:
                break
    return tuple(words)


def _words_around() -> frozenset[str]:
    text = " ".join((NEEDLE, QUESTION, *NAMES)).replace("{", " ").replace("}", " ")
    return frozenset(re.findall(r"[a-z]+", text.lower()))
