"""Prompts that end at the border of a bucket, instead of a little behind it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphs import BatchShape, BucketTable, Miss, Phase
from hpu_duo.engine.batch import exact_shape
from hpu_duo.engine.step_plan import StepPlan


@dataclass(frozen=True)
class ChunkTrimming:
    """Leaves the last tokens of a prompt to the next step when both steps then cost less.

    A step with a few more query tokens than a bucket has is padded to the next larger bucket. Two choices are
    compared by the cost of their buckets: the step as planned and a decode of all others after it, or the
    step cut to the query tokens of a smaller bucket and the same decodes with the rest of the prompt after
    it. Both compute the same tokens. The shape of the step itself is exact; that of the step after it is an
    estimate, for which no request ends or arrives.

    Only a chunk that ends its prompt is cut, only while no request waits for admission, and at least half of
    it remains, so that a prompt of ``n`` tokens takes at most ``log2(n)`` steps more. The tokens are the same
    whichever steps compute them.

    Args:
        table: the buckets that steps are padded to.
        block_size: tokens of one KV block.
    """

    table: BucketTable
    block_size: int

    def num_postponed(self, plan: StepPlan) -> int:
        """Tokens that the last row of a plan should leave to the next step; 0 where that saves nothing."""
        last = plan.rows[-1]
        # Half of it must not be a decode, which is in a step of another phase.
        if last.num_new_tokens < 2 * plan.decode_len + 1 or not last.wants_token:
            return 0
        shape = exact_shape(plan, self.block_size)
        best, least = 0, self._cost(shape) + self._following_cost(plan, shape, 0)
        if least == float("inf"):
            return 0
        for query_len in self._borders:
            postponed = shape.query_len - query_len
            if not 0 < postponed <= last.num_new_tokens // 2:
                continue
            cost = self._cost(replace(shape, query_len=query_len)) + self._following_cost(
                plan, shape, postponed
            )
            if cost < least:
                best, least = postponed, cost
        return best

    @property
    def _borders(self) -> tuple[int, ...]:
        """Query tokens of the buckets that prompts run in."""
        return tuple(sorted({bucket.query_len for bucket in self.table if bucket.phase.causal}))

    def _cost(self, shape: BatchShape) -> float:
        bucket = self.table.fit(shape)
        return float("inf") if isinstance(bucket, Miss) else self.table.cost(bucket)

    def _following_cost(self, plan: StepPlan, shape: BatchShape, postponed: int) -> float:
        """Cost of the next step: a decode of every other row, and the rest of the last row's prompt."""
        last = plan.rows[-1]
        others = sum(row.wants_token for row in plan.rows[:-1])
        query_len = others + postponed
        if not query_len:
            return 0.0
        is_chunk = postponed > plan.decode_len
        shared = 0
        if last.request.num_blocks:
            shared = max(0, shape.num_shared_blocks - self._num_blocks(last.start))
            shared += self._num_blocks(last.end - postponed) if is_chunk else 0
        has_singles = others > 0 or not is_chunk
        following = BatchShape(
            Phase(is_chunk, is_chunk or shared > 0, has_singles),
            query_len,
            shared,
            shape.num_unique_blocks if has_singles else 0,
            shape.num_logits,
        )
        return self._cost(following)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
