"""Bytes that ranks exchange in a step, by formula: what runs in a captured step cannot be counted there.

Formulas of the traffic of ``connect``, ``HeadExchange`` and ``SharedPolicy``, compared by tests of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from graphs import BatchShape
from hpu_duo.parallel.head_exchange import ContextParallelBlocks
from hpu_duo.parallel.modules import RMSNormOverRanks, SummedOverRanks, VocabParallelEmbedding
from hpu_duo.parallel.shared_scores import SharedPolicy
from kernels_ref import Budget, LayerSpec

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
    head_dim: int,
    dtype_bytes: int,
    bucket: BatchShape,
    decode_len: int,
    num_ranks: int,
) -> HeadExchanges:
    """Return the exchanges of a layer in a step.

    Args:
        num_heads: retrieval heads of all ranks; those of a rank are padded to the most that one has.
        group_size: query heads of each.
    """
    if not num_heads or num_ranks == 1:
        return HeadExchanges()
    most, phase = -(-num_heads // num_ranks), bucket.phase
    num_rows = bucket.num_logits * decode_len if phase.unique else 0
    has_shared = phase.shared and bucket.num_shared_blocks > 0
    num_asked = bucket.query_len if has_shared else num_rows
    vectors = 2 * bucket.query_len + group_size * num_asked
    gathered = most * vectors * head_dim * dtype_bytes
    triple = group_size * (head_dim + 2) * _FLOAT32
    if has_shared:
        scattered = (bucket.query_len + num_rows) * num_ranks * most * triple
        return HeadExchanges(gathered, scattered, 2)
    if num_rows:
        return HeadExchanges(gathered + num_rows * num_heads * triple, 0, 2)
    return HeadExchanges(gathered, 0, 1)


def summed_score_bytes(kind: Budget, num_summed: int, bucket: BatchShape) -> int:
    """Return the bytes of scores that a rank all-reduces, for heads with a budget in one layer and step.

    Args:
        num_summed: numbers of each slot; see ``SharedPolicy``.
    """
    phase, num = bucket.phase, 0
    if phase.unique and kind.policy.weighs_decodes:
        num += bucket.num_logits * kind.budget
    if phase.causal:
        num_new = min(kind.chunk, bucket.query_len)
        num_read = kind.num_read(bucket.num_shared_blocks) if phase.shared else 0
        num += kind.max_chunk_rows * (num_new + num_read)
    return num * num_summed * _FLOAT32


class Exchanged(NamedTuple):
    """Bytes that one rank sends in exchanges.

    Attributes:
        reduced: to sums over ranks.
        gathered, scattered: see ``HeadExchanges``.
    """

    reduced: int = 0
    gathered: int = 0
    scattered: int = 0

    def plus(self, other: Exchanged) -> Exchanged:
        """Return both together."""
        return Exchanged(*(own + more for own, more in zip(self, other)))


@dataclass(frozen=True)
class StepExchanges:
    """The exchanges of a step, but for those of its logits.

    Attributes:
        token_bytes: bytes of a query token that ranks sum: rows of tables of tokens, the residual stream
            after attention and MLP of each layer, with a float32 number for each norm over all heads.
        dealt: retrieval heads of all ranks, their query heads each and their size, for each layer with
            context-parallel blocks.
        dtype_bytes: of an element.
        decode_len: tokens of a decode row.
        num_ranks: number of ranks.
        scored: heads with a budget and summed scores, and numbers of each slot, for each group.
    """

    token_bytes: int
    dealt: tuple[tuple[int, int, int], ...]
    dtype_bytes: int
    decode_len: int
    num_ranks: int
    scored: tuple[tuple[Budget, int], ...] = ()

    @classmethod
    def of_model(
        cls, model: nn.Module, specs: Sequence[LayerSpec], hidden_size: int, dtype_bytes: int, decode_len: int
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
            (group.kind.exchange, spec.group_size, spec.head_dim)
            for spec in specs
            for group in spec.groups
            if isinstance(group.kind, ContextParallelBlocks)
        ]
        num_ranks = max((exchange.num_ranks for exchange, _, _ in dealt), default=1)
        sizes = tuple((exchange.num_heads, group_size, size) for exchange, group_size, size in dealt)
        budgets = [group.kind for spec in specs for group in spec.groups if isinstance(group.kind, Budget)]
        scored = tuple(
            (kind, kind.policy.num_summed) for kind in budgets if isinstance(kind.policy, SharedPolicy)
        )
        return cls(token_bytes, sizes, dtype_bytes, decode_len, num_ranks, scored)

    def of(self, bucket: BatchShape) -> Exchanged:
        """Return the bytes of a step in a bucket."""
        layers = [
            head_exchanges(*sizes, self.dtype_bytes, bucket, self.decode_len, self.num_ranks)
            for sizes in self.dealt
        ]
        scores = sum(summed_score_bytes(*each, bucket) for each in self.scored)
        return Exchanged(
            self.token_bytes * bucket.query_len + scores,
            sum(each.gathered for each in layers),
            sum(each.scattered for each in layers),
        )
