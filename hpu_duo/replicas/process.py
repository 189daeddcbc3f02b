"""The process of one replica."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hpu_duo.device.cores import bind_process

HOST = "127.0.0.1"


@dataclass(frozen=True)
class ReplicaCommand:
    """Program, variables and cores that a replica is started with.

    Attributes:
        arguments: the program and its arguments, without where to listen: ``--fd`` and ``--ends-with-stdin``
            are put behind them.
        environment: all of the variables.
        cores: CPU cores to run on; none is wherever the system likes.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    cores: Collection[int] = field(default=())


class ReplicaProcess:
    """A server of its own in a process, which ends with this one.

    It listens on a socket that is bound here and inherited, so its port is known and nobody else's. A pipe
    tells it when this process has died, however that was.

    Attributes:
        url: of the server.
        pid: of the process.
    """

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self._process = process
        self.url = f"http://{HOST}:{port}"
        self.pid = process.pid

    @classmethod
    async def start(cls, command: ReplicaCommand) -> ReplicaProcess:
        """Start one.

        Raises:
            OSError: the system has no room for it.
        """
        with socket.socket() as bound:
            bound.bind((HOST, 0))
            listening = ("--fd", str(bound.fileno()), "--ends-with-stdin")
            process = await asyncio.create_subprocess_exec(
                *command.arguments,
                *listening,
                stdin=subprocess.PIPE,
                env=command.environment,
                pass_fds=[bound.fileno()],
                # Ctrl-C is for the front process, which lets calls end first.
                start_new_session=True,
            )
            bind_process(process.pid, command.cores)
            return cls(process, bound.getsockname()[1])

    async def ended(self) -> int:
        """Wait for its end; returns the exit code, negative for a signal."""
        return await self._process.wait()

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.returncode is None

    def terminate(self) -> None:
        """Let it end its calls, and then itself."""
        if self.is_alive:
            self._process.terminate()

    def kill(self) -> None:
        """End it now, and the processes that it has started: ranks that share its model."""
        # It leads a group of its own, which outlives it as long as one of them does.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
