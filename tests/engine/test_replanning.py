"""Tables that are planned again while serving: less padding, the same tokens, within a budget."""

from __future__ import annotations

import time
from typing import Any

import pytest

from graphs import BatchShape, BucketTable, StepLimits
from graphs.planner.replan import Exchange, Replan, ReplanTask
from graphs.table import PlannedPadding, ShapeReservoir
from hpu_duo import HPUDuoModel
from hpu_duo.device.plain import encode
from hpu_duo.engine import replanning
from hpu_duo.engine.replanning import Replanner, decode_task, encode_task
from hpu_duo.planning import GAUDI3, Deployment, Serving, step_cost
from hpu_duo.sampling import SamplingParams
from kernels_ref import PLAIN
from tests.cost.test_capacity import LLAMA_3_8B
from tests.engine.tiny import Tiny
from tests.tiers import EXHAUSTIVE

LIMITS: dict[str, Any] = {
    "attention": "reference",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "block_size": 8,
    "num_blocks": 128,
}
COARSE = BucketTable.from_strings(
    ["csu/q64/s128/u128/l4", "c-u/q64/s0/u128/l4", "-su/q4/s128/u128/l4", "--u/q4/s0/u128/l4"]
)
PROMPTS = [[number] * (3 + number) for number in range(4)]
PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def tokens(served: HPUDuoModel) -> list[list[int]]:
    return [list(sample.token_ids) for (sample,) in served.engine.generate(PROMPTS, PARAMS)]


def replanned(served: HPUDuoModel) -> None:
    """Serve until a plan is carried out."""
    for _ in range(600):
        served.engine.generate(PROMPTS[:1], SamplingParams(max_tokens=2, ignore_eos=True))
        while served.engine.replan_idle():
            pass
        found = served.stats().replanned
        assert found is not None
        if found.num_plans and not found.num_waiting:
            return
        time.sleep(0.2)
    raise AssertionError("no plan was carried out")


@pytest.mark.parametrize(("device", "backend"), [("cpu", "replay"), ("hpu-sim", "auto")])
def test_shifted_traffic_leads_to_a_table_that_pads_less_and_to_the_same_tokens(
    tiny: Tiny, device: str, backend: str, request: pytest.FixtureRequest
) -> None:
    if device == "hpu-sim":
        request.getfixturevalue("simulated_hpu")
    served = tiny.load(device=device, graphs=backend, buckets=COARSE, **LIMITS)
    served.warmup()
    expected = tokens(served)
    served.engine.replan(60.0, first_plan=served.stats().num_steps + 1)
    replanned(served)
    found, graphs = served.stats().replanned, served.engine.runner.graphs
    assert found is not None
    assert found.num_captured > 0
    assert found.padding < found.padding_before
    assert 0 < found.capture_s < found.budget_s
    assert len(graphs.table) == len(COARSE)
    assert graphs.table.buckets != COARSE.buckets
    # The drift warning compares with the current table.
    assert graphs.table.planned_padding == PlannedPadding.by(graphs.table.cost, found.padding)
    captures = graphs.counters.captures
    assert tokens(served) == expected
    after = graphs.counters
    assert (after.captures, after.late_captures, after.misses) == (captures, 0, 0)
    assert set(graphs.captured) == set(graphs.table)


@pytest.mark.parametrize("method", ["suffix", pytest.param("draft_model", marks=EXHAUSTIVE)])
def test_buckets_of_drafts_stay_where_a_table_is_planned_again(tiny: Tiny, method: str) -> None:
    config: dict[str, Any] = {"num_speculative_tokens": 3, "method": method}
    if method == "draft_model":
        config["model"] = str(tiny.path)
    served = tiny.load(graphs="replay", buckets=COARSE, speculative_config=config, **LIMITS)
    served.warmup()
    expected, limits = tokens(served), served.engine.scheduler.limits
    graphs = served.engine.runner.graphs
    longer = {bucket for bucket in graphs.table if limits.row_len(bucket) > 1}
    served.engine.replan(60.0, first_plan=served.stats().num_steps + 1)
    replanned(served)
    assert (found := served.stats().replanned) is not None
    assert found.num_captured > 0
    assert {bucket for bucket in graphs.table if limits.row_len(bucket) > 1} == longer != set()
    assert tokens(served) == expected
    assert graphs.counters.misses == 0


