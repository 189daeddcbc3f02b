"""Memory that one step needs beside weights and stores, against the length of context.

    python -m benchmarks.transients --out benchmarks/results/transients.md

First measured: a model of one small layer on the CPU, with torch's allocator watched. Then computed by the
audit for Llama-3.1-8B on an HPU, from its sizes alone; nothing here ran on a Gaudi.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bias_builders import StepRows
from graphs import BatchShape
from hpu_duo.config.engine import CacheConfig, EngineConfig, HeadConfig, ModelConfig, SchedulerConfig
from hpu_duo.engine.batch import fill, flatten
from hpu_duo.engine.executor import Executor, bucket_step
from hpu_duo.heads import HeadPattern
from hpu_duo.lab.audit import audit_bucket, build_structure, peak_allocated_bytes
from hpu_duo.modeling.step_model import run_layer
from hpu_duo.planning import GAUDI3
from hpu_duo.startup.assembly import assemble

CONTEXTS = (8_192, 65_536, 262_144)
BLOCK = 128
CHUNK = 32
"""Prompt tokens of a measured step."""

SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 256,
    "max_position_embeddings": 2 * CONTEXTS[-1],
}
LLAMA_3_1_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    # The model serves 131,072 positions; the longest context here is beyond that.
    "max_position_embeddings": 2 * CONTEXTS[-1],
    "dtype": "bfloat16",
}
SINK, RECENT = 128, 256


@dataclass(frozen=True)
class StepKind:
    """A step with one decode, one chunk of a prompt, or both, each on top of the same length of context."""

    name: str
    has_decode: bool
    has_chunk: bool

    def rows(self, context: int) -> StepRows:
        """The rows; ring rows and blocks are given out in order."""
        num_new = [1] * self.has_decode + [CHUNK] * self.has_chunk
        starts = [context - new for new in num_new]
        num_blocks = -(-context // BLOCK)
        blocks = np.arange(num_blocks * len(num_new), dtype=np.int32)
        return StepRows(
            row_id=np.arange(len(num_new), dtype=np.int32),
            start=np.array(starts, np.int32),
            num_new=np.array(num_new, np.int32),
            block_ids=blocks,
            num_blocks=np.full(len(num_new), num_blocks, np.int32),
        )


KINDS = (
    StepKind("one decode", True, False),
    StepKind(f"{CHUNK} tokens of a prompt", False, True),
    StepKind("both", True, True),
)


def small_executor(
    path: Path, attention: str, pattern: HeadPattern | None, max_len: int, attention_rule: str | None = None
) -> Executor:
    """An executor of the small model, with stores for two requests of ``max_len`` tokens."""
    config = EngineConfig(
        model=ModelConfig(path=path, device="cpu", dtype="bfloat16", attention=attention, pack_weights=False),
        heads=HeadConfig(pattern=pattern, attention_rule=attention_rule),
        cache=CacheConfig(block_size=BLOCK, num_blocks=2 * -(-max_len // BLOCK), enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=CHUNK + 1, max_model_len=max_len),
    )
    return assemble(config, frozenset()).runner.executor


def measure(executor: Executor, rows: StepRows, bucket: BatchShape | None = None) -> int:
    """Peak of the allocations of one step, padded to ``bucket``.

    Args:
        bucket: default: the exact shape.
    """
    geometry = executor.geometry
    batch = flatten(rows, np.zeros(int(rows.num_new.sum()), np.int32), geometry.block_size)
    bucket = bucket or batch.shape
    host = {name: np.zeros(shape, np.int32) for name, shape in geometry.field_shapes(bucket).items()}
    fill(host, batch, bucket, geometry)
    inputs = {name: torch.from_numpy(array) for name, array in host.items()}
    runners: dict[Hashable, Callable[..., Any]] = dict.fromkeys(executor.model.kinds, run_layer)
    step = bucket_step(executor.model, geometry, bucket, runners)
    with torch.inference_mode():
        return peak_allocated_bytes(lambda: step(inputs))


def half_streaming(num_layers: int, num_kv_heads: int) -> HeadPattern:
    """Half of the heads of every layer stream."""
    retrieval = np.zeros((num_layers, num_kv_heads), np.bool_)
    retrieval[:, : num_kv_heads // 2] = True
    return HeadPattern(retrieval.astype(np.float32), sink=SINK, recent=RECENT, retrieval=retrieval)


def main() -> None:
    """Measure, compute, and write both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="Markdown file; default: standard output")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = "\n".join((*_measured(), *_computed())) + "\n"
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text)


