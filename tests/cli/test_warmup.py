"""``hpu-duo warmup`` and ``python -m graphs.warmup``: from options to graphs, a manifest, and a sentence."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import Result

from graphs import BatchShape, BucketTable
from graphs.bucket_file import read_table, write_table
from graphs.compile_cache import CompileCache
from graphs.manifest import GraphRecord, read_manifest
from hpu_duo.cli.app import app
from hpu_duo.cli.planning.warmup import ProgressView
from hpu_duo.config.kv_plan import Keep, KVPlan
from hpu_duo.llm import HPUDuoModel
from hpu_duo.startup.warm_up import WarmUp, WarmUpStoppedError

Run = Callable[..., Result]
LIMITS = ("--max-num-seqs", 4, "--max-num-batched-tokens", 64, "--block-size", 16, "--max-model-len", 256)
TABLE = ("csu/q64/s48/u64/l4", "--u/q4/s0/u64/l4", "c-u/q64/s0/u64/l4")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.txt"
    write_table(path, map(BatchShape.parse, TABLE))
    return path


@pytest.fixture
def warmup(hpu_duo: Run, model_dir: Path) -> Run:
    def run(*arguments: object) -> Result:
        return hpu_duo("warmup", "--model", model_dir, *LIMITS, *arguments)

    return run


def test_a_warm_up_says_what_it_will_take_and_what_it_took(warmup: Run, table: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    result = warmup("--buckets", table, "--manifest", manifest)
    assert result.exit_code == 0, result.stderr
    assert "3 (eager): --u x 1  c-u x 1  csu x 1" in result.stderr
    assert "measured before" not in result.stderr
    assert result.stderr.count("computed from sizes") == 2
    assert "3 graphs captured in" in result.stderr
    assert result.stdout == ""
    assert read_manifest(manifest).table().buckets == read_table(table).buckets


def test_a_manifest_is_replayed_and_serves_as_a_table(
    warmup: Run, hpu_duo: Run, model_dir: Path, table: Path, tmp_path: Path
) -> None:
    manifest = tmp_path / "manifest.json"
    assert warmup("--buckets", table, "--manifest", manifest).exit_code == 0
    replayed = warmup("--replay", manifest, "--json")
    assert replayed.exit_code == 0, replayed.stderr
    fields = json.loads(replayed.stdout)
    assert [graph["shape"] for graph in fields["graphs"]] == [
        str(record.shape) for record in read_manifest(manifest).graphs
    ]
    assert fields["num_captured"] == fields["estimate"]["num_measured"] == 3
    assert replayed.stderr.count("as measured before") == 2
    served = hpu_duo(
        *("generate", "--model", model_dir, *LIMITS[2:], "--buckets", manifest),
        *("--prompt", "Once", "--max-new-tokens", 3),
    )
    assert served.exit_code == 0, served.stderr


def test_a_second_run_skips_what_is_in_the_compilers_cache(
    warmup: Run, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cache for a backend that has none: that compilers find their code there is tested elsewhere."""
    monkeypatch.setattr(CompileCache, "of", lambda _: CompileCache.at(tmp_path / "cache"))
    manifest = ("--buckets", table, "--manifest", tmp_path / "manifest.json")
    assert "3 graphs captured in" in warmup(*manifest).stderr
    again = warmup(*manifest)
    assert "3 of 3 graphs, which are in the compiler's cache" in again.stderr
    assert "0 graphs captured, 3 skipped in" in again.stderr
    counted = [
        json.loads(warmup(*manifest, option, "--json").stdout) for option in ("--resume", "--no-resume")
    ]
    assert [(each["num_captured"], each["num_skipped"]) for each in counted] == [(0, 3), (3, 0)]


@pytest.mark.parametrize("spelling", [("--phases", "--u,c-u"), ("--phases=--u,c-u",), ("--phases", "u,cu")])
def test_phases_that_begin_with_dashes_are_no_options(
    warmup: Run, table: Path, spelling: tuple[str, ...]
) -> None:
    result = warmup("--buckets", table, "--dry-run", "--json", *spelling)
    assert result.exit_code == 0, result.stderr
    graphs = json.loads(result.stdout)["estimate"]["graphs"]
    assert [graph["shape"] for graph in graphs] == ["c-u/q64/s0/u64/l4", "--u/q4/s0/u64/l4"]


