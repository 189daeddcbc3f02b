"""Orders that rank 0 broadcasts, and all ranks execute in the same sequence.

Only rank 0 has requests, a scheduler and sampling parameters of callers. Each operation on the device is an
order, broadcast before rank 0 executes it itself; ``Stop`` ends the worker ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from graphs import BatchShape, BucketTable, MissPolicy
from hpu_duo.engine.step_input import StepInput


class Steps(Protocol):
    """The interface of an ``Executor``, which runs steps."""

    def execute(self, message: StepInput) -> object:
        """Run a step to its tokens."""
        ...

    def logits(self, message: StepInput) -> object:
        """Run a step to its logits."""
        ...

    def carry_out(self, message: StepInput) -> object:
        """Execute the copies of a step, and begin its transfers."""
        ...


class WarmsUp(Protocol):
    """The interface of a ``StepWarmUp``, which captures buckets."""

    def touch(self, bucket: BatchShape) -> None:
        """Run padding through an uncaptured step."""
        ...

    def capture(self, bucket: BatchShape) -> bool:
        """Capture a bucket."""
        ...

    def finish(self, captured: Iterable[BatchShape]) -> None:
        """End the warm-up."""
        ...

    def exchange(self, added: BatchShape, dropped: BatchShape, padding: float | None = None) -> None:
        """Capture a bucket, and drop another one from the table."""
        ...


class WorkerRank(Protocol):
    """The interface of a ``Runner``, which executes orders."""

    @property
    def executor(self) -> Steps:
        """Runs steps."""
        ...

    @property
    def warmup(self) -> WarmsUp:
        """Captures buckets."""
        ...

    def set_table(self, table: BucketTable, policy: MissPolicy) -> None:
        """Replace the bucket table."""
        ...

    def open_disk(self, fingerprint: bytes) -> str | None:
        """Open the folder of records of this rank."""
        ...


class Link(Protocol):
    """Receiver of the orders of rank 0."""

    def receive(self) -> Order:
        """Wait for the next order."""
        ...


@dataclass(frozen=True)
class Execute:
    """A step.

    Attributes:
        is_sampled: whether to sample tokens, if the message has sampling parameters; otherwise only logits
            are computed.
    """

    message: StepInput
    is_sampled: bool = True

    def carry_out(self, runner: WorkerRank) -> None:
        """Run it."""
        if self.is_sampled:
            runner.executor.execute(self.message)
        else:
            runner.executor.logits(self.message)


@dataclass(frozen=True)
class CarryOut:
    """The copies and transfers of a step without rows."""

    message: StepInput

    def carry_out(self, runner: WorkerRank) -> None:
        """Run them."""
        runner.executor.carry_out(self.message)


@dataclass(frozen=True)
class Touch:
    """An uncaptured run of padding."""

    bucket: BatchShape

    def carry_out(self, runner: WorkerRank) -> None:
        """Run it."""
        runner.warmup.touch(self.bucket)


@dataclass(frozen=True)
class Capture:
    """The capture of a bucket."""

    bucket: BatchShape

    def carry_out(self, runner: WorkerRank) -> None:
        """Capture it."""
        runner.warmup.capture(self.bucket)


@dataclass(frozen=True)
class FinishWarmUp:
    """The end of a warm-up."""

    captured: tuple[BatchShape, ...]

    def carry_out(self, runner: WorkerRank) -> None:
        """End it."""
        runner.warmup.finish(self.captured)


@dataclass(frozen=True)
class Exchange:
    """The capture of a bucket while serving, in place of another one.

    Attributes:
        padding: planned padding of the table afterwards; None if unknown.
    """

    added: BatchShape
    dropped: BatchShape
    padding: float | None = None

    def carry_out(self, runner: WorkerRank) -> None:
        """Capture it."""
        runner.warmup.exchange(self.added, self.dropped, self.padding)


@dataclass(frozen=True)
class SetTable:
    """Another table of buckets."""

    table: BucketTable
    policy: MissPolicy

    def carry_out(self, runner: WorkerRank) -> None:
        """Set it."""
        runner.set_table(self.table, self.policy)


@dataclass(frozen=True)
class OpenDisk:
    """The folders of records of all ranks.

    Attributes:
        fingerprint: SHA-256 of all that records depend on.
    """

    fingerprint: bytes

    def carry_out(self, runner: WorkerRank) -> None:
        """Open that of this rank."""
        runner.open_disk(self.fingerprint)


@dataclass(frozen=True)
class Stop:
    """The end."""

    def carry_out(self, runner: WorkerRank) -> None:
        """Do nothing; see ``follow``."""


WARM_UP_ORDERS = (Touch, Capture, FinishWarmUp, Exchange)
"""Orders that may compile, without a time limit."""

Order: TypeAlias = Execute | CarryOut | Touch | Capture | FinishWarmUp | Exchange | SetTable | OpenDisk | Stop


def follow(link: Link, runner: WorkerRank, done: Callable[[], None] = lambda: None) -> None:
    """Execute orders until ``Stop``.

    Args:
        done: called after each order.
    """
    while not isinstance(order := link.receive(), Stop):
        order.carry_out(runner)
        done()
