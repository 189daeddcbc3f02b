"""FastGen's sets of tokens: special ones, punctuation with them, heavy hitters with both."""

from __future__ import annotations

import math
import string
import unicodedata
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hpu_duo.heads.eviction.by_position import PolicyWithPositions
from kernels_ref import SlotView, TokenClass

_MARK = 1e9
"""Score of punctuation, half of that of special tokens: above what any token can receive."""
# For a compiler, a tensor differs from a member of an enumeration.
_SPECIAL, _PUNCTUATION = int(TokenClass.SPECIAL), int(TokenClass.PUNCTUATION)
_KINDS = ("special", "punctuation", "heavy")


@dataclass(frozen=True)
class FastGenSet(PolicyWithPositions):
    """Keeps special tokens first, then punctuation, then heavy hitters or the newest tokens.

    A set that is full of marked tokens evicts the oldest punctuation, then the oldest special tokens. Slots
    not used by marked tokens have the newest tokens, which is FastGen's window; with heavy hitters, a share
    of all slots has.

    Source: arXiv:2310.01801, which chooses such a set for each head and prompt. ``hpu-duo calibrate`` does
    for each head.

    Attributes:
        keep: ``special``; ``punctuation``, which is both; or ``heavy``, which is both and heavy hitters.
        recent: with heavy hitters, share of the slots for the newest tokens.
    """

    keep: str = "heavy"
    recent: float = 0.5
    name: ClassVar[str] = "fastgen"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep not in _KINDS:
            raise ValueError(f"expected keep of kv_policy 'fastgen' to be one of {_KINDS}, got {self.keep!r}")
        if not 0.0 <= self.recent < 1.0:
            raise ValueError(f"expected recent in [0, 1) for kv_policy {self.name!r}, got {self.recent}")

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Name, set, and share of recent tokens where it counts."""
        return self.key_of(self.keep, *((self.recent,) if self._is_heavy else ()))

    @property
    def num_observed(self) -> int | None:
        """All queries for heavy hitters, none for others."""
        return None if self._is_heavy else 0

    @property
    def marks_tokens(self) -> bool:
        """Return True: special tokens and punctuation have scores of their own."""
        return True

    @property
    def _is_heavy(self) -> bool:
        return self.keep == "heavy"

    def first_score(self, token_class: torch.Tensor) -> torch.Tensor:
        """Return a mark for tokens of the set's classes, else 0."""
        marks = torch.where(token_class == _SPECIAL, 2 * _MARK, 0.0)
        if self.keep == "special":
            return marks
        return torch.where(token_class == _PUNCTUATION, _MARK, marks)

    def observe(self, slots: SlotView, mass: torch.Tensor) -> torch.Tensor:
        """Add what each token has received, but to marks."""
        if not self._is_heavy:
            return slots.score
        return torch.where(slots.score < _MARK, slots.score + mass, slots.score)

    def protects(self, slots: SlotView) -> torch.Tensor | None:
        """The newest tokens, in addition to heavy hitters."""
        if not self._is_heavy:
            return None
        return slots.position >= slots.end - math.floor(self.recent * slots.num_slots)


@dataclass(frozen=True)
class TokenClasses:
    """Classes of the tokens of a prompt.

    Attributes:
        special, punctuation: bool ``[T]``.
    """

    special: Tensor
    punctuation: Tensor


def is_punctuation(text: str) -> bool:
    """Whether a text has characters besides white space, and all of them are punctuation.

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

        Padding of the vocabulary after the tokenizer's tokens has no class.
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
