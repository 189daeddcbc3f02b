"""The filler text of passkey documents, in pieces."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Protocol

from hpu_duo.lab.tasks.passkeys import SENTENCES, sentences
from hpu_duo.lab.tasks.words import ADJECTIVES, ADVERBS, NOUNS, PEOPLE, PLACES, TIMES, VERBS

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
_WORD = re.compile(r"[^\W\d_]+")
_LONGEST_PIECE = 40
"""Most words of a piece. Passkeys are hidden between pieces, and a document ends with a whole piece."""


class Haystack(Protocol):
    """Filler text without end."""

    @property
    def num_pieces(self) -> int | None:
        """Pieces after which the text repeats itself; None if it never does."""
        ...

    @property
    def fingerprint(self) -> str:
        """A digest, equal for equal texts."""
        ...

    @property
    def words(self) -> frozenset[str]:
        """All words of the text, in lower case."""
        ...

    def pieces(self, rng: random.Random) -> Iterator[str]:
        """Pieces of at most a few dozen words, without end; equal generators give equal pieces."""
        ...


class BuiltinHaystack:
    """Sentences from the templates of the built-in model's language."""

    fingerprint = "builtin"
    num_pieces = None
    words = frozenset(
        word.lower()
        for text in (*SENTENCES, *ADJECTIVES, *ADVERBS, *NOUNS, *PEOPLE, *PLACES, *TIMES, *VERBS)
        for word in _WORD.findall(text)
    )

    def pieces(self, rng: random.Random) -> Iterator[str]:
        """Sentences drawn one by one."""
        return sentences(rng)


class TextHaystack:
    """A text, read from a random sentence on, and from its start again after its end.

    Raises:
        ValueError: the text has no words.
    """

    def __init__(self, text: str) -> None:
        self._pieces = [piece for part in _SENTENCE_END.split(text) for piece in _cut(part)]
        if not self._pieces:
            raise ValueError("expected a haystack with words in it, got an empty text")
        self.fingerprint = hashlib.sha256(text.encode("utf-8")).hexdigest()

    @classmethod
    def read(cls, path: Path) -> TextHaystack:
        """The text of a UTF-8 file; ValueError when it cannot be read."""
        try:
            return cls(path.read_bytes().decode("utf-8"))
        except OSError as error:
            raise ValueError(f"cannot read the haystack {str(path)!r}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ValueError(
                f"expected UTF-8 text in {str(path)!r}, got byte {error.object[error.start]:#04x}"
            ) from error

    @property
    def num_pieces(self) -> int:
        """All sentences, long ones cut."""
        return len(self._pieces)

    @cached_property
    def words(self) -> frozenset[str]:
        """All words of the text, in lower case."""
        return frozenset(word.lower() for piece in self._pieces for word in _WORD.findall(piece))

    def pieces(self, rng: random.Random) -> Iterator[str]:
        """The sentences in order, from a random one on."""
        place = int(rng.random() * len(self._pieces))
        while True:
            yield self._pieces[place]
            place = (place + 1) % len(self._pieces)


def _cut(part: str) -> Iterator[str]:
    words = part.split()
    for start in range(0, len(words), _LONGEST_PIECE):
        yield " ".join(words[start : start + _LONGEST_PIECE])
