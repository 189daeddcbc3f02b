"""Weights, keys and values on the host of a GPU: decodes beside predictions.

    python -m benchmarks.gpu_offload --out benchmarks/results/gpu-offload.md
    python -m benchmarks.gpu_offload --device cpu --out /tmp/toy.md     # toy sizes, anywhere

Layers of Llama-3-8B and of Llama-2-7B, whose heads share no keys, with random weights, in three parts:

- attention on the host to contexts of 16K tokens, and moving them, in turn, beside what the formula predicts
  from the rates that an engine measures at its start;
- all weights on the host, with 1, 2 and 4 groups of rows that share a loaded layer;
- a quarter of the bytes of weights, keys and values on the device, beside the prediction of ``hpu-duo
  plan-offload`` from rates as its ``--measure`` measures them.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.gpu_suite.engines import Setup, decoded, engine_around, make_model
from benchmarks.gpu_suite.memory import llama_config
from benchmarks.gpu_suite.shapes import LLAMA_2_7B, LLAMA_3_8B, TOY, ModelShape
from benchmarks.weight_stream import OUTPUT, PROMPT, ROWS, predicted
from hpu_duo.engine.engine import Engine
from hpu_duo.engine.on_host.attention import HostAttention
from hpu_duo.engine.on_host.choice import HostContextSizes
from hpu_duo.engine.on_host.runner import HostRunner
from hpu_duo.modeling.weight_stream import WeightStream
from hpu_duo.planning import Format
from hpu_duo.planning.offload import (
    Formula,
    OffloadMachine,
    OffloadModel,
    OffloadWork,
    Placement,
    ZigZag,
    offload_model,
)
from hpu_duo.planning.read_model import read_model
from hpu_duo.sampling import SamplingParams
from hpu_duo.startup.placement import offload_machine
from kernels_ref import PLAIN

NUM_DECODES, NUM_ROUNDS, NUM_NEW = 6, 2, 32
PARTS = ("attention", "groups", "quarter")
Row = dict[str, Any]


class Sizes(NamedTuple):
    """Sizes of a run.

    Attributes:
        shapes: of the models that attend on the host, the first of which streams its weights too.
        streamed_layers: of the latter.
        block_size: tokens of a block.
        rows, context: of the requests that attend on the host.
        prompt: tokens of as many requests beside streamed weights.
        chunk: prompt tokens of a step.
    """

    shapes: tuple[ModelShape, ...]
    streamed_layers: int
    block_size: int
    rows: int
    context: int
    prompt: int
    chunk: int


REAL_SIZES = Sizes(
    tuple(replace(each, num_layers=4, vocab_size=32_000) for each in (LLAMA_3_8B, LLAMA_2_7B)),
    *(8, 128, 4, 16_384, 6_144, 2_048),
)
TOY_SIZES = Sizes(TOY.models[::-1], 4, 16, 2, 512, 480, 64)


class OnGpu:
    """The benchmark on a device.

    Args:
        device: a GPU, or a CPU for toy sizes.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_toy = device.type == "cpu"
        self.sizes = TOY_SIZES if self.is_toy else REAL_SIZES
        dtype = torch.float32 if self.is_toy else torch.bfloat16
        self._setup = Setup(device, dtype, "auto", "eager", self.sizes.block_size)
        self.name = platform.machine() if self.is_toy else torch.cuda.get_device_name(device)

    @cached_property
    def machine(self) -> OffloadMachine:
        """Its rates, as ``plan-offload --measure`` measures them."""
        memory = {"device_memory": 1e12, "host_memory": 1e12, "disk": 0.0}
        with tempfile.TemporaryDirectory() as folder:
            size = (16 if self.is_toy else 256) << 20
            return offload_machine(str(self._setup.device), Path(folder), **memory, size=size)

    def _prompts(self, shape: ModelShape, rows: int, length: int) -> list[list[int]]:
        drawn = np.random.default_rng(0).integers(0, shape.vocab_size, (rows, length))
        return [row.tolist() for row in drawn]

    def attention(self) -> Iterator[Row]:
        """Decodes behind contexts on the host, both ways in turn: milliseconds of a layer.

        Those of attention are those of decodes without those of the same rows with short contexts.
        """
        given = self.sizes
        for shape in given.shapes:
            longest = given.context + 4 * given.block_size
            of_token = 2 * shape.num_kv_heads * shape.head_dim * self._setup.dtype.itemsize * shape.num_layers
            options = {
                "block_size": given.block_size,
                "num_blocks": given.chunk // given.block_size + 4 * given.rows + 4,
                "max_num_seqs": given.rows,
                "max_num_batched_tokens": given.chunk,
                "max_model_len": longest,
                "cpu_attention": given.rows * longest * of_token / 2**30,
                "cpu_attention_mode": "auto",
            }
            with engine_around(make_model(shape, longest, self._setup), **options) as engine:
                host = _runner(engine).host
                begin = partial(self._decodes, engine, host, shape)
                [short] = begin(2 * given.block_size, (False,))
                there, moved = begin(given.context, (False, True))
                yield self._compared(shape, host, engine, short, there, moved)
                for request in list(engine.scheduler._running):
                    engine.abort(request.request_id)
                del engine, host, begin

    def _decodes(
        self, engine: Engine, host: HostAttention, shape: ModelShape, length: int, ways: Sequence[bool]
    ) -> list[float]:
        """Seconds of a decode behind prompts, one number for each way; in turn."""
        params = SamplingParams(temperature=0.0, max_tokens=3 * self.sizes.block_size, ignore_eos=True)
        if len(ways) == 1:
            params = replace(params, max_tokens=NUM_DECODES + 1)
        for prompt in self._prompts(shape, self.sizes.rows, length):
            engine.add_request(prompt, params)
        while len(engine.scheduler._running) < self.sizes.rows or any(
            each.num_uncomputed_tokens > 1 for each in engine.scheduler._running
        ):
            engine.step()
        times = {moves: list[float]() for moves in ways}
        for _ in range(NUM_ROUNDS if len(ways) > 1 else 1):
            for moves in ways:
                host.moves_decodes = moves
                for number in range(NUM_DECODES - (len(ways) == 1)):
                    began = time.perf_counter()
                    engine.step()
                    if number:
                        times[moves].append(time.perf_counter() - began)
        while len(ways) == 1 and engine.has_unfinished:
            engine.step()
        return [statistics.median(each) for each in times.values()]

    def _compared(
        self, shape: ModelShape, host: HostAttention, engine: Engine, short: float, there: float, moved: float
    ) -> Row:
        rates, layers = host.rates, shape.num_layers
        assert rates is not None
        lengths = [len(each.host_blocks) for each in engine.scheduler._running]
        unit = host.num_bytes / (host.num_blocks + 1) / layers
        num_tile = next(iter(host._tiles.values()))[0].layout.num_units - 1
        sizes = HostContextSizes.of(
            len(lengths),
            shape.num_heads,
            shape.head_dim,
            sum(lengths) * unit,
            sum(math.ceil(each / num_tile) for each in lengths),
            self._setup.dtype.itemsize,
        )
        attended, moves = 1e3 * sizes.attended(rates), 1e3 * sizes.moved(rates)
        ms = 1e3 / layers
        return {
            "model": f"{shape.name}, {layers} layers",
            "query and KV heads": f"{shape.num_heads}, {shape.num_kv_heads}",
            "rows": len(lengths),
            "tokens on the host": sum(lengths) * self.sizes.block_size,
            "MB of a layer there": sizes.contexts / 1e6,
            "link, GB/s": rates.link / 1e9,
            "host attends, GB/s": rates.host / 1e9,
            f"device {'attends' if rates.tile is None else 'takes in tiles'}, GB/s": rates.device / 1e9,
            "us of a tile": 1e6 * (rates.call if rates.tile is None else rates.tile),
            "short decode, ms of a layer": ms * short,
            "attention there, ms of a layer": ms * (there - short),
            "attention there, predicted": attended,
            "moved, ms of a layer": ms * (moved - short),
            "moved, predicted": moves,
            "moved : there": (moved - short) / (there - short),
            "moved : there, predicted": moves / attended,
            "whole decode, moved : there": moved / there,
        }

    def _streamed_shape(self) -> ModelShape:
        return replace(self.sizes.shapes[0], num_layers=self.sizes.streamed_layers)

    def _model_sizes(self, stream: WeightStream) -> OffloadModel:
        shape = self._streamed_shape()
        with tempfile.TemporaryDirectory() as folder:
            llama_config(shape, self.sizes.context).save_pretrained(folder)
            sizes = offload_model(read_model(Path(folder)), Format.BF16, PLAIN)
        return replace(sizes, layer_bytes=stream.num_bytes / shape.num_layers)

    def groups(self) -> Iterator[Row]:
        """Decodes with all weights on the host, in groups of rows that share a loaded layer."""
        shape, block_size = self._streamed_shape(), self.sizes.block_size
        for num_groups in (1, 2, 4):
            model, num_rows = make_model(shape, self.sizes.context, self._setup), ROWS * num_groups
            prompts = self._prompts(shape, num_rows, PROMPT)
            options = {
                "block_size": block_size,
                "num_blocks": num_rows * (-(-(PROMPT + OUTPUT) // block_size) + 1),
                "max_num_seqs": num_rows,
                "max_num_batched_tokens": num_rows * PROMPT,
                "max_model_len": PROMPT + OUTPUT,
                "offload_num_batches": num_groups,
            }
            with engine_around(model, **options) as engine:
                wanted, resident = decoded(engine, prompts, OUTPUT)
                del engine
            with engine_around(model, **options, offload_policy="0,100,100,0,100,0") as engine:
                found, seconds = decoded(engine, prompts, OUTPUT)
                expected = predicted(
                    self._model_sizes(_stream(engine)), self.machine.up, resident, num_groups
                )
                del engine
            yield {
                "groups": num_groups,
                "rows": num_rows,
                **_speeds(num_rows, resident, seconds, expected),
                "same tokens": found == wanted,
            }
            del model

    def quarter(self) -> Iterator[Row]:
        """Decodes with a quarter of the bytes on the device, which attend on the host or move the context."""
        given, shape = self.sizes, self._streamed_shape()
        model, prompts = (
            make_model(shape, given.context, self._setup),
            self._prompts(shape, given.rows, given.prompt),
        )
        options: dict[str, Any] = {
            "block_size": given.block_size,
            "max_num_seqs": given.rows,
            "max_num_batched_tokens": given.chunk,
            "max_model_len": given.prompt + NUM_NEW,
        }
        blocks = given.rows * -(-(given.prompt + NUM_NEW) // given.block_size)
        with engine_around(model, **options, num_blocks=blocks) as engine:
            block_bytes = engine.runner.store.plan.block_bytes
            wanted, resident = decoded(engine, prompts, NUM_NEW)
            del engine
        options["cpu_attention"] = (blocks * 3 // 4 * block_bytes + 1) / 2**30
        with engine_around(model, **options, offload_policy="0,100,25,75,100,0") as engine:
            host, stream = _runner(engine).host, _stream(engine)
            on_device = stream.buffer_bytes + engine.scheduler.limits.num_blocks * block_bytes
            for moves in (False, True):
                host.moves_decodes = moves
                found, seconds = decoded(engine, prompts, NUM_NEW)
                work, sizes = OffloadWork(given.prompt, NUM_NEW), self._model_sizes(stream)
                formula = Formula(sizes, work, self.machine, given.rows, 1, not moves)
                placement = Placement(0.0, 1.0, 0.0, 0.25, 0.75, 0.0, 1.0, 0.0, 0.0)
                expected = ZigZag(formula, placement).run().decode_s / (NUM_NEW - 1)
                yield {
                    "contexts": "moved" if moves else "attended to on the host",
                    "on the device": on_device / (stream.num_bytes + blocks * block_bytes),
                    **_speeds(given.rows, resident, seconds, expected),
                    "same tokens": found == wanted,
                }
            del engine, host, stream

    def title(self, part: str) -> str:
        """Title of the table of a part."""
        given, streamed = self.sizes, f"{self.sizes.streamed_layers} layers of {self._streamed_shape().name}"
        return {
            "attention": f"Contexts of {given.context:,} tokens on the host",
            "groups": f"All weights of {streamed} on the host, groups of {ROWS} rows",
            "quarter": f"A quarter of the bytes of {streamed} on the device, {given.rows} rows behind "
            f"{given.prompt:,} tokens",
        }[part]


def _speeds(num_rows: int, resident: float, seconds: float, expected: float) -> Row:
    return {
        "all on the device, s": resident,
        "offloaded, s": seconds,
        "predicted, s": expected,
        "tokens/s": num_rows / seconds,
        "predicted tokens/s": num_rows / expected,
        "measured : predicted": expected / seconds,
    }


def _runner(engine: Engine) -> HostRunner:
    assert isinstance(engine.runner, HostRunner)
    return engine.runner


def _stream(engine: Engine) -> WeightStream:
    stream = engine.runner.executor.model.stream
    assert stream is not None
    return stream


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(rows: Sequence[Row]) -> list[str]:
    """Lines of a table with a column for each row, as there are fewer of them than values."""
    names = list(rows[0])
    head = [f"| {' | '.join([names[0], *(_cell(each[names[0]]) for each in rows)])} |"]
    head.append("| --- " * (len(rows) + 1) + "|")
    return head + [f"| {name} | {' | '.join(_cell(each[name]) for each in rows)} |" for name in names[1:]]


def main() -> None:
    """Measure, and write a page and its numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="a GPU, or cpu for toy sizes")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, help="a Markdown file; numbers go to a .json beside it")
    given = parser.parse_args()
    run, found = OnGpu(torch.device(given.device)), dict[str, list[Row]]()
    for name in given.only:
        for row in getattr(run, name)():
            found.setdefault(name, []).append(row)
            if given.out is not None:  # so that a run may be stopped
                given.out.write_text(_page(run, found))
                given.out.with_suffix(".json").write_text(json.dumps(_numbers(run, found), indent=2) + "\n")
    print(_page(run, found))


def _page(run: OnGpu, found: dict[str, list[Row]]) -> str:
    lines = [
        "# Weights, keys and values on the host of a GPU",
        "",
        f"`python -m benchmarks.gpu_offload`, {date.today()}; {run.name}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads of the host. Random weights; medians.",
    ]
    for name, rows in found.items():
        lines += ["", f"## {run.title(name)}", ""]
        if name != "attention":
            rates = run.machine
            lines += [
                f"Rates by `plan-offload --measure`: {rates.up / 1e9:.1f} GB/s to the device, "
                f"{rates.decode_matrix / 1e9:,.0f} GFLOP/s of decodes' products and "
                f"{rates.decode_attention / 1e9:,.0f} of their attention there, "
                f"{rates.host_attention / 1e9:,.1f} of attention on the host.",
                "",
            ]
        lines += _table(rows)
    return "\n".join((*lines, ""))


def _numbers(run: OnGpu, found: dict[str, list[Row]]) -> dict[str, Any]:
    numbers = {"device": run.name, "torch": torch.__version__, "date": str(date.today()), "parts": found}
    if {*found} == {"attention"}:
        return numbers
    return numbers | {"machine": {name: rate for name, rate in vars(run.machine).items() if rate != math.inf}}


if __name__ == "__main__":
    main()
