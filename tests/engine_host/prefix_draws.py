"""Draws of limits with a prefix cache, and texts that begin alike."""

from __future__ import annotations

from hypothesis import strategies as st

from graphs import StepLimits

STEMS = ([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9], [1, 2, 3, 4, 5, 9, 9, 9])


@st.composite
def prefix_limits(draw: st.DrawFn) -> StepLimits:
    max_num_seqs = draw(st.integers(1, 5))
    uses_blocks, uses_rows = draw(st.sampled_from([(True, True), (True, True), (True, False), (False, True)]))
    return StepLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 12)),
        max_model_len=64,
        block_size=draw(st.sampled_from([1, 2, 3, 4, 4])),
        num_blocks=draw(st.integers(10, 30)),
        decode_len=1,
        max_chunk_rows=draw(st.integers(1, 3)),
        uses_blocks=uses_blocks,
        uses_rows=uses_rows,
        caches_prefixes=True,
        num_snapshots=draw(st.sampled_from([0, 1, 3, 5, 8])) if uses_rows else 0,
        max_block_moves=draw(st.sampled_from([0, 1, 2, 20])) if uses_blocks else 0,
    )
