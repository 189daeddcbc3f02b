"""What every engine worker speaks: one JSON request a line on standard input, one JSON reply a line.

A worker runs in the virtual environment of its engine, so this file needs nothing but Python. Requests
are ``{"prompts": [[token ids]], "new": [tokens to generate]}``; the reply holds, for CPU seconds of the
process and for seconds of the clock, the time to the first token of any request, and to the end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO


@dataclass(frozen=True)
class Limits:
    """What a worker is started with.

    Attributes:
        model: directory of the transformers checkpoint.
        max_num_seqs: requests at a time.
        max_model_len: prompt and output of a request.
        max_tokens: query tokens of a step, for engines that ask.
        cache: folder for what an engine converts or compiles.
    """

    model: Path
    max_num_seqs: int
    max_model_len: int
    max_tokens: int
    cache: Path


class Stopwatch:
    """CPU and wall time of one request set, from its creation."""

    def __init__(self) -> None:
        self._began = self._now()
        self.first: tuple[float, float] | None = None

    def token(self) -> None:
        """Note that a token is there; only the first one counts."""
        if self.first is None:
            self.first = self._now()

    def reply(self) -> dict[str, float]:
        """The times, once everything is done."""
        ended = self._now()
        first = self.first or ended
        return {
            "first_cpu_s": first[0] - self._began[0],
            "first_s": first[1] - self._began[1],
            "cpu_s": ended[0] - self._began[0],
            "s": ended[1] - self._began[1],
        }

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.process_time(), time.perf_counter()


Serve = Callable[[list[list[int]], list[int], Stopwatch], None]
"""Generates greedily exactly ``new[i]`` tokens of each prompt, and tells the watch of the first token."""


def private_output() -> TextIO:
    """Standard output for replies; whatever engines print goes to standard error from now on."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return replies


def main(start: Callable[[Limits], tuple[str, Serve]]) -> None:
    """Run a worker.

    Args:
        start: loads the engine; returns its name with version, and what serves.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    for name in ("--max-num-seqs", "--max-model-len", "--max-tokens"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    limits = Limits(**vars(parser.parse_args()))
    replies = private_output()
    name, serve = start(limits)
    replies.write(json.dumps({"engine": name}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        watch = Stopwatch()
        serve(request["prompts"], request["new"], watch)
        replies.write(json.dumps(watch.reply()) + "\n")
