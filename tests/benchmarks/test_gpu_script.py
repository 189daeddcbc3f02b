"""The GPU benchmark script on toy sizes: it runs anywhere, continues, and shows nothing unmeasured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_suite import kernels, rivals
from benchmarks.gpu_suite.budget_cases import FULL_DECODE, PLAIN_DECODE, PORTABLE, WEIGHED_DECODE
from benchmarks.gpu_suite.clock import Clock
from benchmarks.gpu_suite.kernel_cases import REFERENCE, Case, Weighed
from benchmarks.gpu_suite.kernels import measure_case
from benchmarks.gpu_suite.memory import DUO, FULL
from benchmarks.gpu_suite.report import best_ratio, time_of, write_report
from benchmarks.gpu_suite.results import Key, Point, Results
from benchmarks.gpu_suite.shapes import LLAMA_3_8B, REAL, TOY
from hpu_duo.device.runtime import CpuRuntime
from kernels_ref import Partial
from tests.triton_interpreter import replacing_once

TOY_RUN = ("--toy", "--device", "cpu", "--rounds", "1", "--date", "2001-02-03")


@pytest.fixture(scope="module", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    with replacing_once() if find_spec("triton") else nullcontext():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a whole toy run."""
    out = tmp_path_factory.mktemp("gpu")
    gpu.main([*TOY_RUN, "--out", str(out)])
    return out


def stored(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "gpu-toy-2001-02-03.json").read_text())["points"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_toy_run_has_points_in_every_section_and_reports_them(folder: Path) -> None:
    points = stored(folder)
    assert {point["key"][0] for point in points} == set(gpu.SECTIONS)
    text = (folder / "gpu-toy-2001-02-03.md").read_text()
    assert "Toy sizes" in text
    for point in points:
        if point["key"][0] in ("kernels", "budget"):
            assert point["key"][1] in text
    for model in TOY.models:
        assert f"### {model.name}, {model.retrieval_share:.0%} retrieval heads" in text


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_implementation_that_can_run_here_gives_the_reference_s_result(folder: Path) -> None:
    for point in stored(folder):
        assert "wrong result" not in point["note"], point
        if point["key"][0] in ("kernels", "budget") and not point["values"]:
            # Triton is missing only where neither a GPU nor its interpreter is there.
            # Older torch has fused attention for grouped heads on GPUs only.
            reasons = ("CUDA", "GPU", "not installed", "No available kernel")
            assert any(reason in point["note"] for reason in reasons), point
        if point["key"][0] in ("decode", "prefill"):
            assert point["values"], point


@pytest.mark.slow
@pytest.mark.exhaustive
def test_decodes_with_a_budget_stand_beside_full_attention(folder: Path) -> None:
    points = {(p["key"][1], p["key"][2]): p for p in stored(folder) if p["key"][0] == "budget"}
    text = (folder / "gpu-toy-2001-02-03.md").read_text()
    for model in TOY.models:
        name = f"{model.name}, {TOY.budget_rows[0]} rows at {TOY.budget_context}, {TOY.budget_slots} slots"
        systems = (FULL_DECODE, WEIGHED_DECODE, PLAIN_DECODE)
        bytes_read = [points[name, f"{system}{PORTABLE}"]["values"]["bytes"] for system in systems]
        assert bytes_read[0] * TOY.budget_slots == bytes_read[1] * TOY.budget_context
        assert bytes_read[1] == bytes_read[2]
        for system in systems:
            assert f"| {system}{PORTABLE} |" in text.split(f"### {name}")[1]


def test_weights_that_differ_are_a_wrong_result(tmp_path: Path) -> None:
    results = Results(tmp_path / "points.json", {})
    good, bad = (Weighed(_partial(1.0), torch.full((1, 1, 4), value)) for value in (0.25, 0.75))
    case = Case("case", {"portable": lambda: good, "same": lambda: good, "other": lambda: bad}, 1, 1)
    measure_case(case, Clock(torch.device("cpu"), rounds=1, warm_up=0), results, "budget")
    assert [point.is_measured for point in results.of("budget")] == [True, True, False]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_figures_are_drawn_of_both_curves(folder: Path) -> None:
    for section in ("decode", "prefill"):
        path = folder / f"gpu-toy-2001-02-03-{section}.png"
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_second_run_keeps_what_has_been_measured(folder: Path) -> None:
    before = stored(folder)
    gpu.main([*TOY_RUN, "--out", str(folder), "--no-figures"])
    assert stored(folder) == before


def test_a_spent_budget_begins_no_point_and_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*TOY_RUN, "--out", str(tmp_path), "--only", "machine", "decode", "--no-figures"]
    gpu.main([*command, "--seconds", "0"])
    assert {point["key"][0] for point in stored(tmp_path)} == {"machine"}
    assert "the same command goes on" in capsys.readouterr().out


