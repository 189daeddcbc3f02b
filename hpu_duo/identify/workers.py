"""Processes that share the texts of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray


@dataclass(frozen=True)
class Workers:
    """This process among all of them.

    What is exchanged is a few numbers for each text, so it goes through the hosts whatever the device is.

    Attributes:
        rank, size: number of this process, and of processes.
        local_rank: number of this process on its machine, which chooses its device.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this process writes and talks."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Which of ``count`` texts are this process's; ValueError unless all get equally many."""
        if count % self.size:
            raise ValueError(f"expected a batch that {self.size} processes divide, got {count} texts")
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def gather(self, own: NDArray[np.float64]) -> NDArray[np.float64]:
        """Rows of all processes in the order of ranks, the same in each: ``[n, ...]`` to ``[size * n, ...]``.

        Every process then sums the same numbers in the same order, so how many there are changes no bit.
        """
        if self.size == 1:
            return own
        parts = [torch.zeros(own.shape, dtype=torch.float64) for _ in range(self.size)]
        dist.all_gather(parts, torch.from_numpy(np.ascontiguousarray(own)))
        return np.concatenate([part.numpy() for part in parts])

    def wait(self) -> None:
        """Return when every process is here."""
        if self.size > 1:
            dist.barrier()

    def device(self, wanted: torch.device) -> torch.device:
        """The device of this process: processes of one machine take their accelerators in order."""
        if self.size == 1 or wanted.type == "cpu" or wanted.index is not None:
            return wanted
        return torch.device(wanted.type, self.local_rank)


@contextmanager
def joined_workers() -> Iterator[Workers]:
    """The processes that ``torchrun`` started, or this one alone."""
    if not dist.is_torchelastic_launched():
        yield Workers()
        return
    dist.init_process_group("gloo")
    try:
        yield Workers(dist.get_rank(), dist.get_world_size(), dist.get_node_local_rank())
    finally:
        dist.destroy_process_group()
