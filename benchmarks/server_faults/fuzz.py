"""Requests of any content: fields of any types, bytes that are no JSON, and bytes that are no HTTP."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import aiohttp

from benchmarks.server_faults.calls import TIMEOUT_S, check_serves, session, until_nothing_is_held
from benchmarks.server_faults.page import paragraph
from benchmarks.serving import Serving
from hpu_duo.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

TITLE = "Fuzzed requests"
SERVER = ("--max-model-len", "256", "--max-num-seqs", "32", "--tool-call-parser", "hermes")
_KINDS = {
    "/v1/completions": (CompletionRequest, {"prompt": "hi", "max_tokens": 2}),
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    "/tokenize": (TokenizeRequest, {"prompt": "hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5, 6]}),
}
_WORDS = (
    "auto",
    "required",
    "system",
    "text",
    "f",
    "\0",
    "<tool_call>",
    "json_schema",
    "json_object",
    "",
    "é" * 9,
)
_NAMES = (
    "role",
    "content",
    "type",
    "function",
    "name",
    "arguments",
    "schema",
    "json_schema",
    "properties",
    "5",
)
_NUMBERS = (0, 1, -1, 2, 7, 2**31, -(2**63), 10**30, 0.5, -0.0, 1e-300, 1e300)
_STREAMS = 32
_CUT = (
    b"",
    b"POST ",
    b"POST /v1/completions HTTP/1.1\r\n",
    b"GET /stats HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
)
_CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
_LONG = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n"


def any_value(draw: random.Random, depth: int = 3) -> Any:
    """A JSON value."""
    kind = draw.randrange(7 if depth else 5)
    if kind == 0:
        return draw.choice((None, True, False))
    if kind in (1, 2):
        return draw.choice(_NUMBERS)
    if kind in (3, 4):
        return draw.choice(_WORDS)
    if kind == 5:
        return [any_value(draw, depth - 1) for _ in range(draw.randrange(4))]
    return {draw.choice(_NAMES): any_value(draw, depth - 1) for _ in range(draw.randrange(4))}


def any_body(draw: random.Random, path: str) -> bytes:
    """A valid body with some fields that hold anything, or bytes."""
    kind, valid = _KINDS[path]
    chance = draw.random()
    if chance < 0.05:
        return draw.randbytes(draw.randrange(80))
    names = sorted(kind.model_fields)
    fields = draw.sample(names, min(len(names), draw.randrange(5)))
    body = json.dumps({**valid, **{field: any_value(draw) for field in fields}}).encode()
    if chance < 0.15:
        place = draw.randrange(len(body))
        return body[:place] + draw.randbytes(draw.randrange(4)) + body[place + draw.randrange(4) :]
    return body


async def send_body(http: aiohttp.ClientSession, draw: random.Random, seen: Counter[str]) -> None:
    """One call with a body; any answer but one of the API's is a fault."""
    path = draw.choice(sorted(_KINDS))
    body = any_body(draw, path)
    async with http.post(path, data=body, headers={"content-type": "application/json"}) as response:
        text = await response.read()
        if response.status == 200:
            is_stream = response.headers["content-type"].startswith("text/event-stream")
            assert (
                (text.endswith(b"data: [DONE]\n\n") and b'"error"' not in text)
                if is_stream
                else json.loads(text)
            )
        else:
            error = json.loads(text)["error"]
            assert response.status in (400, 404), (response.status, body, text)
            assert set(error) == {"message", "type", "param", "code"}, text
        seen[str(response.status)] += 1


async def send_bytes(port: int, draw: random.Random, seen: Counter[str]) -> None:
    """Bytes that are no HTTP, or the beginning of it, on a connection that is then closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = draw.choice((*_CUT, _CHUNKED, _LONG))
    writer.write(head + draw.randbytes(draw.randrange(200)))
    if draw.random() < 0.5:
        writer.transport.abort()
    else:
        writer.write_eof()
        with suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 30)
        writer.close()
    seen["no HTTP"] += 1


async def attack(serving: Serving, num_requests: int) -> str:
    """Send requests from several callers at once; returns a paragraph."""
    seen: Counter[str] = Counter()
    port = int(serving.url.rsplit(":", 1)[1])
    began = time.perf_counter()
    async with session(serving.url, _STREAMS + 1) as http:

        async def caller(number: int) -> None:
            draw = random.Random(number)
            for _ in range(num_requests // _STREAMS):
                if draw.random() < 0.1:
                    await send_bytes(port, draw, seen)
                else:
                    await send_body(http, draw, seen)

        await asyncio.gather(*(caller(number) for number in range(_STREAMS)))
        seconds = time.perf_counter() - began
        await until_nothing_is_held(http)
        await check_serves(http)
        async with http.get("/ready") as response:
            assert response.status == 200
    answers = ", ".join(f"{count:,} {kind}" for kind, count in sorted(seen.items()))
    return paragraph(
        f"{seen.total():,} requests from {_STREAMS} callers at once in {seconds:,.0f} s.",
        f"Answers by status: {answers}.",
        f"No answer was of another kind, none took {TIMEOUT_S} s, and no row, block or call was",
        "held afterwards.",
    )


def report(serving: Serving, scale: float) -> str:
    """A paragraph."""
    return asyncio.run(attack(serving, round(100_000 * scale) // _STREAMS * _STREAMS + _STREAMS))
