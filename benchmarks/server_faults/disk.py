"""A log of calls on a disk that is full: a file system of 16 KiB in memory, which only root can mount."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.server_faults.calls import check_serves, session
from benchmarks.server_faults.page import paragraph
from benchmarks.serving import Serving

TITLE = "A full disk for the log of calls"
SERVER = ("--max-model-len", "256", "--max-num-seqs", "32")
_BYTES, _NUM_CALLS = 16384, 500


@contextmanager
def more_arguments(folder: Path) -> Iterator[tuple[str, ...]]:
    """Arguments of the server while the file system is there."""
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_BYTES}", "tmpfs", disk], check=True)
    try:
        yield ("--log-requests", str(disk / "calls.jsonl"))
    finally:
        subprocess.run(["umount", disk], check=True)


async def attack(serving: Serving, count: int) -> str:
    """Call; returns a paragraph."""
    async with session(serving.url, 16) as http:
        await asyncio.gather(*(check_serves(http) for _ in range(count)))
        await asyncio.sleep(1)
        async with http.get("/metrics") as response:
            lines = (await response.text()).splitlines()
    [lost] = [float(line.split()[-1]) for line in lines if line.startswith("hpuduo:lost_log_lines_total")]
    assert 0 < lost < count, lost
    log = serving.log.read_text(encoding="utf-8")
    assert log.count("log of calls cannot be written") == 1, log
    return paragraph(
        f"`--log-requests` on a file system of {_BYTES // 1024} KiB: {count:,} of {count:,} calls served,",
        f"{lost:,.0f} lines that found no room counted by the metric `hpuduo:lost_log_lines`, one warning.",
    )


def report(serving: Serving, scale: float) -> str:
    """A paragraph."""
    return asyncio.run(attack(serving, _NUM_CALLS))
