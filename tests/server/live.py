"""A server on a port of this machine, in a thread of the test's process, so that tests can look inside."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI

from hpu_duo import HPUDuoModel
from hpu_duo.server.config import ServerConfig
from hpu_duo.server.http.listening import ConnectionLimits, Connections, DrainingServer, Tls, bind
from hpu_duo.server.http.routes import create_app
from hpu_duo.server.running.admission import Stage
from hpu_duo.server.service import Service, Sink

HOST = "127.0.0.1"
KEY = "sk-of-the-tests"
PATIENCE_S = 30.0


class Live:
    """A server that runs.

    Attributes:
        model: served.
        service: of the server.
        server: as uvicorn has it.
        url: of the server.
    """

    def __init__(
        self,
        model: HPUDuoModel,
        sinks: tuple[Sink, ...] = (),
        *,
        warm_up: bool = False,
        tls: Tls | None = None,
        limits: ConnectionLimits | None = None,
        **settings: Any,
    ) -> None:
        self.model = model
        config = ServerConfig(**{"model_names": ("tiny",), "drain_seconds": 2.0, **settings})
        self.service = Service(model, config, sinks)
        bound = bind(HOST, 0)
        self.port: int = bound.getsockname()[1]
        self.url = f"http{'' if tls is None else 's'}://{HOST}:{self.port}"
        self.server = DrainingServer(
            create_app(self.service, warm_up=warm_up),
            self.service,
            tls,
            connections=Connections(limits or ConnectionLimits(), needs_key=bool(config.api_keys)),
            flush_s=config.flush_seconds,
        )
        self._thread = threading.Thread(target=lambda: self.server.run(sockets=[bound]))
        self._thread.start()
        wait_until(lambda: self.server.started)
        if not warm_up:
            wait_until(lambda: self.service.stage is Stage.READY)

    def client(self, **options: Any) -> OpenAI:
        """The openai package, synchronous."""
        return OpenAI(**{"base_url": f"{self.url}/v1", "api_key": KEY, "max_retries": 0, **options})

    def async_client(self) -> AsyncOpenAI:
        """The openai package, for an event loop."""
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    def http(self, **options: Any) -> httpx.Client:
        """Plain HTTP."""
        return httpx.Client(**{"base_url": self.url, "timeout": PATIENCE_S, **options})

    def signal(self) -> None:
        """As SIGTERM."""
        self.server.handle_exit(signal.SIGTERM, None)

    @property
    def has_been_told_to_end(self) -> bool:
        """Whether a signal has come."""
        return self.server._signal_number is not None

    def join(self) -> bool:
        """Wait for the end; says whether it has come."""
        self._thread.join(PATIENCE_S)
        return not self._thread.is_alive()

    def holds_nothing(self) -> bool:
        """Whether every block and row is free, and nothing is open, in server and engine."""
        stats = self.model.stats()
        held = (stats.used_blocks, stats.used_rows, stats.num_running, stats.num_waiting)
        return held == (0, 0, 0, 0) and self.service.engine.num_open == 0 and not self.service.engine._streams


@contextmanager
def live(model: HPUDuoModel, **settings: Any) -> Iterator[Live]:
    """A server for as long as the context lasts; nothing may be held behind it."""
    server = Live(model, **settings)
    try:
        yield server
        wait_until(server.holds_nothing)
    finally:
        server.signal()
        assert server.join()


def wait_until(is_so: Callable[[], object]) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, "expected it to happen, and it did not"
        time.sleep(0.002)
