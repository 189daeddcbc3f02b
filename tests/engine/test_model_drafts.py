"""Drafts of the model itself, ``method="duo"``: the tokens are those without, and they stay on the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphs.backends.compile import CompileBackend
from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.engine.step_input import with_sources
from hpu_duo.lab import sim
from hpu_duo.lab.replay import replay
from hpu_duo.sampling import SamplingParams
from hpu_duo.startup.recorded_steps import options_of, read_log
from hpu_duo.startup.warm_up_estimate import GraphCosts
from kernels_ref import Blocks
from tests.engine.tiny import PATTERN, Tiny, serve, text_of, tokens_of
from tests.modeling.families import prompts_of
from tests.tiers import EXHAUSTIVE, further

PROMPTS = prompts_of([17, 1, 33, 8], seed=4)
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.7, top_p=0.95, seed=5, max_tokens=30, ignore_eos=True)
DUO = {
    "method": "duo",
    "num_speculative_tokens": 3,
    "draft_sink": 2,
    "draft_recent": 6,
    # Drafts of text would take the place of the model's.
    "suffix_decoding_min_token_prob": 1.0,
    "num_speculative_tokens_per_batch_size": [[1, 4, 3]],
}


RANKED = HeadPattern(np.array([[0.9, 0.4], [0.7, 0.8]], np.float32), sink=2, recent=6)
SPARSER: dict[str, Any] = {"pattern": RANKED, "sparsity": 0.25}
"""Three of four heads retrieve, two of them in one layer."""
EVEN = HeadPattern(np.array([[0.9, 0.8], [0.4, 0.3]], np.float32), sink=2, recent=6)


def load_drafting(tiny: Tiny, draft_sparsity: float | None = None, **options: Any) -> HPUDuoModel:
    config = DUO if draft_sparsity is None else {**DUO, "draft_sparsity": draft_sparsity}
    return tiny.load(**{"max_num_batched_tokens": 24, **options}, speculative_config=config)


@pytest.mark.parametrize(
    ("params", "options"),
    [
        *further((SEEDED, {"pattern": PATTERN})),
        (
            replace(SEEDED, logprobs=2, min_p=0.02, n=3, max_tokens=20),
            {"graphs": "replay", "attention": "sdpa"},
        ),
        *further(
            (
                replace(SEEDED, logit_bias={3: 2.0}),
                {"num_blocks": 14, "max_model_len": 64, "pattern": PATTERN},
            )
        ),
        pytest.param(GREEDY, {"graphs": CompileBackend("eager"), "pattern": PATTERN}, marks=pytest.mark.slow),
        pytest.param(GREEDY, {"graphs": "compile", "pattern": PATTERN}, marks=EXHAUSTIVE),
        pytest.param(replace(SEEDED, n=3), {"enable_prefix_caching": False}, marks=EXHAUSTIVE),
        pytest.param(SEEDED, {"tensor_parallel_size": 2, "pattern": PATTERN}, marks=EXHAUSTIVE),
        pytest.param(GREEDY, {"tensor_parallel_size": 2, "graphs": "replay"}, marks=EXHAUSTIVE),
        pytest.param(GREEDY, {"kv_cache_dtype": "int8_per_token_head"}, marks=pytest.mark.slow),
        pytest.param(SEEDED, {"attention_rule": "top_blocks"}, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_without_drafts(tiny: Tiny, params: SamplingParams, options: dict[str, Any]) -> None:
    as_eager = {"graphs": "eager", "tensor_parallel_size": 1, "attention": "reference"}
    plain, drafting = tiny.load(**{**options, **as_eager}), load_drafting(tiny, **options)
    for _ in range(2):  # the second time from the prefix cache
        done, expected = serve(drafting, PROMPTS, params), serve(plain, PROMPTS, params)
        assert tokens_of(done) == tokens_of(expected)
    stats = drafting.stats()
    assert stats.speculation is not None
    assert 0 < stats.speculation.num_accepted_tokens <= stats.speculation.num_draft_tokens
    assert stats.num_output_tokens == plain.stats().num_output_tokens
    assert stats.num_graph_misses == 0


def test_drafts_that_see_everything_are_accepted_if_they_are_sampled_alike(tiny: Tiny) -> None:
    """With a window as long as the text, a draft is what the model samples; the likeliest token is not."""
    config = {**DUO, "draft_recent": 96, "num_speculative_tokens_per_batch_size": [[1, 4, 3]]}
    params, shares, tokens = [GREEDY, SEEDED, replace(SEEDED, top_k=5), GREEDY], [], []
    for method in ("shared", "greedy"):
        given = {**config, "draft_sample_method": method}
        drafting = tiny.load(max_num_batched_tokens=24, speculative_config=given)
        tokens.append(tokens_of(serve(drafting, PROMPTS, params)))
        stats = drafting.stats().speculation
        assert stats is not None
        assert stats.num_draft_tokens > 60
        shares.append(stats.num_accepted_tokens / stats.num_draft_tokens)
    assert tokens[0] == tokens[1]
    # The likeliest token is not what sampled rows always take.
    assert 0.3 < shares[1] < 0.95 < shares[0] == 1


@pytest.mark.parametrize(
    ("params", "options"),
    [
        (SEEDED, {}),
        pytest.param(GREEDY, {"graphs": "replay", "attention": "sdpa"}, marks=pytest.mark.slow),
        pytest.param(replace(SEEDED, n=3), {"graphs": CompileBackend("eager")}, marks=pytest.mark.slow),
        pytest.param(GREEDY, {"graphs": "compile"}, marks=EXHAUSTIVE),
        pytest.param(SEEDED, {"kv_cache_dtype": "int8_per_token_head"}, marks=EXHAUSTIVE),
        pytest.param(SEEDED, {"tensor_parallel_size": 2, "sparsity": 0.0, "pattern": EVEN}, marks=EXHAUSTIVE),
    ],
)
def test_fewer_heads_may_retrieve_in_drafts_than_in_steps(
    tiny: Tiny, params: SamplingParams, options: dict[str, Any]
) -> None:
    """Prompts with a common prefix have shared blocks, which heads that retrieve in drafts read too."""
    prompts, options = [[*PROMPTS[0], *each] for each in PROMPTS], {**SPARSER, **options}
    as_eager = {"graphs": "eager", "tensor_parallel_size": 1, "attention": "reference"}
    plain, drafting = tiny.load(**{**options, **as_eager}), load_drafting(tiny, 0.5, **options)
    kinds = {group.kind for spec in drafting.engine.runner.model.specs for group in spec.groups}
    assert {Blocks(), Blocks(drafts_in_window=True)} <= kinds
    for _ in range(2):
        done, expected = serve(drafting, prompts, params), serve(plain, prompts, params)
        assert tokens_of(done) == tokens_of(expected)
    stats = drafting.stats()
    assert stats.speculation is not None
    assert 0 < stats.speculation.num_accepted_tokens < stats.speculation.num_draft_tokens
    assert stats.num_graph_misses == 0


def test_drafts_in_which_all_heads_retrieve_are_what_is_sampled(tiny: Tiny) -> None:
    """Of prompts with shared and unique blocks; with fewer heads, drafts are accepted less often."""
    prompts = [[*PROMPTS[0], *each] for each in PROMPTS]
    shares, tokens = [], []
    for draft_sparsity in (0.25, 1.0):
        drafting = load_drafting(tiny, draft_sparsity, **SPARSER)
        tokens.append(tokens_of(serve(drafting, prompts, SEEDED)))
        stats = drafting.stats().speculation
        assert stats is not None
        assert stats.num_draft_tokens > 60
        shares.append(stats.num_accepted_tokens / stats.num_draft_tokens)
    assert tokens[0] == tokens[1]
    assert shares[1] < shares[0] == 1


def test_drafts_without_heads_that_retrieve_are_those_without_a_sparsity(tiny: Tiny) -> None:
    counts = []
    for draft_sparsity in (None, 1.0):
        drafting = load_drafting(tiny, draft_sparsity, **SPARSER)
        serve(drafting, PROMPTS, GREEDY)
        stats, drafts = drafting.stats().speculation, drafting.engine.runner.executor.drafts
        assert stats is not None
        assert drafts is not None
        counts.append((stats.num_draft_tokens, stats.num_accepted_tokens, len(drafts.graphs.table)))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "draft_sparsity=0.5 needs a head pattern"),
        ({**SPARSER, "sparsity": 0.75}, "draft_sparsity=0.5 needs sparsity of at most that, got 0.75"),
        ({**SPARSER, "attention_rule": "top_blocks"}, "needs heads without a KV budget, a KV plan or an"),
    ],
)
def test_heads_that_drafts_cannot_tell_apart_are_refused(
    tiny: Tiny, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_drafting(tiny, 0.5, **options)


def test_an_output_ends_where_it_does_without_drafts(tiny: Tiny) -> None:
    """Stop strings and tokens are found within drafts that the host learns behind the step."""
    ((free,),) = serve(tiny.load(), PROMPTS[:1], GREEDY)
    stop = text_of(free.token_ids[9:11])
    drafting = load_drafting(tiny)
    for params in (
        replace(GREEDY, stop=[stop]),
        replace(GREEDY, stop_token_ids=[free.token_ids[12]]),
        replace(GREEDY, max_tokens=7),
    ):
        ((expected,),), ((done,),) = (serve(each, PROMPTS[:1], params) for each in (tiny.load(), drafting))
        assert (done.token_ids, done.text) == (expected.token_ids, expected.text)
        assert done.finish_reason == expected.finish_reason


def test_rows_whose_sampling_depends_on_drafts_take_none_of_the_model(tiny: Tiny) -> None:
    params = [replace(SEEDED, repetition_penalty=1.3), SEEDED]
    drafting = load_drafting(tiny)
    done, expected = (serve(each, PROMPTS[:2], params) for each in (drafting, tiny.load()))
    assert tokens_of(done) == tokens_of(expected)
    serve(drafting, PROMPTS[:1], params[0])
    stats = drafting.stats().speculation
    assert stats is not None
    assert stats.num_steps_without["none proposed"] > 20


def test_heads_whose_stores_drafts_would_change_are_refused(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="method 'duo' drafts over the stores of the model: expected heads"):
        load_drafting(tiny, kv_policy="h2o", kv_budget=8, max_num_batched_tokens=96)


def test_memory_and_warm_up_count_the_graphs_of_drafts(tiny: Tiny) -> None:
    options = {"graphs": "compile", "max_num_batched_tokens": 24}
    of_text = {"num_speculative_tokens": 3}
    plain, drafting = (tiny.load(**options, speculative_config=each) for each in (of_text, DUO))
    reserved = [each.stats().resolved.graph_bytes for each in (plain, drafting)]
    assert reserved[0] < reserved[1] < 1.5 * reserved[0]
    costs = [GraphCosts.of(each.engine) for each in (plain, drafting)]
    table = drafting.engine.runner.table
    extra = [bucket for bucket in table if costs[1].kept_bytes(bucket) > costs[0].kept_bytes(bucket)]
    assert len(extra) == len(drafting.engine.runner.executor.drafts.graphs.table)  # type: ignore[union-attr]
    assert all(costs[1].seconds(each) > costs[0].seconds(each) for each in extra)


def test_text_comes_first(tiny: Tiny) -> None:
    """A prediction is drafted from, and the model drafts where it ends."""
    ((expected,),) = serve(tiny.load(), PROMPTS[:1], SEEDED)
    drafting = load_drafting(tiny)
    params = replace(SEEDED, prediction_token_ids=expected.token_ids)
    ((done,),) = serve(drafting, PROMPTS[:1], params)
    assert done.token_ids == expected.token_ids
    stats = drafting.stats().speculation
    assert stats is not None
    assert stats.num_accepted_tokens == stats.num_draft_tokens


@pytest.mark.parametrize("graphs", ["eager", pytest.param("replay", marks=pytest.mark.slow)])
def test_recorded_steps_are_replayed(tiny: Tiny, tmp_path: Path, graphs: str) -> None:
    served = load_drafting(tiny, graphs=graphs, pattern=PATTERN, record_steps=tmp_path / "steps")
    serve(served, PROMPTS, SEEDED)
    served.engine.step_recorder.close()  # type: ignore[union-attr]
    log = read_log(tmp_path / "steps")
    assert any(step.message.num_drafts for step in log)
    again = HPUDuoModel.from_pretrained(tiny.path, **options_of(log.origin))
    assert replay(again.engine, tiny.path, log).differences == ()


@pytest.mark.parametrize("graphs", ["eager", "replay"])
def test_a_step_takes_the_tokens_that_the_previous_one_sampled(tiny: Tiny, graphs: str) -> None:
    """``token_source`` without drafts: the host's ids are wrong and are not read."""
    served = tiny.load(graphs=graphs)
    executor = served.engine.runner.executor
    seen: list[bool] = []
    execute = executor.launch

    def launch(message: Any) -> Any:
        is_decode = seen and message.bucket.phase.unique and not message.bucket.phase.causal
        if is_decode:
            message = with_sources(message, np.array([0], np.int32))
            place = executor.inputs.layout(message.bucket).slots["token_ids"].offset
            message.ints[place] = (message.ints[place] + 1) % 40
        seen.append(bool(is_decode))
        return execute(message)

    expected = serve(served, PROMPTS[:1], GREEDY)
    executor.launch = launch  # type: ignore[method-assign]
    assert tokens_of(serve(served, PROMPTS[:1], GREEDY)) == tokens_of(expected)
    assert sum(seen) > 20


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.usefixtures("simulated_hpu", "default_buckets")
@pytest.mark.parametrize(
    ("params", "options"),
    [
        (replace(SEEDED, logprobs=2), {"pattern": PATTERN}),
        (GREEDY, {"pattern": PATTERN}),
        (SEEDED, {"pattern": PATTERN}),
        (SEEDED, SPARSER),
    ],
)
def test_a_simulated_hpu_compiles_nothing_and_reads_once_a_step(
    tiny: Tiny, params: SamplingParams, options: dict[str, Any]
) -> None:
    expected = serve(tiny.load(**options), PROMPTS, params)
    sparsity = 0.5 if options is SPARSER else None
    drafting = load_drafting(tiny, sparsity, device="hpu-sim", num_blocks=30, **options)
    drafting.warmup()
    with sim.watch() as seen:
        done = serve(drafting, PROMPTS, params)
    assert tokens_of(done) == tokens_of(expected)
    stats, report = drafting.stats().speculation, seen.report()
    assert stats is not None
    assert stats.num_steps > 10
    assert not report.excused
    assert (report.new_graphs, report.new_recipes, report.max_reads) == (0, 0, 1)
    assert max(step.h2d_copies for step in report.steps) == (1 if params is GREEDY else 2)
