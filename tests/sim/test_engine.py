"""The real engine on the simulated HPU: the tokens of the CPU, and nothing that a device could not do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig

from graphs import BatchShape
from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.lab import sim
from hpu_duo.lab.sim import HpuRuleViolation
from hpu_duo.request import FinishReason
from hpu_duo.sampling import SamplingParams, StructuredOutputs, static_routes
from hpu_duo.startup import tables
from tests.engine.tiny import PATTERN, Tiny, make_tiny, tokens_of
from tests.modeling.families import (
    BASE,
    BLOCK,
    FAMILIES,
    IS_5,
    LENGTH_DEPENDENT,
    VOCAB,
    Zoo,
    greedy,
    prompts_of,
    save_random,
)
from tests.sim.workload import COARSE, LIMITS, Workload
from tests.tiers import crossed, further

pytestmark = pytest.mark.usefixtures("simulated_hpu", "default_buckets")

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "max_model_len": 24,
}


@pytest.mark.slow
def test_120_requests_get_the_tokens_of_the_cpu_without_anything_new_after_warm_up(
    tiny: Tiny, tmp_path: Path
) -> None:
    work = Workload.random(120, seed=2)
    assert len({len(prompt) for prompt in work.prompts}) > 20
    assert work.num_alike() > 40
    recording = tmp_path / "shapes.jsonl"
    # A card computes short prefixes again where a CPU waits: steps are alike without prefixes only.
    options: dict[str, Any] = {**LIMITS, "pattern": PATTERN, "enable_prefix_caching": False}
    served = tiny.load(device="hpu-sim", record_shapes=recording, **options)
    runner = served.engine.runner
    assert runner.device == torch.device("hpu", 0)
    assert {each.device for layer in runner.store.layers for units in layer for each in units.tensors} == {
        runner.device
    }
    assert {parameter.device for parameter in runner.model.model.parameters()} == {runner.device}
    assert served.warmup().num_captured == len(runner.graphs.table)

    with sim.watch() as seen:
        done = work.run(served)
    report, stats = seen.report(), served.stats()
    assert (report.new_graphs, report.new_recipes) == (0, 0)
    assert (runner.graphs.counters.misses, runner.graphs.counters.late_captures) == (0, 0)
    assert not report.excused
    assert len(report.steps) == stats.num_steps == sum(report.graph_runs.values())
    assert report.between == sim.StepTraffic()

    shapes = [BatchShape.parse(json.loads(line)["shape"]) for line in recording.read_text().splitlines()]
    _check_traffic(served, report.steps, shapes)
    # Samples of one prompt read its blocks together, in steps of decodes alone and beside prompts. Without
    # a prefix cache, other requests that begin alike hold blocks of their own.
    for phase in ("-su", "csu"):
        assert sum(shape.num_shared_blocks > 0 for shape in shapes if str(shape.phase) == phase) > 10
    assert max(shape.num_shared_blocks for shape in shapes if not shape.phase.causal) > 1
    assert stats.num_preemptions >= 10
    reasons = [reason for _, reason in done.values()]
    assert 10 < reasons.count(FinishReason.ABORT) < len(reasons) // 3

    on_cpu = tiny.load(device="cpu", buckets=runner.graphs.table, **options)
    assert work.run(on_cpu) == done
    assert on_cpu.stats().steps == stats.steps
    assert on_cpu.stats().num_preemptions == stats.num_preemptions


@pytest.mark.parametrize("pattern", [*further(None), PATTERN], ids=["full", "duo"])
def test_cached_prefixes_need_nothing_new_after_warm_up(tiny: Tiny, pattern: HeadPattern | None) -> None:
    work = Workload.random(20, seed=4)
    options = {**LIMITS, "pattern": pattern, "buckets": COARSE}
    snapshots = {"num_prefix_snapshots": 5} if pattern else {}  # more than the share of so few blocks
    served = tiny.load(device="hpu-sim", **options, **snapshots)
    served.warmup()
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    text = list(prompts_of((2 * BLOCK + 2,))[0])
    with sim.watch() as seen:
        done = work.run(served)
        for _ in range(2):  # the second turn continues in the middle of a block
            [[answer]] = served.engine.generate([text], params)
            text = [*text, *answer.token_ids, 1]
    report, prefixes = seen.report(), served.stats().prefixes
    assert (report.new_graphs, report.new_recipes) == (0, 0)
    assert not report.excused
    assert prefixes is not None
    assert answer.num_cached_tokens == 2 * BLOCK + (4 if pattern else 0)
    # On a card short prefixes are computed again where they would have to be waited for, and short prompts
    # leave no snapshots.
    assert prefixes.num_hit_tokens > (0 if pattern else 50 + 2 * BLOCK)
    assert prefixes.num_evicted_blocks > 10
    assert work.run(tiny.load(device="cpu", enable_prefix_caching=False, **options)) == done


def _check_traffic(
    served: HPUDuoModel, steps: Sequence[sim.StepTraffic], shapes: Sequence[BatchShape]
) -> None:
    """Compare the copies of each step with the bound of its bucket."""
    num_rows, runner = LIMITS["max_num_seqs"], served.engine.runner
    longest = max(route.num_seen for route in static_routes(num_rows, VOCAB, LIMITS["max_model_len"]))
    sampling = 4 * (9 * num_rows + 3 * 2 * longest)
    for step, shape in zip(steps, shapes, strict=True):
        bucket = runner.graphs.table.fit(shape)
        assert isinstance(bucket, BatchShape)
        assert 0 <= step.h2d_bytes - runner.executor.inputs.layout(bucket).num_bytes <= sampling
        assert step.h2d_copies <= 2
        assert step.d2h_reads <= 1
        assert step.d2h_bytes <= 4 * bucket.num_logits * (3 + 2 * 8)
    assert max(step.d2h_reads for step in steps) == 1


@pytest.fixture(scope="module")
def warmed(simulated_hpu: sim.SimulatedHpu, tiny: Tiny) -> HPUDuoModel:
    """A warmed-up engine with the default buckets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "planned_table", tables.default_table)
        served = tiny.load(device="hpu-sim", pattern=PATTERN, buckets=COARSE, **LIMITS)
    served.warmup()
    return served


