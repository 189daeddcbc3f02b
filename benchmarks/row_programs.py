"""Small operators of a layer as row programs, beside torch's operators one by one, on one thread of a CPU.

    python -m benchmarks.row_programs

Sizes are those of the Llama of ``benchmarks.cpu`` (768 wide, 12 heads of 64, gates of 2,048), bfloat16.
Times are microseconds of a call, the fewest of some rounds, some 10 of which are those of a replayed step as
such; in brackets, how many times longer torch's operators take.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from graphs.backends.traced_step import TracedStep
from hpu_duo.modeling.row_fusion import fuse_rows
from kernels_ref import rowwise

_WIDTH, _GATES, _HEADS, _HEAD_SIZE = 768, 2048, 12, 64
_ROUNDS, _ITEMS = 9, 4e6
Inputs = Mapping[str, Tensor]


def residual_and_norm(inputs: Inputs) -> list[Tensor]:
    """As most families of transformers write it."""
    residual = inputs["x"] + inputs["y"]
    wide = residual.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return [residual, inputs["weight"] * wide.to(residual.dtype)]


def gate(inputs: Inputs) -> Tensor:
    """Silu of one projection times the other one."""
    return torch.nn.functional.silu(inputs["gate"]) * inputs["up"]


def rotary(inputs: Inputs) -> Tensor:
    """A rotary embedding of all heads."""
    q = inputs["q"].view(1, -1, _HEADS, _HEAD_SIZE).transpose(1, 2)
    cos, sin = inputs["cos"][:, None], inputs["sin"][:, None]
    half = _HEAD_SIZE // 2
    return q * cos + torch.cat((-q[..., half:], q[..., :half]), dim=-1) * sin


def finished_sums(inputs: Inputs) -> Tensor:
    """Sums of attention over the sums of their weights."""
    return (inputs["attn"] / inputs["sum"].clamp(min=1e-30)[..., None]).to(torch.bfloat16)


def _inputs(num_rows: int) -> dict[str, Tensor]:
    halves = {
        "x": _WIDTH,
        "y": _WIDTH,
        "gate": _GATES,
        "up": _GATES,
        "q": _WIDTH,
        "cos": _HEAD_SIZE,
        "sin": _HEAD_SIZE,
    }
    inputs = {name: torch.randn(1, num_rows, width).bfloat16() for name, width in halves.items()}
    sums = torch.randn(num_rows, _HEADS, _HEAD_SIZE)
    return {**inputs, "weight": torch.randn(_WIDTH).bfloat16(), "attn": sums, "sum": sums.abs().sum(-1)}


def _microseconds(call: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        best = min(best, (time.perf_counter() - began) / repeats)
    return 1e6 * best


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 512, 2048])
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not rowwise.is_available():
        parser.error("expected a C++ compiler for row programs, found none")
    works = (residual_and_norm, gate, rotary, finished_sums)
    print(f"| rows | {' | '.join(work.__name__.replace('_', ' ') for work in works)} |")
    print(f"| ---: |{' ---: |' * len(works)}")
    with torch.inference_mode():
        for num_rows in options.rows:
            inputs = _inputs(num_rows)
            repeats = max(3, int(_ITEMS / (_GATES * num_rows)))
            cells = []
            for work in works:
                step = TracedStep(work, fuse_rows)
                step(inputs)
                ours = _microseconds(lambda: step(inputs), repeats)  # noqa: B023
                theirs = _microseconds(lambda: work(inputs), max(3, repeats // 4))  # noqa: B023
                cells.append(f"{ours:.1f} ({theirs / ours:.1f})")
            print(f"| {num_rows} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
