"""The file of recorded steps: what is written is read, and nothing else is taken for it."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphs import BatchShape
from hpu_duo.engine.step_input import StepInput
from hpu_duo.sampling import SamplingBatch, SamplingParams, SamplingRoute
from hpu_duo.startup.recorded_steps import CutLogError, LoggedStep, StepLog, StepRecorder, read_log
from tests.engine.tiny import PATTERN, Tiny, serve
from tests.modeling.families import prompts_of


def message(number: int) -> StepInput:
    shape = BatchShape.parse(f"--u/q{number + 1}/s0/u7/l3")
    route = SamplingRoute(3, 100, has_random=True, num_edits=16, has_masks=number == 3)
    floats = np.linspace(-1, 1, route.num_floats, dtype=np.float32)
    masks = np.arange(12, dtype=np.int32).reshape(3, 4) - 7 if route.has_masks else None
    return StepInput(
        shape,
        shape,
        np.arange(10 * number, dtype=np.int32) - 5,
        number,
        2 * number,
        SamplingBatch(route, floats, masks) if number % 2 else None,
        np.arange(number % 3, dtype=np.int32),
        (1,) if number % 3 == 2 else (),
    )


def tokens(number: int) -> np.ndarray:
    return np.arange(number % 3, dtype=np.int32) + 40


@pytest.fixture
def path(tmp_path: Path) -> Path:
    recorder = StepRecorder(tmp_path / "steps", lambda: {"model": "m\nn"})
    for number in range(7):
        recorder.add(message(number), tokens(number))
    recorder.close()
    return tmp_path / "steps"


def assert_equal(log: Iterable[LoggedStep], num_steps: int) -> None:
    steps = list(log)
    assert len(steps) == num_steps
    for number, step in enumerate(steps):
        expected, got = message(number), step.message
        assert step.token_ids.tolist() == tokens(number).tolist()
        assert got.ints.dtype == np.int32
        assert got.ints.tolist() == expected.ints.tolist()
        assert got.sampled.tolist() == expected.sampled.tolist()
        for name in ("shape", "bucket", "num_block_copies", "num_row_copies", "host_sampled"):
            assert getattr(got, name) == getattr(expected, name)
        assert (got.sampling is None) == (expected.sampling is None)
        if got.sampling is not None and expected.sampling is not None:
            assert got.sampling.route == expected.sampling.route
            assert np.array_equal(got.sampling.floats, expected.sampling.floats)
            assert (got.sampling.masks is None) == (expected.sampling.masks is None) == (number != 3)
            if got.sampling.masks is not None:
                assert got.sampling.masks.tolist() == expected.sampling.masks.tolist()


def test_what_is_written_is_read_as_often_as_asked(path: Path) -> None:
    log = read_log(path)
    assert log.origin == {"model": "m\nn"}
    assert_equal(log, 7)
    assert_equal(log, 7)


def test_a_file_cut_anywhere_gives_the_steps_before_the_cut(path: Path) -> None:
    data = path.read_bytes()
    begin = data.index(b"\n", data.index(b"\n") + 1) + 1
    found = set()
    for size in range(begin, len(data), 7):
        path.write_bytes(data[:size])
        steps, problem = whole_steps(read_log(path))
        assert_equal(steps, len(steps))
        if problem is not None:
            assert re.fullmatch(
                rf".*steps ends inside of step {len(steps) + 1}: expected .*, got .*", problem
            )
        found.add((len(steps), problem is None))
    assert {num for num, _ in found} == set(range(7))
    assert {num for num, is_whole in found if not is_whole} == set(range(7))


def whole_steps(log: StepLog) -> tuple[list[LoggedStep], str | None]:
    steps = []
    try:
        for step in log:
            steps.append(step)
    except CutLogError as error:
        return steps, str(error)
    return steps, None


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_with_another_byte_gives_the_steps_before_it_and_says_where_it_is_damaged(
    path: Path, tmp_path: Path, data: st.DataObject
) -> None:
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte != whole[at]))
    damaged = tmp_path / "damaged"
    damaged.write_bytes(whole[:at] + bytes([other]) + whole[at + 1 :])
    steps: list[LoggedStep] = []
    with pytest.raises(ValueError, match=r"expected .*, got "):
        steps.extend(read_log(damaged))
    assert_equal(steps, len(steps))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "got something else"),
        (b'{"shape": "c--/q1/s0/u0/l1", "count": 1}\n', "got something else"),
        (b"hpu-duo steps 2\n{}\n", "expected recorded steps of version 3 in .*, got version 2"),
        (b"hpu-duo steps 4\n{}\n", "expected recorded steps of version 3 in .*, got version 4"),
        (b"hpu-duo steps 3\n", "got no step"),
        (b"hpu-duo steps 3\n%08x []\n" % zlib.crc32(b"[]"), "got no description"),
        (b"hpu-duo steps 3\n{}\n", "description of the engine is damaged: expected .*, got "),
    ],
)
def test_other_files_are_refused(tmp_path: Path, data: bytes, problem: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=problem):
        read_log(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read recorded steps from .*nothing: No such file"):
        read_log(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("old", "new"), [(b'"bucket": "--u', b'"bucket": "xyz'), (b'"num_ints": 10', b'"num_ints": 1e')]
)
def test_a_damaged_step_is_named(path: Path, old: bytes, new: bytes) -> None:
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    with pytest.raises(
        ValueError, match=r"steps: step [12] is damaged: expected the checksum .*, got [0-9a-f]+"
    ):
        list(read_log(path))


def test_damaged_arrays_are_named(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match="step 7 is damaged: expected the checksum"):
        list(read_log(path))


def test_an_older_recording_is_replaced_and_nothing_else(path: Path, tmp_path: Path) -> None:
    recorder = StepRecorder(path, dict)
    recorder.add(message(0), tokens(0))
    assert_equal(read_log(path), 1)
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    with pytest.raises(ValueError, match=r"expected recorded steps to replace in .*notes.txt"):
        StepRecorder(other, dict)
    assert other.read_text() == "mine"
    with pytest.raises(ValueError, match="cannot record steps in"):
        StepRecorder(tmp_path / "no" / "steps", dict)


def test_a_full_disk_ends_the_recording_before_the_step_and_costs_no_token(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of([9, 4])
    options: dict[str, Any] = {"pattern": PATTERN}
    expected = serve(tiny.load(**options), prompts, _params())
    served = tiny.load(record_steps=tmp_path / "steps", **options)
    recorder = served.engine.step_recorder
    assert isinstance(recorder, StepRecorder)
    write, num_writes = recorder._write, 0

    def full(data: bytes) -> None:
        nonlocal num_writes
        num_writes += 1
        if num_writes == 3:
            write(data[: len(data) // 2])
            raise OSError(28, os.strerror(28))
        write(data)

    monkeypatch.setattr(recorder, "_write", full)
    done = serve(served, prompts, _params())
    assert [each[0].token_ids for each in done] == [each[0].token_ids for each in expected]
    assert num_writes == 3
    assert len(list(read_log(tmp_path / "steps"))) == 2
    assert served.stats().num_unrecorded_steps == served.stats().num_steps - 2


def test_a_recording_whose_beginning_failed_does_not_begin_later(tmp_path: Path) -> None:
    may_fail = [True]

    def origin() -> dict[str, str]:
        if may_fail:
            raise ValueError(f"the checkpoint is gone, {may_fail.pop()}")
        return {"model": "m"}

    recorder = StepRecorder(tmp_path / "steps", origin)
    for number in range(3):
        with pytest.raises(ValueError, match="the checkpoint is gone"):
            recorder.add(message(number), tokens(number))
    assert (tmp_path / "steps").stat().st_size == 0


def _params() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
