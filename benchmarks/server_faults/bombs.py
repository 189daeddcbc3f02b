"""Requests that hold as much as they can, and what they cost the event loop beside which others wait."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.server_faults.calls import check_serves, session, until_nothing_is_held
from benchmarks.server_faults.page import paragraph
from benchmarks.serving import Serving

TITLE = "Requests that hold too much"
SERVER = ("--max-model-len", "256", "--max-num-seqs", "32")
_MOST_S = 0.1
_TEXT, _CHAT = "/v1/completions", "/v1/chat/completions"
_TALK = [{"role": "user", "content": "hi"}]


def _call(arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


def _said(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": "hi", **fields}]}


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    described = {"name": "a", "strict": True, "schema": schema}
    return {"messages": _TALK, "response_format": {"type": "json_schema", "json_schema": described}}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def _echoed(num_characters: int, **fields: Any) -> dict[str, Any]:
    """As many answers as there may be, each of which begins with a long message."""
    message = {"role": "assistant", "content": "x" * num_characters}
    many = {"n": 256, "max_tokens": 1, "truncate_prompt_tokens": 9}
    return {"messages": [*_TALK, message], "echo": True, **many, **fields}


_BOMBS: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "stop_token_ids": (_TEXT, lambda n: {"prompt": "hi", "stop_token_ids": list(range(n))}),
    "stop strings": (_TEXT, lambda n: {"prompt": "hi", "stop": [str(k) for k in range(n)]}),
    "logit_bias": (_TEXT, lambda n: {"prompt": "hi", "logit_bias": {str(k): 1 for k in range(n)}}),
    "token ids": (_TEXT, lambda n: {"prompt": [5] * n}),
    "token ids, kept in part": (_TEXT, lambda n: {"prompt": [5] * n, "truncate_prompt_tokens": 9}),
    "token ids and a text": (_TEXT, lambda n: {"prompt": [5] * n + ["hi"]}),
    "prompts": (_TEXT, lambda n: {"prompt": ["hi"] * n}),
    "lists of token ids": (_TEXT, lambda n: {"prompt": [[5]] * n}),
    "text": (_TEXT, lambda n: {"prompt": "the cat sat " * n}),
    "text, kept in part": (_TEXT, lambda n: {"prompt": "the cat sat " * n, "truncate_prompt_tokens": 9}),
    "escaped text": (_TEXT, lambda n: {"prompt": '"\n' * n}),
    "unknown objects": (_TEXT, lambda n: {"prompt": "hi", "unknown": [{}] * n}),
    "guided_choice": (_TEXT, lambda n: {"prompt": "hi", "guided_choice": [str(k) for k in range(n)]}),
    "schema": (
        _TEXT,
        lambda n: {"prompt": "hi", "guided_json": {"properties": {str(k): {} for k in range(n // 2)}}},
    ),
    "deep schema": (_TEXT, lambda n: {"prompt": "hi", "guided_json": "[" * n}),
    "messages": (_CHAT, lambda n: {"messages": _TALK * (n // 3)}),
    "parts": (
        _CHAT,
        lambda n: {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * (n // 3)}]},
    ),
    "fields of a message": (_CHAT, lambda n: _said(**{f"v{k}": 1 for k in range(n)})),
    "arguments of a call": (_CHAT, lambda n: _said(tool_calls=[_call(json.dumps([0] * n))] * 4)),
    "tools": (
        _CHAT,
        lambda n: {
            "messages": _TALK,
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}] * (n // 5),
        },
    ),
    "variables": (
        _CHAT,
        lambda n: {"messages": _TALK, "chat_template_kwargs": {f"v{k}": 1 for k in range(n)}},
    ),
    "documents": (_CHAT, lambda n: {"messages": _TALK, "documents": [{"title": "a"}] * (n // 2)}),
    "wrong values of logit_bias": (
        _TEXT,
        lambda n: {"prompt": "hi", "logit_bias": {f"{'x' * 300}{k}": 1000 for k in range(n // 1000)}},
    ),
    "strict schema": (
        _CHAT,
        lambda n: _strict({"properties": {str(k): {"type": "object"} for k in range(n // 20)}}),
    ),
    "deep strict schema": (_CHAT, lambda n: _strict(_nested(n // 12_000))),
    "strict tools": (
        _CHAT,
        lambda n: {
            "messages": _TALK,
            "tool_choice": "required",
            "tools": [
                {
                    "type": "function",
                    "function": {"name": f"f{k}", "strict": True, "parameters": _nested(n // 40_000)},
                }
                for k in range(n // 1000)
            ],
        },
    ),
    "arguments that are no JSON": (_CHAT, lambda n: _said(tool_calls=[_call("\U0001f600" * 8 * n)])),
    "echoed message": (_CHAT, lambda n: _echoed(n // 4)),
    "echoed message of streams": (_CHAT, lambda n: _echoed(n // 4, stream=True)),
    "token ids that come back": (
        _TEXT,
        lambda n: {
            "prompt": [[5] * (n // 4000)] * 16,
            "n": 16,
            "max_tokens": 1,
            "return_token_ids": True,
            "stream": n % 2 == 0,
        },
    ),
    "text to tokenize": ("/tokenize", lambda n: {"prompt": "a b " * 4000, "return_token_strs": True}),
    "tokens to write": ("/detokenize", lambda n: {"tokens": [5] * n}),
}


def loop_s(serving: Serving) -> float:
    """CPU time that the thread of the event loop, the process's first one, has had."""
    pid = serving.process.pid
    nanoseconds = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text(encoding="utf-8").split()[0]
    return int(nanoseconds) / 1e9


