"""A lone request on Gaudi 3 with full attention, and with half of the heads streaming, by the cost model.

    python -m benchmarks.two_kinds --out benchmarks/results/two-kinds.md

Nothing here ran on a Gaudi. Needs no weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from transformers import LlamaConfig

from benchmarks.one_pass import HEADS, LLAMA, SIZES, write_page
from hpu_duo.planning import GAUDI3, Deployment, ModelSize, Serving, Step
from hpu_duo.planning.read_model import read_model
from kernels_ref import PLAIN

CONTEXTS = (1024, 2048, 4096, 6144, 8192, 12_288, 16_384, 32_768, 65_536, 131_072)
MACHINES = (("8B", 1, "heads"), ("70B", 8, "context"))
"""Model, cards, and what they share of retrieval heads."""


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
