"""Work for the processes of the tests; they import it, so it is no test file."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hpu_duo.device import Member, run_processes

WHEN_IMPORTED = {name: os.environ.get(name) for name in ("RANK", "OWN")}
"""The environment when a process imported this, which is before it runs anything of ours."""

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OWN")


def look_around(member: Member, argument: str) -> dict[str, object]:
    """The environment, and a sum over gloo."""
    values = torch.full((3,), member.rank + 1.0)
    with member.joined("gloo"):
        dist.all_reduce(values)
    environment = {name: os.environ[name] for name in NAMES}
    return {"argument": argument, "at import": WHEN_IMPORTED, "now": environment, "sum": values.tolist()}


def fail(member: Member, how: str) -> None:
    """The last process fails as it is told; others wait for it."""
    with member.joined("gloo"):
        if member.rank == member.size - 1:
            if how == "abort":
                os.abort()
            if how == "interrupt":
                os.kill(os.getpid(), signal.SIGTERM)
            if how == "leave":
                os._exit(0)
            if how == "unhashable":
                {}[[]]  # type: ignore[index]
        dist.barrier()
        time.sleep(600)


def save_when_interrupted(member: Member, directory: Path) -> None:
    """Say that it runs, and when it is interrupted: process 0 in our code, the other one inside torch."""
    with member.joined("gloo"):
        dist.barrier()
        (directory / f"{member.rank}.pid").write_text(str(os.getpid()))
        try:
            if member.rank == 0:
                time.sleep(600)
            dist.barrier()
        finally:
            (directory / f"{member.rank}.saved").touch()


if __name__ == "__main__":
    # A shell that runs the tests in the background has them ignore Ctrl-C, which is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run_processes(save_when_interrupted, (Path(sys.argv[1]),), [{}, {}])
    except KeyboardInterrupt:
        sys.exit(130)


def cores_of(member: Member) -> list[int]:
    """The cores that the process may use."""
    return sorted(os.sched_getaffinity(0))
