"""Exchanges between ranks of heads and of blocks that each of them has some of.

Bytes exchanged in a step follow from a formula: what runs in a captured step cannot be counted there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import nn

from bias_builders import Leading, leading_visible
from graphs import BatchShape
from hpu_duo.device.collectives import gather_from_ranks, send_to_ranks
from hpu_duo.parallel.config import first_head
from hpu_duo.parallel.modules import RMSNormOverRanks, SharedPolicy, SummedOverRanks, VocabParallelEmbedding
from kernels_ref import (
    Blocks,
    Budget,
    GroupKind,
    LayerSpec,
    NewKV,
    Owner,
    Partial,
    Step,
    StepParts,
    StepTensors,
    UnitLayout,
)
from kernels_ref.groups import BlockStep, HeadSizes, PartInputs, PartSizes
from kernels_ref.groups.kind import FLOAT32, causal_bytes
from kernels_ref.partial import fold, merge_all, packed, unfold, unpacked
from kernels_ref.units import gather, write_indices

if TYPE_CHECKING:
    from kernels_ref.impl import Kernels
    from kernels_ref.step import DecodeRows


@dataclass(frozen=True)
class HeadExchange:
    """The heads of a group on all ranks, and their exchanges; see ``hpu_duo.parallel.config.placed``.

    All ranks participate in every exchange, also those without a head of the group. Where ranks have unequal
    numbers of heads, what they send is padded to the most.

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
    """``[A, O, ...]`` padded by heads of zeros to ``[A, num_heads, ...]``."""
    missing = num_heads - heads.shape[1]
    if not missing:
        return heads
    return torch.cat([heads, heads.new_zeros(len(heads), missing, *heads.shape[2:])], dim=1)


EXCHANGE_COPIES = 4
"""Copies of what ranks exchange: as computed or padded, packed, received, and in order."""


class ContextParallelStep(NamedTuple):
    """Tensors that a step derives once for all stores of context-parallel blocks of one layout.

    Attributes:
        own: step tensors of blocks, for this rank's slots: new tokens of other ranks are written to the null
            block, and tails are visible as far as they are stored here.
        shared_start: position of this rank's first slot of each shared block, ``[NS]``.
    """

    own: BlockStep
    shared_start: torch.Tensor


