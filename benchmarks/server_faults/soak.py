"""Minutes of mixed calls, some of them cut off, and the server's memory meanwhile."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import Any

import aiohttp

from benchmarks.server_faults.calls import check_serves, session, stats, until_nothing_is_held
from benchmarks.server_faults.fuzz import send_body
from benchmarks.server_faults.page import paragraph
from benchmarks.serving import Serving

TITLE = "Ten minutes of mixed calls"
SERVER = ("--max-model-len", "256", "--max-num-seqs", "32", "--tool-call-parser", "hermes")
_CALLERS, _SECONDS, _EVERY_S, _MIB = 24, 600.0, 10.0, 2**20
_SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}


def body_of(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a valid body; schemas differ, so that caches of them have to let go."""
    common = {
        "max_tokens": draw.randrange(1, 60),
        "temperature": draw.choice((0, 1)),
        "stream": draw.random() < 0.6,
    }
    text = " ".join(draw.choice(("night", "passkey", "camel", "Joel")) for _ in range(draw.randrange(1, 40)))
    kind = draw.randrange(4)
    if kind == 0:
        return "/v1/completions", {
            **common,
            "prompt": text,
            "n": draw.randrange(1, 4),
            "logprobs": 2,
            "echo": True,
        }
    messages = [{"role": "user", "content": text}]
    if kind == 1:
        schema = {**_SCHEMA, "title": str(draw.randrange(10**9))}
        format_ = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        return "/v1/chat/completions", {**common, "messages": messages, "response_format": format_}
    return "/v1/chat/completions", {**common, "messages": messages, "logprobs": True, "top_logprobs": 3}


async def caller(http: aiohttp.ClientSession, draw: random.Random, until: float, seen: Counter[str]) -> None:
    """Call until it is time; one call of ten is cut off, one is fuzzed."""
    while time.perf_counter() < until:
        chance = draw.random()
        if chance < 0.1:
            await send_body(http, draw, seen)
            continue
        path, body = body_of(draw)
        async with http.post(path, json=body) as response:
            assert response.status == 200, await response.text()
            if chance < 0.2:
                await response.content.readany()
                response.close()
                seen["cut off"] += 1
                continue
            await response.read()
            seen["200"] += 1


def resident_mib(process_id: int) -> float:
    """Resident memory of a process."""
    with open(f"/proc/{process_id}/status", encoding="utf-8") as lines:
        [line] = [line for line in lines if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


async def watch(process_id: int, until: float) -> list[float]:
    """Resident memory, every ten seconds."""
    found = []
    while time.perf_counter() < until:
        await asyncio.sleep(min(_EVERY_S, max(0.1, until - time.perf_counter())))
        found.append(resident_mib(process_id))
    return found


async def attack(serving: Serving, seconds: float) -> str:
    """Call for a while; returns a paragraph."""
    seen: Counter[str] = Counter()
    until = time.perf_counter() + seconds
    async with session(serving.url, _CALLERS + 1) as http:
        callers = [caller(http, random.Random(number), until, seen) for number in range(_CALLERS)]
        [memory, *_] = await asyncio.gather(watch(serving.process.pid, until), *callers)
        await until_nothing_is_held(http)
        await check_serves(http)
        told_at_end = await stats(http)
        num_tokens, stores = told_at_end["num_output_tokens"], told_at_end["kv_bytes"] / _MIB
    fifths = [memory[min(len(memory) - 1, round(part * len(memory) / 5))] for part in range(5)] + [memory[-1]]
    told = ", ".join(f"{one:,.0f}" for one in fifths)
    answers = ", ".join(f"{number:,} {kind}" for kind, number in sorted(seen.items()))
    return paragraph(
        f"{_CALLERS} callers for {seconds:,.0f} s: {seen.total():,} calls ({answers}), {num_tokens:,}",
        "tokens; nothing held afterwards.",
        f"Resident memory after ten seconds, after each fifth and at the end: {told} MiB.",
        f"{stores:,.0f} MiB of it are the stores of keys and values, which become resident while the prefix",
        "cache uses one block after another for the first time.",
    )


def report(serving: Serving, scale: float) -> str:
    """A paragraph."""
    return asyncio.run(attack(serving, _SECONDS * scale))
