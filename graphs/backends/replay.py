"""Replay steps on a CPU as lists of operators; nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from graphs.backends.base import Inputs, Outputs, Region
from graphs.backends.traced_step import Arrange, TracedStep
from graphs.shape import BatchShape


class ReplayBackend:
    """Traces the first run of a bucket, and replays the trace from then on, see ``TracedStep``.

    No request waits for a compiler, and a start costs nothing.

    Attributes:
        arrange: rearranges the calls of a trace into fewer or faster ones; None = it is left as it is.
    """

    name = "replay"
    num_first_runs = 1

    def __init__(self, arrange: Arrange | None = None) -> None:
        self.arrange = arrange

    def problem(self, device: torch.device) -> str | None:
        """Return why steps on ``device`` are not replayed, or None."""
        return None if device.type == "cpu" else f"steps are replayed on device 'cpu', got {str(device)!r}"

    def capture(self, fn: Callable[[Inputs], Outputs], shape: BatchShape) -> Callable[[Inputs], Outputs]:
        """Return the step, which is traced in its first run."""
        return TracedStep(fn, self.arrange)

    def region(self, shape: BatchShape, key: Hashable, fn: Region) -> Region:
        """Return ``fn``: steps are traced whole."""
        return fn
