"""Protocol of the engine workers: one JSON request a line on standard input, one JSON reply a line.

A worker runs in the virtual environment of its engine, so this file needs nothing but Python. Its first
line names the engine. Requests are ``{"prompts": [[token ids]], "new": [tokens to generate],
"late": null or {...}}``; replies are the fields of ``Reply``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, TextIO


@dataclass(frozen=True)
class Limits:
    """Arguments of a worker.

    Attributes:
        model: directory of the transformers checkpoint.
        max_num_seqs: requests at a time.
        max_model_len: prompt and output of a request.
        max_tokens: query tokens of a step, for engines that ask.
        cache: folder for what an engine converts or compiles.
        streaming: share of the KV heads that stream, for this engine alone.
        prefix_caching: whether later prompts take up what earlier ones have computed.
        dtype: name of the dtype to compute in; auto = what the engine chooses.
    """

    model: Path
    max_num_seqs: int
    max_model_len: int
    max_tokens: int
    cache: Path
    streaming: float
    prefix_caching: bool
    dtype: str


@dataclass(frozen=True)
class Late:
    """A prompt that arrives when every other request has ``after`` tokens.

    Attributes:
        new: tokens to generate.
    """

    prompt: list[int]
    new: int
    after: int


class Moment(NamedTuple):
    """CPU seconds of the process and seconds of the clock."""

    cpu: float
    clock: float

    @staticmethod
    def now() -> Moment:
        """Return the current moment."""
        return Moment(time.process_time(), time.perf_counter())

    def since(self, earlier: Moment) -> Moment:
        """Return the seconds between an earlier moment and this one."""
        return Moment(self.cpu - earlier.cpu, self.clock - earlier.clock)


@dataclass(frozen=True)
class Reply:
    """Times of one request set, ``(CPU seconds, clock seconds)`` each.

    Attributes:
        first: until the first token of any request.
        whole: until the end.
        late_first: from the late prompt's arrival to its first token, if there was one.
        stall: the longest time between two tokens of another request meanwhile, if there was one.
        peak_bytes: most resident memory of the process so far.
    """

    first: Moment
    whole: Moment
    late_first: Moment | None
    stall: Moment | None
    peak_bytes: int


class Engine(ABC):
    """An engine that serves whole request sets."""

    name: str

    @abstractmethod
    def serve(self, prompts: list[list[int]], new: list[int], late: Late | None) -> Reply:
        """Generate greedily exactly ``new[i]`` tokens of each prompt."""


class SteppedEngine(Engine):
    """An engine that takes requests at any time and works in steps."""

    @abstractmethod
    def add(self, key: int, prompt: list[int], new: int) -> None:
        """Queue a prompt; ``step`` calls it by its key."""

    @abstractmethod
    def step(self) -> Sequence[int]:
        """Run one step; the keys of the requests that got tokens."""

    @abstractmethod
    def is_busy(self) -> bool:
        """Whether a request is unfinished."""

    def serve(self, prompts: list[list[int]], new: list[int], late: Late | None) -> Reply:
        """Add all prompts, and the late one when it is due, and step to the end."""
        began = Moment.now()
        for key, (prompt, length) in enumerate(zip(prompts, new)):
            self.add(key, prompt, length)
        num_tokens = dict.fromkeys(range(len(prompts)), 0)
        first = came = late_first = None
        last: dict[int, Moment] = {}
        stalls: list[Moment] = []
        while self.is_busy():
            keys, now = self.step(), Moment.now()
            if keys:
                first = first or now.since(began)
            for key in keys:
                if key not in num_tokens:
                    late_first = late_first or now.since(came)
                    continue
                num_tokens[key] += 1
                if came and key in last and not late_first:
                    stalls.append(now.since(last[key]))
                last[key] = now
            if late and not came and min(num_tokens.values()) >= late.after:
                came = Moment.now()
                self.add(len(prompts), late.prompt, late.new)
        whole = Moment.now().since(began)
        return Reply(first or whole, whole, late_first, max(stalls, default=None), peak_bytes())


def peak_bytes() -> int:
    """Most resident memory of this process so far."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))


def private_output() -> TextIO:
    """Standard output for replies; whatever engines print goes to standard error from now on."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return replies


def main(start: Callable[[Limits], Engine]) -> None:
    """Run a worker.

    Args:
        start: loads the engine.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    for name in ("--max-num-seqs", "--max-model-len", "--max-tokens"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--streaming", type=float, default=0.0)
    parser.add_argument("--prefix-caching", type=lambda text: bool(int(text)), default=False)
    parser.add_argument("--dtype", default="auto")
    limits = Limits(**vars(parser.parse_args()))
    replies = private_output()
    engine = start(limits)
    replies.write(json.dumps({"engine": engine.name}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        late = Late(**request["late"]) if request["late"] else None
        reply = engine.serve(request["prompts"], request["new"], late)
        replies.write(json.dumps(asdict(reply)) + "\n")
