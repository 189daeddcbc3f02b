"""Warm-ups that several processes share: what they compile, and where they are refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from graphs import BatchShape
from graphs.backends.compile import CompileBackend, cpu_compile_problem
from graphs.manifest import GraphRecord, read_manifest
from hpu_duo.device.plain import decode
from hpu_duo.device.runtime import HostMemory
from hpu_duo.startup import warm_up, warm_up_jobs
from hpu_duo.startup.warm_up import WarmUpStoppedError
from hpu_duo.startup.warm_up_estimate import WarmUpBudget
from hpu_duo.startup.warm_up_jobs import BucketQueue, Jobs, JobTask
from tests.engine.tiny import PATTERN, Tiny
from tests.warmup.killed import TABLE, TABLE_OF_TWO

SHAPES = ["--u/q4/s0/u48/l4", "c--/q16/s0/u0/l4"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(cpu_compile_problem() is not None, reason="needs a C++ compiler")
def test_what_another_process_compiles_is_found_in_the_cache(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process is given one of two buckets."""
    path = tmp_path / "manifest.json"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    given = SHAPES[1:]
    model = tiny.load(graphs="compile", pattern=PATTERN, buckets=TABLE_OF_TWO)
    prepared = model.prepare_warmup(num_jobs=2)
    assert prepared._task is not None
    records: list[GraphRecord] = []
    with Jobs(1, prepared._task, BucketQueue([*map(BatchShape.parse, given)]), records.append) as jobs:
        jobs.wait()
    assert [str(record.shape) for record in records] == given
    assert prepared.cache is not None
    assert {record.cache for record in records} == {prepared.cache.identifier}
    # A resumed warm-up in a new process captures both, one of them from the cache.
    command = [sys.executable, "-m", "tests.warmup.killed", str(tiny.path), str(path), "unserved"]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert json.loads(found.splitlines()[-1])["misses"] == 1
    assert read_manifest(path).is_complete


def test_a_process_whose_engine_is_another_one_captures_nothing(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.load(graphs="compile", pattern=PATTERN, buckets=TABLE_OF_TWO)
    task = model.prepare_warmup(num_jobs=2)._task
    assert task is not None
    wrong = replace(task, graphs={**task.graphs, "dtype": "float64"})
    # The main function of the other process, in this one.
    monkeypatch.setattr(warm_up_jobs.os, "_exit", lambda status: None)
    monkeypatch.setattr(warm_up_jobs.signal, "signal", lambda *_: None)
    ours, theirs = Pipe()
    with ours:
        warm_up_jobs._work(theirs, wrong)
        error = decode(ours.recv_bytes())
    assert re.search("dtype: expected float64, got float32", error)


@pytest.mark.parametrize(
    ("options", "num_jobs", "message"),
    [
        ({"graphs": "eager"}, 2, "expected a compiler with a cache on disk for 2 jobs, got eager"),
        ({"graphs": "replay"}, 3, "got replay: its graphs end with the process"),
        ({"graphs": "compile"}, 0, "expected at least 1 job, got 0"),
        ({"graphs": CompileBackend()}, 2, "expected the name of a capture backend for 2 jobs, got an object"),
        ({"graphs": "compile"}, 9, r"expected at most 3 jobs within the free host memory, got 9: .* 2.0 GiB"),
    ],
)
def test_jobs_that_cannot_help_are_refused_before_any_starts(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], num_jobs: int, message: str
) -> None:
    monkeypatch.setattr(warm_up_jobs, "host_memory", lambda: HostMemory(8 << 30, 4 << 30))
    monkeypatch.setattr(warm_up_jobs, "peak_bytes", lambda: 1 << 30)
    model = tiny.load(buckets=TABLE, **options)
    with pytest.raises(ValueError, match=message):
        model.warmup(num_jobs=num_jobs)


def test_each_bucket_is_taken_once_and_none_after_a_stop() -> None:
    buckets = tuple(map(BatchShape.parse, SHAPES))
    queue = BucketQueue(buckets)
    assert (next(iter(queue)), *queue) == buckets
    stopped = BucketQueue(buckets)
    stopped.stop()
    assert not list(stopped)


def test_a_task_fixes_what_follows_from_free_memory(tiny: Tiny) -> None:
    model = tiny.load(graphs="compile", buckets=TABLE, num_blocks=48, max_model_len=None)
    task = JobTask.of(model.engine, model.engine_config, TABLE, {}, compile_only=False)
    limits = model.engine.scheduler.limits
    assert task.engine.cache.num_blocks == limits.num_blocks
    assert task.engine.scheduler.max_model_len == limits.max_model_len


@pytest.mark.skipif(cpu_compile_problem() is not None, reason="needs a C++ compiler")
def test_the_budget_bounds_captures_of_what_other_processes_compiled(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process, which is a stand-in, compiles all buckets; then this one captures from the cache."""

    class Elsewhere(nullcontext[Any]):
        def __init__(self, num_more: int, task: JobTask, queue: BucketQueue, note: Any) -> None:
            super().__init__(self)
            for bucket in queue:
                note(GraphRecord(bucket))

        def wait(self) -> None:
            pass

    captured: list[BatchShape] = []

    def capture(shape: BatchShape) -> None:
        captured.append(shape)
        prepared._budget = WarmUpBudget(max_seconds=1e-9)

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = tiny.load(graphs="compile", pattern=PATTERN, buckets=TABLE)
    prepared = model.prepare_warmup(num_jobs=2)
    monkeypatch.setattr(warm_up, "Jobs", Elsewhere)
    monkeypatch.setattr(prepared._capturing, "fill_tables", lambda buckets: None)
    monkeypatch.setattr(model.engine.runner.warmup, "capture", capture)
    with pytest.raises(WarmUpStoppedError, match=r"used up its budget: .* for 1 of 3 graphs"):
        prepared.run()
    assert len(captured) == 1
