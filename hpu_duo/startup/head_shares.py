"""One rank's share of the heads of each layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpu_duo.device.ranks import Ranks
from hpu_duo.heads import HeadLayout
from hpu_duo.modeling.probe import DecoderLayer
from hpu_duo.sharded import DealtBlocks, HeadExchange, RankHeads, ScoreExchange, SharedPolicy, placed
from hpu_duo.startup.heads import HeadAssignment
from kernels_ref import Budget, GroupKind, HeadGroup, Owner


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
        is_planned: whether a KV plan names what each head keeps; the same goes for it.
    """

    ranks: Ranks
    group: str
    deals_blocks: bool
    is_planned: bool = False

    def heads(self, index: int, whole: HeadAssignment, layer: DecoderLayer) -> RankHeads:
        """Return the heads of the rank by their numbers in the checkpoint.

        Args:
            index: of the layer.
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
        ranks = self._ranks(index, num_kv_heads)
        return RankHeads.of(groups, num_heads, ranks, is_even=self._is_even)

    def assignment(self, index: int, whole: HeadAssignment, layer: DecoderLayer) -> HeadAssignment:
        """Return the groups of the rank, whose heads were loaded in their order.

        Args:
            index: of the layer.
            whole: groups of all ranks.
            layer: of the rank's share.
        """
        layout = HeadLayout(tuple(range(layer.call.num_kv_heads)), layer.call.num_heads)
        num_kv_heads = whole.layout.num_kv_heads
        if num_kv_heads < self.ranks.size:
            # Neighbours hold copies of the same one.
            nums = [1] * len(whole.groups)
        else:
            sizes = [each.num_heads for each in whole.groups]
            places = placed(sizes, self._ranks(index, num_kv_heads), is_even=self._is_even)
            nums = [place.stop - place.start for place in places]
        shares = (self._share(each, num, num_kv_heads) for each, num in zip(whole.groups, nums))
        return HeadAssignment(layout, tuple(each for each in shares if each is not None))

    @property
    def _is_even(self) -> bool:
        return not (self.deals_blocks or self.is_planned)

    def _ranks(self, index: int, num_kv_heads: int) -> Ranks:
        """This rank among all, as heads of a layer are dealt: under a plan another one is first each time.

        So no rank has more of the heads that keep most in all layers, where ranks do not share them evenly.
        """
        rank, size = self.ranks.rank, self.ranks.size
        is_turned = self.is_planned and not self.deals_blocks and num_kv_heads >= size
        return Ranks((rank + index) % size, size) if is_turned else self.ranks

    def _share(self, group: HeadGroup, num_own: int, num_kv_heads: int) -> HeadGroup | None:
        if self.deals_blocks and group.kind.owner is Owner.BLOCK:
            exchange = HeadExchange(group.num_heads, self.ranks.size, self.ranks.rank, self.group)
            return HeadGroup(num_own, DealtBlocks(exchange))
        return HeadGroup(num_own, self._kind(group.kind, num_kv_heads)) if num_own else None

    def _kind(self, kind: GroupKind, num_kv_heads: int) -> GroupKind:
        if not isinstance(kind, Budget):
            return kind
        exchange = ScoreExchange.of(num_kv_heads, self.ranks, self.group)
        return replace(kind, policy=SharedPolicy.of(kind.policy, exchange))
