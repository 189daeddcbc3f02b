"""Ranks as threads of one process, for exchanges without process groups."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class ThreadRanks:
    """Carries out the exchanges of ranks that are threads; see ``hpu_duo.device.collectives``.

    Attributes:
        sent_bytes: of each exchange, what rank 0 has given.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent_bytes: list[int] = []
        self._here = threading.local()
        self._given: list[torch.Tensor] = [torch.empty(0)] * size
        self._meeting = threading.Barrier(size, timeout=20.0)

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Run ``work(rank)`` on all ranks at once; returns their results."""

        def on(rank: int) -> T:
            self._here.rank = rank
            try:
                return work(rank)
            except BaseException:
                self._meeting.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(on, range(self.size)))

    def gather(self, tensor: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
        """In place of ``gather_from_ranks``."""
        return torch.cat(self._all(tensor))

    def sum(self, tensor: torch.Tensor, group: str) -> torch.Tensor:
        """In place of ``sum_over_ranks``."""
        return torch.stack(self._all(tensor)).sum(dim=0)

    def send(self, tensor: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
        """In place of ``send_to_ranks``."""
        return torch.stack([each[self._here.rank] for each in self._all(tensor)])

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if self._here.rank == 0:
            self.sent_bytes.append(tensor.nbytes)
        self._given[self._here.rank] = tensor
        self._meeting.wait()
        given = list(self._given)
        self._meeting.wait()
        assert len({each.shape for each in given}) == 1, "ranks exchange tensors of one shape"
        return given
