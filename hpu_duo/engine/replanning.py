"""Another bucket table while serving: planned in a process of its own, captured between steps."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import takewhile
from typing import IO, Protocol

from graphs import BatchShape, BucketTable, StepLimits
from graphs.planner.replan import Exchange, Replan, ReplanTask, replan
from graphs.table import ShapeReservoir
from hpu_duo.device.plain import decode, encode
from hpu_duo.device.processes import helper_environment
from hpu_duo.device.ranks import RankError

_log = logging.getLogger(__name__)

FIRST_PLAN = 2048
"""Number of steps after which a table is planned again for the first time."""

_NEXT_PLAN = 4
"""Growth of that number from one plan to the next, so that most shapes in the sample are new ones."""

_NICENESS = 10
"""Of the process that plans."""

_SHARE = 0.1
"""Most of the time that captures take between steps; an idle engine captures without pause."""


@dataclass(frozen=True)
class ReplanStats:
    """Tables that were planned while serving.

    Attributes:
        num_plans: tables that were planned.
        num_captured: buckets that were captured for them.
        num_waiting: buckets of the last plan that are to be captured.
        capture_s: seconds that captures took.
        budget_s: seconds that they may take.
        padding_before: mean padding of the sampled steps in the table before the last plan, as a share of
            their exact cost.
        padding: the same in the current table.
    """

    num_plans: int = 0
    num_captured: int = 0
    num_waiting: int = 0
    capture_s: float = 0.0
    budget_s: float = 0.0
    padding_before: float = 0.0
    padding: float = 0.0


class ExchangesBuckets(Protocol):
    """The interface of a ``Runner`` that captures exchanged buckets."""

    @property
    def table(self) -> BucketTable:
        """The current table."""
        ...

    def exchange(self, added: BatchShape, dropped: BatchShape, padding: float | None = None) -> None:
        """Capture a bucket, and drop another one from the table, which then has that planned padding."""
        ...


class Replanner:
    """Plans the table again for the steps that were served, and exchanges its buckets one by one.

    The number of buckets stays the same, and after each exchange the table holds every reachable shape.
    Buckets whose rows verify drafts are not exchanged. All methods are called between steps. An error ends
    the planning, and the table stays as it is.

    Args:
        runner: captures buckets, on all ranks.
        limits: of the steps.
        sample: shapes of the steps so far.
        budget_s: seconds that captures may take; none begins that would exceed it if it took as long as the
            longest so far.
        first_plan: number of steps before the first plan.
        changed: called after each exchange.
        clock: returns seconds.

    Attributes:
        stats: counts up to now.
    """

    def __init__(
        self,
        runner: ExchangesBuckets,
        limits: StepLimits,
        sample: ShapeReservoir,
        budget_s: float,
        first_plan: int = FIRST_PLAN,
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner, self._limits, self._sample, self._clock = runner, limits, sample, clock
        self._changed = changed
        self._planning: _Planning | None = None
        self._waiting: deque[Exchange] = deque()
        self._next_plan, self._has_failed = first_plan, False
        self._num_plans = self._num_captured = 0
        self._budget_s, self._capture_s, self._longest_s, self._free_at = budget_s, 0.0, 0.0, 0.0
        self._padding_before = self._padding = 0.0

    @property
    def stats(self) -> ReplanStats:
        """Counts up to now."""
        return ReplanStats(
            self._num_plans,
            self._num_captured,
            len(self._waiting),
            self._capture_s,
            self._budget_s,
            self._padding_before,
            self._padding,
        )

    @property
    def can_go_on(self) -> bool:
        """Whether an idle engine has buckets to capture, within the budget."""
        return bool(self._waiting) and self._capture_s + self._longest_s < self._budget_s

    @property
    def is_planning(self) -> bool:
        """Whether a plan is computed, which an idle engine takes when it is there."""
        return self._planning is not None and not self._has_failed

    def advance(self, *, is_idle: bool = False) -> None:
        """Start or collect a plan, or capture one bucket, if it is time for that.

        Args:
            is_idle: whether no request waits for the capture.

        Raises:
            RankError: other ranks do not follow.
        """
        if self._has_failed:
            return
        try:
            self._advance(is_idle)
        except RankError:
            raise
        except Exception as error:
            self._has_failed = True
            self._waiting.clear()
            _log.warning("the bucket table is not planned again: %s", error)

    def _advance(self, is_idle: bool) -> None:
        if self._waiting:
            if self.can_go_on and (is_idle or self._clock() >= self._free_at):
                self._capture(self._waiting.popleft())
        elif self._planning is not None:
            found = self._planning.result()
            if found is not None:
                self._planning = None
                self._take(found)
        elif self._sample.num_steps >= self._next_plan and self._capture_s + self._longest_s < self._budget_s:
            self._next_plan = self._sample.num_steps * _NEXT_PLAN
            self._planning = _Planning(
                *_without_drafts(self._runner.table, self._limits, self._sample.counts())
            )

    def _take(self, found: Replan) -> None:
        self._num_plans += 1
        shortest, row_len = self._limits.prompt_decode_len, self._limits.row_len
        # Up to a bucket that would be one of longer rows: later exchanges count on it.
        self._waiting.extend(takewhile(lambda each: row_len(each.added) == shortest, found.exchanges))
        self._padding_before = self._padding = found.padding
        if found.exchanges:
            _log.info(
                "planned the bucket table again: %d captures lower padding from %.1f%% to %.1f%%",
                len(found.exchanges),
                100 * found.padding,
                100 * found.exchanges[-1].padding,
            )

    def _capture(self, exchange: Exchange) -> None:
        began = self._clock()
        self._runner.exchange(exchange.added, exchange.dropped, exchange.padding)
        self._changed()
        now = self._clock()
        took = now - began
        self._capture_s += took
        self._longest_s = max(self._longest_s, took)
        self._free_at = now + took * (1 / _SHARE - 1)
        self._num_captured += 1
        self._padding = exchange.padding


def _without_drafts(
    table: BucketTable, limits: StepLimits, traffic: dict[BatchShape, int]
) -> tuple[BucketTable, StepLimits, dict[BatchShape, int]]:
    """Return the part of a table and its traffic that is planned: buckets of longer rows stay as they are."""
    if not limits.draft_lens:
        return table, limits, traffic
    shortest = limits.prompt_decode_len
    buckets = tuple(bucket for bucket in table if limits.row_len(bucket) == shortest)
    plain = {shape: num for shape, num in traffic.items() if limits.row_len(shape) == shortest}
    return replace(table, buckets=buckets, draft_lens=()), limits.without_drafts, plain


class _Planning:
    """A process that plans; its arguments and result are files, so that it never waits for this one."""

    def __init__(self, table: BucketTable, limits: StepLimits, traffic: dict[BatchShape, int]) -> None:
        self._result: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        with tempfile.TemporaryFile() as arguments:
            arguments.write(encode_task(ReplanTask(table, limits, traffic)))
            arguments.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hpu_duo.engine.replanning"],
                stdin=arguments,
                stdout=self._result,
                env=helper_environment(),
            )

    def result(self) -> Replan | None:
        """Return the result; None while there is none.

        Raises:
            RuntimeError: the process has failed.
        """
        status = self._process.poll()
        if status is None:
            return None
        with self._result:
            if status:
                raise RuntimeError(f"the process that plans has ended with status {status}")
            self._result.seek(0)
            return Replan.from_json(self._result.read().decode())


def encode_task(task: ReplanTask) -> bytearray:
    """Write a task, with the module of its cost function, which the process has to import.

    Raises:
        TypeError: the cost function is not plain, see ``hpu_duo.device.plain``.
    """
    return encode((type(task.table.cost).__module__, bytes(encode(task))))


def decode_task(data: bytes) -> ReplanTask:
    """Read what ``encode_task`` wrote.

    Raises:
        ValueError: it is something else.
    """
    module, fields = decode(data)
    import_module(module)
    task = decode(fields)
    if not isinstance(task, ReplanTask):
        raise ValueError(f"expected a ReplanTask, got {type(task).__name__}")
    return task


def main() -> None:
    """Read a task and write a ``Replan`` as JSON, in a process of a lower priority than the engine's."""
    os.nice(_NICENESS)
    task = decode_task(sys.stdin.buffer.read())
    print(replan(task.table, task.limits, task.traffic).to_json())


if __name__ == "__main__":
    main()
