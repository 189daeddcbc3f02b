"""Prompts that are cut at the borders of buckets give the same tokens."""

from __future__ import annotations

import pytest

from graphs import BatchShape, BucketTable, Phase
from hpu_duo import HeadPattern
from hpu_duo.sampling import SamplingParams
from hpu_duo.startup import device_side
from tests.engine.tiny import PATTERN, Tiny, serve, tokens_of
from tests.modeling.families import prompts_of

WHOLE = Phase(causal=True, shared=True, unique=True)
TABLE = BucketTable(
    tuple(BatchShape(WHOLE, query_len, 64, 64, 8) for query_len in (8, 64, 80)),
    lambda bucket: 1.0 + bucket.query_len,
)


@pytest.mark.parametrize("pattern", [None, PATTERN], ids=["full", "duo"])
def test_trimming_changes_steps_and_no_token(tiny: Tiny, pattern: HeadPattern | None) -> None:
    prompts = prompts_of([9, 30, 27])
    params = [
        SamplingParams(temperature=0, max_tokens=9),
        SamplingParams(temperature=1.2, seed=3, max_tokens=9, n=3),
        SamplingParams(temperature=0.9, seed=4, max_tokens=9),
    ]
    options = {"pattern": pattern, "buckets": TABLE, "num_blocks": 64, "max_num_seqs": 8}
    # With snapshots, prompts of streaming heads end chunks at borders of blocks in both.
    options["enable_prefix_caching"] = False
    plain = tiny.load(**options, max_num_batched_tokens=80)
    trimming = tiny.load(**options, max_num_batched_tokens=80, trim_chunks=True)
    assert tokens_of(serve(trimming, prompts, params)) == tokens_of(serve(plain, prompts, params))
    # The same prompts took other steps, with less padding in all of them.
    before, after = plain.stats(), trimming.stats()
    assert after.steps != before.steps
    assert after.num_padded_tokens < before.num_padded_tokens
    assert after.num_prompt_tokens == before.num_prompt_tokens


def test_trimming_without_buckets_is_refused_before_weights_are_packed(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(device_side, "_pack")
    with pytest.raises(ValueError, match="trim_chunks needs a table of buckets to trim to"):
        tiny.load(trim_chunks=True)
