"""Warm-ups of real engines: captured and refused buckets, the manifest, and the steps that follow."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from graphs import BatchShape, BucketTable
from graphs.backends.base import Inputs, Outputs
from graphs.backends.compile import CompileBackend
from graphs.backends.replay import ReplayBackend
from graphs.manifest import GraphRecord, read_manifest
from hpu_duo import HPUDuoModel
from hpu_duo.sampling import SamplingParams
from hpu_duo.startup.warm_up import WarmUpStoppedError
from hpu_duo.startup.warm_up_estimate import WarmUpBudget
from tests.engine.tiny import PATTERN, Tiny, tokens_of
from tests.modeling.families import prompts_of
from tests.tiers import every

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = prompts_of([1, 7, 20, 41], seed=3)
WAYS = ["eager", "compile", "hpu-sim"]

FEW = ("csu/q16/s30/u48/l4", "--u/q4/s0/u48/l4")
SIX = (*FEW, "-su/q4/s24/u48/l4", "c-u/q16/s0/u48/l4", "cs-/q16/s12/u0/l4", "c--/q16/s0/u0/l4")


def load(tiny: Tiny, way: str, **options: Any) -> HPUDuoModel:
    """An engine that pads its steps, by each way to capture them; the compiler only traces."""
    match way:
        case "eager":
            chosen: dict[str, Any] = {"graphs": "eager", "buckets": BucketTable.from_strings(SIX)}
        case "compile":
            backend = CompileBackend("eager", guards=True)
            chosen = {"graphs": backend, "buckets": BucketTable.from_strings(FEW)}
        case _:
            chosen = {"device": "hpu-sim", "buckets": BucketTable.from_strings(SIX)}
    return tiny.load(**{**chosen, "pattern": PATTERN, **options})


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    if request.param == "hpu-sim":
        request.getfixturevalue("simulated_hpu")
        request.getfixturevalue("default_buckets")
    return str(request.param)


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> list[list[list[int]]]:
    return tokens_of(tiny.load(pattern=PATTERN).engine.generate(PROMPTS, GREEDY))


def serves_without_surprise(served: HPUDuoModel, expected: list[list[list[int]]]) -> None:
    """The right tokens, from graphs that were all there before."""
    captures = served.engine.runner.graphs.counters.captures
    assert tokens_of(served.engine.generate(PROMPTS, GREEDY)) == expected
    counters = served.engine.runner.graphs.counters
    assert (counters.captures, counters.misses, counters.late_captures) == (captures, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("way", every(3, ["eager", "hpu-sim", "compile"]), indirect=True)
def test_after_a_replay_nothing_is_captured_and_nothing_misses(
    tiny: Tiny, tmp_path: Path, way: str, expected: list[list[list[int]]]
) -> None:
    path = tmp_path / "manifest.json"
    first = load(tiny, way)
    report = first.warmup(manifest=path)
    table = first.engine.runner.graphs.table
    assert report.num_captured == len(table) == len(report.records)
    manifest = read_manifest(path)
    assert manifest.is_complete
    assert manifest.table().buckets == table.buckets
    serves_without_surprise(first, expected)

    again = load(tiny, way)
    replayed = again.warmup(replay=path)
    assert replayed.num_captured == len(table)
    assert again.engine.runner.graphs.table.buckets == table.buckets
    assert replayed.estimate.num_measured == len(table)
    assert replayed.estimate.graphs[0].high_s == manifest.graphs[0].seconds
    serves_without_surprise(again, expected)


def test_a_manifest_is_a_table_that_a_model_can_be_loaded_with(
    tiny: Tiny, tmp_path: Path, expected: list[list[list[int]]]
) -> None:
    path = tmp_path / "manifest.json"
    table = BucketTable.from_strings(["csu/q16/s20/u20/l4", "--u/q1/s0/u20/l1"])
    first = load(tiny, "eager", num_blocks=20, buckets=table)
    first.warmup(manifest=path)
    # The number of blocks and the longest request, which would follow from free memory, are taken from it.
    again = tiny.load(buckets=path, pattern=PATTERN, max_model_len=None)
    assert again.engine.scheduler.limits == first.engine.scheduler.limits
    again.warmup()
    serves_without_surprise(again, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 3}, "limits.max_num_seqs: expected 4, got 3"),
        ({"num_blocks": 30}, "limits.num_blocks: expected 48, got 30"),
        ({"dtype": "bfloat16"}, "dtype: expected float32, got bfloat16"),
        ({"pattern": None}, r"attention.layer_0: expected .*1 retrieval and 1 .*, got .*2 retrieval and 0"),
        ({"graphs": CompileBackend("eager")}, "backend: expected eager, got compile"),
    ],
)
def test_a_manifest_of_another_configuration_is_refused_by_name(
    tiny: Tiny, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    path = tmp_path / "manifest.json"
    load(tiny, "eager").warmup(manifest=path)
    with pytest.raises(ValueError, match=f"for another configuration.*{message}"):
        tiny.load(**{"pattern": PATTERN, "buckets": path, **options})
    other = load(
        tiny, "eager", **{"buckets": BucketTable((BatchShape.parse("csu/q16/s40/u30/l3"),)), **options}
    )
    with pytest.raises(ValueError, match=message):
        other.warmup(replay=path)
    assert other.engine.runner.graphs.counters.captures == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format": "of somebody else"}', "expected a warm-up manifest in .*, got 'of somebody else'"),
        ("{ torn", "which is not JSON"),
    ],
)
def test_a_model_refuses_a_table_file_that_is_another_kind_of_json(
    tiny: Tiny, tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "table"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        tiny.load(buckets=path)


def test_a_mismatch_that_needs_no_weights_is_told_before_they_are_read(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "manifest.json"
    load(tiny, "eager").warmup(manifest=path)

    def read_weights(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("hpu_duo.llm.assemble", read_weights)
    with pytest.raises(ValueError, match=r"limits\.block_size: expected 8, got 16$"):
        tiny.load(buckets=path, block_size=16)
    with pytest.raises(ValueError, match="backend: expected eager, got compile"):
        tiny.load(buckets=path, graphs="compile")


def test_a_dry_run_estimates_and_does_nothing(tiny: Tiny, tmp_path: Path, way: str) -> None:
    path = tmp_path / "manifest.json"
    served = load(tiny, way)
    runner = served.engine.runner
    table, tables_before = runner.graphs, runner.store.layers[0][0].tensors[0]
    report = served.warmup(
        manifest=path, dry_run=True, table=BucketTable((served.engine.scheduler.limits.largest,))
    )
    assert report.is_dry_run
    assert len(report.estimate.graphs) == 1
    assert (report.num_captured, report.records) == (0, ())
    assert runner.graphs is table
    assert runner.graphs.counters.captures == 0
    assert runner.store.layers[0][0].tensors[0] is tables_before
    assert not path.exists()


@pytest.mark.parametrize(
    "budget", [WarmUpBudget(max_graphs=1), WarmUpBudget(max_seconds=0.1), WarmUpBudget(max_gib=1e-5)]
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_what_may_exceed_the_budget_is_not_begun(
    tiny: Tiny, tmp_path: Path, budget: WarmUpBudget, dry_run: bool
) -> None:
    served = load(tiny, "compile")
    with pytest.raises(ValueError, match="does not fit its budget"):
        served.warmup(budget=budget, manifest=tmp_path / "manifest.json", dry_run=dry_run)
    assert served.engine.runner.graphs.counters.captures == 0
    assert list(tmp_path.iterdir()) == []


def test_a_phase_filter_captures_its_phases_and_leaves_the_others_to_traffic(
    tiny: Tiny, simulated_hpu: object
) -> None:
    served = load(tiny, "hpu-sim")
    graphs = served.engine.runner.graphs
    report = served.warmup(phases="u,c--")
    assert {str(record.shape.phase) for record in report.records} == {"--u", "c--"}
    served.engine.generate([[1] * 20], GREEDY)
    assert graphs.counters.late_captures == 1
    assert [str(bucket.phase) for bucket in graphs.captured_late] == ["cs-"]


def test_a_table_that_lacks_a_reachable_shape_is_refused_by_that_shape(tiny: Tiny) -> None:
    table = BucketTable.from_strings(["--u/q4/s0/u48/l4", "csu/q16/s30/u40/l4"])
    served = load(tiny, "eager", buckets=table)
    with pytest.raises(ValueError, match=r"the table lacks reachable shapes: .*csu/q16/s30/u48/l4"):
        served.warmup()
    assert served.engine.runner.graphs.counters.captures == 0


@pytest.mark.parametrize("on_miss", ["capture", "eager"])
def test_it_is_noted_where_a_miss_is_allowed(tiny: Tiny, on_miss: str) -> None:
    table = BucketTable.from_strings(["--u/q4/s0/u48/l4"])
    report = load(tiny, "eager", buckets=table, on_miss=on_miss).warmup()
    assert report.num_captured == 1
    assert ["lacks reachable shapes" in note for note in report.notes] == [True]


def test_an_interrupted_warm_up_leaves_what_it_measured_and_goes_on_from_there(
    tiny: Tiny, tmp_path: Path, expected: list[list[list[int]]]
) -> None:
    path = tmp_path / "manifest.json"
    served = load(tiny, "eager")
    seen: list[GraphRecord] = []

    def interrupt(done: int, total: int, record: GraphRecord) -> None:
        seen.append(record)
        manifest = read_manifest(path)
        assert sum(each.seconds is not None for each in manifest.graphs) == done
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        served.warmup(interrupt, manifest=path)
    partial = read_manifest(path)
    assert not partial.is_complete
    assert [partial.record_of(record.shape) for record in seen] == seen
    assert len(partial.graphs) == len(served.engine.runner.graphs.table)

    rest = served.warmup(manifest=path)
    assert rest.num_captured == len(partial.graphs) - 2
    assert rest.records[:2] == tuple(seen)
    assert rest.estimate.num_measured == 2
    assert read_manifest(path).is_complete
    serves_without_surprise(served, expected)

    # Another process has to capture all of them, and knows what they cost.
    path.write_text(path.read_text())
    other = load(tiny, "eager").warmup(manifest=path)
    assert (other.num_captured, other.estimate.num_measured) == (len(partial.graphs),) * 2


def test_an_earlier_manifest_of_another_configuration_is_replaced_and_another_file_is_not(
    tiny: Tiny, tmp_path: Path
) -> None:
    path, notes = tmp_path / "manifest.json", tmp_path / "notes.txt"
    load(tiny, "eager").warmup(manifest=path)
    served = load(tiny, "eager", max_num_seqs=2, buckets=BucketTable.from_strings(["csu/q16/s24/u24/l2"]))
    assert served.warmup(manifest=path).estimate.num_measured == 0
    assert read_manifest(path).configuration["limits.max_num_seqs"] == 2
    notes.write_text("mine")
    with pytest.raises(ValueError, match="expected a warm-up manifest in"):
        served.warmup(manifest=notes)
    assert notes.read_text() == "mine"


def test_costs_of_other_software_are_noted_and_not_used(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    load(tiny, "eager").warmup(manifest=path)
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "versions": {**fields["versions"], "torch": "2.7.0"}}))
    report = load(tiny, "eager").warmup(replay=path)
    assert report.estimate.num_measured == 0
    assert "torch 2.7.0 then" in report.notes[0]


def test_time_that_turns_out_too_short_ends_the_warm_up_between_two_graphs(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "manifest.json"
    served = load(tiny, "eager")
    clock = count(step=0.25)
    monkeypatch.setattr("hpu_duo.startup.warm_up.time.perf_counter", lambda: next(clock))
    most = served.warmup(dry_run=True).estimate.high_s
    with pytest.raises(WarmUpStoppedError, match=r"has used up its budget: .* s for \d of 6 graphs"):
        served.warmup(budget=WarmUpBudget(max_seconds=most), manifest=path)
    done = served.engine.runner.graphs.counters.captures
    assert 0 < done < 6
    assert sum(record.seconds is not None for record in read_manifest(path).graphs) == done


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_while_a_graph_is_made_and_is_then_as_it_was(tiny: Tiny, enabled: bool) -> None:
    within: list[bool] = []

    class Watching(ReplayBackend):
        def capture(self, fn: Callable[[Inputs], Outputs], shape: BatchShape) -> Callable[[Inputs], Outputs]:
            within.append(gc.isenabled())
            return super().capture(fn, shape)

    between: list[bool] = []
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        served = load(tiny, "eager", graphs=Watching())
        between.append(gc.isenabled())
        served.warmup(lambda done, total, record: between.append(gc.isenabled()))
    finally:
        (gc.enable if was_enabled else gc.disable)()
    assert within == [False] * len(SIX)
    assert between == [enabled] * (1 + len(SIX))


def test_memory_that_does_not_suffice_is_told_with_the_graph(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = load(tiny, "eager")

    def capture(bucket: BatchShape) -> bool:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(served.engine.runner.warmup, "capture", capture)
    with pytest.raises(WarmUpStoppedError, match=r"out of memory at graph 1 of 6, csu/q16/s30/u48/l4"):
        served.warmup()


def test_a_table_cannot_change_once_something_has_been_captured(tiny: Tiny) -> None:
    served = load(tiny, "eager")
    served.warmup(phases="--u")
    with pytest.raises(ValueError, match="before graphs are captured, got 1 graphs"):
        served.warmup(table=BucketTable((served.engine.scheduler.limits.largest,)))


def test_an_engine_without_a_table_has_nothing_to_warm_up(tiny: Tiny, tmp_path: Path) -> None:
    served = tiny.load()
    assert served.warmup().num_captured == 0
    with pytest.raises(ValueError, match="steps run at their exact shapes here"):
        served.warmup(manifest=tmp_path / "manifest.json")
