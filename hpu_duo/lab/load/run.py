"""The loop that sends every request at its time, whatever happens to the others."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpu_duo.garbage import leave_out_what_is_there, unfreeze
from hpu_duo.lab.load.endpoint import Endpoint
from hpu_duo.lab.load.outcome import Failure, Outcome
from hpu_duo.lab.load.plan import PlannedRequest

if TYPE_CHECKING:
    from hpu_duo.lab.load.client import Client


@dataclass(frozen=True)
class Pace:
    """Limit on the sending of requests.

    Attributes:
        max_concurrency: most requests under way; others wait in the client, so that the loop is closed. None
            sends each at its time.

    Raises:
        ValueError: a number below 1.
    """

    max_concurrency: int | None = None

    def __post_init__(self) -> None:
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"expected max_concurrency of at least 1, got {self.max_concurrency}")


class LoadRun:
    """One measurement.

    Args:
        requests: in order of time.
        on_end: called with each outcome as its request ends.

    Attributes:
        outcomes: one per request, in the order of ``requests``; those not sent yet are marked as interrupted.
        duration_s: from the beginning to the end of the last request.
        is_interrupted: whether it was cancelled.
        cpu_share: seconds of processor time of this process per second of the run.
    """

    def __init__(
        self,
        client: Client,
        endpoint: Endpoint,
        requests: Sequence[PlannedRequest],
        pace: Pace | None = None,
        on_end: Callable[[Outcome], None] | None = None,
    ) -> None:
        self._client, self._endpoint, self._requests = client, endpoint, requests
        self._on_end = on_end
        limit = (pace or Pace()).max_concurrency
        self._turns = contextlib.nullcontext() if limit is None else asyncio.Semaphore(limit)
        self.outcomes = [
            Outcome(each.time_s, each.num_prompt_tokens, failure=Failure.INTERRUPTED, error="not sent")
            for each in requests
        ]
        self.duration_s = self.cpu_share = 0.0
        self.is_interrupted = False

    async def run(self) -> None:
        """Send everything and wait for all ends.

        Cancelling it ends the requests under way; what has come until then stays in ``outcomes``.
        """
        with _settled_memory():
            start, cpu = time.perf_counter(), time.process_time()
            tasks: list[asyncio.Task[None]] = []
            try:
                for request, outcome in zip(self._requests, self.outcomes):
                    wait = start + request.time_s - time.perf_counter()
                    if wait > 0:
                        await asyncio.sleep(wait)
                    tasks.append(asyncio.create_task(self._send(request, outcome, start)))
                    if wait <= 0 and len(tasks) % 64 == 0:
                        # Many at once: let those that were made begin, and read what has come.
                        await asyncio.sleep(0)
                await asyncio.gather(*tasks)
            except asyncio.CancelledError:
                self.is_interrupted = True
                raise
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self.duration_s = time.perf_counter() - start
                self.cpu_share = (time.process_time() - cpu) / self.duration_s

    async def _send(self, request: PlannedRequest, outcome: Outcome, start: float) -> None:
        async with self._turns:
            await self._client.send(self._endpoint, request, outcome, lambda: time.perf_counter() - start)
        if self._on_end is not None:
            self._on_end(outcome)


@contextlib.contextmanager
def _settled_memory() -> Iterator[None]:
    """Keep the garbage collector from visiting older objects while the clock runs."""
    had_left_out = gc.get_freeze_count() > 0
    leave_out_what_is_there()
    try:
        yield
    finally:
        if not had_left_out:
            unfreeze()