def test_steps_at_their_exact_shapes_have_no_table_to_plan_again(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="replan needs a table of buckets to exchange"):
        tiny.load(graphs="eager", replan=1.0)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "soon"])
def test_a_budget_that_is_no_number_of_seconds_is_refused(tiny: Tiny, value: Any) -> None:
    with pytest.raises(ValueError, match="expected replan to be"):
        tiny.load(graphs="replay", replan=value)


def _limits() -> StepLimits:
    sizes = {name: LIMITS[name] for name in LIMITS if name != "attention"}
    return StepLimits(**sizes, max_chunk_rows=1, decode_len=1)


class Captured:
    """A runner whose captures take a second of a clock."""

    def __init__(self) -> None:
        self.table, self.now = COARSE, 0.0
        self.done: list[BatchShape] = []

    def exchange(self, added: BatchShape, dropped: BatchShape, padding: float | None = None) -> None:
        self.done.append(added)
        self.now += 1.0


class Planned:
    """A plan that is there at once."""

    def __init__(self, *_: object) -> None:
        pass

    def result(self) -> Replan:
        shapes = [BatchShape.parse(f"--u/q1/s0/u{number}/l1") for number in range(1, 9)]
        return Replan(1.0, tuple(Exchange(shape, COARSE.buckets[0], 0.5) for shape in shapes))


def planned(monkeypatch: pytest.MonkeyPatch, budget_s: float) -> tuple[Replanner, Captured]:
    monkeypatch.setattr(replanning, "_Planning", Planned)
    runner, sample = Captured(), ShapeReservoir()
    sample.add(COARSE.buckets[0])
    made = Replanner(runner, _limits(), sample, budget_s, first_plan=1, clock=lambda: runner.now)
    for _ in range(2):
        made.advance()
    assert made.stats.num_waiting == 8
    return made, runner


def test_captures_end_with_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    made, runner = planned(monkeypatch, 3.5)
    while made.can_go_on:
        made.advance(is_idle=True)
    assert len(runner.done) == 3
    made.advance(is_idle=True)
    assert (made.stats.num_captured, made.stats.capture_s) == (3, 3.0)


def test_captures_between_steps_take_at_most_a_tenth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made, runner = planned(monkeypatch, 100.0)
    for _ in range(50):
        made.advance()
        runner.now += 0.5
    assert len(runner.done) == 3  # 28 s, of which captures took 3


def test_a_capture_that_fails_leaves_the_table_and_ends_the_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    made, runner = planned(monkeypatch, 100.0)
    monkeypatch.setattr(runner, "exchange", lambda *_: 1 / 0)
    made.advance()
    assert (made.stats.num_captured, made.stats.num_waiting) == (0, 0)
    assert not made.can_go_on


def test_a_task_for_another_process_reads_as_it_was_written() -> None:
    work = Deployment(LLAMA_3_8B, Serving(GAUDI3), 0.5, PLAIN, 8192)
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 4096, "block_size": 64}
    limits = StepLimits(**sizes, num_blocks=200, max_chunk_rows=1, decode_len=1)
    table = BucketTable.from_strings(["csu/q256/s200/u200/l8", "--u/q8/s0/u200/l8"], step_cost(work))
    task = ReplanTask(table, limits, {BatchShape.parse("--u/q2/s0/u7/l2"): 5})
    assert decode_task(bytes(encode_task(task))) == task
    with pytest.raises(ValueError, match="expected a ReplanTask, got int"):
        decode_task(bytes(encode(("graphs", bytes(encode(3))))))
