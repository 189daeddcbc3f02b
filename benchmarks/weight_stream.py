"""Decodes of a model of the 110M class with a quarter of its layers on the device, against predictions.

    OMP_NUM_THREADS=1 python -m benchmarks.weight_stream --out benchmarks/results/weight-stream.md

Three quarters of the weights pass through a link that a thread throttles. The prediction is the simulated
schedule of ``hpu-duo plan-offload``, with the time of a layer as measured with all weights on the device.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.cpu_systems import make_checkpoint
from benchmarks.prefix_cache import NUM_KV_HEADS, Tokens, run
from hpu_duo import HPUDuoModel, SamplingParams
from hpu_duo.modeling.weight_stream import ThreadMover, weight_bytes
from hpu_duo.planning import Format
from hpu_duo.planning.offload import (
    FLEXGEN_T4,
    Formula,
    OffloadWork,
    Placement,
    ZigZag,
    offload_model,
)
from hpu_duo.planning.read_model import read_model
from kernels_ref import PLAIN

ROWS, PROMPT, OUTPUT = 8, 64, 12
RATES = (100e6, 200e6, 400e6)


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


def main() -> None:
    """Measure, and print a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder), NUM_KV_HEADS)
        setup: dict[str, Any] = {
            "block_size": 128,
            "num_blocks": 32,
            "max_num_seqs": ROWS,
            "max_num_batched_tokens": ROWS * PROMPT,
            "max_model_len": 256,
            "graphs": "replay",
            "enable_prefix_caching": False,
        }
        tokens = Tokens("weights", 0)
        prompts = [tokens.draw(PROMPT) for _ in range(ROWS)]
        resident = HPUDuoModel.from_pretrained(path, **setup)
        layers = resident.engine.runner.executor.model.model.model.layers
        total = sum(map(weight_bytes, layers))
        run(resident, prompts, 2)
        wanted, compute = decode(resident, prompts)
        streamed = HPUDuoModel.from_pretrained(path, **setup, cpu_offload_gb=0.70 * total / 2**30)
        stream = streamed.engine.runner.executor.model.stream
        assert stream is not None
        sizes = replace(offload_model(read_model(path), Format.BF16, PLAIN), layer_bytes=total / len(layers))
        share = stream.num_bytes / total
        for rate in RATES:
            stream.mover = ThreadMover(rate)
            found, taken = decode(streamed, prompts)
            machine = replace(
                FLEXGEN_T4,
                up=rate,
                decode_matrix=ROWS * 2 * sizes.layer_params * len(layers) / compute,
                decode_attention=float("inf"),
                loads_first=False,
            )
            formula = Formula(sizes, OffloadWork(PROMPT, OUTPUT), machine, ROWS, 1, False)
            placement = Placement(1 - share, share, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0)
            predicted = ZigZag(formula, placement).run().decode_s / (OUTPUT - 1)
            lines.append(
                f"| {rate / 1e6:.0f} | {compute:.3f} | {taken:.3f} | {predicted:.3f} | "
                f"{taken / predicted:.2f} | {'yes' if found == wanted else 'no'} |"
            )
    page = "\n".join(
        [
            "# Weights on the host behind a throttled link",
            "",
            f"`python -m benchmarks.weight_stream`, {date.today()}; {platform.machine()}, torch "
            f"{torch.__version__}, transformers {transformers.__version__}, 1 thread.",
            "",
            f"Llama of the 110M class in bfloat16, {ROWS} rows; {share:.0%} of the layers' weights "
            f"({stream.num_bytes / 1e6:.0f} MB) lie on the host and pass through "
            f"{stream.buffer_bytes / 1e6:.0f} MB of buffers. Seconds of a decode by the clock, medians.",
            "",
            "| link, MB/s | all on the device | streamed | predicted | streamed : predicted | same tokens |",
            "| --- | --- | --- | --- | --- | --- |",
            *lines,
            "",
        ]
    )
    print(page)
    if options.out is not None:
        options.out.write_text(page)


if __name__ == "__main__":
    main()