def _copies(served: HPUDuoModel, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[int]:
    """Host-to-device copies of each step."""
    with sim.watch() as seen:
        served.engine.generate(prompts, params)
    return [step.h2d_copies for step in seen.report().steps]


COMMON: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}
COPIES = {
    "plain greedy": (SamplingParams(temperature=0, **COMMON), 1),
    "sampled": (SamplingParams(temperature=1.1, seed=3, **COMMON), 2),
    "filtered": (SamplingParams(temperature=1.1, top_k=5, top_p=0.9, min_p=0.01, **COMMON), 2),
    "penalised": (SamplingParams(temperature=0, repetition_penalty=1.2, **COMMON), 2),
    "biased": (SamplingParams(temperature=0, logit_bias={3: 1.0}, **COMMON), 2),
    "log-probabilities": (SamplingParams(temperature=0, logprobs=3, **COMMON), 2),
    "everything": (
        SamplingParams(
            temperature=0.8, top_p=0.9, presence_penalty=0.5, logit_bias={3: 1.0}, logprobs=8, **COMMON
        ),
        2,
    ),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_step_copies_once_and_once_more_to_sample(warmed: HPUDuoModel, name: str) -> None:
    params, num_copies = COPIES[name]
    assert _copies(warmed, prompts_of([5]), [params]) == [num_copies] * 6
    assert _copies(warmed, prompts_of([5, 7]), [params, COPIES["plain greedy"][0]]) == [num_copies] * 6


def test_grammars_cost_one_more_copy_and_nothing_new_after_warm_up(tmp_path: Path) -> None:
    ending = make_tiny(tmp_path, {2: "<eos>"})
    GenerationConfig(pad_token_id=0, eos_token_id=2).save_pretrained(tmp_path)
    prompts = prompts_of([5, 12, 30], seed=4)
    wanted = StructuredOutputs(regex="[A-Z]{2}-[0-9]{1,4}( [a-z]+)?!")
    options = {"pattern": PATTERN, "buckets": COARSE, **LIMITS}
    served = ending.load(device="hpu-sim", **options)
    served.warmup()
    on_cpu = ending.load(device="cpu", **options)
    for temperature in (0.0, 1.2):
        common: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_tokens": 12}
        params = [
            SamplingParams(structured_outputs=wanted, **common),
            SamplingParams(structured_outputs=wanted, logprobs=2, repetition_penalty=1.3, n=2, **common),
            SamplingParams(**common),
        ]
        with sim.watch() as seen:
            done = served.engine.generate(prompts, params)
        report = seen.report()
        assert not report.excused
        assert (report.new_graphs, report.new_recipes) == (0, 0)
        assert report.max_reads == 1
        assert max(step.h2d_copies for step in report.steps) == 3
        assert tokens_of(done) == tokens_of(on_cpu.engine.generate(prompts, params))


@pytest.mark.parametrize("name", ["plain greedy", "penalised"])
def test_forks_and_rows_that_move_add_no_copy(
    warmed: HPUDuoModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, num_copies = COPIES[name]
    forking = replace(params, n=3)
    short = replace(params, max_tokens=2)
    carried_out = 0
    store = warmed.engine.runner.store
    carry_out = store.carry_out

    def counted(blocks: torch.Tensor, rows: torch.Tensor) -> None:
        nonlocal carried_out
        carried_out += 1
        carry_out(blocks, rows)

    monkeypatch.setattr(store, "carry_out", counted)
    # Samples fork behind the prompt; the last row takes the place of the first one, which ends.
    copies = _copies(warmed, prompts_of([5, 13]), [short, forking])
    assert set(copies) == {num_copies}
    assert carried_out >= 2


@pytest.mark.parametrize("pattern", [None, PATTERN], ids=["full", "duo"])
def test_logprobs_come_with_the_one_read_of_a_step(tiny: Tiny, pattern: HeadPattern | None) -> None:
    prompts = prompts_of([5, 12], seed=4)
    params = [
        SamplingParams(temperature=0, max_tokens=4, logprobs=3),
        SamplingParams(temperature=1.3, seed=5, max_tokens=4, logprobs=0),
    ]
    # With a cache a CPU cuts prompts at borders of blocks where a card does not.
    options = {"pattern": pattern, "enable_prefix_caching": False}
    served = tiny.load(device="hpu-sim", **options)
    with sim.watch() as seen:
        done = served.engine.generate(prompts, params)
    assert seen.report().max_reads == 1
    on_cpu = tiny.load(device="cpu", buckets=served.engine.runner.graphs.table, **options)
    for (got,), (expected,) in zip(done, on_cpu.engine.generate(prompts, params)):
        assert got.token_ids == expected.token_ids
        assert got.logprobs == expected.logprobs


def test_rows_of_the_host_cost_one_more_read_and_nothing_new_after_warm_up(tiny: Tiny) -> None:
    kwargs: dict[str, Any] = {"max_new_tokens": 6, "no_repeat_ngram_size": 2, "output_scores": True}
    served = tiny.load(device="hpu-sim", **LIMITS)
    served.warmup()
    prompts = prompts_of([11, 3, 20], seed=4)
    with sim.watch() as seen:
        done = served.generate(prompts, return_dict_in_generate=True, **kwargs)
    report = seen.report()
    assert report.max_reads == 2
    assert not report.excused
    assert (report.new_graphs, report.new_recipes) == (0, 0)
    expected = tiny.load().generate(prompts, return_dict_in_generate=True, **kwargs)
    assert done.sequences.tolist() == expected.sequences.tolist()
    for mine, theirs in zip(done.scores, expected.scores, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_another_capture_backend_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="captures steps in its own way, got graphs='compile'"):
        tiny.load(device="hpu-sim", graphs="compile")


def test_the_cpu_attention_kernels_are_refused(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="'sdpa' is torch's CPU kernel"):
        tiny.load(device="hpu-sim", attention="sdpa")


@pytest.mark.parametrize(
    ("of_texts", "rope"),
    crossed(
        {"short": ([5, 37], 48), "long": ([70, 75], 80)},
        {str(rope["rope_type"]): rope for rope in LENGTH_DEPENDENT},
    ),
)
def test_frequencies_that_depend_on_the_length_are_those_of_transformers(
    tmp_path: Path, rope: dict[str, Any], of_texts: tuple[list[int], int]
) -> None:
    lengths, max_model_len = of_texts
    key = "rope_parameters" if IS_5 else "rope_scaling"
    model = save_random(LlamaConfig(**{**BASE, "num_hidden_layers": 2, key: rope}), tmp_path)
    prompts, params = prompts_of(lengths, seed=6), SamplingParams(temperature=0, max_tokens=5)
    limits = {**SMALL, "max_model_len": max_model_len}
    served = HPUDuoModel.from_pretrained(tmp_path, device="hpu-sim", **limits)
    with sim.watch() as seen:
        done = served.engine.generate(prompts, params)
    assert not seen.report().excused
    assert seen.report().max_reads == 1
    assert [samples for (samples,) in tokens_of(done)] == [greedy(model, prompt, 5) for prompt in prompts]


EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss")


@pytest.mark.skipif(not IS_5, reason="before 5, transformers needs shapes that depend on the routing")
@pytest.mark.parametrize(("family", "num_experts"), crossed(EXPERTS, [4, 16]))
def test_experts_are_routed_on_the_device_like_on_the_cpu_without_an_exception(
    family: str, num_experts: int, tmp_path: Path
) -> None:
    config = FAMILIES[family]()
    setattr(config, "num_experts" if family == "qwen3_moe" else "num_local_experts", num_experts)
    config.num_hidden_layers = 2
    config.layer_types = config.layer_types[:2] if family == "gpt_oss" else None
    save_random(config, tmp_path, seed=1)
    prompts, params = prompts_of([5, 11], seed=6), SamplingParams(temperature=0, max_tokens=3)
    served = HPUDuoModel.from_pretrained(tmp_path, device="hpu-sim", **SMALL)
    with sim.watch() as seen:
        done = served.engine.generate(prompts, params)
    assert seen.report().max_reads == 1
    assert not seen.report().excused
    table = served.engine.runner.graphs.table
    on_cpu = HPUDuoModel.from_pretrained(
        tmp_path, device="cpu", attention="reference", buckets=table, **SMALL
    )
    assert tokens_of(done) == tokens_of(on_cpu.engine.generate(prompts, params))


@pytest.mark.skipif(IS_5, reason="from 5 on, experts have static shapes")
def test_routing_with_dynamic_shapes_is_refused(zoo: Zoo) -> None:
    _, path = zoo.load("mixtral")
    served = HPUDuoModel.from_pretrained(path, device="hpu-sim", **SMALL)
    with pytest.raises(HpuRuleViolation, match="transformers"):
        served.engine.generate(prompts_of([5]), SamplingParams(temperature=0, max_tokens=3))
