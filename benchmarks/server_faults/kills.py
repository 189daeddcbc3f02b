"""Clients that are killed in the middle of their streams."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time

import aiohttp

from benchmarks.server_faults.calls import check_serves, session, stats, stream_body, until_nothing_is_held
from benchmarks.server_faults.page import paragraph
from benchmarks.serving import Serving

TITLE = "Clients killed in the middle of a stream"
SERVER = ("--max-model-len", "2048", "--max-num-seqs", "64")
_STREAMS, _NUM_TOKENS = 50, 1900


async def read_until_killed(url: str, num_streams: int) -> None:
    """Open streams, and print a line when each of them has had an event."""
    async with session(url, num_streams) as http:
        begun = asyncio.Semaphore(0)

        async def read() -> None:
            async with http.post("/v1/completions", json=stream_body(_NUM_TOKENS)) as response:
                await response.content.readany()
                begun.release()
                async for _ in response.content.iter_any():
                    pass

        readers = [asyncio.create_task(read()) for _ in range(num_streams)]
        for _ in range(num_streams):
            await begun.acquire()
        print("begun", flush=True)
        await asyncio.gather(*readers)


async def kill_one(url: str, http: aiohttp.ClientSession) -> float:
    """Kill a process that reads streams; returns the seconds until everything is free."""
    command = [sys.executable, "-m", "benchmarks.server_faults.kills", url, str(_STREAMS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"begun\n"
        assert (await stats(http))["num_open"] == _STREAMS
        process.kill()
        process.wait()
        return await until_nothing_is_held(http)


async def attack(serving: Serving, num_clients: int) -> str:
    """Kill processes with streams each; returns a paragraph."""
    began = time.perf_counter()
    async with session(serving.url, 4) as http:
        before = (await stats(http))["num_output_tokens"]
        waits = [await kill_one(serving.url, http) for _ in range(num_clients // _STREAMS)]
        num_tokens = (await stats(http))["num_output_tokens"] - before
        await check_serves(http)
    num_killed = len(waits) * _STREAMS
    took_s = time.perf_counter() - began
    return paragraph(
        f"{len(waits)} processes with {_STREAMS} streams of {_NUM_TOKENS:,} tokens each, killed (SIGKILL)",
        f"once every stream had had an event: {num_killed:,} clients in {took_s:,.0f} s.",
        f"{num_tokens:,} of {num_killed * _NUM_TOKENS:,} tokens were computed. From the kill until `/stats`",
        f"had no row, block or call: median {1e3 * statistics.median(waits):.0f} ms, at most",
        f"{1e3 * max(waits):.0f} ms, which has the end of the process and the wait for the statistics in it.",
        "That it takes one step is asserted by a test.",
    )


def report(serving: Serving, scale: float) -> str:
    """A paragraph."""
    return asyncio.run(attack(serving, max(_STREAMS, round(1000 * scale))))


if __name__ == "__main__":
    asyncio.run(read_until_killed(sys.argv[1], int(sys.argv[2])))
