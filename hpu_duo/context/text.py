"""Token ids of a text, and of what is written behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Document:
    """A text as token ids, and as it was written.

    Attributes:
        token_ids: one or more.
        text: None if token ids were given.
        adds_special_tokens: whether the tokenizer adds its own to the text.
    """

    token_ids: tuple[int, ...]
    text: str | None = None
    adds_special_tokens: bool = True

    @classmethod
    def read(
        cls, document: Any, tokenizer: PreTrainedTokenizerBase | None, add_special_tokens: bool = True
    ) -> Document:
        """Read a text, or the token ids of one.

        Raises:
            ValueError: it is empty or neither of them, or a text and there is no tokenizer.
        """
        if not isinstance(document, str):
            return cls(_as_token_ids("the document", document))
        if not document:
            raise ValueError("expected text in the document, got none")
        ids = _need(tokenizer)(document, add_special_tokens=add_special_tokens)["input_ids"]
        return cls(tuple(ids), document, add_special_tokens)

    def followed_by(self, more: Any, num_kept: int, tokenizer: PreTrainedTokenizerBase | None) -> Document:
        """Return the text with more behind it.

        Token ids are appended. A text is tokenised together with this one, if that leaves its first
        ``num_kept`` tokens as they are; otherwise, or if this one was given as token ids, its own tokens are
        appended, without special ones.

        Args:
            num_kept: tokens that may not change.

        Raises:
            ValueError: see ``read``.
        """
        if not isinstance(more, str):
            return Document((*self.token_ids, *_as_token_ids("what follows a document", more)))
        if not more:
            raise ValueError("expected text behind the document, got none")
        if self.text is not None:
            whole = Document.read(self.text + more, tokenizer, self.adds_special_tokens)
            if len(whole.token_ids) > num_kept and whole.token_ids[:num_kept] == self.token_ids[:num_kept]:
                return whole
        own = _need(tokenizer)(more, add_special_tokens=False)["input_ids"]
        text = None if self.text is None else self.text + more
        return Document((*self.token_ids, *own), text, self.adds_special_tokens)


def _need(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise ValueError("expected token ids, got text: this model was loaded without a tokenizer")
    return tokenizer


def _as_token_ids(name: str, given: Sequence[int]) -> tuple[int, ...]:
    try:
        tokens = np.asarray(given)
    except (TypeError, ValueError):
        tokens = np.zeros((0, 0), np.object_)
    if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"{name}: expected one text, or the token ids of one, got {type(given).__name__} of shape "
            f"{list(tokens.shape)} and {tokens.dtype}; several documents are several calls"
        )
    return tuple(tokens.tolist())
