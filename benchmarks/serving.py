"""A process that serves."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

_PATIENCE_S = 300


@dataclass(frozen=True)
class Serving:
    """A server that runs.

    Attributes:
        url: of the server, without a path.
        process: of ``hpu-duo serve``.
        log: what it writes to standard error.
    """

    url: str
    process: subprocess.Popen[bytes]
    log: Path


@contextmanager
def serving(arguments: Sequence[str], log: Path, *, most_files: int | None = None) -> Iterator[Serving]:
    """Serve the built-in model in a process of its own, and end it by SIGTERM.

    Args:
        arguments: of ``hpu-duo serve``; without a port it takes one that is free.
        log: file that gets its standard error.
        most_files: limit of its open files and connections.

    Raises:
        RuntimeError: it does not get ready, or does not end as it should.
    """
    command = [sys.executable, "-m", "hpu_duo.cli", "serve", "--port", "0", *arguments]
    if most_files is not None:
        command = ["bash", "-c", f'ulimit -n {most_files} && exec "$@"', "bash", *command]
    with log.open("wb") as opened, subprocess.Popen(command, stderr=opened) as process:
        try:
            url = _when_ready(process, log)
            yield Serving(url, process, log)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(_PATIENCE_S)


def _when_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
        found = re.search(r"serving \S+ at (http\S+?),?\s", log.read_text(encoding="utf-8"))
        if found is None:
            continue
        try:
            with urlopen(f"{found[1]}/ready", timeout=5):
                return found[1]
        except URLError:
            continue
    raise RuntimeError(f"expected a server that gets ready, got: {log.read_text(encoding='utf-8')}")
