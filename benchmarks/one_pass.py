"""Decodes of long contexts on Gaudi 3: chunks of blocks in loops against one pass, by the cost model.

    python -m benchmarks.one_pass --out benchmarks/results/one-pass.md

Nothing here ran on a Gaudi. Needs no weights.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from transformers import LlamaConfig

from graphs import BatchShape
from hpu_duo.planning import GAUDI3, Deployment, ModelSize, Prediction, Serving, Step
from hpu_duo.planning.engine_work import EngineWork
from hpu_duo.planning.read_model import read_model
from kernels_ref import PLAIN
from kernels_ref.chunks import DEFAULT_BOUNDS, MOST_INLINE, ChunkBounds

CHUNKED = DEFAULT_BOUNDS._replace(most_inline=MOST_INLINE)
"""The bounds that an HPU had before: whole blocks of 8,192 slots at a time."""

LLAMA = {"num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 131_072}
SIZES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80},
}
HEADS = {"8B": 32, "70B": 64}


class Case(NamedTuple):
    """A model as it is served, and its decode.

    Attributes:
        model, num_devices, by: name, cards, and what they share of retrieval heads.
        sparsity: share of the heads that stream.
        context: tokens of each request.
        is_alone: one request, instead of as many as fit.
    """

    model: str
    num_devices: int
    by: str
    sparsity: float
    context: int
    is_alone: bool = False


CASES = (
    Case("8B", 1, "heads", 0.0, 131_072, True),
    Case("8B", 1, "heads", 0.0, 131_072),
    Case("8B", 1, "heads", 0.5, 131_072),
    Case("8B", 1, "heads", 0.0, 32_768),
    Case("8B", 1, "heads", 0.0, 8_192),
    Case("70B", 8, "heads", 0.0, 131_072, True),
    Case("70B", 8, "heads", 0.0, 131_072),
    Case("70B", 8, "heads", 0.0, 32_768),
    Case("70B", 8, "context", 0.0, 131_072),
    Case("70B", 8, "context", 0.5, 131_072),
)
MIXED = (
    *("--u/q64/s0/u5120/l64", "-su/q64/s256/u4096/l64", "c--/q2048/s0/u0/l2"),
    *("c-u/q512/s0/u5120/l17", "cs-/q2048/s256/u0/l1", "csu/q512/s256/u4096/l17"),
)
"""Steps of Llama 8B, by their buckets."""


def main() -> None:
    """Compute both tables, and write them."""
    write_page(_page, __doc__)


def write_page(page: Callable[[], Iterable[str]], description: str | None) -> None:
    """Write the lines of a page to the file of the option ``--out``, or to standard output."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="Markdown file; default: standard output")
    options = parser.parse_args()
    text = "\n".join(page()) + "\n"
    if options.out is None:
        print(text, end="")
    else:
        options.out.write_text(text)


def _page() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        models = {name: _model(Path(directory) / name, name) for name in SIZES}
    yield from (
        "# Decodes of long contexts on Gaudi 3: one pass against chunks",
        "",
        "Made by `python -m benchmarks.one_pass`. **Predicted by the cost model (`docs/cost-model.md`),",
        "measured by nobody.** Llama 3.1 in bf16, fused operators, `hpu-compile`. *Chunks* have 8,192",
        "slots, or as many as the tails allow, as an HPU had them before; more than two are a loop outside",
        "the graph of a layer. *Calls* are those of regions beyond one for each layer; *unpriced* takes",
        "them to cost nothing, as the model did before. *MiB* are the intermediates of the pass, *spilled*",
        "their share of the bytes moved.",
        "",
        "| model | cards | by | streaming | requests | context | chunks | calls a step | tokens/s, unpriced "
        "| tokens/s | one pass: calls | MiB | spilled | tokens/s |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    )
    yield from (_row(case, models[case.model]) for case in CASES)
    yield from (
        "",
        "## Calls of regions by step",
        "",
        "Llama 3.1 8B on one card, for each layer, beyond the one graph of the layer.",
        "",
        "| bucket | full, chunks | full, one pass | half stream, chunks | half stream, one pass |",
        "| --- | ---: | ---: | ---: | ---: |",
    )
    works = [_deployment(case, models["8B"]).engine_work for case in CASES[1:3]]
    for text in MIXED:
        bucket, cells = BatchShape.parse(text), []
        for work in works:
            for one in (_chunked(work), work):
                cells.append(f"{one.of(bucket).num_region_calls / len(work.kv_layers):.0f}")
        yield f"| `{text}` | {' | '.join(cells)} |"


def _model(directory: Path, name: str) -> ModelSize:
    LlamaConfig(**LLAMA, **SIZES[name], num_attention_heads=HEADS[name], dtype="bfloat16").save_pretrained(
        directory
    )
    return read_model(directory)


def _deployment(case: Case, model: ModelSize) -> Deployment:
    serving = Serving(GAUDI3, case.num_devices, retrieval_parallel=case.by)
    return Deployment(model, serving, case.sparsity, PLAIN, 131_072)


def _chunked(work: EngineWork, bounds: ChunkBounds = CHUNKED) -> EngineWork:
    return replace(work, chunks=bounds)


def _row(case: Case, model: ModelSize) -> str:
    deployment = _deployment(case, model)
    fits = min(deployment.count_requests(case.context), deployment.serving.max_num_seqs)
    num = 1 if case.is_alone else fits
    bucket = deployment.shape_of(Step(num, case.context - 1))
    work = deployment.engine_work
    one, chunked = work.of(bucket), _chunked(work).of(bucket)

    def rate(found: object) -> str:
        seconds = Prediction.of(found, GAUDI3, case.num_devices, 1.0)  # type: ignore[arg-type]
        return f"{num / seconds.value:,.0f}"

    chunks = max(runs.unique_chunks for _, runs, _ in _chunked(work).attention_of(bucket))
    made = max(sizes.unique_bytes(num, bucket.num_unique_blocks) for sizes in work.block_groups())
    cells = (
        *(case.model, case.num_devices, case.by, f"{case.sparsity:.0%}", num, f"{case.context:,}"),
        *(f"{chunks:.0f}", f"{chunked.num_region_calls:,.0f}"),
        *(rate(replace(chunked, num_region_calls=0.0)), rate(chunked)),
        *(f"{one.num_region_calls:,.0f}", f"{made / 2**20:,.0f}"),
        *(f"{one.spilled_bytes / one.fused.num_bytes:.0%}", rate(one)),
    )
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
