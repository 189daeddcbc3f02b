"""Special tokens and punctuation among the tokens of a prompt, for any transformers tokenizer."""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels_ref import TokenClass


@dataclass(frozen=True)
class TokenClasses:
    """Classes of the tokens of a prompt.

    Attributes:
        special, punctuation: bool ``[T]``.
    """

    special: Tensor
    punctuation: Tensor


def is_punctuation(text: str) -> bool:
    """Tell whether a text has characters beside white space, and all of them are punctuation.

    Punctuation is what Unicode counts as such, and the marks of ASCII, some of which it counts as symbols.
    """
    marks = "".join(text.split())
    return bool(marks) and all(
        mark in string.punctuation or unicodedata.category(mark).startswith("P") for mark in marks
    )


class TokenClassifier:
    """Classes of tokens by id; a token is looked up once.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Marks of chat templates are special without being one of the named special tokens.
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = {int(each) for each in tokenizer.all_special_ids}
        self._special |= {int(each) for each, token in added.items() if getattr(token, "special", False)}
        self._is_mark: dict[int, bool] = {}

    def classes(self, ids: Sequence[int]) -> TokenClasses:
        """Classes of the tokens of a prompt. A special token is no punctuation, whatever its text is."""
        special = torch.tensor([each in self._special for each in ids], dtype=torch.bool)
        marks = torch.tensor([self._marks(each) for each in ids], dtype=torch.bool)
        return TokenClasses(special, marks & ~special)

    def table(self, vocab_size: int) -> np.ndarray:
        """Numbers of ``TokenClass`` of the whole vocabulary, int32 ``[vocab_size]``.

        Rows of padding behind the tokenizer's own tokens are of no class.
        """
        known = min(vocab_size, len(self._tokenizer))
        found = self.classes(range(known))
        table = np.zeros(vocab_size, np.int32)
        table[:known][found.punctuation.numpy()] = TokenClass.PUNCTUATION
        table[:known][found.special.numpy()] = TokenClass.SPECIAL
        return table

    def _marks(self, token: int) -> bool:
        known = self._is_mark.get(token)
        if known is None:
            text = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
            known = self._is_mark[token] = is_punctuation(text)
        return known
