"""Compile every Triton kernel for NVIDIA GPUs on a machine that has none.

The launching functions run as they are, on CPU tensors; a stand-in for the driver tells Triton which GPU to
compile for, and a launch ends after compilation. So what is compiled is what a GPU would get: the same
arguments, specialisations and options. Triton brings its own assembler, whose binaries tell registers,
stack (spilled registers) and shared memory.

Run as a module, it compiles all variants and prints a table::

    python -m tests.kernels_ref.offline_compile [--quick 90] [--json]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bias_builders import Dilated, Fixed, RuleIntersection, RuleUnion, Window, encode_rule
from kernels_ref.triton import launch
from kernels_ref.triton.launch import DeviceLimits

DEVICES = {
    80: DeviceLimits(num_processors=108, shared_bytes=163 << 10),
    86: DeviceLimits(num_processors=84, shared_bytes=99 << 10),
    90: DeviceLimits(num_processors=132, shared_bytes=227 << 10),
}
"""By compute capability."""

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)
OF_CODES = ", codes"
"""Behind the names of kernels with stores of codes."""
QUICK = {80: (("float16", 128), ("bfloat16", 80)), 86: (("float32", 256),), 90: (("bfloat16", 128),)}
"""The variants of a quick run, by compute capability."""


@dataclass(frozen=True)
class Compiled:
    """One binary; ``stack_bytes`` of each thread are spilled registers, ``limit`` is the device's."""

    kernel: str
    capability: int
    dtype: str
    head_dim: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    limit: int


class _Driver:
    """The part of a driver that Triton needs to compile."""

    def __init__(self) -> None:
        self.capability = 0

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


def compile_variants(variants: list[tuple[int, str, int]]) -> Iterator[Compiled]:
    """All kernels for each (compute capability, type, head size).

    Must run in a process in which Triton's interpreter is off.
    """
    import triton
    from triton.runtime import driver

    fake = _Driver()
    driver.set_active(fake)
    made: list[Any] = []
    run = triton.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert all(size > 0 for size in grid), f"{self.fn.__name__} has an empty grid {grid}"
        name = self.fn.__name__ + (OF_CODES if kwargs.get("KEYS") else "")
        made.append((name, run(self, *args, grid=grid, warmup=True, **kwargs)))

    triton.JITFunction.run = compile_only
    for capability, dtype, head_dim in variants:
        fake.capability = capability
        launch.device_limits = lambda device, limits=DEVICES[capability]: limits  # type: ignore[assignment]
        made.clear()
        for start in launches(DTYPES[dtype], head_dim):
            start()
        for name, kernel in dict(made).items():
            used = _resources(kernel.asm["cubin"])
            yield Compiled(
                name, capability, dtype, head_dim, used["REG"], used["STACK"], kernel.metadata.shared,
                DEVICES[capability].shared_bytes,
            )  # fmt: skip


def _resources(cubin: bytes) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", done.stdout)}


