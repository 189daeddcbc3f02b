"""A Ray of this machine, and the application on it, as small as they go."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import ray
from ray import serve

from hpu_duo.fleet.ray_serve.app import build_app
from hpu_duo.fleet.ray_serve.arguments import RayServeArgs

HOST, PREFIX, APP = "127.0.0.1", "/duo", "duo"
PATIENCE_S = 240.0
SMALL = {
    "dtype": "float32",
    "max_num_seqs": 2,
    "max_model_len": 2048,
    "block_size": 16,
    "num_blocks": 300,
    "graphs": "eager",
}
_STORE_BYTES = 80 * 2**20


class Cluster:
    """A Ray with one node, which ends with ``close``.

    Attributes:
        url: of the application.
    """

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind((HOST, 0))
            port = free.getsockname()[1]
        self.url = f"http://{HOST}:{port}{PREFIX}"
        self._deployed: dict[str, Any] | None = None
        ray.init(
            num_cpus=2, object_store_memory=_STORE_BYTES, include_dashboard=False, configure_logging=False
        )
        serve.start(http_options={"host": HOST, "port": port})

    def deploy(self, **arguments: Any) -> None:
        """Run the application with arguments, unless it does, and wait until all replicas take calls."""
        if arguments == self._deployed:
            return
        self._deployed = arguments
        given: dict[str, Any] = {"device": "cpu", "num_cpus": 0.1, "ingress_num_cpus": 0.1, "engine": SMALL}
        args = RayServeArgs.model_validate({**given, **arguments})
        serve.run(build_app(args), name=APP, route_prefix=PREFIX)
        self.wait_until(lambda: len(self.replicas()) == (args.num_replicas or 1))

    def http(self) -> httpx.Client:
        """Plain HTTP."""
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    def replicas(self) -> dict[str, dict[str, Any] | None]:
        """Statistics of each replica that takes calls, by name; None of one that does not answer."""
        with self.http() as http:
            return {each["name"]: each["stats"] for each in http.get("/stats").json()["replicas"]}

    def busy(self) -> str:
        """The replica that has the only call."""
        found: list[str] = []

        def is_found() -> bool:
            found[:] = [name for name, stats in self.replicas().items() if stats and stats["num_open"]]
            return bool(found)

        self.wait_until(is_found)
        (name,) = found
        return name

    def pid(self, replica: str) -> int:
        """Number of a replica's process."""
        actor = ray.get_actor(f"SERVE_REPLICA::{APP}#Engine#{replica}", namespace="serve")
        return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())))

    def counted(self, name: str) -> float:
        """Sum of the samples of a metric."""
        with self.http() as http:
            lines = http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"hpuduo:{name}"))

    @staticmethod
    def wait_until(is_so: Callable[[], bool]) -> None:
        """Wait, but not for ever."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    @staticmethod
    def close() -> None:
        """End everything."""
        serve.shutdown()
        ray.shutdown()
