"""Tables whose steps without prompts have decode rows of several lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import BatchShape, BucketTable, Miss, Phase, StepLimits
from graphs.shape import row_len

LENS = (1, 4, 9)
LIMITS = StepLimits(
    max_num_seqs=8,
    max_num_batched_tokens=128,
    max_model_len=512,
    block_size=16,
    num_blocks=64,
    max_chunk_rows=2,
    decode_len=9,
    draft_lens=LENS,
)
PLAIN = BucketTable.exponential(LIMITS.without_drafts)
TABLE = PLAIN.with_drafts(LENS)


@settings(max_examples=300, deadline=None)
@given(
    phase=st.sampled_from(LIMITS.reachable_phases),
    num_rows=st.integers(1, 8),
    length=st.sampled_from(LENS),
    shared=st.integers(0, 64),
    unique=st.integers(0, 64),
)
def test_every_step_finds_a_bucket_with_rows_that_are_long_enough(
    phase: Phase, num_rows: int, length: int, shared: int, unique: int
) -> None:
    query_len = 100 if phase.causal else num_rows * length
    blocks = min(shared, LIMITS.max_shared_blocks(phase)), unique if phase.unique else 0
    shape = BatchShape(phase, query_len, *blocks, num_rows)
    bucket = TABLE.fit(shape)
    assert not isinstance(bucket, Miss)
    assert bucket.holds(shape)
    assert row_len(bucket, 9, LENS) >= row_len(shape, 9, LENS)
    assert LIMITS.largest.holds(bucket)


def test_plain_steps_run_in_the_buckets_that_they_had() -> None:
    shape = BatchShape(Phase(unique=True), 3, 0, 20, 3)
    assert TABLE.fit(shape) == PLAIN.fit(shape)


def test_lengths_are_added_once() -> None:
    num_decodes = sum(bucket.phase.unique and not bucket.phase.causal for bucket in PLAIN)
    assert len(TABLE) == len(PLAIN) + 2 * num_decodes
    assert TABLE.with_drafts(LENS) == TABLE


def test_rows_of_steps_with_prompts_have_the_first_length() -> None:
    assert LIMITS.row_len(BatchShape(Phase.parse("c-u"), 90, 0, 8, 2)) == 1
    assert LIMITS.row_len(BatchShape(Phase.parse("--u"), 90, 0, 8, 2)) == 9
    assert replace(LIMITS, draft_lens=()).row_len(BatchShape(Phase.parse("c-u"), 90, 0, 8, 2)) == 9


def test_lengths_ascend_up_to_the_longest_row() -> None:
    with pytest.raises(ValueError, match=r"draft_lens that ascend .* decode_len=9, got \(1, 4\)"):
        replace(LIMITS, draft_lens=(1, 4))
