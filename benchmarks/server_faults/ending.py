"""A server that is told to end under load, one that is killed, and the next one on its port."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import aiohttp
import openai

from benchmarks.server_faults.calls import PROMPT, check_serves, session, stream_body
from benchmarks.server_faults.page import paragraph
from benchmarks.serving import Serving, serving

TITLE = "SIGTERM under load, SIGKILL, and the next server"
SERVER = ("--max-model-len", "1024", "--max-num-seqs", "32")
_RUNNING, _WAITING, _NUM_TOKENS = 32, 16, 400
_ASKED = {
    "model": "builtin",
    "prompt": PROMPT,
    "max_tokens": 900,
    "stream": True,
    "extra_body": {"ignore_eos": True},
}


async def read_to_the_end(http: aiohttp.ClientSession, begun: asyncio.Semaphore) -> bool:
    """Whether a stream came whole."""
    async with http.post("/v1/completions", json=stream_body(_NUM_TOKENS)) as response:
        data = b""
        async for piece in response.content.iter_any():
            if not data:
                begun.release()
            data += piece
        return data.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"length"' in data


async def drain(server: Serving) -> str:
    """SIGTERM while streams run and wait; every one of them has to end by itself."""
    async with session(server.url, 100) as http:
        begun = asyncio.Semaphore(0)
        streams = [asyncio.create_task(read_to_the_end(http, begun)) for _ in range(_RUNNING + _WAITING)]
        for _ in range(_RUNNING):
            await begun.acquire()
        server.process.send_signal(signal.SIGTERM)
        began = time.perf_counter()
        seen: Counter[str] = Counter()
        while not all(stream.done() for stream in streams):
            try:
                async with http.post("/v1/completions", json=stream_body(1)) as response:
                    seen[str(response.status)] += 1
            except aiohttp.ClientConnectionError:
                seen["connection refused"] += 1
            await asyncio.sleep(0.02)
        whole = sum([await stream for stream in streams])
        seconds = time.perf_counter() - began
    code = await asyncio.to_thread(server.process.wait, 60)
    assert (whole, code) == (len(streams), 0), (whole, code)
    assert seen["503"], seen
    answers = ", ".join(f"{number} {kind}" for kind, number in sorted(seen.items()))
    return paragraph(
        f"SIGTERM while {_RUNNING} streams ran and {_WAITING} waited: all {whole} ended whole within",
        f"{seconds:.1f} s. Calls that came meanwhile: {answers} (200 until the signal is seen, which takes a",
        f"tenth of a second at most). Exit code {code}.",
    )


async def one_stream(client: openai.AsyncOpenAI, begun: asyncio.Semaphore) -> str:
    """Tell how a stream ended, as a user of the openai package sees it."""
    try:
        num_parts = 0
        async for _ in await client.completions.create(**_ASKED):
            num_parts += 1
            if num_parts == 1:
                begun.release()
    except Exception as error:
        return f"{type(error).__module__.split('.')[0]}.{type(error).__name__}"
    return "whole"


async def kill(server: Serving) -> Counter[str]:
    """SIGKILL while streams run; returns how they ended."""
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        begun = asyncio.Semaphore(0)
        streams = [asyncio.create_task(one_stream(client, begun)) for _ in range(_RUNNING)]
        for _ in range(_RUNNING):
            await begun.acquire()
        server.process.kill()
        return Counter(await asyncio.gather(*streams))


async def start_again(folder: Path, port: str) -> float:
    """Start on the same port while a client retries; returns the seconds until it was answered."""

    async def ask() -> None:
        url = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=20) as client:
            done = await client.completions.create(model="builtin", prompt=PROMPT, max_tokens=5)
            assert done.choices

    began = time.perf_counter()
    asked = asyncio.create_task(ask())
    entered = serving((*SERVER, "--port", port), folder / "again.log")
    server = await asyncio.to_thread(entered.__enter__)
    try:
        await asked
        seconds = time.perf_counter() - began
        async with session(server.url, 1) as http:
            await check_serves(http)
    finally:
        await asyncio.to_thread(entered.__exit__, None, None, None)
    return seconds


async def attack(server: Serving) -> str:
    """All of it; returns paragraphs."""
    drained = await drain(server)
    with tempfile.TemporaryDirectory() as name:
        with serving(SERVER, Path(name) / "killed.log") as victim:
            ends = await kill(victim)
            assert "whole" not in ends, ends
            port = victim.url.rsplit(":", 1)[1]
        seconds = await start_again(Path(name), port)
    told = ", ".join(f"{number} with `{kind}`" for kind, number in ends.items())
    killed = paragraph(
        f"SIGKILL while {_RUNNING} streams ran: they ended {told}, none as if it were whole. A server was",
        "started on the same port at once; a client of the openai package that was retrying meanwhile was",
        f"answered after {seconds:.1f} s.",
    )
    return f"{drained}\n\n{killed}"


def report(server: Serving, scale: float) -> str:
    """Paragraphs."""
    return asyncio.run(attack(server))