async def throw(http: aiohttp.ClientSession, path: str, body: bytes) -> int:
    """Send a body; returns the status, 0 where the connection ended."""
    headers = {"content-type": "application/json"}
    try:
        async with http.post(path, data=body, headers=headers) as response:
            await response.read()
            return response.status
    except aiohttp.ClientError:
        return 0


async def longest_health(
    serving: Serving, http: aiohttp.ClientSession, done: asyncio.Task[int]
) -> tuple[float, float]:
    """Ask ``/health`` until a call is over; most CPU time of the loop, and most time, that an answer took."""
    most_cpu = most = 0.0
    while True:
        is_last = done.done()
        cpu, began = loop_s(serving), time.perf_counter()
        async with http.get("/health") as response:
            assert response.status == 200
        most_cpu, most = max(most_cpu, loop_s(serving) - cpu), max(most, time.perf_counter() - began)
        if is_last:
            return most_cpu, most
        await asyncio.sleep(0.005)


async def attack(serving: Serving, num_values: int) -> str:
    """Throw each bomb, at both sides of the limit of values, be they keys or not; returns a table."""
    rows = ["| holds too much | status | loop's CPU, ms | answer, ms |", "| --- | --- | --- | --- |"]
    draw, worst = random.Random(os.getpid()), 0.0
    async with session(serving.url, 2) as http:
        for name, (path, make) in draw.sample(sorted(_BOMBS.items()), len(_BOMBS)):
            for size in (num_values // 9, num_values, num_values + num_values // 8):
                body = json.dumps(make(size)).encode()
                call = asyncio.create_task(throw(http, path, body))
                cpu, waited = await longest_health(serving, http, call)
                worst = max(worst, cpu)
                status, times = await call or "closed", f"{1e3 * cpu:.0f} | {1e3 * waited:.0f}"
                rows.append(f"| {name}, {len(body):,} bytes | {status} | {times} |")
        await until_nothing_is_held(http)
        await check_serves(http)
    text = paragraph(
        "While each of these calls was read and answered, `/health` was asked all the time. The answer that",
        f"took most cost {1e3 * worst:.0f} ms of CPU time of the event loop's thread.",
    )
    assert worst <= _MOST_S, "\n".join([text, *rows])
    return "\n".join([text, "", *rows])


def report(serving: Serving, scale: float) -> str:
    """A paragraph and a table."""
    return asyncio.run(attack(serving, round(1_000_000 * scale)))
