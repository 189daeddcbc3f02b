"""Streams of copies of the simulated device, which end some time after they were queued."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from hpu_duo.device.streams import Mark
from hpu_duo.lab.rules import Rule
from hpu_duo.lab.sim.checks import BreakRule


@dataclass(frozen=True)
class _Copy:
    """A copy that has not run: its memory, and what was in the source when it was queued."""

    name: str
    target: torch.Tensor
    source: torch.Tensor
    expected: torch.Tensor


class SimCopyStream:
    """A queue of copies; see ``hpu_duo.device.streams.CopyQueue``.

    A copy runs when a mark behind it is found passed, which is at the second look, or waited for. Until then
    its target has ones in every bit, not a number in every float format, and neither side may change.

    Args:
        enter: makes a stream current, and yields what broken rules are reported to.
    """

    def __init__(self, enter: Callable[[SimCopyStream], AbstractContextManager[BreakRule]]) -> None:
        self._enter = enter
        self._break_rule: BreakRule | None = None
        self._copies: deque[_Copy] = deque()
        self._num_run = 0

    @contextmanager
    def after_launched(self) -> Iterator[None]:
        """Queue copies here."""
        with self._enter(self) as self._break_rule:
            yield

    def queue(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between tensors of the host, of which one is the data of a device tensor."""
        self._copies.append(_Copy(name, target, source, _bytes(source).clone()))
        _bytes(target).fill_(0xFF)

    def mark(self) -> SimMark:
        """Put a mark behind what is queued."""
        return SimMark(self, self._num_run + len(self._copies))

    def run(self, number: int) -> None:
        """Run copies until so many have been run since the beginning."""
        while self._num_run < number:
            copy = self._copies.popleft()
            self._num_run += 1
            is_same = torch.equal(_bytes(copy.source), copy.expected)
            if not is_same or not bool((_bytes(copy.target) == 0xFF).all()):
                assert self._break_rule is not None, "copies are queued in the context"
                side = "target" if is_same else "source"
                self._break_rule(Rule.COPY_RACE, copy.name, f"its {side} was written before it had ended")
            _bytes(copy.target).copy_(copy.expected)


class SimMark:
    """A place in a queue of copies."""

    def __init__(self, stream: SimCopyStream, number: int) -> None:
        self._stream, self._number, self._looks = stream, number, 0

    @property
    def is_passed(self) -> bool:
        """Whether it was looked at before, or waited for."""
        self._looks += 1
        if self._looks == 1:
            return False
        self._stream.run(self._number)
        return True

    def seconds_since(self, earlier: Mark) -> float:
        """No seconds: time is not simulated."""
        return 0.0

    def hold_computation(self) -> None:
        """Run the copies before it."""
        self.wait()

    def wait(self) -> None:
        """Run the copies before it."""
        self._looks += 1
        self._stream.run(self._number)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
