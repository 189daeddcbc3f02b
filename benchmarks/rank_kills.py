"""Random kills of ranks under load: no wrong or truncated answer may be called complete.

    python -m benchmarks.rank_kills --out benchmarks/results/rank-kills.md

Two ranks share the built-in model and serve the same greedy questions over HTTP again and again, whole and as
streams. At random times one of them is killed or made to hang; a loop starts the server again when it ends.
Every answer that says that it is complete is compared with the answer from before the first kill; every other
one has to be an error.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import httpx

from benchmarks.replica_kills import (
    NUM_CALLERS,
    NUM_TOKENS,
    PROMPTS,
    Seen,
    ask,
    call_again_and_again,
    machine,
)
from hpu_duo import __version__

TIMEOUT_S = 5
SERVE = (
    "serve --tensor-parallel-size 2 --max-num-seqs 4 --max-model-len 512 --num-blocks 32 --graphs eager "
    f"--drain-seconds 5 --rank-timeout-seconds {TIMEOUT_S}"
)
BACK_S = 120.0
"""Stated time: so soon behind a kill the server takes calls again, on a machine as busy as this one."""
PATIENCE_S = 300.0


class Supervisor:
    """Starts a command again whenever it ends.

    Args:
        command: what to run.

    Attributes:
        exit_codes: of the runs that have ended.
        told: what they have written on standard error.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._is_stopped = False
        self.exit_codes: list[int] = []
        self.told: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_stopped:
            with subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True) as self._process:
                _, told = self._process.communicate()
            self.told.append(told)
            self.exit_codes.append(self._process.returncode)

    @property
    def pid(self) -> int:
        """Process of the run under way: rank 0."""
        assert self._process is not None, "it has been started"
        return self._process.pid

    def stop(self) -> None:
        """End the run under way, and start no other."""
        self._is_stopped = True
        if self._process is not None:
            self._process.terminate()
        self._thread.join()