def launches(dtype: torch.dtype, dim: int) -> list[Callable[[], Any]]:
    """Every launching function on a step of usual shapes: 8 heads of 4 query heads, blocks of 128 slots."""
    from kernels_ref.triton.causal import causal
    from kernels_ref.triton.column_sums import column_sums
    from kernels_ref.triton.linear_of_codes import linear_of_codes
    from kernels_ref.triton.merging import finish
    from kernels_ref.triton.rings import held_rings, leading_rings, rings_with_weights, shared_rings
    from kernels_ref.triton.rules import sparse_causal, sparse_shared, sparse_unique
    from kernels_ref.triton.shared_blocks import shared_blocks
    from kernels_ref.triton.stream_k import stream_k
    from kernels_ref.triton.unique_blocks import split_unique_blocks
    from kernels_ref.triton.write_kv import write_kv

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    tokens, rows, heads, group, blocks, slots, window = 64, 4, 8, 4, 16, 128, 320
    q = torch.zeros(tokens, heads, group, dim, dtype=dtype)
    q_rows = q[:rows]
    k = v = torch.zeros(tokens, heads, dim, dtype=dtype)
    k_store = v_store = torch.zeros(blocks, heads, slots, dim, dtype=dtype)
    k_flat = v_flat = k_store.view(-1, dim)
    k_ring = v_ring = torch.zeros(rows + 1, heads, window, dim, dtype=dtype)
    triple, row_triple = launch.partials(q, tokens), launch.partials(q, rows)
    token, row, place = ints(tokens), ints(rows), torch.zeros(tokens * heads, dtype=torch.int64)
    shared = (token, row, ints(blocks), ints(blocks), ints(rows + 1, blocks))
    one, several = (ints(rows, 1), ints(rows, 1, 1)), (ints(rows, 2), ints(rows, 2, 8))
    q_several = torch.zeros(rows, heads, 8 * group, dim, dtype=dtype)
    tokens_of_rows, held = ints(rows, 8), ints(rows, 1, window)
    rule = encode_rule(RuleUnion((RuleIntersection((Window(4, 256), Dilated(64, 2))), Fixed(128, 8))))
    k_slots = v_slots = torch.zeros(rows + 1, heads, 4096, dim, dtype=dtype)
    lse, sinks = torch.zeros(tokens, heads, group), torch.zeros(heads, group)
    chunk = (row, row, ints(rows, tokens))
    ends, tails = ints(rows, 8), (several[0], several[0], several[1])
    # Keys of 8 bits, values of 4.
    bits_8, bits_4 = (torch.zeros(blocks, heads, slots, n, dtype=torch.uint8) for n in (dim, dim // 2))
    scale, meta = (torch.zeros(blocks, heads, slots, n, dtype=torch.bfloat16) for n in (1, 2))
    k8v4, v4 = (scale, meta, 1, 2), (bits_8.view(torch.int8), bits_4)
    # A layer of 1024 inputs and 512 outputs in groups of 128 inputs, one of 4 bits and one of 8.
    x = torch.zeros(256, 1024, dtype=dtype)
    weights = torch.zeros(512, 512, dtype=torch.uint8), torch.zeros(512, 1024, dtype=torch.int8)
    table, layout = torch.zeros(512, 8, dtype=torch.bfloat16), (512, 1, 128)
    zeros = torch.zeros(512, 8, dtype=torch.uint8)
    return [
        lambda: linear_of_codes(x[:4], weights[0], table, zeros, None, None, *layout, 2, 0),
        lambda: linear_of_codes(x[:1], weights[1], table, None, None, None, *layout, 1, 0),
        lambda: linear_of_codes(x[:64], weights[1], table, None, None, None, *layout, 1, 0),
        lambda: linear_of_codes(x, weights[0], table, zeros, None, None, *layout, 2, 0),
        lambda: linear_of_codes(x, weights[1], table[:, :1], None, None, None, 512, 1, 1024, 1, 1024),
        lambda: stream_k(q_several, *v4, ints(blocks), *several, 0.0, *k8v4),
        lambda: stream_k(q_rows, *v4, ints(blocks), *one, 0.0, *k8v4),
        lambda: split_unique_blocks(q_rows, *v4, ints(blocks), *one, 0.0, *k8v4),
        lambda: shared_blocks(q, *v4, *shared, 0.0, *k8v4),
        lambda: leading_rings(q_rows, *v4, one[1], 0.0, *k8v4),
        lambda: rings_with_weights(q_rows, *v4, one[1], sinks, 0.0, *k8v4),
        lambda: held_rings(
            q_several, *v4, held[:, :, :slots].contiguous(), tokens_of_rows, tokens_of_rows, 64, 0.0, *k8v4
        ),
        lambda: sparse_shared(q, *v4, token, *shared, rule, 0.0, *k8v4),
        lambda: sparse_unique(q_several, *v4, ints(blocks), ints(blocks), *tails, ends, rule, 0.0, *k8v4),
        lambda: sparse_causal(q, k, v, token, token, row, rule, 0.0),
        lambda: sparse_shared(q, k_store, v_store, token, *shared, rule, 0.0),
        lambda: sparse_unique(
            q_several, k_store, v_store, ints(blocks), ints(blocks), *tails, ends, rule, 0.0
        ),
        lambda: causal(q, k, v, token, token, row, 0, 0, 0.0),
        lambda: causal(q, k, v, token, token, row, 64, 256, 0.0),
        lambda: shared_blocks(q, k_store, v_store, *shared, 0.0),
        lambda: shared_rings(q, k_ring, v_ring, token, token, row, row, ints(rows, window), 64, 256, 0.0),
        lambda: split_unique_blocks(q_several, k_store, v_store, ints(blocks), *several, 0.0),
        lambda: split_unique_blocks(q_rows, k_store, v_store, ints(blocks), *one, 0.0),
        lambda: stream_k(q_several, k_store, v_store, ints(blocks), *several, 0.0),
        lambda: stream_k(q_rows, k_store, v_store, ints(blocks), *one, 0.0),
        lambda: leading_rings(q_rows, k_ring, v_ring, one[1], 0.0),
        lambda: rings_with_weights(q_rows, k_ring, v_ring, one[1], sinks, 0.0),
        lambda: rings_with_weights(q_rows, k_slots, v_slots, one[1], sinks, 0.0),
        lambda: column_sums(q, lse, k, k_ring[:rows], *chunk, tokens, 0.0),
        lambda: column_sums(q, lse, k, None, *chunk, 1, 0.0),
        lambda: held_rings(q_several, k_ring, v_ring, held, tokens_of_rows, tokens_of_rows, 64, 0.0),
        lambda: write_kv(k_flat, v_flat, place, k, v),
        lambda: finish(q, [*triple, *triple, *triple], list(row_triple), token, sinks),
    ]


def main() -> None:
    """Print a table, or with ``--json`` a list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", type=int, choices=QUICK, help="a few variants of a device instead of all")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    variants = (
        [(chosen.quick, *each) for each in QUICK[chosen.quick]]
        if chosen.quick
        else [(capability, dtype, dim) for capability in DEVICES for dtype in DTYPES for dim in HEAD_DIMS]
    )
    compiled = compile_variants(variants)
    if chosen.json:
        print(json.dumps([asdict(each) for each in compiled]))
        return
    print("| kernel | sm | type | head | registers | stack | shared KiB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for each in compiled:
        values = [str(value) for value in asdict(each).values()][:-2]
        print("| " + " | ".join([*values, f"{each.shared_bytes / 1024:.1f}"]) + " |", flush=True)


if __name__ == "__main__":
    main()
