"""The interface between stores with a fixed number of slots and eviction policies.

Shapes: X rows, K key/value heads of the group, S slots or candidates for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from enum import IntEnum
from typing import ClassVar, NamedTuple

import torch


class TokenClass(IntEnum):
    """Class of a token by its text, for policies that prefer to retain some classes."""

    OTHER = 0
    PUNCTUATION = 1
    SPECIAL = 2


class SlotView(NamedTuple):
    """Stored tokens and candidates, as input of a policy.

    Attributes:
        score: accumulated so far, ``first_score`` for a new token, float32 ``[X, K, S]``.
        position: in the text; anything where ``valid`` is not set, int32 ``[X, K, S]``, K may be 1.
        valid: whether there is a token, bool ``[X, K, S]``, K may be 1.
        end: position after the newest token of the row, int32 ``[X, 1, 1]``.
        num_slots: tokens that a head may store.
        is_chunk: whether the new tokens are a chunk of a prompt, not one decoded token.
    """

    score: torch.Tensor
    position: torch.Tensor
    valid: torch.Tensor
    end: torch.Tensor
    num_slots: int
    is_chunk: bool = False


class FutureQueries(NamedTuple):
    """Statistics of the queries expected after a chunk, assumed to be normally distributed.

    Queries are scaled as in attention, and rotated by the mean of the rotations to some positions.

    Attributes:
        mean: of each query head, G of a key/value head, float32 ``[X, K, G, D]``.
        covariance: float32 ``[X, K, G, D, D]``.
    """

    mean: torch.Tensor
    covariance: torch.Tensor


class KVPolicy(ABC):
    """An eviction policy, which scores the tokens of a head; a frozen dataclass of plain numbers.

    A token begins with score 0, or with one by its class. After each attention the policy computes new scores
    from scores and observed weights. When a slot is needed, the unprotected token with the lowest score is
    evicted, ties by lowest position. All methods are tensor code of static shapes, which captured steps
    contain.

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
        """Number of last queries of a chunk whose weights it observes; None = all of them, 0 = none."""
        return 0

    @property
    def weighs_decodes(self) -> bool:
        """Whether it observes the weights of decodes; otherwise these are passed as zeros, at no cost."""
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
        """Number of positions after a chunk to estimate queries for; 0 = no such statistics.

        If not 0, ``expect`` computes the scores of a chunk instead of ``observe``.
        """
        return 0

    @property
    def first_query(self) -> int:
        """Position of the first query that counts for such statistics."""
        return 0

    @property
    def positions_in_cache(self) -> bool:
        """Whether the rotary position of a token is its rank among the tokens that its head stores.

        Keys are then stored without rotation, and rotated to their rank whenever they are read.
        """
        return False

    @property
    def needs_rotary(self) -> bool:
        """Whether it needs the frequencies of the rotary embedding."""
        return self.num_ahead > 0 or self.positions_in_cache

    def check(self, num_slots: int) -> None:
        """Raise ValueError if the number of slots is too small: at least one token must be unprotected."""
        if num_slots < 1:
            raise ValueError(f"kv_policy {self.name!r} needs a budget of 1 slot or more, got {num_slots}")

    def num_needed(self, max_len: int) -> int:
        """Slots that texts of this number of tokens need; more than 1 only for rules by position.

        With fewer, every token would be protected.
        """
        return 1

    def observe(self, slots: SlotView, mass: torch.Tensor) -> torch.Tensor:
        """Return new scores, float32 ``[X, K, S]``, finite and of magnitudes below 1e30.

        Args:
            slots: with the new tokens, before this attention.
            mass: weights of the observed queries on each token, summed over them and over the query heads of
                each key/value head, float32 ``[X, K, S]``; 0 where ``valid`` is not set. Each row and head
                sums to the number of observed queries times the query heads of a key/value head. All 0 after
                a decode unless ``weighs_decodes``.
        """
        return slots.score

    def expect(
        self, slots: SlotView, queries: FutureQueries, k_PKSD: torch.Tensor, v_PKSD: torch.Tensor
    ) -> torch.Tensor:
        """Return new scores from keys, values and expected queries, in place of ``observe`` after a chunk.

        They are averages over the query heads of each key/value head, which may be sharded over ranks.
        Policies with ``num_ahead`` override this; for all others it is never called.

        Args:
            k_PKSD, v_PKSD: of each slot and new token, finite.
        """
        raise NotImplementedError(f"kv_policy {self.name!r} uses no expected queries")

    def protects(self, slots: SlotView) -> torch.Tensor | None:
        """Tokens that must not be evicted, bool, broadcast against the scores; None = all may be.

        Fewer than ``num_slots``, so that there is always a victim.
        """
        return None
