"""Calls of a server, and what it holds afterwards."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp

PROMPT = "It was a quiet night."
TIMEOUT_S = 120
_PATIENCE_S = 60.0
HELD = ("num_open", "num_running", "num_waiting", "used_blocks", "used_rows")
"""Fields of ``/stats`` that are zero while nothing is served."""


def stream_body(num_tokens: int) -> dict[str, Any]:
    """A stream of so many tokens."""
    return {"prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True}


def session(url: str, connections: int) -> aiohttp.ClientSession:
    """A client with so many connections."""
    connector = aiohttp.TCPConnector(limit=connections)
    return aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))


async def stats(http: aiohttp.ClientSession) -> dict[str, Any]:
    """Statistics of the engine."""
    async with http.get("/stats") as response:
        return dict(await response.json())


async def until_nothing_is_held(http: aiohttp.ClientSession) -> float:
    """Wait until every block and row is free; returns the seconds that took.

    Raises:
        AssertionError: they do not get free.
    """
    began = time.perf_counter()
    while True:
        found = await stats(http)
        held = {name: found[name] for name in HELD}
        if not any(held.values()):
            return time.perf_counter() - began
        assert time.perf_counter() - began < _PATIENCE_S, f"expected nothing to be held, got {held}"
        await asyncio.sleep(0.005)


async def check_serves(http: aiohttp.ClientSession) -> None:
    """Assert that a completion is served."""
    async with http.post("/v1/completions", json={**stream_body(5), "stream": False}) as response:
        assert response.status == 200, await response.text()
        assert (await response.json())["usage"]["completion_tokens"] == 5
