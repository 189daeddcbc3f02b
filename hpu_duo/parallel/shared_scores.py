"""Scores of tokens summed over ranks, for heads with a KV budget.

A rank weighs tokens by its own query heads. That is a policy's whole measure if each rank has key/value heads
of its own and the policy scores them separately. It is a part of it if ranks have copies of one key/value
head with some of its query heads each, and if a policy averages over all heads of a layer.

Shapes: X rows, K key/value heads of the group on this rank, S slots or candidates for them, t ranks, H
key/value heads of the layer if ranks have copies of them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from hpu_duo.device.collectives import sum_over_ranks
from hpu_duo.device.ranks import Ranks
from kernels_ref import FutureQueries, KVPolicy, SlotView


@dataclass(frozen=True)
class ScoreExchange:
    """All-reduces over the ranks of a layer, with equally many heads each; all of them participate.

    Backends return the same sum on every rank, bit for bit, so that choices are equal.

    Attributes:
        num_ranks: t.
        num_copies: neighbouring ranks with copies of the same key/value head, with a share of its query heads
            each; 1 if each has heads of its own.
        rank: this one; equal on all ranks is what does not depend on it.
        group: name of the ranks' process group.
    """

    num_ranks: int
    num_copies: int
    rank: int = field(compare=False)
    group: str

    @classmethod
    def of(cls, num_kv_heads: int, ranks: Ranks, group: str) -> ScoreExchange:
        """Return the exchange of a layer with a number of key/value heads; see ``RankHeads.of``."""
        return cls(ranks.size, max(1, ranks.size // num_kv_heads), ranks.rank, group)

    @property
    def num_summed(self) -> int:
        """Number of heads in a sum over copies (H)."""
        return self.num_ranks // self.num_copies

    def mean_of_heads(self, mass: torch.Tensor) -> torch.Tensor:
        """Average weights over the key/value heads of all ranks.

        Args:
            mass: of the query heads of this rank, ``[X, K, S]``.

        Returns:
            ``[X, 1, S]``, the same on all ranks.
        """
        own = mass.mean(dim=1, keepdim=True)
        return sum_over_ranks(own, self.group) * (self.num_copies / self.num_ranks)

    def sum_of_copies(self, own_X1S: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks with copies of this rank's one head, ``[X, 1, S]``.

        One sum over all ranks carries all heads, each in its place.
        """
        if self.num_summed == 1:
            return sum_over_ranks(own_X1S, self.group)
        head = self.rank // self.num_copies
        nothing = torch.zeros_like(own_X1S)
        every = [own_X1S if number == head else nothing for number in range(self.num_summed)]
        return sum_over_ranks(torch.cat(every, dim=1), self.group)[:, head : head + 1]


@dataclass(frozen=True)
class SharedPolicy(KVPolicy):
    """A policy with scores over the heads of all ranks, as if one rank had them.

    Attributes:
        policy: that of one rank.
        exchange: of the layer.
    """

    policy: KVPolicy
    exchange: ScoreExchange

    @classmethod
    def of(cls, policy: KVPolicy, exchange: ScoreExchange) -> KVPolicy:
        """Return a policy for ranks: the same one where scores need no exchange."""
        looks = policy.num_observed != 0 or policy.num_ahead > 0
        needs_others = policy.pools_heads or exchange.num_copies > 1
        return cls(policy, exchange) if looks and needs_others else policy

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the policy."""
        return self.policy.name

    @property
    def key(self) -> tuple[Hashable, ...]:
        """The policy's, and copies of heads if there are any, in which layers may differ."""
        copies = self.exchange.num_copies
        return self.policy.key if copies == 1 else (*self.policy.key, f"{copies} copies")

    @property
    def num_observed(self) -> int | None:
        """See the wrapped policy."""
        return self.policy.num_observed

    @property
    def weighs_decodes(self) -> bool:
        """See the wrapped policy."""
        return self.policy.weighs_decodes

    @property
    def marks_tokens(self) -> bool:
        """See the wrapped policy."""
        return self.policy.marks_tokens

    @property
    def has_scores(self) -> bool:
        """See the wrapped policy."""
        return self.policy.has_scores

    def first_score(self, token_class: torch.Tensor) -> torch.Tensor:
        """Return the result of the wrapped policy."""
        return self.policy.first_score(token_class)

    @property
    def pools_heads(self) -> bool:
        """See the wrapped policy."""
        return self.policy.pools_heads

    @property
    def num_ahead(self) -> int:
        """See the wrapped policy."""
        return self.policy.num_ahead

    @property
    def first_query(self) -> int:
        """See the wrapped policy."""
        return self.policy.first_query

    @property
    def positions_in_cache(self) -> bool:
        """See the wrapped policy."""
        return self.policy.positions_in_cache

    @property
    def needs_rotary(self) -> bool:
        """See the wrapped policy."""
        return self.policy.needs_rotary

    @property
    def num_summed(self) -> int:
        """Numbers of each slot that ranks sum."""
        return 1 if self.pools_heads else self.exchange.num_summed

    def check(self, num_slots: int) -> None:
        """Check as the policy does."""
        self.policy.check(num_slots)

    def num_needed(self, max_len: int) -> int:
        """Return the result of the wrapped policy."""
        return self.policy.num_needed(max_len)

    def observe(self, slots: SlotView, mass: torch.Tensor) -> torch.Tensor:
        """Return the policy's scores by the weights of all heads that count."""
        if slots.is_chunk or self.weighs_decodes:
            if self.pools_heads:
                mass = self.exchange.mean_of_heads(mass).expand_as(mass)
            else:
                mass = self.exchange.sum_of_copies(mass)
        return self.policy.observe(slots, mass)

    def expect(
        self, slots: SlotView, queries: FutureQueries, k_PKSD: torch.Tensor, v_PKSD: torch.Tensor
    ) -> torch.Tensor:
        """Return the average of the policy's scores by the query heads of each rank."""
        own = self.policy.expect(slots, queries, k_PKSD, v_PKSD)
        return self.exchange.sum_of_copies(own) / self.exchange.num_copies

    def protects(self, slots: SlotView) -> torch.Tensor | None:
        """Return the result of the wrapped policy."""
        return self.policy.protects(slots)
