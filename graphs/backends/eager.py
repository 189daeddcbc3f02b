"""Run steps as they are written: the default on CPU, and the reference for the other backends."""

from collections.abc import Callable, Hashable

import torch

from graphs.backends.base import Inputs, Outputs, Region
from graphs.shape import BatchShape


class EagerBackend:
    """Captures nothing: every step and region is the function that was given.

    Keeps no region either, so each call of ``region`` returns its own ``fn``, whatever the key.
    """

    name = "eager"
    num_first_runs = 1

    def problem(self, device: torch.device) -> str | None:
        """Return None: steps run as written everywhere."""
        return None

    def capture(self, fn: Callable[[Inputs], Outputs], shape: BatchShape) -> Callable[[Inputs], Outputs]:
        """Return ``fn``."""
        return fn

    def region(self, shape: BatchShape, key: Hashable, fn: Region) -> Region:
        """Return ``fn``."""
        return fn