@dataclass(frozen=True)
class ContextParallelBlocks(GroupKind):
    """Heads that store all tokens, in context-parallel blocks.

    All ranks gather the new keys, and the queries that attend to the context, of all heads; each writes and
    reads its slots; and the rank of a head merges the partials of all ranks with the causal part, which it
    computes alone.

    Attributes:
        exchange: the heads on all ranks.
    """

    exchange: HeadExchange
    name: ClassVar[str] = "context-parallel blocks"
    owner: ClassVar[Owner] = Owner.BLOCK

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Name, ranks and heads."""
        return self.name, self.exchange.num_ranks, self.exchange.num_heads

    @property
    def reach(self) -> int | None:
        """Return None: a token sees all tokens."""
        return None

    def describe(self) -> str:
        """Return an empty text: a token sees all tokens."""
        return ""

    def num_slots(self, block_size: int) -> int:
        """Return this rank's slots of a super-block."""
        return block_size // self.exchange.num_ranks

    def num_kept(self, num_heads: int) -> int:
        """Return the heads of all ranks."""
        return self.exchange.num_heads

    def prepare(
        self, parts: StepParts, tensors: StepTensors, rows: DecodeRows, layouts: Collection[UnitLayout]
    ) -> dict[UnitLayout, ContextParallelStep]:
        """See ``ContextParallelStep``."""
        t, layout = tensors, next(iter(layouts))
        num_slots, null = layout.num_slots, layout.num_units - 1
        first = self.exchange.rank * num_slots
        slot = t.write_offset - first
        is_own = (slot >= 0) & (slot < num_slots)
        place = torch.where(is_own, t.write_block, null), torch.where(is_own, slot, 0)
        index = write_indices(*place, layouts)
        tails = t.tail_start[:, :0, None]
        if parts.unique:
            tails = leading_visible((t.tail_start + first)[:, :, None], rows.end[:, None], num_slots)
        start = t.shared_start + first
        return {
            layout: ContextParallelStep(BlockStep(index[layout], Leading(tails), rows.end), start)
            for layout in layouts
        }

    def masked(
        self, plans: Mapping[UnitLayout, ContextParallelStep], dtype: torch.dtype
    ) -> dict[UnitLayout, ContextParallelStep]:
        """Return the plans with masks of tails."""
        own = Blocks().masked({layout: plan.own for layout, plan in plans.items()}, dtype)
        return {layout: plan._replace(own=own[layout]) for layout, plan in plans.items()}

    def attend(self, run: Kernels, inputs: PartInputs, step: Step) -> torch.Tensor:
        """Writes first: decode rows read their new keys from their blocks, on the rank that stores them."""
        parts, t, units = step.parts, inputs.tensors, inputs.units
        plan: ContextParallelStep = step.plans[self.key, units.layout]
        q_QOGD = inputs.q
        has_shared = parts.shared and t.shared_block.shape[0] > 0
        asked = self._asked(q_QOGD, step, has_shared=has_shared)
        k_QKD, v_QKD, *queries = self.exchange.gather([*inputs.new, *asked])
        run.write_kv(units, plan.own.write_index, units.encode(NewKV(k_QKD, v_QKD)))
        of_tokens: list[Partial] = []
        decoded = None
        if parts.unique:
            q_LKGD = gather(queries[0], step.row_token) if has_shared else queries[0]
            of_rows = inputs._replace(q=fold(q_LKGD, step.decode_len))
            decoded = run.unique_blocks(of_rows, plan.own)
            decoded = unfold(decoded, step.decode_len)
        if has_shared:
            own = inputs._replace(q=queries[0], tensors=t._replace(shared_start=plan.shared_start))
            shared = run.shared_blocks(own)
            shared, decoded = self._merged(shared, decoded)
            of_tokens.append(shared)
        elif decoded is not None:
            decoded = self.exchange.merge_few(decoded)
        if not q_QOGD.shape[1]:
            return q_QOGD.new_empty(*q_QOGD.shape[:-1], units.encoding.value_dim)
        if parts.causal:
            of_tokens.append(run.causal(inputs._replace(new=units.encode(inputs.new).values)))
        return run.finish(q_QOGD, of_tokens, decoded, step.decode_slot, inputs.sinks)

    @staticmethod
    def _asked(q_QOGD: torch.Tensor, step: Step, *, has_shared: bool) -> list[torch.Tensor]:
        """The queries that attend to the context: those of all tokens, of decode rows, or none."""
        if has_shared:
            return [q_QOGD]
        return [gather(q_QOGD, step.row_token)] if step.parts.unique else []

    def _merged(self, shared: Partial, decoded: Partial | None) -> tuple[Partial, Partial | None]:
        """Both merged over ranks in one exchange."""
        if decoded is None:
            return self.exchange.merge_many(shared), None
        num_tokens = shared.max.shape[0]
        both = self.exchange.merge_many(Partial(*(torch.cat(list(each)) for each in zip(shared, decoded))))
        return Partial(*(each[:num_tokens] for each in both)), Partial(*(each[num_tokens:] for each in both))

    def transient_bytes(self, heads: HeadSizes, sizes: PartSizes) -> int:
        """Intermediates of blocks, for the heads of all ranks and this rank's slots, and of exchanges."""
        parts, every = sizes.parts, heads._replace(num_heads=self.exchange.num_heads)
        context = replace(parts, causal=False)
        own = sizes._replace(block_size=self.num_slots(sizes.block_size), parts=context)
        has_shared = parts.shared and sizes.num_shared_blocks > 0
        num_rows = sizes.num_rows * sizes.decode_len if parts.unique else 0
        num_asked = sizes.query_len if has_shared else num_rows
        width = every.num_heads * every.head_dim
        sent = (2 * sizes.query_len + every.group_size * num_asked) * width * every.dtype_bytes
        num_merged = num_rows + (sizes.query_len if has_shared else 0)
        triples = num_merged * every.num_query_heads * (every.head_dim + 2) * FLOAT32
        met = max(causal_bytes(heads, sizes), Blocks().transient_bytes(every, own))
        return met + EXCHANGE_COPIES * (sent + triples)


_FLOAT32 = 4


class HeadExchanges(NamedTuple):
    """Bytes that one rank sends in the exchanges of one layer, and the number of these.

    Attributes:
        gathered: bytes sent to every other rank: new keys and values, queries, and the partial results of
            decodes if no prompt continues.
        scattered: bytes split over all ranks: partial results if a prompt continues.
        number: of exchanges.
    """

    gathered: int = 0
    scattered: int = 0
    number: int = 0

    def bytes_to_each(self, num_ranks: int) -> float:
        """Bytes from a rank to each other one."""
        return self.gathered + self.scattered / num_ranks


