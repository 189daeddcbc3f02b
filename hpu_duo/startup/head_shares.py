"""One rank's share of the heads of each layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpu_duo.device.ranks import Ranks
from hpu_duo.heads import HeadLayout
from hpu_duo.modeling.probe import DecoderLayer
from hpu_duo.sharded import DealtBlocks, HeadExchange, RankHeads, placed
from hpu_duo.startup.heads import HeadAssignment
from kernels_ref import HeadGroup, Owner


def check_dealt(num_kv_heads: int, num_ranks: int) -> None:
    """Refuse to deal blocks of a layer over more ranks than it has key/value heads.

    Raises:
        ValueError: it has fewer.
    """
    if num_kv_heads < num_ranks:
        raise ValueError(
            "retrieval_parallel='context' needs a key/value head for each rank: expected at least "
            f"{num_ranks} of them in every layer, got {num_kv_heads}"
        )


@dataclass(frozen=True)
class Shares:
    """The way in which ranks share the heads of a layer.

    Attributes:
        ranks: this rank among all.
        group: name of the ranks' process group.
        deals_blocks: whether each rank keeps a part of the tokens of all heads that keep blocks. Ranks then
            have equally many heads of a layer, and not equally many of each group.
    """

    ranks: Ranks
    group: str
    deals_blocks: bool

    def heads(self, whole: HeadAssignment, layer: DecoderLayer) -> RankHeads:
        """Return the heads of the rank by their numbers in the checkpoint.

        Args:
            whole: groups of all ranks.
            layer: of the whole model.

        Raises:
            ValueError: ranks cannot share them.
        """
        num_heads, num_kv_heads = layer.call.num_heads, layer.call.num_kv_heads
        if self.deals_blocks:
            check_dealt(num_kv_heads, self.ranks.size)
        order, groups = list(whole.layout.kv_order), []
        for group in whole.groups:
            groups.append(order[: group.num_heads])
            del order[: group.num_heads]
        return RankHeads.of(groups, num_heads, self.ranks, is_even=not self.deals_blocks)

    def assignment(self, whole: HeadAssignment, layer: DecoderLayer) -> HeadAssignment:
        """Return the groups of the rank, whose heads were loaded in their order.

        Args:
            whole: groups of all ranks.
            layer: of the rank's share.
        """
        layout = HeadLayout(tuple(range(layer.call.num_kv_heads)), layer.call.num_heads)
        return HeadAssignment(layout, self._groups(whole.groups))

    def _groups(self, groups: tuple[HeadGroup, ...]) -> tuple[HeadGroup, ...]:
        if not self.deals_blocks:
            # With fewer key/value heads than ranks, neighbours hold the same one.
            return tuple(
                replace(each, num_heads=max(1, each.num_heads // self.ranks.size)) for each in groups
            )
        places = placed([each.num_heads for each in groups], self.ranks, is_even=False)
        shares = (self._dealt(each, place.stop - place.start) for each, place in zip(groups, places))
        return tuple(each for each in shares if each is not None)

    def _dealt(self, group: HeadGroup, num_own: int) -> HeadGroup | None:
        if group.kind.owner is Owner.BLOCK:
            exchange = HeadExchange(group.num_heads, self.ranks.size, self.ranks.rank, self.group)
            return HeadGroup(num_own, DealtBlocks(exchange))
        return HeadGroup(num_own, group.kind) if num_own else None
