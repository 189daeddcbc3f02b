"""Captured steps against the same steps uncaptured: seconds of a step, and the cost of capturing.

    python -m benchmarks.gpu_graphs                          # Llama-3-8B in random weights, 32 decodes
    python -m benchmarks.gpu_graphs --model small            # small layers: the host's share is largest
    python -m benchmarks.gpu_graphs --device cpu --model toy --graphs eager     # shows that it works

Both engines pad to the same buckets and serve the same requests, so the tokens must be the same. Every bucket
is captured first; CUDA refuses to record a step that waits for the device, so a bucket that could be captured
waits for nothing. The waits of whole steps, sampling included, are counted as torch reports them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_suite.clock import Timing
from benchmarks.gpu_suite.engines import Setup, make_model
from benchmarks.gpu_suite.results import describe_environment
from benchmarks.gpu_suite.shapes import LLAMA_3_8B, ModelShape
from graphs import BatchShape, BucketTable, CaptureBackend
from hpu_duo.config.engine import CacheConfig, EngineConfig, GraphConfig, ModelConfig, SchedulerConfig
from hpu_duo.device import resolve_device
from hpu_duo.engine.engine import Engine
from hpu_duo.sampling import SamplingParams
from hpu_duo.startup.assembly import assemble_around

_SMALL: dict[str, Any] = {
    "hidden_size": 512,
    "num_layers": 12,
    "num_heads": 8,
    "num_kv_heads": 4,
    "intermediate_size": 1536,
}
_TOY: dict[str, Any] = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "intermediate_size": 48,
}
MODELS: dict[str, ModelShape] = {
    "8b": LLAMA_3_8B,
    "small": replace(LLAMA_3_8B, name="12 layers of 512", vocab_size=32_000, **_SMALL),
    "toy": replace(LLAMA_3_8B, name="toy", vocab_size=96, **_TOY),
}
_SYNC_WARNING = "synchronizing CUDA operation"
_MIB = 1 << 20


@dataclass(frozen=True)
class Work:
    """Requests that decode side by side.

    Attributes:
        num_decodes: requests.
        num_context: tokens of each prompt.
        num_steps: decode steps that are timed, after ``num_warm`` that are not.
    """

    num_decodes: int
    num_context: int
    num_steps: int
    num_warm: int = 5

    def __post_init__(self) -> None:
        for name in ("num_decodes", "num_context", "num_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")

    @property
    def num_new(self) -> int:
        """Tokens that each request samples: enough for the timed steps to find all of them decoding."""
        return self.num_decodes + self.num_warm + self.num_steps + 2


@dataclass(frozen=True)
class Capture:
    """One bucket: seconds to capture it, and bytes that the process held afterwards and not before."""

    shape: BatchShape
    seconds: float
    num_bytes: int


@dataclass(frozen=True)
class Measured:
    """One engine: its captures, seconds of a step, waits per step, and the tokens it sampled."""

    backend: str
    captures: tuple[Capture, ...]
    step: Timing
    waits: float
    tokens: dict[str, list[int]]


def measure(
    shape: ModelShape, setup: Setup, work: Work, graphs: str | CaptureBackend, table: BucketTable | None
) -> tuple[Measured, BucketTable]:
    """Capture every bucket, then time decode steps; returns the table as well.

    Args:
        graphs: capture backend.
        table: buckets; None = the default ones.
    """
    max_len = work.num_context + work.num_new
    engine = assemble_around(
        make_model(shape, max_len, setup),
        EngineConfig(
            model=ModelConfig(
                path="random weights", device=setup.device, dtype=setup.dtype, attention=setup.attention
            ),
            cache=CacheConfig(block_size=setup.block_size, enable_prefix_caching=False),
            scheduler=SchedulerConfig(
                max_num_seqs=work.num_decodes,
                max_num_batched_tokens=max(2048, work.num_decodes),
                max_model_len=max_len,
            ),
            graph=GraphConfig(backend=graphs, table=table),
        ),
        frozenset(),
    )
    captures = tuple(_captures(engine))
    engine.runner.warmup.finish(engine.runner.graphs.table)
    tokens: dict[str, list[int]] = {}
    generator = torch.Generator().manual_seed(1)
    params = SamplingParams(temperature=0.0, max_tokens=work.num_new, ignore_eos=True)
    for _ in range(work.num_decodes):
        prompt = torch.randint(shape.vocab_size, (work.num_context,), generator=generator)
        tokens[engine.add_request(prompt.tolist(), params)] = []
    seconds: list[float] = []
    waits: list[int] = []
    while engine.has_unfinished:
        is_decode = engine.stats().num_waiting == 0 and all(tokens.values())
        began = time.perf_counter()
        with _counted() as counted:
            outputs = engine.step()
        taken = time.perf_counter() - began
        for output in outputs:
            tokens[output.request_id].extend(output.token_ids)
        if is_decode and len(outputs) == work.num_decodes:
            seconds.append(taken)
            waits.append(counted.num_waits)
    timed = slice(work.num_warm, work.num_warm + work.num_steps)
    step, mean_waits = Timing.of(seconds[timed]), statistics.mean(waits[timed])
    backend = engine.runner.graphs.backend.name
    return Measured(backend, captures, step, mean_waits, tokens), engine.runner.graphs.table


def _captures(engine: Engine) -> list[Capture]:
    runner, done = engine.runner, []
    for bucket in reversed(runner.graphs.table.by_cost):
        held, began = runner.runtime.used_bytes(), time.perf_counter()
        runner.warmup.capture(bucket)
        runner.runtime.synchronize()
        done.append(Capture(bucket, time.perf_counter() - began, runner.runtime.used_bytes() - held))
    return done


class _counted:
    """Waits for the device inside, as torch reports them on CUDA; none elsewhere."""

    num_waits = 0

    def __enter__(self) -> _counted:
        self._caught = warnings.catch_warnings(record=True)
        self._seen = self._caught.__enter__()
        warnings.simplefilter("always")
        self._is_cuda = torch.cuda.is_available()
        if self._is_cuda:
            torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *raised: object) -> None:
        if self._is_cuda:
            torch.cuda.set_sync_debug_mode("default")
        assert self._seen is not None, "warnings are recorded"
        self.num_waits = sum(_SYNC_WARNING in str(each.message) for each in self._seen)
        self._caught.__exit__(None, None, None)


def report(
    shape: ModelShape, work: Work, environment: dict[str, str], written: Measured, captured: Measured
) -> str:
    """The figures as Markdown.

    Raises:
        ValueError: the two engines sampled different tokens, so that their times cannot be compared.
    """
    if written.tokens != captured.tokens:
        different = [name for name in written.tokens if written.tokens[name] != captured.tokens.get(name)]
        raise ValueError(f"expected equal tokens from both engines, got others for {', '.join(different)}")
    ratio = written.step.median_s / captured.step.median_s
    num_bytes = sum(each.num_bytes for each in captured.captures)
    lines = [
        "# Captured steps against steps as written",
        "",
        f"{shape.name}, random weights: {work.num_decodes} decodes, {work.num_context:,} tokens of context "
        f"each, {captured.step.rounds} steps. " + ", ".join(f"{k} {v}" for k, v in environment.items()) + ".",
        "",
        "| | milliseconds per step: median (least to most) | waits per step |",
        "| --- | ---: | ---: |",
        *(_row("as written", written), _row(captured.backend, captured)),
        "",
        f"Captured steps take {1 / ratio:.1%} of the time. Both sampled the same tokens.",
        "",
        f"All {len(captured.captures)} buckets were captured in "
        f"{sum(each.seconds for each in captured.captures):.1f} s, and keep {num_bytes / _MIB:,.1f} MiB:",
        "",
        "| bucket | seconds | MiB |",
        "| --- | ---: | ---: |",
        *(
            f"| {each.shape} | {each.seconds:.3f} | {each.num_bytes / _MIB:.1f} |"
            for each in captured.captures
        ),
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, measured: Measured) -> str:
    step = measured.step
    times = f"{step.median_s * 1e3:.3f} ({step.low_s * 1e3:.3f} to {step.high_s * 1e3:.3f})"
    return f"| {name} | {times} | {measured.waits:.2f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both, print the report, and write it where asked to."""
    options = _parser().parse_args(arguments)
    try:
        work = Work(options.decodes, options.context, options.steps)
        device = resolve_device(options.device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        setup = Setup(device, dtype, options.attention, options.graphs, options.block_size)
        shape = MODELS[options.model]
        captured, table = measure(shape, setup, work, options.graphs, None)
        written, _ = measure(shape, setup, work, "eager", table if len(table) else None)
        environment = describe_environment(device, is_toy=options.model == "toy")
        text = report(shape, work, environment, written, captured)
    except ValueError as error:
        sys.exit(f"gpu_graphs.py: {error}")
    print(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text, encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="8b", help="sizes of the model")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to see that it works")
    parser.add_argument("--graphs", default="cuda", help="capture backend that is compared with none")
    parser.add_argument("--attention", default="auto", help="kernels of the attention parts")
    parser.add_argument("--decodes", type=int, default=32, help="requests that decode side by side")
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens of each")
    parser.add_argument("--steps", type=int, default=100, help="timed steps")
    parser.add_argument("--block-size", type=int, default=128, help="tokens of a block")
    parser.add_argument("--out", type=Path, help="file for the report")
    return parser


if __name__ == "__main__":
    main()
