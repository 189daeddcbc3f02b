"""Run recorded steps again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from graphs import MissPolicy
from hpu_duo.engine.engine import Engine
from hpu_duo.engine.step_input import StepInput
from hpu_duo.startup.recorded_steps import CutLogError, LoggedStep, StepLog, check_origin, differing_versions


class Difference(NamedTuple):
    """A token that differs from the recorded one.

    Attributes:
        step: number of the step, from 1 on.
        row: of the step's logits.
        expected, got: token ids.
    """

    step: int
    row: int
    expected: int
    got: int


@dataclass(frozen=True)
class ReplayReport:
    """Result of a replay.

    Attributes:
        num_steps, num_tokens: steps that ran, and tokens compared.
        num_host_sampled: tokens chosen on the host, which a message cannot repeat; the tokens after them
            are compared, since later messages hold the host's choices.
        differences: tokens that differ.
        versions: software whose version differs.
        cut: where the file ends inside of a step, in words: it was replayed up to there; None if it is whole.
    """

    num_steps: int
    num_tokens: int
    num_host_sampled: int
    differences: tuple[Difference, ...]
    versions: tuple[str, ...]
    cut: str | None = None


def replay(engine: Engine, model: str | Path, log: StepLog) -> ReplayReport:
    """Run recorded steps and compare their tokens.

    Args:
        engine: without requests; its stores are overwritten, and its cached prefixes forgotten.
        model: the checkpoint that it was loaded from.

    Raises:
        ValueError: the engine is of another model, head pattern, dtype or layout, or has requests; or a step
            is damaged.
    """
    with engine.exclusive():
        if engine.has_unfinished:
            raise ValueError("expected an engine without requests to replay steps on, got one with some")
        check_origin(log.origin, engine, model)
        if (prefixes := engine.scheduler.allocations.prefixes) is not None:
            prefixes.clear()
        num_tokens = num_host_sampled = number = 0
        differences: list[Difference] = []
        steps = _WholeSteps(log)
        for number, step in enumerate(steps, start=1):
            message = step.message
            _make_room(engine, message)
            got = engine.runner.executor.execute(message).token_ids
            is_host_sampled = np.isin(message.sampled, np.array(message.host_sampled, np.int32))
            num_host_sampled += int(is_host_sampled.sum())
            num_tokens += int((~is_host_sampled).sum())
            for place in np.flatnonzero((got != step.token_ids) & ~is_host_sampled).tolist():
                row, expected = int(message.sampled[place]), int(step.token_ids[place])
                differences.append(Difference(number, row, expected, int(got[place])))
    versions = tuple(differing_versions(log.origin, engine))
    return ReplayReport(number, num_tokens, num_host_sampled, tuple(differences), versions, steps.cut)


class _WholeSteps:
    """The steps of a log, without one that the end of the file cuts off.

    Attributes:
        cut: the place of the cut, in words, once all others have been read.
    """

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self.cut: str | None = None

    def __iter__(self) -> Iterator[LoggedStep]:
        try:
            yield from self._log
        except CutLogError as error:
            self.cut = str(error)


def _make_room(engine: Engine, message: StepInput) -> None:
    """Add the bucket of a message to the table, if a miss had added it when the step was recorded."""
    executor = engine.runner.executor
    graphs = executor.graphs
    if executor.uses_table and graphs.policy is MissPolicy.CAPTURE and message.bucket not in graphs.table:
        executor.bucket_of(message.bucket)
