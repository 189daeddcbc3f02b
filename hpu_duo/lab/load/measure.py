"""A measurement from the first request to the last token."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpu_duo.lab.load.client import Client, ServerError
from hpu_duo.lab.load.endpoint import Endpoint
from hpu_duo.lab.load.outcome import Outcome
from hpu_duo.lab.load.plan import plan_requests
from hpu_duo.lab.load.run import LoadRun, Pace
from hpu_duo.lab.traces import Arrival, PromptIds


@dataclass(frozen=True)
class Measurement:
    """Settings of a measurement.

    Attributes:
        arrivals: at least one, in order of time.
        model: by the server's name; None takes the first one it serves.
        prompt_ids, decode, extra: see ``plan_requests``.
        num_warmups: copies of the first request that are sent before, one after the other, and do not count.
        wait_s: seconds to wait for a server that starts.
    """

    endpoint: Endpoint
    arrivals: Sequence[Arrival]
    prompt_ids: PromptIds
    model: str | None = None
    decode: Callable[[list[int]], str] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    num_warmups: int = 1
    wait_s: float = 0.0

    async def run(
        self, client: Client, on_end: Callable[[Outcome], None] | None = None
    ) -> tuple[str, LoadRun]:
        """Measure; returns the model's name and the run.

        Ctrl-C ends the requests under way, and the run so far is returned.

        Raises:
            ServerError: the server cannot be reached, serves no such model, or fails a warm-up.
            ValueError: see ``plan_requests``.
        """
        async with client:
            model = await self._model(client)
            requests = plan_requests(
                self.arrivals, self.endpoint, model, self.prompt_ids, decode=self.decode, extra=self.extra
            )
            for _ in range(self.num_warmups):
                warmup = LoadRun(client, self.endpoint, requests[:1])
                await warmup.run()
                if not warmup.outcomes[0].is_whole:
                    raise ServerError(f"a warm-up request failed: {warmup.outcomes[0].error}")
            run = LoadRun(client, self.endpoint, requests, self.pace, on_end)
            task = asyncio.ensure_future(run.run())
            with _cancelled_by_ctrl_c(task), contextlib.suppress(asyncio.CancelledError):
                await task
            return model, run

    async def _model(self, client: Client) -> str:
        served = await client.models(self.wait_s)
        if self.model is not None and self.model not in served:
            raise ServerError(f"expected a model among {', '.join(served)}, got {self.model!r}")
        if not served:
            raise ServerError(f"{client.address} serves no model")
        return self.model or served[0]


@contextlib.contextmanager
def _cancelled_by_ctrl_c(task: asyncio.Future[None]) -> Iterator[None]:
    """Cancel a task on Ctrl-C; where signals cannot be handled, in a thread say, Ctrl-C is not changed."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGINT, task.cancel)
    except (NotImplementedError, RuntimeError, ValueError):
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