def head_exchanges(
    num_heads: int,
    group_size: int,
    dims: tuple[int, int],
    dtype_bytes: int,
    bucket: BatchShape,
    decode_len: int,
    num_ranks: int,
    *,
    of_latents: bool = False,
) -> HeadExchanges:
    """Return the exchanges of a layer in a step.

    Args:
        num_heads: retrieval heads of all ranks; those of a rank are padded to the most that one has.
        group_size: query heads of each.
        dims: elements of a key and of a value.
        of_latents: whether these are of latents, of which every rank has all new ones.
    """
    if not num_heads or num_ranks == 1:
        return HeadExchanges()
    most, phase = -(-num_heads // num_ranks), bucket.phase
    num_rows = bucket.num_logits * decode_len if phase.unique else 0
    has_shared = phase.shared and bucket.num_shared_blocks > 0
    num_asked = bucket.query_len if has_shared else num_rows
    num_new = 0 if of_latents else bucket.query_len
    elements = sum(dims) * num_new + group_size * num_asked * dims[0]
    gathered = most * elements * dtype_bytes
    triple = group_size * (dims[1] + 2) * _FLOAT32
    if has_shared:
        scattered = (bucket.query_len + num_rows) * num_ranks * most * triple
        return HeadExchanges(gathered, scattered, 2)
    if phase.unique:
        return HeadExchanges(gathered + num_rows * num_heads * triple, 0, 2)
    return HeadExchanges(gathered, 0, 0 if of_latents else 1)


def summed_score_bytes(kind: Budget, num_summed: int, bucket: BatchShape, decode_len: int = 1) -> int:
    """Return the bytes of scores that a rank all-reduces, for heads with a budget in one layer and step.

    Args:
        num_summed: numbers of each slot; see ``SharedPolicy``.
        decode_len: tokens of a decode row, each of which has a sum of its own.
    """
    phase, num = bucket.phase, 0
    if phase.unique and kind.policy.weighs_decodes:
        num += bucket.num_logits * decode_len * (kind.budget + kind.versions - 1)
    if phase.causal:
        num_new = min(kind.chunk, bucket.query_len)
        num_read = kind.num_read(bucket.num_shared_blocks) if phase.shared else 0
        num += kind.max_chunk_rows * (num_new + num_read)
    return num * num_summed * _FLOAT32


class ContextParallelHeads(NamedTuple):
    """Heads of all ranks with context-parallel blocks in a layer; see ``head_exchanges``.

    Attributes:
        sizes: their number, the query heads of each, and the elements of a stored key and value.
        of_latents: whether these are latents.
    """

    sizes: tuple[int, int, tuple[int, int]]
    of_latents: bool


class Exchanged(NamedTuple):
    """Bytes that one rank sends in exchanges.

    Attributes:
        reduced: to sums over ranks.
        gathered, scattered: see ``HeadExchanges``.
    """

    reduced: int = 0
    gathered: int = 0
    scattered: int = 0

    def plus(self, other: Exchanged, times: int = 1) -> Exchanged:
        """Return both together, the other one so many times."""
        return Exchanged(*(own + times * more for own, more in zip(self, other)))


@dataclass(frozen=True)
class StepExchanges:
    """The exchanges of a step, but for those of its logits.

    Attributes:
        token_bytes: bytes of a query token that ranks sum: rows of tables of tokens, the residual stream
            after attention and MLP of each layer, with a float32 number for each norm over all heads.
        dealt: heads with context-parallel blocks, of each layer that has some.
        dtype_bytes: of an element.
        row_len: returns the tokens of a decode row in a step of a bucket.
        num_ranks: number of ranks.
        scored: heads with a budget and summed scores, and numbers of each slot, for each group.
    """

    token_bytes: int
    dealt: tuple[ContextParallelHeads, ...]
    dtype_bytes: int
    row_len: Callable[[BatchShape], int]
    num_ranks: int
    scored: tuple[tuple[Budget, int], ...] = ()

    @classmethod
    def of_model(
        cls,
        model: nn.Module,
        specs: Sequence[LayerSpec],
        hidden_size: int,
        dtype_bytes: int,
        row_len: Callable[[BatchShape], int],
    ) -> StepExchanges:
        """Derive them from a rank's shard of a model, after ``connect``."""
        token_bytes = 0
        for each in model.modules():
            match each:
                case SummedOverRanks():
                    token_bytes += hidden_size * dtype_bytes
                case VocabParallelEmbedding():
                    token_bytes += each.inner.embedding_dim * dtype_bytes
                case RMSNormOverRanks():
                    token_bytes += _FLOAT32
        dealt = [
            (group.kind, spec)
            for spec in specs
            for group in spec.groups
            if isinstance(group.kind, ContextParallelBlocks)
        ]
        num_ranks = max((kind.exchange.num_ranks for kind, _ in dealt), default=1)
        sizes = tuple(
            ContextParallelHeads(
                (
                    kind.exchange.num_heads,
                    spec.group_size,
                    kind.stored_dims(spec.head_dim, spec.value_dim),
                ),
                spec.stores_latents,
            )
            for kind, spec in dealt
        )
        budgets = [
            (group.kind, spec.turn)
            for spec in specs
            for group in spec.groups
            if isinstance(group.kind, Budget)
        ]
        # Layers that share a store score tokens once, but average what each of them expects.
        scored = tuple(
            (kind, kind.policy.num_summed)
            for kind, turn in budgets
            if isinstance(kind.policy, SharedPolicy) and (turn.is_last or kind.policy.num_ahead)
        )
        return cls(token_bytes, sizes, dtype_bytes, row_len, num_ranks, scored)

    def of(self, bucket: BatchShape) -> Exchanged:
        """Return the bytes of a step in a bucket."""
        layers = [
            head_exchanges(
                *each.sizes,
                self.dtype_bytes,
                bucket,
                self.row_len(bucket),
                self.num_ranks,
                of_latents=each.of_latents,
            )
            for each in self.dealt
        ]
        row_len = self.row_len(bucket)
        scores = sum(summed_score_bytes(*each, bucket, row_len) for each in self.scored)
        return Exchanged(
            self.token_bytes * bucket.query_len + scores,
            sum(each.gathered for each in layers),
            sum(each.scattered for each in layers),
        )
