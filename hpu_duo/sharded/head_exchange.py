"""Exchanges between ranks of heads that each of them has some of.

Shapes: A tokens, K heads of all ranks, O of them here, E elements of a head, t ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from hpu_duo.device.exchange import gather_from_ranks, send_to_ranks
from hpu_duo.sharded.heads import first_head
from kernels_ref.partial import Partial, merge_all, packed, unpacked


@dataclass(frozen=True)
class HeadExchange:
    """The heads of a group on all ranks, and their exchanges; see ``hpu_duo.sharded.heads.placed``.

    All ranks take part in every exchange, also those that have no head of the group. Where ranks have
    unequal numbers of heads, what they send is padded to the most.

    Attributes:
        num_heads: K.
        num_ranks: t.
        rank: this one; equal on all ranks is what does not depend on it.
        group: name of the ranks' process group.
    """

    num_heads: int
    num_ranks: int
    rank: int = field(compare=False)
    group: str

    @property
    def own(self) -> slice:
        """The heads of this rank among all."""
        begin, end = (first_head(self.num_heads, rank, self.num_ranks) for rank in (self.rank, self.rank + 1))
        return slice(begin, end)

    @property
    def most(self) -> int:
        """The most heads of a rank."""
        return -(-self.num_heads // self.num_ranks)

    def gather(self, own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gather tensors of all heads in one exchange.

        Args:
            own: ``[A, O, ...]`` each, of one dtype.

        Returns:
            ``[A, K, ...]`` each, on all ranks.
        """
        padded = [_padded(each, self.most) for each in own]
        sent = padded[0].flatten() if len(padded) == 1 else torch.cat([each.flatten() for each in padded])
        received = gather_from_ranks(sent, self.num_ranks, self.group).view(self.num_ranks, -1)
        parts = received.split([prod(each.shape) for each in padded], dim=1)
        return [self._in_order(part.unflatten(1, each.shape)) for part, each in zip(parts, padded)]

    def merge_few(self, partial: Partial) -> Partial:
        """Merge partials of all ranks for the heads of this one, by one gather: for few tokens.

        Args:
            partial: of all heads over the keys of this rank, ``[A, K, G, D]``.

        Returns:
            Over the keys of all ranks, ``[A, O, G, D]``.
        """
        sent = packed(partial)
        received = gather_from_ranks(sent, self.num_ranks, self.group).unflatten(0, (self.num_ranks, -1))
        return merge_all(unpacked(received[:, :, self.own]))

    def merge_many(self, partial: Partial) -> Partial:
        """Merge as ``merge_few`` does, and send each rank only the partials of its heads."""
        received = send_to_ranks(self._by_rank(packed(partial)), self.num_ranks, self.group)
        own = self.own
        return merge_all(unpacked(received[:, :, : own.stop - own.start]))

    @property
    def _with_fewer(self) -> tuple[int, int]:
        """The ranks that have one head fewer than others, and the heads of each of them."""
        each, rest = divmod(self.num_heads, self.num_ranks)
        return self.num_ranks - rest if rest else 0, each

    def _in_order(self, received: torch.Tensor) -> torch.Tensor:
        """From ``[t, A, most, ...]`` to ``[A, K, ...]``."""
        by_token = received.transpose(0, 1)
        ranks, each = self._with_fewer
        rest = by_token[:, ranks:].flatten(1, 2)
        if not ranks * each:
            return rest
        return torch.cat([by_token[:, :ranks, :each].flatten(1, 2), rest], dim=1)

    def _by_rank(self, heads: torch.Tensor) -> torch.Tensor:
        """From ``[A, K, ...]`` to ``[t, A, most, ...]``."""
        ranks, each = self._with_fewer
        rest = heads[:, ranks * each :].unflatten(1, (self.num_ranks - ranks, self.most)).transpose(0, 1)
        if not ranks:
            return rest
        fewer = heads.new_zeros(ranks, len(heads), self.most, *heads.shape[2:])
        if each:
            first = heads[:, : ranks * each].unflatten(1, (ranks, each))
            fewer = torch.stack([_padded(part, self.most) for part in first.unbind(1)])
        return torch.cat([fewer, rest])


def _padded(heads: torch.Tensor, num_heads: int) -> torch.Tensor:
    """``[A, O, ...]`` with heads of zeros behind them, ``[A, num_heads, ...]``."""
    missing = num_heads - heads.shape[1]
    if not missing:
        return heads
    return torch.cat([heads, heads.new_zeros(len(heads), missing, *heads.shape[2:])], dim=1)
