"""Contexts on the simulated HPU: opened, asked, saved, loaded and forked with nothing new after warm-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphs import BucketTable
from hpu_duo import HeadPattern
from hpu_duo.lab import sim
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import PATTERN, Tiny, tokens_of
from tests.modeling.families import BLOCK, prompts_of
from tests.tiers import further

pytestmark = pytest.mark.usefixtures("simulated_hpu", "default_buckets")

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
DOCUMENT = prompts_of((2 * BLOCK + 3,), seed=9)[0]
QUESTIONS = [[5, 6, 7], [8]]
LIMITS: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "num_blocks": 12,
    "max_model_len": 32,
}


@pytest.mark.parametrize(
    "pattern", [pytest.param(None, marks=pytest.mark.slow), *further(PATTERN)], ids=["full", "duo"]
)
def test_contexts_need_nothing_new_after_warm_up(
    tiny: Tiny, pattern: HeadPattern | None, tmp_path: Path
) -> None:
    options = {**LIMITS, "pattern": pattern}
    cold = tiny.load(device="cpu", enable_prefix_caching=False, **options)
    expected = tokens_of(cold.engine.generate([[*DOCUMENT, *question] for question in QUESTIONS], GREEDY))
    snapshots = {"num_prefix_snapshots": 3} if pattern else {}
    table = BucketTable.from_strings(["csu/q8/s8/u12/l2"])
    served = tiny.load(device="hpu-sim", buckets=table, **options, **snapshots)
    served.warmup()
    with sim.watch() as seen:
        for number in range(2):
            context = served.load_context(tmp_path / "document") if number else served.prefill(DOCUMENT)
            with context:
                if not number:
                    context.save(tmp_path / "document")
                prompts = [context.prompt(question) for question in QUESTIONS]
                done = served.engine.generate(prompts, GREEDY, context=context.hold())
                assert tokens_of(done) == expected
                assert min(sample.num_cached_tokens for [sample] in done) >= 2 * BLOCK
                with context.fork([4] * 5):
                    pass
            prefixes = served.engine.scheduler.allocations.prefixes
            assert prefixes is not None
            prefixes.clear()
    report = seen.report()
    assert (report.new_graphs, report.new_recipes) == (0, 0)
    assert not report.excused