@pytest.mark.slow
def test_caches_that_do_not_fit_are_noted_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuRuntime, "free_bytes", lambda self: 100_000)
    gpu.main([*TOY_RUN, "--out", str(tmp_path), "--only", "decode", "--no-figures"])
    points = {tuple(point["key"][1:]): point for point in stored(tmp_path)}
    assert len(points) == len(TOY.models) * len(TOY.decode_contexts) * 2
    small, large = (points[f"{TOY.models[0].name} at {context}", FULL] for context in TOY.decode_contexts)
    assert small["values"]
    assert "only 100000 bytes are free" in large["note"]


def test_real_sizes_on_a_cpu_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected --toy together with --device cpu"):
        gpu.main(["--device", "cpu", "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_cuda_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected a CUDA device, got none for 'cuda'"):
        gpu.main(["--out", str(tmp_path)])


def test_results_of_other_hardware_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "points.json"
    Results(path, {"device": "A", "torch": "1"}).add(
        Point(Key("machine", "copy", "torch"), {"median_s": 1.0})
    )
    with pytest.raises(ValueError, match="measured with device='A', and this is 'B'"):
        Results(path, {"device": "B", "torch": "1"})
    assert Results(path, {"device": "A", "torch": "1"}).is_measured(Key("machine", "copy", "torch"))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_eager_and_captured_steps_are_not_mixed_in_one_file(folder: Path) -> None:
    with pytest.raises(SystemExit, match="measured with graphs='eager', and this is 'compile'"):
        gpu.main([*TOY_RUN, "--out", str(folder), "--graphs", "compile", "--no-figures"])


@pytest.mark.parametrize("text", ["", "[]", '{"points": []}'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "points.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="expected results of this script"):
        Results(path, {})


def _partial(value: float) -> Partial:
    return Partial(torch.full((1, 1, 1, 8), value), torch.zeros(1, 1, 1), torch.ones(1, 1, 1))


def test_a_wrong_result_is_noted_and_not_timed(tmp_path: Path) -> None:
    results = Results(tmp_path / "points.json", {})
    case = Case("case", {REFERENCE: lambda: _partial(1.0), "other": lambda: _partial(1.5)}, 1, 1)
    measure_case(case, Clock(torch.device("cpu"), rounds=1, warm_up=0), results)
    good, bad = results.of("kernels")
    assert good.is_measured
    assert not bad.is_measured
    assert "off by 0.5" in bad.note


def test_nan_is_a_wrong_result(tmp_path: Path) -> None:
    results = Results(tmp_path / "points.json", {})
    case = Case("case", {REFERENCE: lambda: _partial(1.0), "other": lambda: _partial(torch.nan)}, 1, 1)
    measure_case(case, Clock(torch.device("cpu"), rounds=1, warm_up=0), results)
    assert not results.of("kernels")[1].is_measured


def test_what_an_implementation_cannot_do_is_noted_in_its_own_words(tmp_path: Path) -> None:
    def refuse() -> Partial:
        raise RuntimeError("No available kernel.\nand a long story")

    results = Results(tmp_path / "points.json", {})
    case = Case("case", {REFERENCE: lambda: _partial(1.0), "other": refuse}, 1, 1)
    measure_case(case, Clock(torch.device("cpu"), rounds=1, warm_up=0), results)
    assert results.of("kernels")[1].note == "No available kernel."


def test_what_failed_is_tried_again_and_what_was_measured_is_kept(tmp_path: Path) -> None:
    calls: list[str] = []

    def work(name: str, problem: Exception | None = None) -> Partial:
        calls.append(name)
        if problem is not None:
            raise problem
        return _partial(1.0)

    clock = Clock(torch.device("cpu"), rounds=1, warm_up=0)
    for problem in (RuntimeError(), None):
        results = Results(tmp_path / "points.json", {})
        ours = {REFERENCE: lambda: work(REFERENCE), "other": partial(work, "other", problem)}
        measure_case(Case("case", ours, 1, 1), clock, results)
        other = results.get(Key("kernels", "case", "other"))
        assert other is not None
        assert other.note == ("" if problem is None else "RuntimeError")
    calls.clear()
    measure_case(Case("case", ours, 1, 1), clock, Results(tmp_path / "points.json", {}))
    assert not calls


def test_a_rival_that_cannot_be_imported_or_raises_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    assert rivals._imported("flash_attn") == "flash_attn cannot be imported: undefined symbol"

    def refuse() -> torch.Tensor:
        raise ValueError("head_dim 48 is not supported")

    monkeypatch.setattr(kernels, "rivals", lambda dense: {"rival": refuse})
    dense = rivals.Dense(torch.ones(1, 1, 1, 8), torch.ones(1, 1, 1, 8), torch.ones(1, 1, 1, 8), False)
    results = Results(tmp_path / "points.json", {})
    case = Case("case", {REFERENCE: lambda: _partial(1.0)}, 1, 1, dense=dense)
    measure_case(case, Clock(torch.device("cpu"), rounds=1, warm_up=0), results)
    assert results.of("kernels")[1].note == "head_dim 48 is not supported"


@pytest.mark.slow
def test_a_figure_that_fails_does_not_cost_the_report(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no fonts")

    (tmp_path / "gpu-toy-2001-02-03.json").write_bytes((folder / "gpu-toy-2001-02-03.json").read_bytes())
    monkeypatch.setattr("benchmarks.gpu_suite.figures.draw_figures", fail)
    with pytest.raises(RuntimeError, match="no fonts"):
        gpu.main([*TOY_RUN, "--out", str(tmp_path)])
    assert "## Kernels" in (tmp_path / "gpu-toy-2001-02-03.md").read_text()


def test_the_report_compares_pairs_that_were_measured_and_says_so_of_the_others(tmp_path: Path) -> None:
    results = Results(tmp_path / "points.json", {"device": "test", "sizes": "real"})
    seconds = {(1024, FULL): 2.0, (1024, DUO): 1.0, (2048, FULL): 9.0}
    for (context, system), value in seconds.items():
        values = {"median_s": value, "low_s": value, "high_s": value, "rounds": 3, "kv_bytes": 8}
        results.add(Point(Key("decode", f"Llama-3-8B at {context}", system), values))
    results.add(Point(Key("decode", "Llama-3-8B at 2048", DUO), note="out of memory"))
    assert best_ratio(results, "decode", LLAMA_3_8B, time_of) == (2.0, "at 1024")
    text = write_report(results, REAL, "2001-02-03", ["command"], [])
    assert "| Llama-3-8B | decode, times faster | 1.50 | 2.00 (at 1024) |" in text
    assert "| Llama-2-7B | decode, times faster | 2.18 | not measured |" in text
    assert "not measured: out of memory" in text


@pytest.mark.parametrize(("rounds", "warm_up"), [(0, 1), (1, -1)])
def test_a_clock_times_at_least_once(rounds: int, warm_up: int) -> None:
    with pytest.raises(ValueError, match="expected rounds >= 1 and warm_up >= 0"):
        Clock(torch.device("cpu"), rounds, warm_up)


def test_a_device_that_torch_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"expected a device such as cuda, cuda:1 or cpu, got 'gpu'"):
        gpu.main(["--device", "gpu", "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())
