"""Speed of attention over formats of keys and values beside bfloat16, by our kernels on this CPU.

One thread; every round runs all formats one after the other, and CPU time is counted. Reported are the best
time of each, and the median over rounds of bfloat16's time divided by its own.

    python -m benchmarks.kv_codes
    HPU_DUO_X86_KERNELS=avx2 python -m benchmarks.kv_codes
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from kernels_ref.formats import format_of
from kernels_ref.partial import empty
from kernels_ref.units import Encoding, KVUnits, UnitLayout, units_of
from kernels_ref.x86 import codes, library

FORMATS = ("int8_per_token_head", "k8v4", "int4_per_token_head", "fp8", "fp8_per_token_head")
NUM_TOKENS, NUM_HEADS, DIM, BLOCK = 16384, 8, 128, 128


def stores(dtype: torch.dtype) -> dict[str, KVUnits]:
    """Keys and values of a context in each format, ``bfloat16`` first."""
    num_blocks = NUM_TOKENS // BLOCK
    kv = torch.randn(2, num_blocks, NUM_HEADS, BLOCK, DIM)
    layout, found = UnitLayout.dense(num_blocks, NUM_HEADS, BLOCK), {}
    for name in ("bfloat16", *FORMATS):
        kv_format = format_of(name)
        tensors = [*kv_format.keys.encode(kv[0]), *kv_format.values.encode(kv[1])]
        flat = tuple(each.reshape(-1, each.shape[-1]) for each in tensors)
        found[name] = units_of(flat, layout, Encoding(kv_format, DIM, DIM, dtype))
    return found


def decode(units: KVUnits, q: torch.Tensor) -> None:
    """One row over all blocks."""
    num_blocks = units.layout.num_units
    plan = torch.zeros(num_blocks, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    hidden = torch.zeros(1, 1, 1, dtype=torch.int32)
    if units.encoding.format.is_floats:
        k, v = units.views
        library.attend_blocks(q, k, v, *plan, hidden)
    else:
        codes.attend_blocks(q, units, *plan, hidden)


def prompt(units: KVUnits, q: torch.Tensor) -> None:
    """A chunk of a prompt over all blocks, which are widened 2,048 tokens at a time."""
    total = empty(q)
    for some in torch.arange(units.layout.num_units).split(2048 // BLOCK):
        k, v = (x.transpose(1, 2).flatten(0, 1) for x in codes.tile(units, some))
        library.attend(total, q, k.contiguous(), v.contiguous())


def measure(
    name: str,
    run: Callable[[KVUnits, torch.Tensor], None],
    q: torch.Tensor,
    cases: dict[str, KVUnits],
    num: int,
) -> None:
    """Print a row of the table."""
    times: dict[str, list[float]] = {each: [] for each in cases}
    for _ in range(num):
        for each, units in cases.items():
            begin = time.process_time()
            run(units, q)
            times[each].append(time.process_time() - begin)
    plain = times["bfloat16"]
    cells = [
        f"{min(own) * 1e3:.2f}, {median(x / y for x, y in zip(plain, own, strict=True)):.2f}"
        for own in times.values()
    ]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if library.is_supported() else torch.float32
    library.require(dtype)
    cases = stores(dtype)
    print(f"{library.description(dtype)}; cells: best ms, ratio\n")
    print(f"| query heads, tokens | {' | '.join(cases)} |")
    print("| --- " * (len(cases) + 1) + "|")
    for group in (1, 2, 4):
        q = torch.randn(1, NUM_HEADS, group, DIM).to(dtype) / DIM**0.5
        measure(f"{group}, 1", decode, q, cases, options.rounds)
    for num_tokens in (16, 64, 256):
        q = torch.randn(num_tokens, NUM_HEADS, 4, DIM).to(dtype) / DIM**0.5
        measure(f"4, chunk of {num_tokens}", prompt, q, cases, max(3, options.rounds // 8))


if __name__ == "__main__":
    main()