def _measured() -> Iterator[str]:
    yield from (
        "# Transient memory of one step against context",
        "",
        "Made by `python -m benchmarks.transients`. Weights, stores and staged inputs are not counted.",
        "",
        "## Measured: one small layer on a CPU",
        "",
        f"{SMALL['num_attention_heads']} query and {SMALL['num_key_value_heads']} KV heads of "
        f"{SMALL['head_dim']}, bfloat16, blocks of {BLOCK} tokens; the most that torch's CPU allocator had",
        "given out at any moment of a step, in MiB. *Padded* steps run in the bucket of the longest context.",
        "",
        f"| attention | heads | step | {' | '.join(f'{c:,}' for c in CONTEXTS)} | "
        f"padded: {' | '.join(f'{c:,}' for c in CONTEXTS)} |",
        f"| --- | --- | --- |{' ---: |' * 2 * len(CONTEXTS)}",
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(path)
        for attention in ("reference", "sdpa"):
            for heads, pattern in (("all retrieve", None), ("half stream", half_streaming(1, 8))):
                executor = small_executor(path, attention, pattern, CONTEXTS[-1])
                for kind in KINDS:
                    longest = kind.rows(CONTEXTS[-1])
                    num_tokens = int(longest.num_new.sum())
                    bucket = flatten(longest, np.zeros(num_tokens, np.int32), BLOCK).shape
                    exact = [measure(executor, kind.rows(context)) for context in CONTEXTS]
                    padded = [measure(executor, kind.rows(context), bucket) for context in CONTEXTS]
                    yield f"| {attention} | {heads} | {kind.name} | {_mebibytes((*exact, *padded))} |"


def _computed() -> Iterator[str]:
    yield from (
        "",
        "## Computed: Llama-3.1-8B on an HPU",
        "",
        "By the audit, for the reference kernels in bfloat16, operator by operator and unfused, in MiB; then",
        "the operators that a step launches. Rows of decodes share out the blocks of one context. Longer",
        f"than the {131_072:,} tokens that the model serves only to show the trend.",
        "",
        f"| heads | step | {' | '.join(f'{c:,}' for c in CONTEXTS)} | "
        f"operators: {' | '.join(f'{c:,}' for c in CONTEXTS)} |",
        f"| --- | --- |{' ---: |' * 2 * len(CONTEXTS)}",
    )
    shapes = (
        ("1 decode", "--u/q1/s0/u{n}/l1"),
        ("16 decodes", "--u/q16/s0/u{n}/l16"),
        ("16 decodes that share all but a block", "-su/q16/s{n}/u16/l16"),
        ("2,048 tokens of a prompt", "cs-/q2048/s{n}/u0/l1"),
        ("256 tokens of a prompt and 16 decodes", "csu/q272/s{n}/u{n}/l17"),
    )
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(**LLAMA_3_1_8B).save_pretrained(folder)
        for heads, pattern in (("all retrieve", None), ("half stream", half_streaming(32, 8))):
            config = EngineConfig(
                model=ModelConfig(path=folder),
                heads=HeadConfig(pattern=pattern),
                cache=CacheConfig(
                    block_size=BLOCK, num_blocks=CONTEXTS[-1] // BLOCK, enable_prefix_caching=False
                ),
                scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=2048),
            )
            structure = build_structure(config, GAUDI3)
            for name, shape in shapes:
                steps = [
                    audit_bucket(structure, BatchShape.parse(shape.format(n=context // BLOCK)))
                    for context in CONTEXTS
                ]
                launches = [sum(work.num_launches for work in step.work.values()) for step in steps]
                yield (
                    f"| {heads} | {name} | {_mebibytes([step.peak_transient_bytes for step in steps])} | "
                    f"{' | '.join(f'{count:,}' for count in launches)} |"
                )


def _mebibytes(sizes: Sequence[int]) -> str:
    return " | ".join(f"{size / 2**20:,.2f}" for size in sizes)


if __name__ == "__main__":
    main()
