"""Random kills of replicas under load: no wrong or truncated answer may be called complete.

    python -m benchmarks.replica_kills --out benchmarks/results/replica-kills.md

Two replicas of the built-in model serve the same greedy questions over HTTP again and again, whole and as
streams. At random times one of them is killed, sometimes both. Every answer that says that it is complete is
compared with the answer from before the first kill; every other one has to be an error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import httpx

from hpu_duo import __version__

SERVE = (
    "serve --port 0 --replicas 2 --max-num-seqs 4 --max-model-len 512 --num-blocks 16 --graphs eager "
    "--drain-seconds 5"
)
NUM_CALLERS, NUM_TOKENS = 4, 60
PROMPTS = [f"The passkey for {name} is loom actor camel." for name in ("Joel", "Nina", "Ada", "Max")]
BACK_S = 60.0
"""Stated time: so soon behind a kill every replica takes calls again."""


@dataclass
class Seen:
    """Outcomes of calls, as callers saw them.

    Attributes:
        outcomes: how calls have ended.
        wrong: answers that were called complete and were not what they should be.
        completed: times of complete answers.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    completed: list[float] = field(default_factory=list)


def body(prompt: str, is_streamed: bool) -> dict[str, object]:
    """A call."""
    asked = {"prompt": prompt, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return {**asked, "stream": is_streamed}


async def ask(http: httpx.AsyncClient, prompt: str, is_streamed: bool) -> tuple[str, str | None]:
    """Ask once; returns how it ended, and the text if the answer is called complete."""
    try:
        if not is_streamed:
            done = await http.post("/v1/completions", json=body(prompt, False))
            if done.status_code != 200:
                return f"whole: error {done.status_code}", None
            choice = done.json()["choices"][0]
            return "whole: complete", choice["text"] if choice["finish_reason"] else None
        text, finish, has_error = "", None, False
        async with http.stream("POST", "/v1/completions", json=body(prompt, True)) as answer:
            if answer.status_code != 200:
                return f"stream: error {answer.status_code}", None
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                if not line.startswith("data: "):
                    continue
                if data == "[DONE]":
                    return "stream: complete", text
                event = json.loads(data)
                if "error" in event:
                    has_error = True
                    continue
                text += event["choices"][0]["text"]
                finish = event["choices"][0]["finish_reason"] or finish
        if finish is not None:
            return "stream: finish_reason without [DONE]", text
        return ("stream: error event" if has_error else "stream: ended SILENTLY"), None
    except httpx.HTTPError as error:
        return f"connection: {type(error).__name__}", None


async def call_again_and_again(
    http: httpx.AsyncClient, expected: dict[str, str], seen: Seen, stop: asyncio.Event, seed: int
) -> None:
    """One caller."""
    rng = random.Random(seed)
    while not stop.is_set():
        prompt = rng.choice(PROMPTS)
        outcome, text = await ask(http, prompt, rng.random() < 0.6)
        seen.outcomes[outcome] += 1
        if text is not None:
            seen.completed.append(time.monotonic())
            if text != expected[prompt]:
                seen.wrong.append(f"{outcome}: {text!r} for {prompt!r}")
        else:
            await asyncio.sleep(0.2)


async def states(http: httpx.AsyncClient) -> list[tuple[str, int | None]]:
    """State and process of each replica."""
    fields = (await http.get("/stats")).json()
    return [(each["state"], each["pid"]) for each in fields["replicas"]]


async def until_all_are_ready(http: httpx.AsyncClient) -> float:
    """Wait; returns the seconds it took."""
    began = time.monotonic()
    while any(state != "ready" for state, _ in await states(http)):
        if time.monotonic() - began > 300:
            raise SystemExit("replicas did not come back")
        await asyncio.sleep(0.1)
    return time.monotonic() - began


@dataclass(frozen=True)
class Kill:
    """A kill.

    Attributes:
        at: time.
        num_killed: replicas.
        all_ready_s: seconds until all replicas were ready again.
    """

    at: float
    num_killed: int
    all_ready_s: float


async def kill_at_random(url: str, num_kills: int, seed: int) -> tuple[Seen, list[Kill], list[float]]:
    """Kill replicas under load; returns the gaps without a complete answer behind each kill as well."""
    rng, stop, seen = random.Random(seed), asyncio.Event(), Seen()
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        await until_all_are_ready(http)
        expected = {prompt: (await ask(http, prompt, False))[1] or "" for prompt in PROMPTS}
        callers = [
            asyncio.create_task(call_again_and_again(http, expected, seen, stop, seed + number))
            for number in range(NUM_CALLERS)
        ]
        kills: list[Kill] = []
        while sum(each.num_killed for each in kills) < num_kills:
            await asyncio.sleep(rng.uniform(0.2, 2.0))
            pids = [pid for _, pid in await states(http) if pid is not None]
            chosen = pids if rng.random() < 0.2 else [rng.choice(pids)]
            for pid in chosen:
                os.kill(pid, signal.SIGKILL)
            at = time.monotonic()
            kills.append(Kill(at, len(chosen), await until_all_are_ready(http)))
            print(f"{sum(each.num_killed for each in kills)} kills, {dict(seen.outcomes)}", flush=True)
        await asyncio.sleep(2)
        stop.set()
        await asyncio.gather(*callers)
    gaps = [min(done for done in seen.completed if done > kill.at) - kill.at for kill in kills]
    return seen, kills, gaps


def page(seen: Seen, kills: list[Kill], gaps: list[float], seconds: float) -> str:
    """The page."""
    one = [gap for gap, kill in zip(gaps, kills) if kill.num_killed == 1]
    both = [gap for gap, kill in zip(gaps, kills) if kill.num_killed > 1]
    num_kills = sum(each.num_killed for each in kills)
    silent = sum(num for name, num in seen.outcomes.items() if "SILENTLY" in name)
    lines = [
        "# Random kills of replicas",
        "",
        "`python -m benchmarks.replica_kills --out benchmarks/results/replica-kills.md`",
        "",
        f"HPU-Duo {__version__}, Python {platform.python_version()}, httpx {httpx.__version__}, "
        f"{date.today()}; "
        f"{os.cpu_count()} cores of `{machine()}`, shared with other work. `hpu-duo {SERVE}`, the "
        f"built-in model; "
        f"{NUM_CALLERS} callers with {len(PROMPTS)} greedy questions of {NUM_TOKENS} tokens, 60 % of "
        f"them as streams.",
        "",
        f"{num_kills} replicas were killed (SIGKILL) at {len(kills)} random moments within "
        f"{seconds:.0f} s; at "
        f"{len(both)} of them both at once.",
        "",
        "| outcome of a call | calls |",
        "| --- | ---: |",
        *(f"| {name} | {num:,} |" for name, num in sorted(seen.outcomes.items())),
        "",
        "Answers that were called complete and differ from those before the first kill: "
        f"**{len(seen.wrong)}**. "
        f"Streams that ended without an error and without an end: **{silent}**.",
        "",
        "From a kill until every replica takes calls again: at most "
        f"{max(each.all_ready_s for each in kills):.1f} s (stated: {BACK_S:.0f} s), which is the "
        "time to start Python and load the model on a busy machine. From a kill to the next complete "
        "answer of 60 tokens, "
        f"whatever was killed in between: at most {max(one, default=0):.1f} s where one was killed, and "
        f"{max(both, default=0):.1f} s where both were.",
    ]
    return "\n".join(lines) + "\n"


def machine() -> str:
    """Name of the processor."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return found[1] if found else platform.machine()


def main() -> None:
    """Kill, and write the page; exits with 1 if any answer was wrong or any stream ended silently."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    command = [sys.executable, "-m", "hpu_duo.cli", *SERVE.split()]
    began = time.monotonic()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = ""
        while not (found := re.search(r"behind (http://\S+),", told)):
            told += (line := process.stderr.readline())
            if not line:
                raise SystemExit(told)
        # Somebody has to read what it tells further on.
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        try:
            seen, kills, gaps = asyncio.run(kill_at_random(found[1], asked.kills, asked.seed))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            drain.wait(10)
    asked.out.write_text(page(seen, kills, gaps, time.monotonic() - began), encoding="utf-8")
    print(asked.out.read_text(encoding="utf-8"))
    if (
        seen.wrong
        or any("SILENTLY" in name for name in seen.outcomes)
        or max(each.all_ready_s for each in kills) > BACK_S
    ):
        raise SystemExit("\n".join(seen.wrong) or "a stream ended silently, or service was not back in time")


if __name__ == "__main__":
    main()
