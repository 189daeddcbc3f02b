"""A lone request on Gaudi 3 with full attention, and with half of the heads streaming, by the cost model.

    python -m benchmarks.two_kinds --out benchmarks/results/two-kinds.md

Nothing here ran on a Gaudi. Needs no weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from transformers import LlamaConfig

from benchmarks.one_pass import HEADS, LLAMA, SIZES, write_page
from hpu_duo.planning import FITTED, GAUDI3, Deployment, ModelSize, Serving, Step, predict_seconds
from hpu_duo.planning.read_model import read_model
from hpu_duo.planning.roofline import Seconds
from kernels_ref import PLAIN

CONTEXTS = (1024, 2048, 4096, 6144, 8192, 12_288, 16_384, 32_768, 65_536, 131_072)
MACHINES = (("8B", 1, "heads"), ("70B", 8, "context"))
"""Model, cards, and what they share of retrieval heads."""

BREAK_EVEN = 8192
"""Tokens from which half of the heads streaming should be faster."""

AIM = 1.3
"""Times faster that half of the heads streaming should make a lone request."""


def main() -> None:
    """Compute the table, and write it."""
    write_page(_page, __doc__)


def _page() -> Iterator[str]:
    yield from (
        "# A lone request on Gaudi 3 with one kind of heads and with two",
        "",
        "Made by `python -m benchmarks.two_kinds`. **Predicted by the cost model (`docs/cost-model.md`),",
        "measured by nobody.** Llama 3.1 in bf16, fused operators, decodes of one request. *Operators* are",
        "those of a step over its layers; half of the heads of every layer stream, with the window of the",
        "default.",
        "",
        "| model | cards | by | context | operators, full | half streaming | tokens/s, full | half streaming "
        "| faster |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    )
    with tempfile.TemporaryDirectory() as directory:
        for name, num_devices, by in MACHINES:
            model = _model(Path(directory) / name, name)
            serving = Serving(GAUDI3, num_devices, retrieval_parallel=by)
            both = [Deployment(model, serving, share, PLAIN, max(CONTEXTS)) for share in (0.0, 0.5)]
            for context in CONTEXTS:
                operators = [f"{_layer_operators(each, context):.0f}" for each in both]
                full, half = (each.decode_tokens_per_s(1, context).value for each in both)
                cells = (name, num_devices, by, f"{context:,}", *operators, f"{full:.1f}", f"{half:.1f}")
                yield f"| {' | '.join(map(str, cells))} | {half / full - 1:+.1%} |"
        yield from _bounds(Path(directory))


def _bounds(directory: Path) -> Iterator[str]:
    context = max(CONTEXTS)
    yield from (
        "",
        f"## What bounds the gain after {context:,} tokens",
        "",
        "Milliseconds of a step with full attention, by term, and how many times faster half of the heads",
        "streaming makes it: as predicted, and if the second kind of heads had no operators of its own. *No",
        "keys* is how many times faster the step is that reads no keys and values at all: no share of",
        f"streaming heads gains more. *For {AIM}* are the operators of a layer that both steps would have to",
        f"lose besides. *At {BREAK_EVEN:,}* are the operators of a layer that take as long as the keys and",
        "values of half of the heads after so many tokens: a second kind of fewer makes a step faster.",
        "",
        "| model | cards | by | weights | keys and values | operators | links | total | faster "
        f"| without its operators | no keys | for {AIM} | at {BREAK_EVEN:,} |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    )
    for name, num_devices, by in MACHINES:
        model = read_model(directory / name)
        serving = Serving(GAUDI3, num_devices, retrieval_parallel=by)
        both = [Deployment(model, serving, share, PLAIN, context) for share in (0.0, 0.5)]
        full, half = (_terms(each, context) for each in both)
        joined = half.total - half.launch + full.launch
        keys = _key_seconds(both[0], context)
        extra, operator_s = (full.total - AIM * joined) / (1 - AIM), FITTED.launch_s * len(model.layers)
        worth = _key_seconds(both[0], BREAK_EVEN) / 2 / operator_s
        rates = (full.total / each for each in (half.total, joined, full.total - keys))
        seconds = full.memory - keys, keys, full.launch, full.link, full.total
        cells = (name, num_devices, by, *(f"{1e3 * each:.2f}" for each in seconds))
        most = f"{extra / operator_s:.0f} of {full.launch / operator_s:.0f}"
        own = f"{worth:.1f}, has {(half.launch - full.launch) / operator_s:.1f}"
        yield f"| {' | '.join((*map(str, cells), *(f'{rate:.3f}' for rate in rates), most, own))} |"


def _terms(deployment: Deployment, context: int) -> Seconds:
    work = deployment.engine_work.of(deployment.shape_of(Step(1, context - 1)))
    return predict_seconds(work.fused, GAUDI3, deployment.serving.num_devices, FITTED)


def _key_seconds(deployment: Deployment, context: int) -> float:
    """Seconds in which keys and values are read."""
    work = deployment.engine_work.of(deployment.shape_of(Step(1, context - 1)))
    rest = replace(work, kv_bytes=0.0)
    seconds = (
        predict_seconds(each.fused, GAUDI3, deployment.serving.num_devices, FITTED) for each in (work, rest)
    )
    return next(seconds).memory - next(seconds).memory


def _layer_operators(deployment: Deployment, context: int) -> float:
    bucket = deployment.shape_of(Step(1, context - 1))
    return deployment.engine_work.of(bucket).num_launches / len(deployment.model.layers)


def _model(directory: Path, name: str) -> ModelSize:
    LlamaConfig(**LLAMA, **SIZES[name], num_attention_heads=HEADS[name], dtype="bfloat16").save_pretrained(
        directory
    )
    return read_model(directory)


if __name__ == "__main__":
    main()
