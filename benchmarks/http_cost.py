"""HTTP's share of the time of a server: tokens/s of 32 streams over HTTP against the engine alone.

    python -m benchmarks.http_cost --new 128 --only 110M --out benchmarks/results/server.md

One process serves, a second one reads 32 streams. Rounds alternate: the engine's thread generates for 32
prompts by itself, then the same prompts come as streams over HTTP, one event per token. Beside the clock the
CPU time of both threads is read, the engine's and the event loop's, since other users of a machine disturb
the clock: the loop's share is all that HTTP can cost where both threads share one core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from benchmarks.cpu_systems import VOCAB, make_checkpoint, prompt
from hpu_duo import HPUDuoModel
from hpu_duo.builtin import MODEL_DIR
from hpu_duo.sampling import SamplingParams
from hpu_duo.server.config import ServerConfig
from hpu_duo.server.http.listening import DrainingServer, bind
from hpu_duo.server.http.routes import create_app
from hpu_duo.server.running.admission import Stage
from hpu_duo.server.service import Service
from hpu_duo.server.telemetry.request_log import CallRecord

NUM_STREAMS = 32
PROMPT_LEN = 64


@dataclass(frozen=True)
class Round:
    """One round: the same work without and with HTTP.

    Attributes:
        alone_s, http_s: seconds by the clock.
        alone_cpu_s, engine_cpu_s, loop_cpu_s: CPU seconds of the engine's thread alone, then of it and of
            the event loop's thread with HTTP.
        num_events: events that the client got.
    """

    alone_s: float
    http_s: float
    alone_cpu_s: float
    engine_cpu_s: float
    loop_cpu_s: float
    num_events: int


class Served:
    """A server in this process.

    Args:
        model: served.

    Attributes:
        records: of calls that are over.
        thread: of the event loop.
    """

    def __init__(self, model: HPUDuoModel) -> None:
        self.records: list[CallRecord] = []
        self.service = Service(model, ServerConfig(("model",)), (self.records.append,))
        bound = bind("127.0.0.1", 0)
        self.port: int = bound.getsockname()[1]
        app = create_app(self.service, warm_up=model.engine.runner.executor.uses_table)
        self._server = DrainingServer(app, self.service)
        self.thread = threading.Thread(target=lambda: self._server.run(sockets=[bound]))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Serve inside."""
        self.thread.start()
        while self.service.stage is not Stage.READY:
            time.sleep(0.05)
        try:
            yield
        finally:
            self._server.handle_exit(15, None)
            self.thread.join()

    def seconds(self) -> float:
        """From the arrival of the first recorded call to the end of the last one."""
        return max(one.ended for one in self.records) - min(one.timing.arrived for one in self.records)


def cpu_s(thread: threading.Thread) -> float:
    """CPU seconds of a thread."""
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def measure(served: Served, prompts: Sequence[Sequence[int]], num_new: int, num_rounds: int) -> list[Round]:
    """Rounds of both ways in turn, after one of each that does not count."""
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    loop = served.service.engine._loop
    assert loop is not None
    engine_thread = served.service.engine._thread._thread

    def alone() -> tuple[float, float]:
        asked = served.service.engine.ask(lambda engine: engine.generate(prompts, params))
        began, cpu = time.perf_counter(), cpu_s(engine_thread)
        asyncio.run_coroutine_threadsafe(asked, loop).result()
        return time.perf_counter() - began, cpu_s(engine_thread) - cpu

    with Client(served.port, prompts, num_new) as client:
        alone(), client.run()
        rounds = []
        for _ in range(num_rounds):
            alone_s, alone_cpu_s = alone()
            served.records.clear()
            engine_cpu, loop_cpu = cpu_s(engine_thread), cpu_s(served.thread)
            num_events = client.run()
            rounds.append(
                Round(
                    alone_s,
                    served.seconds(),
                    alone_cpu_s,
                    cpu_s(engine_thread) - engine_cpu,
                    cpu_s(served.thread) - loop_cpu,
                    num_events,
                )
            )
    return rounds


class Client:
    """A process that reads streams, as often as it is asked to.

    Args:
        port: of the server.
        prompts: one for each stream.
        num_new: tokens of each stream.
    """

    def __init__(self, port: int, prompts: Sequence[Sequence[int]], num_new: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.stream_client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._say({"port": port, "prompts": prompts, "num_new": num_new})

    def run(self) -> int:
        """Read all streams to their ends; returns the number of events with text."""
        self._say("run")
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def _say(self, value: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()


def save_words(directory: Path) -> None:
    """Save a tokenizer of one word per token, so that every token of the random model is text."""
    words = Tokenizer(
        models.WordLevel({f"w{number:05d} ": number for number in range(VOCAB)}, unk_token="w00000 ")
    )
    words.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)


def table(name: str, rounds: Sequence[Round], num_new: int) -> list[str]:
    """Lines of markdown for one model."""
    num_tokens = NUM_STREAMS * num_new
    lines = []
    for one in rounds:
        lines.append(
            f"| {name} | {num_tokens / one.alone_s:,.0f} | {num_tokens / one.http_s:,.0f} | "
            f"{one.alone_s / one.http_s:.3f} | {one.engine_cpu_s / num_tokens * 1e6:,.0f} | "
            f"{one.loop_cpu_s / num_tokens * 1e6:,.1f} | {one.loop_cpu_s / one.engine_cpu_s:.1%} | "
            f"{one.num_events:,} |"
        )
    ratio = statistics.median(one.alone_s / one.http_s for one in rounds)
    share = statistics.median(one.loop_cpu_s / one.engine_cpu_s for one in rounds)
    lines.append(f"| {name}, median | | | **{ratio:.3f}** | | | **{share:.1%}** | |")
    return lines


def report(lines: Sequence[str], arguments: Sequence[str]) -> str:
    """The page."""
    cpu = next(
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    )
    command = " ".join(["python -m benchmarks.http_cost", *arguments])
    return "\n".join(
        [
            f"# HTTP's share, {date.today().isoformat()}",
            "",
            f"`{command}` on {cpu}, Python {platform.python_version()}, torch {torch.__version__}.",
            f"{NUM_STREAMS} streams of greedy tokens behind prompts of {PROMPT_LEN}, one event per token",
            "with text, one thread of torch. *Ratio* is tokens/s over HTTP by those of the engine alone in",
            "the same round; *engine* and *loop* are CPU time of the engine's thread and of the event",
            "loop's, in microseconds per token, while HTTP is served.",
            "",
            "| model | tokens/s alone | over HTTP | ratio | engine | loop | loop / engine | events |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
            *lines,
            "",
        ]
    )


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=32, help="tokens of each stream")
    parser.add_argument("--graphs", default="auto")
    parser.add_argument("--only", choices=("110M", "built-in"), nargs="*", default=["110M", "built-in"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    options = {"max_num_seqs": NUM_STREAMS, "max_model_len": 512, "graphs": args.graphs}
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only:
            path = MODEL_DIR if name == "built-in" else make_checkpoint(Path(folder), 4)
            if name != "built-in":
                save_words(path)
            served = Served(HPUDuoModel.from_pretrained(path, enable_prefix_caching=False, **options))
            prompts = [[token % 1000 + 3 for token in prompt(PROMPT_LEN, n)] for n in range(NUM_STREAMS)]
            with served.running():
                lines += table(name, measure(served, prompts, args.new, args.rounds), args.new)
            print("\n".join(lines), flush=True)
    text = report(lines, sys.argv[1:])
    print(text)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
