"""Run the stages, in processes of their own, so that no stage can stop the others."""

from __future__ import annotations

import faulthandler
import math
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path

from hpu_duo.device import Member, WorkerError, run_processes
from hpu_duo.lab.selftest.finding import Notes, StageNotes, read_notes
from hpu_duo.lab.selftest.report import Report, StageResult
from hpu_duo.lab.selftest.stages import Stage, stages_of
from hpu_duo.lab.selftest.subject import Subject

_LAZY_VARIABLE = "PT_HPU_LAZY_MODE"
_POLL_S = 0.2
Progress = Callable[[str], None]


def run_selftest(
    subject: Subject,
    *,
    only: Sequence[str] = (),
    stage_deadline_s: float = 900.0,
    deadline_s: float = 1200.0,
    progress: Progress = lambda _: None,
) -> Report:
    """Test a device in stages; see ``run_stages``. The report has no names of the machine and its user.

    Args:
        only: names of stages; empty = all.
        deadline_s: most seconds of all stages.

    Raises:
        ValueError: there is no stage of a name.
    """
    stages = stages_of(subject.kind)
    unknown = sorted(set(only) - {stage.name for stage in stages})
    if unknown:
        known = ", ".join(stage.name for stage in stages)
        raise ValueError(f"expected stages among {known}, got {', '.join(unknown)}")
    chosen = [stage for stage in stages if not only or stage.name in only]
    began = datetime.now(timezone.utc)
    results = run_stages(subject, chosen, stage_deadline_s, progress, deadline_s=deadline_s)
    return Report(subject, began, tuple(results)).without_names()


def run_stages(
    subject: Subject,
    stages: Sequence[Stage],
    stage_deadline_s: float,
    progress: Progress = lambda _: None,
    *,
    deadline_s: float = math.inf,
) -> list[StageResult]:
    """Run stages in processes; returns whatever happens to these.

    Neighbours that agree on the mode of the device, and on whether they take it, share a process, one after
    the other. When it dies, or a stage takes too long, that stage has failed, and the rest goes on in a new
    process.

    Args:
        stages: can be pickled.
        stage_deadline_s: most seconds of a stage.
        progress: called with the title of each stage that begins.
        deadline_s: most seconds of all stages; those that do not begin by then have failed.
    """
    # Processes of a machine share this clock.
    ends = time.monotonic() + deadline_s
    results: list[StageResult] = []
    for (is_lazy, _), group in groupby(stages, lambda stage: (stage.is_lazy, stage.holds_device)):
        variables = {} if is_lazy is None else {_LAZY_VARIABLE: str(int(is_lazy))}
        rest = list(group)
        while rest:
            if time.monotonic() >= ends:
                results += [_not_run(stage, deadline_s) for stage in rest]
                break
            found = _run_together(subject, rest, variables, (stage_deadline_s, ends), progress)
            results += found
            rest = rest[len(found) :]
    return results


def _run_together(
    subject: Subject,
    stages: list[Stage],
    variables: Mapping[str, str],
    deadlines: tuple[float, float],
    progress: Progress,
) -> list[StageResult]:
    """Run stages in one process; returns their results, up to the stage in which the process died."""
    with tempfile.TemporaryDirectory(prefix="hpu-duo-selftest-") as name:
        path, end = Path(name) / "notes.jsonl", "without a word"
        with _following(path, {stage.name: stage.title for stage in stages}, progress):
            try:
                run_processes(_work, (subject, stages, path, deadlines), [variables])
            except WorkerError as error:
                end = str(error)
        found = read_notes(path) or [StageNotes(stages[0].name)]
    return [_result(stage, notes, end) for stage, notes in zip(stages, found)]


def _not_run(stage: Stage, deadline_s: float) -> StageResult:
    error = f"not run: the {deadline_s:g} seconds of all stages were over"
    return StageResult(stage.name, stage.title, 0.0, (), error)


def _result(stage: Stage, notes: StageNotes, end: str) -> StageResult:
    error = notes.error
    if notes.seconds is None:
        # The process died, or was ended because the stage took too long.
        at = f" at {notes.begun}" if notes.begun else ""
        error = f"its process ended{at}: {end}"
    return StageResult(stage.name, stage.title, notes.seconds or 0.0, tuple(notes.findings), error)


@contextmanager
def _following(path: Path, titles: Mapping[str, str], progress: Progress) -> Iterator[None]:
    """Call ``progress`` with the titles of stages as they appear in a file of notes."""
    is_over = threading.Event()

    def follow() -> None:
        num_told = 0
        while True:
            was_over = is_over.wait(_POLL_S)
            begun = read_notes(path)
            for stage in begun[num_told:]:
                progress(titles[stage.name])
            num_told = len(begun)
            if was_over:
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _work(
    member: Member, subject: Subject, stages: Sequence[Stage], path: Path, deadlines: tuple[float, float]
) -> None:
    """Run stages one after the other, in a process of their own, which ends when one takes too long.

    Args:
        deadlines: seconds of a stage, and the time by ``time.monotonic`` at which all end.
    """
    notes, (stage_deadline_s, ends) = Notes(path), deadlines
    for number, stage in enumerate(stages):
        left = ends - time.monotonic()
        if number and left <= 0:
            return
        notes.begin_stage(stage.name)
        began, error = time.perf_counter(), None
        # By a thread of its own that needs no interpreter: a device that hangs may hold it.
        faulthandler.dump_traceback_later(min(stage_deadline_s, max(left, 1.0)), exit=True)
        try:
            stage.run(subject, notes)
        except Exception as failure:
            error = "".join(traceback.format_exception(failure)).strip()
        faulthandler.cancel_dump_traceback_later()
        notes.end_stage(time.perf_counter() - began, error)
