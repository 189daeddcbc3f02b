"""Codes on a GPU: linear layers, and Llama-3-8B with 8-bit weights behind millions of tokens in 4 bits.

    python -m benchmarks.gpu_quantised --out benchmarks/results/gpu-quantised.md
    TRITON_INTERPRET=1 python -m benchmarks.gpu_quantised --device cpu --out /tmp/toy.md     # toy sizes

Two parts, in real shapes with random weights:

- linear layers: their product of plain bfloat16 weights by torch, beside those of codes;
- decodes of one request in CUDA graphs, whose context is placed and not computed: plain weights, keys and
  values with full attention, the same with half of the heads streaming, and int8 weights with 4-bit keys and
  values, up to the tokens that fit the memory.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.gpu_suite.clock import Clock
from benchmarks.gpu_suite.engines import Setup, engine_of, free_unused, make_model, place_context
from benchmarks.gpu_suite.memory import DUO, FULL
from benchmarks.gpu_suite.shapes import LLAMA_3_8B, TOY, ModelShape
from hpu_duo.modeling.quantised.cuda import TritonLinear
from hpu_duo.modeling.quantised.format import Activations
from hpu_duo.modeling.quantised.linear import QuantisedLinear
from hpu_duo.modeling.quantised.panels import weights_of
from hpu_duo.modeling.quantised.rounding import rounded

PARTS = ("linears", "decodes")
FORMATS = ("int8", "int4", "fp8", "w8a8", "fp8 inputs")
ROWS = (1, 4, 16, 64, 256, 2048)
WARM_STEPS = 5
Row = dict[str, Any]


class Decode(NamedTuple):
    """One point of the decodes: a system, formats of weights and of keys and values, and tokens before."""

    system: str
    weights: str
    kv: str
    context: int


class Sizes(NamedTuple):
    """Sizes of a run.

    Attributes:
        shape: of the model.
        layers: outputs and inputs of linear layers.
        decodes: points, those of plain weights first.
        steps: timed decodes of a point.
        chunk: prompt tokens that a step plans.
    """

    shape: ModelShape
    layers: tuple[tuple[int, int], ...]
    decodes: tuple[Decode, ...]
    steps: int
    chunk: int


REAL_SIZES = Sizes(
    LLAMA_3_8B,
    ((1024, 4096), (4096, 4096), (14_336, 4096), (4096, 14_336)),
    (
        *(Decode(system, "bfloat16", "auto", 320_000) for system in (FULL, DUO)),
        Decode(FULL, "int8", "auto", 320_000),
        *(
            Decode(DUO, "int8", "int4_per_token_head", context)
            for context in (320_000, 1_000_000, 3_300_000, 4_000_000)
        ),
    ),
    100,
    65_536,
)
TOY_SIZES = Sizes(
    replace(TOY.models[1], hidden_size=64),
    ((64, 64),),
    (Decode(FULL, "bfloat16", "auto", 64), Decode(DUO, "int8", "int4_per_token_head", 160)),
    2,
    32,
)


def quantised(layer: nn.Linear, name: str) -> QuantisedLinear:
    """A layer with its weight rounded; "w8a8" and "fp8 inputs" round inputs too."""
    kind = {"w8a8": "int8", "fp8 inputs": "fp8"}.get(name, name)
    stored = rounded(layer.weight.detach(), kind, layer.weight.dtype)
    if kind != name:
        stored = replace(stored, activations=Activations(kind))
    return QuantisedLinear(layer.in_features, layer.out_features, layer.bias, stored)


def linears(sizes: Sizes, setup: Setup, rounds: int) -> Iterator[Row]:
    """Products of layers, each with a cold cache: microseconds, and how many times faster codes are."""
    clock = Clock(setup.device, rounds, warm_up=3)
    for num_outputs, num_inputs in sizes.layers:
        with torch.device(setup.device):
            plain = nn.Linear(num_inputs, num_outputs, bias=False, dtype=setup.dtype).requires_grad_(False)
        layers = {name: TritonLinear(quantised(plain, name)) for name in FORMATS}
        for num_rows in ROWS:
            x = torch.randn(num_rows, num_inputs, dtype=setup.dtype, device=setup.device)
            seconds = clock.time(partial(plain, x)).median_s
            row: Row = {"outputs x inputs": f"{num_outputs} x {num_inputs}", "rows": num_rows}
            row["bfloat16, us"] = 1e6 * seconds
            for name, layer in layers.items():
                row[name] = seconds / clock.time(partial(layer, x)).median_s
            yield row


def decodes(sizes: Sizes, setup: Setup) -> Iterator[Row]:
    """Decodes of one request behind a placed context: milliseconds a token, and bytes."""
    longest = max(each.context for each in sizes.decodes) + sizes.steps + WARM_STEPS + 2
    clock = Clock(setup.device)
    for each in sizes.decodes:
        # An engine orders heads, and replaces layers of codes.
        model = make_model(sizes.shape, longest, setup)
        if each.weights != "bfloat16":
            for module in list(model.model.modules()):
                for name, child in list(module.named_children()):
                    if type(child) is nn.Linear:
                        setattr(module, name, quantised(child, each.weights))
                        del child
            free_unused(setup.device)
        row: Row = {
            "heads": each.system, "weights": each.weights, "keys and values": each.kv,
            "context": each.context,
        }  # fmt: skip
        num_tokens = each.context + WARM_STEPS + sizes.steps + 1
        options = {"num_tokens": num_tokens, "chunk": sizes.chunk, "kv_cache_dtype": each.kv}
        try:
            with engine_of(model, sizes.shape, each.system, setup, is_captured=True, **options) as engine:
                request = place_context(engine, each.context, num_tokens - each.context)
                for _ in range(WARM_STEPS):
                    engine.step()
                times = [clock.wall(engine.step) for _ in range(sizes.steps)]
                engine.abort(request)
                weights, kv = weights_of(model)[1], engine.runner.store.num_bytes
                row |= {
                    "ms a token": 1e3 * statistics.median(times),
                    "GiB of weights": weights / 2**30,
                    "GiB of keys and values": kv / 2**30,
                    "GB/s": (weights + kv) / statistics.median(times) / 1e9,
                }
                del engine
        except (torch.OutOfMemoryError, ValueError) as refusal:
            row["ms a token"] = f"none: {refusal}"
        del model
        free_unused(setup.device)
        yield row


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(rows: Sequence[Row]) -> list[str]:
    names = list(max(rows, key=len))
    lines = [" | ".join(names), " | ".join("---" for _ in names)]
    return [
        f"| {line} |"
        for line in (*lines, *(" | ".join(_cell(each.get(n, "")) for n in names) for each in rows))
    ]


def main() -> None:
    """Measure, and write a page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for toy sizes")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument("--rounds", type=int, default=20, help="timed calls of a layer")
    parser.add_argument("--out", type=Path, required=True, help="the page")
    given = parser.parse_args()
    device = torch.device(given.device)
    is_toy = device.type == "cpu"
    sizes = TOY_SIZES if is_toy else REAL_SIZES
    setup = Setup(
        device,
        torch.float32 if is_toy else torch.bfloat16,
        "triton",
        "eager" if is_toy else "cuda",
        16 if is_toy else 128,
    )
    name = platform.machine() if is_toy else torch.cuda.get_device_name(device)
    page = [f"# Codes on a GPU\n\n{date.today()}, {name}, torch {torch.__version__}.\n"]
    runs = {
        "linears": lambda: linears(sizes, setup, 2 if is_toy else given.rounds),
        "decodes": lambda: decodes(sizes, setup),
    }
    titles = {
        "linears": "## Linear layers\n\nHow many times faster than plain weights by torch.\n",
        "decodes": "## Decodes of one request\n",
    }
    for part in given.only:
        rows: list[Row] = []
        for row in runs[part]():
            rows.append(row)
            print(row, flush=True)
            given.out.write_text("\n".join([*page, titles[part], *_table(rows), ""]))
        page += [titles[part], *_table(rows), ""]


if __name__ == "__main__":
    main()
