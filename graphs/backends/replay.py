"""Steps on a CPU as lists of operators; nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from graphs.backends.base import Inputs, Outputs, Region
from graphs.backends.tape import Arrange, TapedStep
from graphs.shape import BatchShape


class ReplayBackend:
    """The second run of a bucket is written down and replayed from then on, see ``TapedStep``.

    No request waits for a compiler, and a start costs nothing.

    Args:
        arrange: makes fewer or faster lines of those that were written.
    """

    name = "replay"
    num_first_runs = 2

    def __init__(self, arrange: Arrange | None = None) -> None:
        self._arrange = arrange

    def problem(self, device: torch.device) -> str | None:
        """Why steps on ``device`` are not replayed, or None."""
        return None if device.type == "cpu" else f"steps are replayed on device 'cpu', got {str(device)!r}"

    def capture(self, fn: Callable[[Inputs], Outputs], shape: BatchShape) -> Callable[[Inputs], Outputs]:
        """Return the step, which writes itself down in its second run."""
        return TapedStep(fn, self._arrange)

    def region(self, shape: BatchShape, key: Hashable, fn: Region) -> Region:
        """Return ``fn``: steps are written down whole."""
        return fn
