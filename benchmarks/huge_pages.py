"""Reading packed weights from huge pages and from ordinary ones, for one decoded token.

    python benchmarks/huge_pages.py

All linears of the 110M Llama of ``benchmarks/cpu_systems.py`` are multiplied with one row each, by one
thread, from tensors of torch's allocator and from ``HugePages`` in turns. CPU time of the process is
compared.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from datetime import date
from pathlib import Path

import torch

from hpu_duo.modeling.huge_pages import HugePages
from kernels_ref.x86 import linear

HIDDEN, KEYS, INNER, VOCABULARY, LAYERS = 768, 256, 2048, 32000, 12
LAYER = [
    (HIDDEN, HIDDEN),
    (KEYS, HIDDEN),
    (KEYS, HIDDEN),
    (HIDDEN, HIDDEN),
    *[(INNER, HIDDEN)] * 2,
    (HIDDEN, INNER),
]
SHAPES = [*LAYER * LAYERS, (VOCABULARY, HIDDEN)]
ROUNDS = 15


def decode_s(weights: list[torch.Tensor]) -> float:
    """CPU seconds of one row through every weight."""
    rows = [torch.ones(1, num_inputs, dtype=torch.bfloat16) for _, num_inputs in SHAPES]
    began = time.process_time()
    for row, weight, (num_outputs, _) in zip(rows, weights, SHAPES):
        linear.multiply(row, weight, None, num_outputs)
    return time.process_time() - began


def report(ratios: list[float], num_bytes: int, is_set: str) -> str:
    """The dated markdown report."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"""# Weights in huge pages, {date.today().isoformat()}

`python benchmarks/huge_pages.py`, 1 thread, {torch.backends.cpu.get_cpu_capability()}, Python
{platform.python_version()}, torch {torch.__version__}; transparent huge pages set to `{is_set}`.

One row through {num_bytes / 1e6:.0f} MB of packed weights. CPU time with ordinary pages over CPU time with
huge pages, median of {len(ratios)} rounds and quartiles: **{middle:.2f}** ({low:.2f}-{high:.2f}).
"""


def main() -> None:
    """Measure in turns; print the report, and write it where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="markdown file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    plain = [linear.pack(torch.randn(shape).bfloat16()) for shape in SHAPES]
    num_bytes = sum(weight.nbytes for weight in plain)
    memory = HugePages(num_bytes)
    huge = [memory.take(tuple(weight.shape), weight.dtype).copy_(weight) for weight in plain]
    times = [(decode_s(plain), decode_s(huge)) for _ in range(ROUNDS + 1)][1:]
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    text = report([slow / fast for slow, fast in times], num_bytes, setting.split("[")[1].split("]")[0])
    print(text)
    if args.out is not None:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
