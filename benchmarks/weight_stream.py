"""Decodes of a model of the 110M class with all of its layers on the host, against predictions.

    OMP_NUM_THREADS=1 python -m benchmarks.weight_stream --out benchmarks/results/weight-stream.md

The weights of layers pass through a link that a thread throttles. The prediction is the simulated
schedule of ``hpu-duo plan-offload``, with the time of a layer as measured with all weights on the device.
A second table has several groups of rows, which pass through a loaded layer one after the other.

    OMP_NUM_THREADS=1 python -m benchmarks.weight_stream --budget

The device has room for a quarter of the weights of layers and of the keys and values; both share one link.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.cpu_systems import make_checkpoint
from benchmarks.prefix_cache import NUM_KV_HEADS, Tokens, run
from hpu_duo import HPUDuoModel, SamplingParams
from hpu_duo.engine.on_host.runner import HostRunner
from hpu_duo.engine.on_host.worker import WorkerThread
from hpu_duo.modeling.weight_stream import ThreadMover, Weights, weight_bytes
from hpu_duo.planning import Format
from hpu_duo.planning.offload import (
    FLEXGEN_T4,
    Formula,
    OffloadModel,
    OffloadWork,
    Placement,
    ZigZag,
    offload_model,
)
from hpu_duo.planning.read_model import read_model
from kernels_ref import PLAIN

T = TypeVar("T")
ROWS, PROMPT, OUTPUT = 8, 64, 12
RATES = (100e6, 200e6, 400e6)
LONG_ROWS, LONG, LONG_OUTPUT, LONG_STEP, LONG_RATES = 2, 1024, 14, 256, (50e6, 100e6)
NUM_BATCHES, GROUPED_RATES = (1, 2, 4), (50e6, 100e6)
SETUP: dict[str, Any] = {
    "block_size": 128,
    "num_blocks": 64,
    "max_model_len": 256,
    "enable_prefix_caching": False,
}


class Link:
    """A link of some bytes/s that threads share; who asks first is served first."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._free_at, self._lock = bytes_per_s, 0.0, Lock()

    def carry(self, num_bytes: int, asked_at: float) -> None:
        """Wait until so many bytes have crossed, which were asked for at a time of ``time.monotonic``."""
        with self._lock:
            end = self._free_at = max(self._free_at, asked_at) + num_bytes / self._bytes_per_s
        time.sleep(max(0.0, end - time.monotonic()))


class WeightsOver(ThreadMover):
    """Copies weights over a link."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

    def _copy(self, source: Weights, target: torch.Tensor, asked_at: float) -> None:
        super()._copy(source, target, asked_at)
        self._link.carry(source.nbytes, asked_at)


class ContextOver(WorkerThread):
    """Copies queries, results, and keys and values over a link."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

    def move(self, num_bytes: int, copy: Callable[[], T]) -> T:
        """Copy, for as long as the link takes."""
        began, copied = time.monotonic(), copy()
        self._link.carry(num_bytes, began)
        return copied


def decode(model: HPUDuoModel, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    """Tokens of each request, and seconds of a decode: the median of all steps behind the first token."""
    found = run(model, prompts, OUTPUT)
    engine = model.engine
    for each in prompts:
        engine.add_request(each, SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True))
    times: list[float] = []
    while engine.has_unfinished:
        began = time.monotonic()
        engine.step()
        times.append(time.monotonic() - began)
    return found, statistics.median(times[-(OUTPUT - 2) :])


def predicted(sizes: OffloadModel, rate: float, compute: float, num_batches: int) -> float:
    """Seconds of a decode of all groups by the simulated schedule.

    Args:
        rate: of the link, bytes/s.
        compute: seconds of a decode of all groups with all weights on the device.
    """
    machine = replace(
        FLEXGEN_T4,
        up=rate,
        decode_matrix=ROWS * num_batches * 2 * sizes.layer_params * sizes.num_layers / compute,
        decode_attention=float("inf"),
        loads_first=False,
    )
    formula = Formula(sizes, OffloadWork(PROMPT, OUTPUT), machine, ROWS, num_batches, False)
    placement = Placement(0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0)
    return ZigZag(formula, placement).run().decode_s / (OUTPUT - 1)


