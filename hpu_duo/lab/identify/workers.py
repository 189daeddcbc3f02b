"""Processes that share the texts of a batch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from hpu_duo.device import Member, own_device


@dataclass(frozen=True)
class Workers:
    """This process among all of them.

    Processes exchange a few numbers for each text, through their hosts whatever the device is.

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
        """Return the texts of this process, out of ``count``; ValueError unless all get equally many."""
        if count % self.size:
            raise ValueError(f"expected a batch that {self.size} processes divide, got {count} texts")
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def gather(self, own: NDArray[np.float64]) -> NDArray[np.float64]:
        """Rows of all processes in the order of ranks, the same in each: ``[n, ...]`` to ``[size * n, ...]``.

        Every process then sums the same numbers in the same order, so the number of processes changes no bit.
        """
        if self.size == 1:
            return own
        parts = [torch.zeros(own.shape, dtype=torch.float64) for _ in range(self.size)]
        try:
            dist.all_gather(parts, torch.from_numpy(np.ascontiguousarray(own)))
        except RuntimeError:
            # Where all processes are interrupted, one that waits here first sees the others leave. Python
            # raises the interrupt, which is the reason, at the next call.
            time.sleep(0)
            raise
        return np.concatenate([part.numpy() for part in parts])

    def wait(self) -> None:
        """Wait until every process has called this."""
        if self.size > 1:
            dist.barrier()

    def device(self, wanted: torch.device) -> torch.device:
        """The device of this process: processes of one machine take their accelerators in order."""
        return wanted if self.size == 1 else own_device(wanted, self.local_rank)


@contextmanager
def joined_workers(member: Member | None = None) -> Iterator[Workers]:
    """The processes that this one was started with, by ``run_processes`` or ``torchrun``, or this one alone.

    Args:
        member: the argument that ``run_processes`` gave this process.
    """
    if member is not None:
        with member.joined("gloo"):
            yield Workers(member.rank, member.size, member.rank)
    elif dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        try:
            yield Workers(dist.get_rank(), dist.get_world_size(), dist.get_node_local_rank())
        finally:
            dist.destroy_process_group()
    else:
        yield Workers()
