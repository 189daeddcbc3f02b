"""Our x86 kernels against torch's: packed linears by number of rows, and causal attention of a prompt.

    OMP_NUM_THREADS=1 python -m benchmarks.x86_kernels --out benchmarks/results/x86-kernels.md

One thread. A round multiplies with as many different weights as 200 MB hold, so that they come from memory;
the median round counts.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

import torch

from benchmarks.cpu import kernels_in_use
from hpu_duo.modeling.huge_pages import HugePages
from kernels_ref.partial import empty
from kernels_ref.x86 import attention, linear
from kernels_ref.x86.library import Instructions, variants

ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 2048)
SHAPES = ((2048, 768), (768, 2048))
PROMPTS = ((2048, 4, 3, 64), (8192, 1, 3, 64), (2048, 2, 4, 128))
WEIGHT_BYTES = 200 << 20
ROUNDS = 5


def median_s(run: Callable[[], object]) -> float:
    """Seconds of the median round, after one that does not count."""
    times = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def linear_lines(num_outputs: int, num_inputs: int, names: list[Instructions]) -> list[str]:
    """A line of the table for each number of rows: GB/s of weights and GFLOP/s."""
    num_weights = WEIGHT_BYTES // (2 * num_outputs * num_inputs)
    memory = HugePages(WEIGHT_BYTES + num_weights * 64)
    shape = linear.packed_shape(num_outputs, num_inputs)
    plain = torch.randn(num_outputs, num_inputs).bfloat16()
    ours = [linear.pack(plain, memory.take(shape, plain.dtype)) for _ in range(num_weights)]
    theirs = [torch.ops.mkldnn._reorder_linear_weight(plain) for _ in range(num_weights)]
    lines = []
    for rows in ROWS:
        x, used = torch.randn(rows, num_inputs).bfloat16(), num_weights if rows < 256 else 6

        def multiply(name: Instructions, x: torch.Tensor = x, used: int = used) -> None:
            for weight in ours[:used]:
                linear.multiply(x, weight, None, num_outputs, None, name)

        def one_dnn(x: torch.Tensor = x, used: int = used) -> None:
            for weight in theirs[:used]:
                torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")

        cells = []
        for run in (*(partial(multiply, name) for name in names), one_dnn):
            seconds = median_s(run) / used
            cells.append(
                f"{plain.nbytes / seconds / 1e9:.1f} | {2 * rows * plain.numel() / seconds / 1e9:.0f}"
            )
        lines.append(f"| {num_outputs} x {num_inputs} | {rows} | " + " | ".join(cells) + " |")
    return lines


def attention_line(length: int, num_kv: int, group: int, dim: int, names: list[Instructions]) -> str:
    """A line of the table: milliseconds of causal attention."""
    q = (torch.randn(length, num_kv, group, dim) * 2 * dim**-0.5).bfloat16()
    k, v = (torch.randn(length, num_kv, dim).bfloat16() for _ in range(2))
    total = empty(q)
    views = (q.permute(2, 1, 0, 3), *(x.transpose(0, 1).expand(group, -1, -1, -1) for x in (k, v)))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    runs = [partial(attention.attend, total, q, k, v, is_causal=True, instructions=name) for name in names]
    cells = [f"{median_s(run) * 1e3:.1f}" for run in (*runs, partial(flash, *views, 0.0, True, scale=1.0))]
    return f"| {length} tokens, {num_kv * group} / {num_kv} heads of {dim} | " + " | ".join(cells) + " |"


def main() -> None:
    """Measure and print, and write the report where asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="markdown file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names: list[Instructions] = [name for name in variants() if name != "model"]
    cpu = next(x for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x).split(": ")[1]
    columns = " | ".join(f"{name}, GB/s | GFLOP/s" for name in (*names, "oneDNN"))
    lines = [
        f"# x86 kernels, {date.today().isoformat()}",
        "",
        f"`{' '.join(['python -m benchmarks.x86_kernels', *sys.argv[1:]])}` on {cpu}, 1 thread, Python",
        f"{platform.python_version()}, torch {torch.__version__}, bfloat16; {kernels_in_use()}.",
        "",
        f"| linear | rows | {columns} |",
        "| --- | --- |" + " --- | --- |" * (len(names) + 1),
        *(line for shape in SHAPES for line in linear_lines(*shape, names)),
        "",
        f"| causal attention, ms | {' | '.join((*names, 'torch'))} |",
        "| --- |" + " --- |" * (len(names) + 1),
        *(attention_line(*sizes, names) for sizes in PROMPTS),
        "",
    ]
    print("\n".join(lines))
    if args.out is not None:
        args.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
