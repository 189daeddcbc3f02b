"""Records in host memory, and the threads that move them."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from hpu_duo.kv.tiers.link import Landed, Transfer, Transfers
from hpu_duo.not_picklable import NotPicklable


class HostLink(NotPicklable):
    """Records in host memory, and transfers by two threads, one for each direction.

    On a CPU the threads copy. Other devices get the copies in the order of their stream, and the thread
    waits for them: a transfer shares no unit with a step, so none of them waits for the other.

    Args:
        blocks, rows: tensors of the stores, a unit for each entry of dimension 0, ``[X, ...]``.
        num_slots: slots of the records.
        slot_bytes: bytes of each.

    Raises:
        MemoryError: the system has no such range of addresses.
    """

    def __init__(
        self,
        blocks: Sequence[torch.Tensor],
        rows: Sequence[torch.Tensor],
        num_slots: int,
        slot_bytes: int,
    ) -> None:
        self._tensors = {False: tuple(blocks), True: tuple(rows)}
        try:
            memory = mmap.mmap(-1, num_slots * slot_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise MemoryError(
                f"expected room for {num_slots * slot_bytes:,} bytes of records: {error}"
            ) from error
        self.slots: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8).reshape(num_slots, slot_bytes)
        self._up, self._down = (ThreadPoolExecutor(1, f"hpu-duo-{name}") for name in ("kv-store", "kv-load"))
        self._flying: dict[tuple[Transfer, bool], Future[float]] = {}

    def begin(self, transfers: Transfers) -> None:
        """Begin the transfers of a step."""
        for is_row in (False, True):
            for is_load, each in ((False, transfers.stores), (True, transfers.loads)):
                batch = tuple(transfer for transfer in each if transfer.is_row is is_row)
                if not batch:
                    continue
                pool, move = (self._down, self._load) if is_load else (self._up, self._store)
                future = pool.submit(_timed, move, batch)
                for transfer in batch:
                    self._flying[transfer, is_load] = future

    def poll(self) -> list[Landed]:
        """Return the transfers that have ended.

        Raises:
            Exception: of a transfer.
        """
        return [
            Landed(transfer, is_load, self._flying.pop((transfer, is_load)).result())
            for (transfer, is_load), future in list(self._flying.items())
            if future.done()
        ]

    def wait(self, transfers: Sequence[Transfer]) -> None:
        """Wait until transfers have ended, and forget them."""
        for key in list(self._flying):
            if key[0] in transfers:
                self._flying.pop(key).result()

    def wait_any(self) -> None:
        """Wait until one more has ended."""
        wait(set(self._flying.values()), return_when=FIRST_COMPLETED)

    def drain(self) -> None:
        """Wait for all, and forget them."""
        wait(set(self._flying.values()))
        self._flying.clear()

    def close(self) -> None:
        """End the threads."""
        for pool in (self._up, self._down):
            pool.shutdown()

    @torch.inference_mode()
    def _store(self, batch: Sequence[Transfer]) -> None:
        tensors = self._tensors[batch[0].is_row]
        if not tensors:  # heads that need them are on other ranks
            return
        units = _indices(batch, tensors)
        parts = [each.index_select(0, units).cpu().flatten(1).contiguous() for each in tensors]
        places, start = np.array([each.slots for each in batch]), 0
        data = self._records(batch)
        for part in parts:
            as_bytes = part.view(torch.uint8).numpy()
            data[:, start : start + as_bytes.shape[1]] = as_bytes
            start += as_bytes.shape[1]
        self.slots[places.reshape(-1)] = data.reshape(-1, self.slots.shape[1])

    @torch.inference_mode()
    def _load(self, batch: Sequence[Transfer]) -> None:
        tensors = self._tensors[batch[0].is_row]
        if not tensors:
            return
        units = _indices(batch, tensors)
        places, start = list(chain.from_iterable(each.slots for each in batch)), 0
        data = self.slots[places].reshape(len(batch), -1)
        for each in tensors:
            width = each[0].nbytes
            part = torch.from_numpy(np.ascontiguousarray(data[:, start : start + width]))
            shaped = part.view(each.dtype).view(len(batch), *each.shape[1:])
            each.index_copy_(0, units, shaped.to(each.device))
            start += width

    def _records(self, batch: Sequence[Transfer]) -> npt.NDArray[np.uint8]:
        return np.zeros((len(batch), len(batch[0].slots) * self.slots.shape[1]), np.uint8)

    def poison(self, transfer: Transfer) -> None:
        """Fill a unit with ones in every bit: not a number in every float format."""
        for each in self._tensors[transfer.is_row]:
            each[transfer.unit].view(torch.uint8).fill_(0xFF)


def _indices(batch: Sequence[Transfer], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([each.unit for each in batch], device=tensors[0].device)


def _timed(move: Callable[[Sequence[Transfer]], None], batch: Sequence[Transfer]) -> float:
    began = time.perf_counter()
    move(batch)
    return (time.perf_counter() - began) / len(batch)
