"""Drafts of another model, ``method="draft_model"``, over its own stores: the tokens are those without."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from graphs.backends.compile import CompileBackend
from hpu_duo import HPUDuoModel
from hpu_duo.lab import sim
from hpu_duo.sampling import SamplingParams
from hpu_duo.startup.warm_up_estimate import configuration_of
from tests.engine.tiny import PATTERN, Tiny, make_tiny, serve, tokens_of
from tests.modeling.families import BASE, prompts_of, save_random
from tests.tiers import EXHAUSTIVE, further

PROMPTS = prompts_of([17, 1, 33, 8], seed=4)
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.7, top_p=0.95, seed=5, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def shallow(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer with the vocabulary of the tiny one."""
    path = tmp_path_factory.mktemp("shallow")
    save_random(LlamaConfig(**{**BASE, "num_hidden_layers": 1}), path)
    for file in tiny.path.glob("tokenizer*"):
        shutil.copy(file, path)
    return path


def load_drafting(tiny: Tiny, model: Path, **options: Any) -> HPUDuoModel:
    config = {
        "method": "draft_model",
        "model": str(model),
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 4, 3]],
    }
    return tiny.load(**{"max_num_batched_tokens": 24, **options}, speculative_config=config)


@pytest.mark.parametrize(
    ("params", "options"),
    [
        *further(
            (SEEDED, {"pattern": PATTERN}),
            (replace(SEEDED, logprobs=2, n=3), {"graphs": "replay", "attention": "sdpa"}),
        ),
        pytest.param(GREEDY, {"num_blocks": 14, "max_model_len": 64}, marks=pytest.mark.slow),
        pytest.param(GREEDY, {"graphs": CompileBackend("eager"), "pattern": PATTERN}, marks=EXHAUSTIVE),
        pytest.param(GREEDY, {"graphs": "compile", "pattern": PATTERN}, marks=EXHAUSTIVE),
        pytest.param(SEEDED, {"tensor_parallel_size": 2, "graphs": "replay"}, marks=EXHAUSTIVE),
        pytest.param(SEEDED, {"enable_prefix_caching": False}, marks=EXHAUSTIVE),
        pytest.param(
            GREEDY, {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": [1]}, marks=pytest.mark.slow
        ),
    ],
)
def test_tokens_are_those_without_drafts(
    tiny: Tiny, shallow: Path, params: SamplingParams, options: dict[str, Any]
) -> None:
    as_eager = {"graphs": "eager", "attention": "reference", "tensor_parallel_size": 1}
    plain = tiny.load(**{**options, **as_eager})
    drafting = load_drafting(tiny, shallow, **options)
    for _ in range(2):  # the second time from the prefix cache
        assert tokens_of(serve(drafting, PROMPTS, params)) == tokens_of(serve(plain, PROMPTS, params))
    stats = drafting.stats()
    assert stats.speculation is not None
    assert 0 < stats.speculation.num_accepted_tokens < stats.speculation.num_draft_tokens
    assert stats.num_graph_misses == 0


@pytest.mark.parametrize("options", [{"num_blocks": 20}, *further({"graphs": "replay"})])
def test_the_served_model_as_its_own_draft_is_always_right(tiny: Tiny, options: dict[str, Any]) -> None:
    """Through prompts in chunks, forks, prefix hits, preemption and blocks that move."""
    drafting = load_drafting(tiny, tiny.path, **options)
    for params in (GREEDY, replace(SEEDED, n=3), SEEDED):
        serve(drafting, PROMPTS, params)
    stats = drafting.stats().speculation
    assert stats is not None
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 200


def test_models_that_cannot_draft_are_refused(tiny: Tiny, shallow: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path, {3: "<other>"})
    with pytest.raises(ValueError, match=r"expected a model with the vocabulary of .*2 tokens differ"):
        load_drafting(tiny, tmp_path)
    save_random(LlamaConfig(**{**BASE, "num_hidden_layers": 1, "max_position_embeddings": 48}), tmp_path)
    for file in tiny.path.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    with pytest.raises(ValueError, match=r"speculative_config: model .*expected max_model_len of at most 48"):
        load_drafting(tiny, tmp_path)
    for options in (
        {"pattern": PATTERN, "sparsity": 1.0},
        {"kv_policy": "h2o", "kv_budget": 8, "max_num_batched_tokens": 96},
    ):
        with pytest.raises(
            ValueError, match="needs a served model with heads that store all tokens, on each rank, got none"
        ):
            load_drafting(tiny, shallow, **options)


def test_both_stores_are_within_the_planned_memory(tiny: Tiny, shallow: Path) -> None:
    """A block of the draft's layer takes half of what a block of two layers takes."""
    alone, beside = tiny.load(kv_cache_bytes=60_000), load_drafting(tiny, shallow, kv_cache_bytes=60_000)
    blocks, fewer = (each.engine.scheduler.limits.num_blocks for each in (alone, beside))
    assert 0.6 * blocks < fewer < 0.7 * blocks
    stats = beside.stats()
    assert beside.engine.runner.store.num_bytes < stats.kv_bytes == stats.resolved.kv_bytes <= 60_000
    found = configuration_of(beside.engine)
    assert found["drafts"] == "llama, 1 layers of 32"
    assert "drafts" not in configuration_of(alone.engine)


@pytest.mark.slow
def test_each_rank_has_all_of_the_draft(tiny: Tiny) -> None:
    """So it is accepted to 100 % if it is the served model."""
    drafting = load_drafting(tiny, tiny.path, tensor_parallel_size=2)
    serve(drafting, PROMPTS, [GREEDY, SEEDED, replace(SEEDED, n=3), GREEDY])
    stats = drafting.stats().speculation
    assert stats is not None
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 60


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.usefixtures("simulated_hpu", "default_buckets")
def test_a_simulated_hpu_compiles_nothing_and_reads_once_a_step(tiny: Tiny, shallow: Path) -> None:
    expected = serve(tiny.load(), PROMPTS, SEEDED)
    drafting = load_drafting(tiny, shallow, device="hpu-sim", num_blocks=30)
    drafting.warmup()
    with sim.watch() as seen:
        assert tokens_of(serve(drafting, PROMPTS, SEEDED)) == tokens_of(expected)
    report = seen.report()
    assert not report.excused
    assert (report.new_graphs, report.new_recipes, report.max_reads) == (0, 0, 1)


def test_generate_takes_the_assistant_that_drafts_and_the_most_drafts(
    tiny: Tiny, shallow: Path, caplog: pytest.LogCaptureFixture
) -> None:
    call: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    expected: Any = tiny.load().generate(PROMPTS[:1], **call)
    drafting = load_drafting(tiny, shallow)
    cases: tuple[tuple[dict[str, Any], int], ...] = (
        ({"assistant_model": shallow, "num_assistant_tokens": 2}, 2),
        ({"assistant_model": HPUDuoModel.from_pretrained(shallow, max_model_len=64)}, 3),
        ({"prompt_lookup_num_tokens": 1}, 1),
    )
    for given, most in cases:
        before = drafting.stats().speculation
        assert expected.equal(drafting.generate(PROMPTS[:1], **call, **given))
        after = drafting.stats().speculation
        assert before is not None
        assert after is not None
        num_drafts = after.num_drafts - before.num_drafts
        assert 0 < after.num_draft_tokens - before.num_draft_tokens <= most * num_drafts
    with pytest.raises(ValueError, match=r"assistant_model: expected .*shallow.* or None, got 'other'"):
        drafting.generate(PROMPTS[:1], assistant_model="other")
    with pytest.raises(ValueError, match="expected assistant_model or prompt_lookup_num_tokens, got both"):
        drafting.generate(PROMPTS[:1], assistant_model=shallow, prompt_lookup_num_tokens=3)
    with pytest.raises(ValueError, match=r"assistant_confidence_threshold: expected None, got 0\.4"):
        drafting.generate(PROMPTS[:1], assistant_model=shallow, assistant_confidence_threshold=0.4)
    with pytest.raises(ValueError, match="max_matching_ngram_size: expected None, got 2"):
        drafting.generate(PROMPTS[:1], prompt_lookup_num_tokens=3, max_matching_ngram_size=2)
    assert expected.equal(tiny.load().generate(PROMPTS[:1], **call, prompt_lookup_num_tokens=3))
    assert "tokens are decoded one by one" in caplog.text
