"""Linear layers of 8-bit and 4-bit codes against bfloat16 ones, by our kernels on this CPU.

Every round runs all formats one after the other, so a loaded machine slows all of them; CPU time is counted.
Reported are the best time of each, and the median over rounds of bfloat16's time divided by its own.
Weights are copied until they exceed the caches, as those of a model do.

    python benchmarks/quantised_linears.py --out benchmarks/results/quantised-linears.md
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn

from hpu_duo.modeling.packed_linear import HugePages, PanelLinear
from hpu_duo.modeling.quantised.linear import QuantisedLinear
from hpu_duo.modeling.quantised.panels import PanelQuantisedLinear
from hpu_duo.modeling.quantised.rounding import rounded
from kernels_ref.x86.library import cpu_flags, description, is_supported

FORMATS = ("bf16", "int8", "fp8", "int4")
SHAPES = ("4096x4096", "4096x14336")
ROWS = (1, 2, 4, 8, 16, 32, 64, 512)
CACHE_BYTES = 256 << 20
"""Bytes of the copies of a weight in bfloat16, together."""


def made(plain: nn.Linear, name: str, memory: HugePages) -> nn.Module:
    """A layer of a format."""
    if name == "bf16":
        return PanelLinear(plain, memory, None)
    stored = rounded(plain.weight.detach(), name, torch.bfloat16)
    layer = QuantisedLinear(plain.in_features, plain.out_features, None, stored)
    return PanelQuantisedLinear(layer, memory, None)


def arithmetic() -> torch.dtype:
    """Dtype of inputs: bfloat16 where this CPU multiplies it, else float32, in which it serves bfloat16."""
    return torch.bfloat16 if is_supported() else torch.float32


def weight_bytes(layer: nn.Module) -> int:
    """Bytes of all tensors that a product reads."""
    return sum(each.nbytes for each in layer.buffers())


class Case:
    """A shape, with enough copies of the weight for the caches to be of no use."""

    def __init__(self, shape: tuple[int, int]) -> None:
        outputs, inputs = shape
        plain = nn.Linear(inputs, outputs, bias=False).bfloat16().requires_grad_(False)
        count = max(2, CACHE_BYTES // (2 * outputs * inputs))
        self.layers: dict[str, list[nn.Module]] = {}
        for name in FORMATS:
            memory = HugePages(count * (2 * outputs * inputs + (1 << 20)))
            self.layers[name] = [made(plain, name, memory) for _ in range(count)]

    def seconds(self, name: str, x: torch.Tensor, num_calls: int) -> float:
        """CPU time of a call and thread, over ``num_calls`` of them with one copy after the other."""
        layers = self.layers[name]
        begin = time.process_time()
        for call in range(num_calls):
            layers[call % len(layers)](x)
        return (time.process_time() - begin) / num_calls / torch.get_num_threads()


def measure(case: Case, rows: int, inputs: int, num_rounds: int) -> dict[str, tuple[float, float]]:
    """Best time, and median ratio of bfloat16's time to it, by format."""
    x = torch.randn(rows, inputs).to(arithmetic())
    num_calls = max(2, 32 // rows)
    times: dict[str, list[float]] = {name: [] for name in FORMATS}
    for _ in range(num_rounds):
        for name in FORMATS:
            times[name].append(case.seconds(name, x, num_calls))
    return {
        name: (min(own), median(plain / each for plain, each in zip(times["bf16"], own, strict=True)))
        for name, own in times.items()
    }


def report(shapes: list[str], num_rounds: int, threads: int) -> str:
    """The results page."""
    flags = "".join(f", {name}" for name in ("avx512_bf16", "amx_tile") if name in cpu_flags())
    load = os.getloadavg()[0]
    lines = [
        "# Linear layers of codes",
        "",
        f"{description(arithmetic())}{flags}, {os.cpu_count()} cores, {threads} thread, load average "
        f"{load:.1f} at the "
        "start: other work ran on the machine, so CPU time is counted. "
        "`python benchmarks/quantised_linears.py`; "
        f"{num_rounds} rounds, all formats in each. Ratios: median over rounds of bf16's time to that of the "
        "format. GB/s: bytes of the weight as it is stored, at the best time. int4 has groups of 128.",
        "",
        "| outputs x inputs | rows | bf16: ms, GB/s | int8: ms, GB/s, ratio | fp8 | int4 g128 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    with torch.inference_mode():
        for shape in (
            (int(outputs), int(inputs)) for outputs, inputs in (each.split("x") for each in shapes)
        ):
            case = Case(shape)
            for rows in ROWS:
                cells = []
                for name, (best, ratio) in measure(case, rows, shape[1], num_rounds).items():
                    rate = weight_bytes(case.layers[name][0]) / best / 1e9
                    cells.append(
                        f"{best * 1e3:.3f}, {rate:.1f}" + ("" if name == "bf16" else f", {ratio:.2f}")
                    )
                lines.append(f"| {shape[0]} x {shape[1]} | {rows} | " + " | ".join(cells) + " |")
                print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Parse arguments, measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="page to write")
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES], help="outputs x inputs, such as 4096x4096")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    page = report(arguments.shapes, arguments.rounds, arguments.threads)
    if arguments.out is not None:
        arguments.out.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