class Served:
    """A checkpoint with all weights on the device, and with those of all layers on the host."""

    def __init__(self, path: Path, num_batches: int, graphs: str) -> None:
        num_rows = self.num_rows = ROWS * num_batches
        self.num_batches = num_batches
        rows = {"max_num_seqs": num_rows, "max_num_batched_tokens": num_rows * PROMPT}
        setup = {**SETUP, **rows, "graphs": graphs, "offload_num_batches": num_batches}
        tokens = Tokens("weights", 0)
        self.prompts = [tokens.draw(PROMPT) for _ in range(num_rows)]
        resident = HPUDuoModel.from_pretrained(path, **setup)
        run(resident, self.prompts, 2)
        self.wanted, self.compute = decode(resident, self.prompts)
        layers = AutoModelForCausalLM.from_pretrained(path).model.layers
        total = sum(map(weight_bytes, layers))
        self.model = HPUDuoModel.from_pretrained(path, **setup, cpu_offload_gb=0.97 * total / 2**30)
        stream = self.model.engine.runner.executor.model.stream
        assert stream is not None
        self.stream = stream
        sizes = offload_model(read_model(path), Format.BF16, PLAIN)
        self.sizes = replace(sizes, layer_bytes=stream.num_bytes / len(layers))

    def row(self, rate: float) -> tuple[float, str]:
        """Seconds of a decode with a link of some bytes/s, and the end of a row of a table."""
        self.stream.mover = ThreadMover(rate)
        found, taken = decode(self.model, self.prompts)
        expected = predicted(self.sizes, rate, self.compute, self.num_batches)
        same = "yes" if found == self.wanted else "no"
        cells = f"{self.compute:.3f} | {taken:.3f} | {expected:.3f} | {taken / expected:.2f} | {same} |"
        return taken, cells


