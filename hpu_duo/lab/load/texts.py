"""Texts of a given number of tokens, for endpoints that take no token ids."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

_MOST_TRIES = 8


class Texts:
    """A tokenizer, as a load generator needs it.

    Args:
        path: of a ``tokenizer.json``, or a directory with one.

    Raises:
        ValueError: there is none that can be read.
    """

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more precise
            raise ValueError(f"cannot read the tokenizer {file}: {error}") from None

    @property
    def vocabulary(self) -> list[int]:
        """Ids of all tokens but special ones."""
        special = {
            number for number, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        }
        return sorted(set(self._tokenizer.get_vocab().values()) - special)

    def count(self, text: str) -> int:
        """Count the tokens of a text, without special tokens of a beginning."""
        return len(self.encode(text))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens of a beginning."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def of(self, ids: list[int]) -> str:
        """Return a text of as many tokens as there are ids, as nearly as these ids allow.

        The text of ids is not always encoded as the same ids. So it is cut, or continued with its own ids
        from the beginning, until the number is right; a text for which that fails is taken as it is.
        """
        wanted = len(ids)
        text = self._tokenizer.decode(ids)
        for _ in range(_MOST_TRIES):
            found = self._tokenizer.encode(text, add_special_tokens=False).ids
            if len(found) == wanted:
                break
            found = found[:wanted] + ids[: max(0, wanted - len(found))]
            text = self._tokenizer.decode(found)
        return text
