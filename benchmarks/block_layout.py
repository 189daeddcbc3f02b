"""Decode attention over one long context in three layouts of the block store, and with fused attention.

    python benchmarks/block_layout.py --out benchmarks/results/block-layout.md

One query token per step, bfloat16. The forms run alternately; the table gives the median of the
rounds as a multiple of the head-major product, which is the store's layout.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

from kernels_ref.partial import attend

HEAD_DIM, BLOCK, LAYERS = 64, 128, 12


def forms(num_heads: int, num_kv_heads: int, context: int) -> dict[str, Callable[[], None]]:
    """The code to time, by name: all layers of one decode step."""
    group, num_blocks = num_heads // num_kv_heads, context // BLOCK
    q = torch.randn(1, num_kv_heads, group, HEAD_DIM, dtype=torch.bfloat16)
    slots_first = torch.randn(LAYERS, 2, num_blocks, BLOCK, num_kv_heads, HEAD_DIM, dtype=torch.bfloat16)
    heads_first = slots_first.transpose(3, 4).contiguous()

    def product(k: torch.Tensor, v: torch.Tensor) -> None:
        attend(torch.matmul(q, k.transpose(-1, -2)).float(), None, v)

    def head_major() -> None:
        for k, v in heads_first:
            product(k, v)

    def slot_major() -> None:
        for k, v in slots_first:
            product(k.transpose(1, 2), v.transpose(1, 2))

    def fused() -> None:
        for layer in slots_first:
            k, v = (x.flatten(0, 1).transpose(0, 1)[None] for x in layer)
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, scale=1.0)

    return {"head-major": head_major, "slot-major": slot_major, "fused, contiguous slots": fused}


def main() -> None:
    """Time all forms and print, and optionally write, the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    amx = "with AMX" if torch.cpu._is_amx_tile_supported() else "without AMX"
    lines = [
        f"# Layout of the block store, {date.today().isoformat()}",
        "",
        f"`python benchmarks/block_layout.py`, {args.threads} thread(s), "
        f"{torch.backends.cpu.get_cpu_capability()}, {amx}, Python {platform.python_version()},",
        f"torch {torch.__version__}. Time of a decode step's attention as a multiple of head-major.",
        "",
        "| query / KV heads | context | head-major | slot-major | fused, contiguous slots |",
        "| --- | --- | --- | --- | --- |",
    ]
    for num_heads, num_kv_heads in ((12, 4), (12, 12)):
        for context in (1024, 8192):
            times: dict[str, list[float]] = {}
            work = forms(num_heads, num_kv_heads, context)
            for _ in range(args.rounds + 1):
                for name, run in work.items():
                    began = time.perf_counter()
                    run()
                    times.setdefault(name, []).append(time.perf_counter() - began)
            medians = {name: statistics.median(values[1:]) for name, values in times.items()}
            ratios = " | ".join(f"{value / medians['head-major']:.2f}" for value in medians.values())
            lines.append(f"| {num_heads} / {num_kv_heads} | {context:,} | {ratios} |")
    text = "\n".join([*lines, ""])
    print(text)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)


if __name__ == "__main__":
    main()
