"""A front process in a thread, before stub replicas."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from hpu_duo.fleet.replicas.app import create_front_app
from hpu_duo.fleet.replicas.front import Front, FrontConfig
from hpu_duo.fleet.replicas.replica import ReplicaCommand
from hpu_duo.server.config import ServerConfig
from hpu_duo.server.http.listening import DrainingServer, bind
from tests.server.live import HOST, PATIENCE_S, wait_until

STUB = Path(__file__).with_name("stub_replica.py")


class LiveFront:
    """A front that runs.

    Attributes:
        front: inside of the server.
        url: of it.
        notes: file that stubs write into.
    """

    def __init__(
        self,
        directory: Path,
        *programs: Path,
        router: str = "least-loaded",
        load_timeout_s: float = FrontConfig.load_timeout_s,
        **settings: Any,
    ) -> None:
        self.notes = directory / "notes"
        self.notes.touch()
        config = ServerConfig(**{"model_names": ("stub",), "drain_seconds": 5.0, **settings})
        files = programs or (STUB, STUB)
        commands = [
            ReplicaCommand([sys.executable, "-S", str(file), str(number), str(self.notes)], dict(os.environ))
            for number, file in enumerate(files)
        ]
        self.front = Front(FrontConfig(config, len(files), router, load_timeout_s), commands)
        bound = bind(HOST, 0)
        self.url = f"http://{HOST}:{bound.getsockname()[1]}"
        self.server = DrainingServer(create_front_app(self.front), self.front)
        self._thread = threading.Thread(target=lambda: self.server.run(sockets=[bound]))
        self._thread.start()
        wait_until(lambda: self.server.started)

    def http(self, **options: Any) -> httpx.Client:
        """Plain HTTP."""
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, **options)

    def all_ready(self) -> None:
        """Wait until every replica is."""
        wait_until(lambda: self.front.num_ready == len(self.front.replicas))

    def signal(self) -> None:
        """As SIGTERM."""
        self.server.handle_exit(signal.SIGTERM, None)

    def join(self) -> bool:
        """Wait for the end; says whether it has come."""
        self._thread.join(PATIENCE_S)
        return not self._thread.is_alive()


@contextmanager
def live_front(directory: Path, *programs: Path, **settings: Any) -> Iterator[LiveFront]:
    """A front for as long as the context lasts, with every replica ready; no process is left behind it."""
    running = LiveFront(directory, *programs, **settings)
    try:
        running.all_ready()
        yield running
    finally:
        running.signal()
        assert running.join()
        assert all(each.pid is None for each in running.front.replicas.values())
