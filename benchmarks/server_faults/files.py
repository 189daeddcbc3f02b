"""More connections than the server may have files."""

from __future__ import annotations

import asyncio
import time

import aiohttp

from benchmarks.server_faults.calls import check_serves, session, until_nothing_is_held
from benchmarks.server_faults.connections import open_all
from benchmarks.server_faults.page import paragraph
from benchmarks.serving import Serving

TITLE = "More connections than files"
SERVER = ("--max-model-len", "256", "--max-num-seqs", "32")
MOST_FILES = 256
"""The server's limit, for the runner to set."""
_PATIENCE_S = 30.0


async def until_served(http: aiohttp.ClientSession) -> float:
    """Call until a call is served; returns the seconds that took."""
    began = time.perf_counter()
    while True:
        try:
            await check_serves(http)
            return time.perf_counter() - began
        except aiohttp.ClientConnectionError:
            assert time.perf_counter() - began < _PATIENCE_S, "expected a server that serves again"
            await asyncio.sleep(0.05)


async def attack(serving: Serving) -> str:
    """Open four times as many; returns a paragraph."""
    port = int(serving.url.rsplit(":", 1)[1])
    opened = await open_all(port, 4 * MOST_FILES)
    await asyncio.sleep(1)
    num_closed = sum(reader.at_eof() for reader, _ in opened)
    for _, writer in opened:
        writer.transport.abort()
    async with session(serving.url, 4) as http:
        seconds = await until_served(http)
        await until_nothing_is_held(http)
    return paragraph(
        f"{4 * MOST_FILES:,} connections to a server with a limit of {MOST_FILES} files: {num_closed:,}",
        "were closed by it within a second, the others stayed open or waited. Once they were gone, a call",
        f"that was tried again where it was refused was served after {seconds:.2f} s.",
    )


def report(serving: Serving, scale: float) -> str:
    """A paragraph."""
    return asyncio.run(attack(serving))