@pytest.mark.slow
def test_a_table_is_planned_within_the_budget(warmup: Run) -> None:
    result = warmup("--graphs-budget", 6, "--max-graphs", 1, "--dry-run", "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["estimate"]["num_graphs"] == 1
    assert (report["is_dry_run"], report["num_captured"]) == (True, 0)


def test_what_exceeds_its_budget_is_refused_after_the_estimate(
    warmup: Run, table: Path, tmp_path: Path
) -> None:
    manifest = tmp_path / "manifest.json"
    result = warmup("--buckets", table, "--max-graphs", 2, "--max-seconds", 1, "--manifest", manifest)
    assert result.exit_code == 2
    assert "3 (eager)" in result.stderr
    assert "3 graphs, expected at most 2; 0 to 2 s, expected at most 1 s. Nothing has been" in result.stderr
    assert not manifest.exists()


def test_a_warm_up_that_has_to_stop_ends_with_a_sentence(
    warmup: Run, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise WarmUpStoppedError("no more memory")

    monkeypatch.setattr(WarmUp, "_capture", stop)
    result = warmup("--buckets", table)
    assert result.exit_code == 2
    assert result.stderr.endswith("hpu-duo: error: no more memory\n")


def test_another_configuration_is_refused_by_name(warmup: Run, table: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    assert warmup("--buckets", table, "--manifest", manifest).exit_code == 0
    result = warmup("--replay", manifest, "--max-num-batched-tokens", 32)
    assert result.exit_code == 2
    assert "limits.max_num_batched_tokens: expected 64, got 32" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "steps run at their own shapes and nothing is captured: expected --buckets"),
        (("--buckets", "a", "--replay", "b"), "expected one source of the table, got --buckets and --replay"),
        (("--from-shapes", "a"), "expected --graphs-budget too"),
        (("--phases", "x"), "phases 'x': expected a phase such as 'csu'"),
        (("--max-gib", 0), "expected max_gib to be a number above 0, got 0.0"),
        (("--replay", "missing.json"), "cannot read a manifest from missing.json: No such file"),
        (("--replay", "{table}"), "which is not JSON"),
        (
            ("--manifest", "nodir/x"),
            "got nodir/x: nodir does not exist",
        ),
        (("--buckets", "{table}", "--manifest", "{table}"), "which is not JSON"),
        (
            ("--buckets", "{table}", "--phases", "cs"),
            "expected phases that the table has, which are --u, c-u",
        ),
        (("--buckets", "{lacking}"), "the table lacks reachable shapes"),
        (
            ("--buckets", "{table}", "--jobs", 2),
            "expected a compiler with a cache on disk for 2 jobs, got eager",
        ),
        (("--buckets", "{table}", "--compile-only"), "is a mode of hpu devices, got cpu"),
        (("--graphs-budget", 4, "--max-seconds", 0.01), "does not hold the smallest table: one graph takes"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(
    warmup: Run, table: Path, tmp_path: Path, arguments: tuple[object, ...], message: str
) -> None:
    lacking = tmp_path / "lacking.txt"
    write_table(lacking, BucketTable.from_strings(TABLE[1:]))
    filled = [str(each).format(table=table, lacking=lacking) for each in arguments]
    result = warmup(*filled)
    assert result.exit_code == 2, result.stdout
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_the_module_is_the_same_command(
    model_dir: Path, table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", model_dir, *LIMITS, "--buckets", table, "--dry-run", "--json"]
    monkeypatch.setattr(sys, "argv", ["graphs.warmup", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("graphs.warmup", run_name="__main__")
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out)["estimate"]["num_graphs"] == 3


def test_names_and_defaults_are_those_of_generate() -> None:
    commands: Any = typer.main.get_command(app)
    ours, theirs = (
        {option: each.default for each in commands.commands[name].params for option in each.opts}
        for name in ("warmup", "generate")
    )
    shared = ours.keys() & theirs.keys()
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
    assert shared >= {"--model", "--device", "--graphs", "--max-num-seqs", "--num-blocks", "--kv-cache-bytes"}


def test_a_model_and_the_command_agree(warmup: Run, model_dir: Path, table: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    assert warmup("--buckets", table, "--manifest", manifest).exit_code == 0
    model = HPUDuoModel.from_pretrained(
        model_dir, buckets=manifest, max_num_seqs=4, max_num_batched_tokens=64, block_size=16
    )
    assert model.warmup(replay=manifest).num_captured == 3


def test_a_bar_shows_how_far_it_is_on_a_terminal_and_nothing_elsewhere() -> None:
    record = GraphRecord(BatchShape.parse("csu/q64/s48/u64/l4"), 1.25, 4096)
    drawn = {}
    for is_terminal in (True, False):
        screen = StringIO()
        with ProgressView(Console(file=screen, force_terminal=is_terminal, width=120)) as view:
            view.done(1, 3, record)
        drawn[is_terminal] = screen.getvalue()
    assert "1/3" in drawn[True]
    assert "csu/q64/s48/u64/l4 1.2 s" in drawn[True]
    assert drawn[False] == ""


@pytest.mark.parametrize("has_plan", [False, True])
def test_graphs_of_heads_with_a_budget_are_captured(warmup: Run, tmp_path: Path, has_plan: bool) -> None:
    shapes: tuple[str, ...] = TABLE
    given: tuple[object, ...] = ("--kv-plan", tmp_path / "plan.yaml")
    if has_plan:
        KVPlan(((Keep("h2o", 20), Keep("tova", 0.1)), (Keep(), Keep()))).save(tmp_path / "plan.yaml")
    else:
        # Without heads that see all tokens there are no blocks.
        shapes, given = ("csu/q64/s0/u0/l4",), ("--kv-policy", "h2o:recent=0", "--kv-budget", 20)
    (tmp_path / "shapes.txt").write_text("\n".join(shapes))
    result = warmup("--buckets", tmp_path / "shapes.txt", "--json", "--kv-chunk", 32, *given)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["num_captured"] == len(shapes)
