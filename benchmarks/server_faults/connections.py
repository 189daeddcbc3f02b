"""Many open connections, with and without requests on them."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections import Counter

from benchmarks.server_faults.calls import PROMPT, check_serves, session, until_nothing_is_held
from benchmarks.server_faults.page import paragraph
from benchmarks.serving import Serving

TITLE = "Open connections"
SERVER = (
    *("--max-model-len", "256", "--max-num-seqs", "32"),
    *("--max-unauthenticated-connections", "1000000"),
)
_AT_ONCE = 500


async def open_all(port: int, count: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connections that ask for nothing."""
    found: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    while len(found) < count:
        several = (
            asyncio.open_connection("127.0.0.1", port) for _ in range(min(_AT_ONCE, count - len(found)))
        )
        found += await asyncio.gather(*several)
    return found


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    """Ask for a token on a connection; returns the status, or how the connection ended."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
    fields = (
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    head = "\r\n".join(("POST /v1/completions HTTP/1.1", *fields, "", ""))
    try:
        writer.write(head.encode() + body)
        answer = await asyncio.wait_for(reader.read(), 300)
    except ConnectionError as error:
        return type(error).__name__
    finally:
        writer.close()
    return answer[9:12].decode() or "closed"


async def attack(serving: Serving, count: int) -> str:
    """Open connections, serve beside them, then ask on each; returns a paragraph."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = min(count, hard - 200)
    port = int(serving.url.rsplit(":", 1)[1])
    async with session(serving.url, 4) as http:
        began = time.perf_counter()
        opened = await open_all(port, count)
        opened_s = time.perf_counter() - began
        await check_serves(http)
        assert not any(reader.at_eof() for reader, _ in opened), "expected every connection to stay open"
        began = time.perf_counter()
        seen = Counter(await asyncio.gather(*(ask(*one) for one in opened)))
        answered_s = time.perf_counter() - began
        assert set(seen) <= {"200", "429"}, seen
        await until_nothing_is_held(http)
        await check_serves(http)
    answers = ", ".join(f"{number:,} {kind}" for kind, number in sorted(seen.items()))
    return paragraph(
        f"{count:,} connections opened in {opened_s:.1f} s (limit of files {hard:,}),",
        "none closed by the server, and a call beside them served. Then a request on each of them at once,",
        f"answered in {answered_s:.1f} s: {answers}. Nothing was held afterwards, and the next call served.",
    )


def report(serving: Serving, scale: float) -> str:
    """A paragraph."""
    return asyncio.run(attack(serving, max(100, round(10_000 * scale))))