def timed(model: HPUDuoModel, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    """Tokens of each request, and seconds of a step in which all of them decode: the median."""
    engine, params = model.engine, SamplingParams(max_tokens=LONG_OUTPUT, temperature=0, ignore_eos=True)
    numbers = [engine.add_request(each, params) for each in prompts]
    found = {number: list[int]() for number in numbers}
    times: list[float] = []
    while engine.has_unfinished:
        began = time.monotonic()
        outputs = engine.step()
        times.append(time.monotonic() - began)
        for each in outputs:
            found[each.request_id] += each.token_ids
    num_prompt_steps = len(prompts) * -(-LONG // LONG_STEP)
    return [found[number] for number in numbers], statistics.median(times[num_prompt_steps + 1 : -2])


def quarter(path: Path) -> Iterator[str]:
    """Decodes with a quarter of the bytes of weights and of keys and values on the device, line by line."""
    setup: dict[str, Any] = {
        "block_size": 32,
        "max_num_seqs": LONG_ROWS,
        "max_model_len": LONG + 64,
        "max_num_batched_tokens": LONG_STEP,
        "enable_prefix_caching": False,
        "graphs": "eager",
        "offload_prefetch_step": 2,  # three buffers, a quarter of the twelve layers
    }
    tokens = Tokens("quarter", 0)
    prompts = [tokens.draw(LONG) for _ in range(LONG_ROWS)]
    resident = HPUDuoModel.from_pretrained(path, **setup)
    wanted, compute = timed(resident, prompts)
    memory = resident.engine.runner.store.plan
    on_host = memory.num_blocks * 3 // 4 * memory.block_bytes
    model = HPUDuoModel.from_pretrained(
        path, **setup, offload_policy="0,100,25,75,100,0", cpu_attention=(on_host + 1) / 2**30
    )
    engine, runner = model.engine, model.engine.runner
    stream = runner.executor.model.stream
    assert stream is not None
    assert isinstance(runner, HostRunner)
    sizes = offload_model(read_model(path), Format.BF16, PLAIN)
    sizes = replace(sizes, layer_bytes=stream.num_bytes / sizes.num_layers)
    blocks = engine.scheduler.limits.num_blocks
    total = stream.num_bytes + memory.num_blocks * memory.block_bytes
    share = (stream.buffer_bytes + blocks * memory.block_bytes) / total
    yield from (
        f"Weights of layers and keys and values are {total / 1e6:.0f} MB, of which the device holds "
        f"{share:.0%}: all layers pass through {stream.buffer_bytes / 1e6:.0f} MB of buffers, and {blocks} "
        f"of {memory.num_blocks} KV blocks lie there. {LONG_ROWS} rows behind {LONG:,} tokens, "
        f"{LONG_OUTPUT} sampled ones each. Weights and context share the link, which threads throttle.",
        "",
        "| link, MB/s | keys and values on the host | all on the device | offloaded | predicted | "
        "offloaded : predicted | same tokens |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    )
    for rate in LONG_RATES:
        for moves in (False, True):
            link = Link(rate)
            stream.mover, runner.host.worker, runner.host.moves_decodes = (
                *(WeightsOver(link), ContextOver(link)),
                moves,
            )
            found, taken = timed(model, prompts)
            machine = replace(
                FLEXGEN_T4,
                up=rate,
                decode_matrix=LONG_ROWS * 2 * sizes.layer_params * sizes.num_layers / compute,
                decode_attention=float("inf"),
                host_attention=float("inf"),
                loads_first=False,
            )
            formula = Formula(sizes, OffloadWork(LONG, LONG_OUTPUT), machine, LONG_ROWS, 1, not moves)
            placement = Placement(0.0, 1.0, 0.0, 0.25, 0.75, 0.0, 1.0, 0.0, 0.0)
            expected = ZigZag(formula, placement).run().decode_s / (LONG_OUTPUT - 1)
            cells = f"{compute:.3f} | {taken:.3f} | {expected:.3f} | {taken / expected:.2f}"
            way, same = "moved" if moves else "attended to there", "yes" if found == wanted else "no"
            yield f"| {rate / 1e6:.0f} | {way} | {cells} | {same} |"


def main() -> None:
    """Measure, and print a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", action="store_true", help="only a quarter of the bytes on the device")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.budget:
        with tempfile.TemporaryDirectory() as folder:
            for line in quarter(make_checkpoint(Path(folder), NUM_KV_HEADS)):
                print(line, flush=True)
        return
    lines, grouped, first = [], [], dict[float, float]()
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder), NUM_KV_HEADS)
        served = Served(path, 1, "replay")
        stream = served.stream
        lines = [f"| {rate / 1e6:.0f} | {served.row(rate)[1]}" for rate in RATES]
        for num_batches in NUM_BATCHES:
            served = Served(path, num_batches, "eager")
            for rate in GROUPED_RATES:
                taken, cells = served.row(rate)
                per_s = served.num_rows / taken
                first.setdefault(rate, per_s)
                speed = f"{per_s:.1f} | {per_s / first[rate]:.2f}"
                grouped.append(f"| {rate / 1e6:.0f} | {num_batches} | {speed} | {cells}")
    page = "\n".join(
        [
            "# Weights on the host behind a throttled link",
            "",
            f"`python -m benchmarks.weight_stream`, {date.today()}; {platform.machine()}, torch "
            f"{torch.__version__}, transformers {transformers.__version__}, 1 thread.",
            "",
            f"Llama of the 110M class in bfloat16, {ROWS} rows; the weights of all layers "
            f"({stream.num_bytes / 1e6:.0f} MB) lie on the host and pass through "
            f"{stream.buffer_bytes / 1e6:.0f} MB of buffers. Seconds of a decode by the clock, medians.",
            "",
            "| link, MB/s | all on the device | streamed | predicted | streamed : predicted | same tokens |",
            "| --- | --- | --- | --- | --- | --- |",
            *lines,
            "",
            f"Groups of {ROWS} rows that pass through a loaded layer one after the other "
            '(`offload_num_batches`), with `graphs="eager"`. Times are seconds of a decode.',
            "",
            "| link, MB/s | groups | tokens/s | speedup over one group | all on the device | streamed | "
            "predicted | streamed : predicted | same tokens |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
            *grouped,
            "",
        ]
    )
    print(page)
    if options.out is not None:
        options.out.write_text(page)


if __name__ == "__main__":
    main()
