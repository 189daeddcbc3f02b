"""The joint between a store of a fixed number of slots and the policies that say which tokens stay in it.

Shapes: X rows, K key/value heads of the group, S slots or candidates for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from enum import IntEnum
from typing import ClassVar, NamedTuple

import torch


class TokenClass(IntEnum):
    """Class of a token by its text, for policies that keep some classes first."""

    OTHER = 0
    PUNCTUATION = 1
    SPECIAL = 2


class SlotView(NamedTuple):
    """Tokens that are, or might be, kept, as far as a policy may know them.

    Attributes:
        score: what attention has made of it so far, ``first_score`` for a new token, float32 ``[X, K, S]``.
        position: in the text; anything where ``valid`` is not set, int32 ``[X, K, S]``, K may be 1.
        valid: whether there is a token, bool ``[X, K, S]``, K may be 1.
        end: position behind the newest token of the row, int32 ``[X, 1, 1]``.
        num_slots: tokens that a head may keep.
        is_chunk: whether a chunk of a prompt has come, and not one token.
    """

    score: torch.Tensor
    position: torch.Tensor
    valid: torch.Tensor
    end: torch.Tensor
    num_slots: int
    is_chunk: bool = False


class FutureQueries(NamedTuple):
    """Queries that are expected behind a chunk, as if normally distributed.

    They are scaled as queries of attention are, and rotated by the mean of the rotations to some positions.

    Attributes:
        mean: of each query head, G of a key/value head, float32 ``[X, K, G, D]``.
        covariance: float32 ``[X, K, G, D, D]``.
    """

    mean: torch.Tensor
    covariance: torch.Tensor


class KVPolicy(ABC):
    """Says which tokens a head keeps; a frozen dataclass of plain numbers.

    A token begins with score 0, or with one by its class. After each attention the policy turns scores and
    observed weights into new scores. When a slot is needed, the unprotected token with the lowest score goes,
    of equal ones the one with the lowest position. All methods are tensor code of static shapes, which
    captured steps contain.

    Attributes:
        name: by which users choose it.
    """

    name: ClassVar[str]

    @property
    @abstractmethod
    def key(self) -> tuple[Hashable, ...]:
        """Name and numbers."""

    @property
    def num_observed(self) -> int | None:
        """Last queries of a chunk whose weights it is told; None = all of them, 0 = it looks at none."""
        return 0

    @property
    def weighs_decodes(self) -> bool:
        """Whether it looks at the weights of decodes; otherwise it is told zeros, which cost nothing."""
        return self.num_observed != 0

    @property
    def marks_tokens(self) -> bool:
        """Whether a new token has a score by its class: ``first_score``."""
        return False

    @property
    def has_scores(self) -> bool:
        """Whether tokens differ in their scores."""
        return self.num_observed != 0 or self.marks_tokens

    def first_score(self, token_class: torch.Tensor) -> torch.Tensor:
        """Return the scores of new tokens, float32.

        Args:
            token_class: numbers of ``TokenClass``, int32 of any shape.
        """
        return torch.zeros(token_class.shape, dtype=torch.float32, device=token_class.device)

    @property
    def pools_heads(self) -> bool:
        """Whether a token has one score in all heads of the group, by the average of their weights."""
        return False

    @property
    def num_ahead(self) -> int:
        """Positions behind a chunk for which queries are expected; 0 = it asks for no such statistics.

        With any, ``expect`` makes the scores of a chunk, and not ``observe``.
        """
        return 0

    @property
    def first_query(self) -> int:
        """Position of the first query that counts for such statistics."""
        return 0

    @property
    def positions_in_cache(self) -> bool:
        """Whether the rotary position of a token is its rank among the tokens that its head keeps.

        Keys are then stored without their rotation, and get that of their rank whenever they are read.
        """
        return False

    @property
    def needs_rotary(self) -> bool:
        """Whether it has to know the frequencies of the rotary embedding."""
        return self.num_ahead > 0 or self.positions_in_cache

    def check(self, num_slots: int) -> None:
        """Raise ValueError if it cannot work with so many slots: one token at least must be free to go."""
        if num_slots < 1:
            raise ValueError(f"kv_policy {self.name!r} needs a budget of 1 slot or more, got {num_slots}")

    def num_needed(self, max_len: int) -> int:
        """Slots that texts of so many tokens need; more than 1 for rules by position alone.

        Fewer would leave no unprotected token to go.
        """
        return 1

    def observe(self, slots: SlotView, mass: torch.Tensor) -> torch.Tensor:
        """Return new scores, float32 ``[X, K, S]``, finite and of magnitudes below 1e30.

        Args:
            slots: with the new tokens, before this attention.
            mass: weights of the observed queries on each token, summed over them and over the query heads of
                each key/value head, float32 ``[X, K, S]``; 0 where ``valid`` is not set. Each row and head
                sums to the number of observed queries times the query heads of a key/value head. All 0 behind
                a decode unless ``weighs_decodes``.
        """
        return slots.score

    def expect(
        self, slots: SlotView, queries: FutureQueries, k_PKSD: torch.Tensor, v_PKSD: torch.Tensor
    ) -> torch.Tensor:
        """Return new scores from keys, values and the queries to come, as ``observe`` does behind a chunk.

        They are averages over the query heads of each key/value head, which may be those of some ranks each.

        Args:
            k_PKSD, v_PKSD: of each slot and new token, finite.
        """
        raise NotImplementedError(f"kv_policy {self.name!r} asks for no queries to come")

    def protects(self, slots: SlotView) -> torch.Tensor | None:
        """Tokens that must not go, bool, broadcast against the scores; None = any may.

        Fewer than ``num_slots``, so that there is always one to go.
        """
        return None