def followers(pid: int) -> list[int]:
    """The processes of the other ranks of a server."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return [child for child in children if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]


def is_there(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


@dataclass(frozen=True)
class Kill:
    """A kill.

    Attributes:
        at: time.
        what: what was done to which rank.
        ended_s: seconds until no process of the run was left.
        ready_s: seconds until the server was ready again.
    """

    at: float
    what: str
    ended_s: float
    ready_s: float


async def is_ready(http: httpx.AsyncClient) -> bool:
    """Whether the server takes calls."""
    try:
        return (await http.get("/ready", timeout=5)).status_code == 200
    except httpx.HTTPError:
        return False


async def until_ready(http: httpx.AsyncClient, since: float) -> float:
    """Wait; returns the seconds since then."""
    while not await is_ready(http):
        if time.monotonic() - since > PATIENCE_S:
            raise SystemExit("the server did not come back")
        await asyncio.sleep(0.1)
    return time.monotonic() - since


KINDS = {
    "rank 1 killed (SIGKILL)": (1, signal.SIGKILL, 5),
    "rank 0, the server, killed (SIGKILL)": (0, signal.SIGKILL, 2),
    f"rank 1 stopped (SIGSTOP), with a timeout of {TIMEOUT_S} s": (1, signal.SIGSTOP, 3),
}
"""Rank, signal and weight of what is done."""


async def kill_once(http: httpx.AsyncClient, supervisor: Supervisor, what: str) -> Kill:
    """Do something to a rank, and wait until the server is back."""
    rank, number, _ = KINDS[what]
    server = supervisor.pid
    pids = [server, *followers(server)]
    assert len(pids) == 2, "two ranks"
    os.kill(pids[rank], number)
    at = time.monotonic()
    while any(map(is_there, pids)):
        if time.monotonic() - at > PATIENCE_S:
            raise SystemExit(f"{what}: a process of the run is still there")
        await asyncio.sleep(0.05)
    ended_s = time.monotonic() - at
    return Kill(at, what, ended_s, await until_ready(http, at))


async def kill_at_random(
    url: str, supervisor: Supervisor, num_kills: int, seed: int
) -> tuple[Seen, list[Kill]]:
    """Kill ranks under load."""
    rng, stop, seen = random.Random(seed), asyncio.Event(), Seen()
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        await until_ready(http, time.monotonic())
        expected = {prompt: (await ask(http, prompt, False))[1] or "" for prompt in PROMPTS}
        assert all(expected.values()), expected
        callers = [
            asyncio.create_task(call_again_and_again(http, expected, seen, stop, seed + number))
            for number in range(NUM_CALLERS)
        ]
        kills: list[Kill] = []
        while len(kills) < num_kills:
            await asyncio.sleep(rng.uniform(0.2, 4.0))
            what = rng.choices(list(KINDS), [weight for *_, weight in KINDS.values()])[0]
            kills.append(await kill_once(http, supervisor, what))
            print(f"{len(kills)} kills, {kills[-1]}, {dict(seen.outcomes)}", flush=True)
        await asyncio.sleep(3)
        stop.set()
        await asyncio.gather(*callers)
    return seen, kills


def unnamed(kills: Sequence[Kill], told: Sequence[str]) -> list[str]:
    """Return what was done where the run's errors do not name the rank; rank 0 is gone and names nobody.

    Args:
        told: by the run that each kill has ended, on standard error.
    """
    missed = []
    for kill, words in zip(kills, told, strict=True):
        rank, number, _ = KINDS[kill.what]
        end = "sent no heartbeat" if number == signal.SIGSTOP else "ended with exit code -9"
        if rank and f"rank {rank} {end}" not in words:
            missed.append(kill.what)
    return missed


def page(seen: Seen, kills: list[Kill], supervisor: Supervisor, seconds: float) -> str:
    """The page."""
    silent = sum(num for name, num in seen.outcomes.items() if "SILENTLY" in name)
    codes = Counter(supervisor.exit_codes[: len(kills)])
    lines = [
        "# Random kills of ranks",
        "",
        "`python -m benchmarks.rank_kills --out benchmarks/results/rank-kills.md`",
        "",
        f"HPU-Duo {__version__}, Python {platform.python_version()}, httpx {httpx.__version__}, "
        f"{date.today()}; {os.cpu_count()} cores of `{machine()}`, shared with other work, so that times say "
        f"little and counts much. `hpu-duo {SERVE}`, the built-in model, started again by a loop whenever it "
        f"ends; {NUM_CALLERS} callers with {len(PROMPTS)} greedy questions of {NUM_TOKENS} tokens, 60 % of "
        "them as streams.",
        "",
        f"{len(kills)} kills at random moments within {seconds:.0f} s.",
        "",
        "| what was done | times | error names the rank | all processes gone, at most | ready again, median "
        "| ready again, at most |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for what, (rank, _, _) in KINDS.items():
        of_kind = [(kill, told) for kill, told in zip(kills, supervisor.told) if kill.what == what]
        if not of_kind:
            continue
        named = len(of_kind) - len(unnamed([kill for kill, _ in of_kind], [told for _, told in of_kind]))
        ready = sorted(kill.ready_s for kill, _ in of_kind)
        lines.append(
            f"| {what} | {len(of_kind)} | {named if rank else 'it is gone'} | "
            f"{max(kill.ended_s for kill, _ in of_kind):.1f} s | {ready[len(ready) // 2]:.1f} s | "
            f"{ready[-1]:.1f} s |"
        )
    told_codes = ", ".join(f"{code} ({num} times)" for code, num in sorted(codes.items()))
    lines += [
        "",
        f"Exit codes of the server: {told_codes}; -9 is the kill of rank 0 itself.",
        "",
        "| outcome of a call | calls |",
        "| --- | ---: |",
        *(f"| {name} | {num:,} |" for name, num in sorted(seen.outcomes.items())),
        "",
        "Answers that were called complete and differ from those before the first kill: "
        f"**{len(seen.wrong)}**. Streams that ended without an error and without an end: **{silent}**.",
        "",
        f"Stated for the time until the server is ready again: {BACK_S:.0f} s. It is the time to end, to "
        "start Python twice and to load the model. Callers who find nobody listening ask again after 0.2 s, "
        "which is why there are so many connection errors.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Kill, and write the page; exits with 1 if an answer was wrong, or a rank was not named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=18731)
    asked = parser.parse_args()
    command = [sys.executable, "-m", "hpu_duo.cli", *SERVE.split(), "--port", str(asked.port)]
    began, supervisor = time.monotonic(), Supervisor(command)
    try:
        seen, kills = asyncio.run(
            kill_at_random(f"http://127.0.0.1:{asked.port}", supervisor, asked.kills, asked.seed)
        )
    finally:
        supervisor.stop()
    asked.out.write_text(page(seen, kills, supervisor, time.monotonic() - began), encoding="utf-8")
    print(asked.out.read_text(encoding="utf-8"))
    codes = supervisor.exit_codes[: len(kills)]
    missed = unnamed(kills, supervisor.told[: len(kills)])
    if (
        seen.wrong
        or 0 in codes
        or missed
        or any("SILENTLY" in name for name in seen.outcomes)
        or max(each.ready_s for each in kills) > BACK_S
    ):
        named = [f"{what}: no error names the rank" for what in missed]
        raise SystemExit(
            "\n".join([*seen.wrong, *named]) or "silence, an exit code of 0, or service not back in time"
        )


if __name__ == "__main__":
    main()
