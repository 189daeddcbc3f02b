"""A profile of some steps: which ones, of what, and where it is written."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity

from hpu_duo.lab.step_profiler import StepProfiler
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import Tiny, serve


def events(trace: Path) -> list[str]:
    with gzip.open(trace) as file:
        return [event["name"] for event in json.load(file)["traceEvents"] if event.get("cat") == "cpu_op"]


def test_so_many_steps_are_profiled_behind_those_left_out(tmp_path: Path) -> None:
    profiler = StepProfiler("cpu", tmp_path / "traces", num_steps=2, num_skipped=3)
    operators = [torch.neg, torch.abs, torch.cos, torch.sin, torch.tanh, torch.exp]
    for number, operator in enumerate(operators):
        operator(torch.ones(3))
        assert profiler.remaining == 5 - number if number < 5 else profiler.remaining == 0
        profiler.stepped()
    assert profiler.trace is not None
    assert profiler.trace.parent == tmp_path / "traces"
    names = {f"aten::{operator.__name__}" for operator in operators}
    assert names & set(events(profiler.trace)) == {"aten::sin", "aten::tanh"}


def test_an_engine_profiles_its_steps_and_serves_the_same_tokens(tiny: Tiny, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=6)
    plain = serve(tiny.load(), [[1, 2, 3]], params)
    model = tiny.load()
    profiler = model.engine.profiler = StepProfiler(model.engine.runner.runtime.name, tmp_path, 2)
    profiled = serve(model, [[1, 2, 3]], params)
    assert profiled[0][0].token_ids == plain[0][0].token_ids
    assert profiler.trace is not None
    assert events(profiler.trace).count("aten::embedding") == 2


def test_a_profile_that_cannot_be_written_fails_no_step(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny.load()
    place = tmp_path / "traces"
    profiler = model.engine.profiler = StepProfiler("cpu", place, 2)
    place.write_text("in the way")
    assert len(serve(model, [[1, 2, 3]], SamplingParams(max_tokens=6))[0][0].token_ids) == 6
    assert profiler.trace is None
    assert model.stats().num_unrecorded_steps == 1


def test_the_device_of_the_engine_is_profiled_with_the_host() -> None:
    asked = {
        "cpu": [ProfilerActivity.CPU],
        "hpu-sim": [ProfilerActivity.CPU],
        "hpu": [ProfilerActivity.CPU, ProfilerActivity.HPU],
        "cuda": [ProfilerActivity.CPU, ProfilerActivity.CUDA],
    }
    for device, activities in asked.items():
        assert StepProfiler(device, "/tmp", 1).activities == activities


def test_without_the_vendors_plug_in_the_host_is_profiled_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiler = StepProfiler("hpu", tmp_path, 1)
    profiler.stepped()
    assert "cannot profile HPU" in caplog.text
    torch.tanh(torch.ones(3))
    profiler.stepped()
    assert profiler.trace is not None
    assert "aten::tanh" in events(profiler.trace)


@pytest.mark.parametrize(("num_steps", "num_skipped"), [(0, 1), (1, 0), (-1, 1)])
def test_a_number_too_small_is_refused(tmp_path: Path, num_steps: int, num_skipped: int) -> None:
    with pytest.raises(ValueError, match="at least one step"):
        StepProfiler("cpu", tmp_path, num_steps, num_skipped)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="directory of the profile"):
        StepProfiler("cpu", tmp_path / "file", 1)
