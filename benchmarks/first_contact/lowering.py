"""Nodes, seconds of tracing, and copies of whole stores of the regions that are compiled for a bucket.

    python -m benchmarks.first_contact lowering

Takes minutes on one core. Regions are traced as for the vendor's compiler, on tensors without data.
"""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig

from benchmarks.first_contact.page import paragraph
from benchmarks.first_contact.recording import processor
from benchmarks.transients import half_streaming
from graphs import BatchShape
from hpu_duo.audit import LoweredGraph, Structure, build_structure, lower_bucket
from hpu_duo.config import CacheConfig, EngineConfig, HeadConfig, ModelConfig, SchedulerConfig
from hpu_duo.cost import GAUDI3
from hpu_duo.cost.warm_up import TRACE_S_PER_NODE

TITLE = "Nodes, tracing and store-sized copies"
LLAMA_3_1_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 262_144,
    "dtype": "bfloat16",
}
BLOCK_SIZE, CONTEXTS = 128, (8_192, 262_144)
SHAPES = (
    *("--u/q1/s0/u{n}/l1", "--u/q64/s0/u{n}/l64", "c--/q2048/s0/u0/l1"),
    *("cs-/q2048/s{n}/u0/l1", "-su/q16/s{n}/u16/l16", "csu/q272/s{n}/u{n}/l17"),
)


def report() -> Iterator[str]:
    """Lines of the section."""
    yield from (
        paragraph(
            f"""
            `python -m benchmarks.first_contact lowering`. The regions that are compiled apart for a
            bucket of Llama-3.1-8B, whose layers have four heads that retrieve and four that stream: traced
            and functionalised by torch's compiler as for the vendor's, on tensors without data
            (`hpu_duo/audit/lowering.py`), blocks of {BLOCK_SIZE}. *Nodes* are operators of the
            largest graph, views included; *in all* are those of all graphs of the bucket. *Copies*
            are as large as a whole store of keys or values. *Tracing* is process time.
            {processor()}, one core, torch {torch.__version__}, transformers {transformers.__version__},
            Python {platform.python_version()}, 2026-11-22.
            """
        ),
        "",
        "| attention | bucket | graphs | nodes | in all | writes | copies | tracing | ms a node |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    )
    nodes = seconds = 0.0
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(**LLAMA_3_1_8B).save_pretrained(folder)
        for attention in ("reference", "hpu"):
            structure = _structure(Path(folder), attention)
            lower_bucket(structure, BatchShape.parse(_buckets()[0]))  # what the first one alone would pay for
            for text in _buckets():
                began = time.process_time()
                found = lower_bucket(structure, BatchShape.parse(text))
                spent = time.process_time() - began
                yield _row(attention, text, found, spent)
                nodes += sum(graph.num_nodes for graph in found)
                seconds += spent
    yield ""
    yield paragraph(
        f"""
        Over all of them {seconds / nodes * 1e3:.1f} ms a node; estimates of warm-ups take
        {TRACE_S_PER_NODE * 1e3:.1f} ms (`hpu_duo/cost/warm_up.py`). How long Synapse then takes
        to compile a graph of so many nodes is unknown until a Gaudi has run.
        """
    )


def _buckets() -> list[str]:
    sizes = [context // BLOCK_SIZE for context in CONTEXTS]
    return list(dict.fromkeys(shape.format(n=num) for shape in SHAPES for num in sizes))


def _structure(path: Path, attention: str) -> Structure:
    config = EngineConfig(
        model=ModelConfig(path=path, attention=attention),
        heads=HeadConfig(pattern=half_streaming(32, 8)),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=CONTEXTS[-1] // BLOCK_SIZE),
        scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048),
    )
    return build_structure(config, GAUDI3)


def _row(attention: str, bucket: str, found: tuple[LoweredGraph, ...], seconds: float) -> str:
    nodes = sum(graph.num_nodes for graph in found)
    cells = (
        attention,
        f"`{bucket}`",
        str(len(found)),
        f"{max(graph.num_nodes for graph in found):,}",
        f"{nodes:,}",
        str(sum(graph.num_writes for graph in found)),
        str(sum(len(graph.store_copies) for graph in found)),
        f"{seconds:.1f} s",
        f"{seconds / nodes * 1e3:.1f}",
    )
    return f"| {' | '.join(cells)} |"
