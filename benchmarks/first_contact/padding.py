"""Padding of traffics that tables were planned for, and of others.

    python -m benchmarks.first_contact padding

Takes some minutes on one core. Costs are ``graphs.StepCost`` of Llama-3.1-8B, not seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.first_contact.page import paragraph
from benchmarks.first_contact.traffic import TRAFFICS
from graphs import BatchShape, BucketTable, Miss, StepCost, StepLimits
from graphs.planner import evaluate
from hpu_duo.simulate import plan_buckets

TITLE = "Padding of four traffics"
COST = StepCost(hidden_size=4096, num_layers=32, vocab_size=128_256, kv_ratio=0.25)
LIMITS = StepLimits(
    max_num_seqs=64,
    max_num_batched_tokens=8192,
    max_model_len=131_072,
    block_size=128,
    num_blocks=4000,
    decode_len=1,
    max_chunk_rows=1,
)
NUM_GRAPHS = 64
NUM_RECORDED, NUM_MEASURED = 8000, 4000
RECORDED_SEED, MEASURED_SEED = 1, 2
Steps = Mapping[BatchShape, int]


def report() -> Iterator[str]:
    """Lines of the section."""
    yield from (
        paragraph(
            f"""
            `python -m benchmarks.first_contact padding`. Four invented traffics
            (`benchmarks/first_contact/traffic.py`) are served by the engine's scheduler on a
            virtual clock: {LIMITS.max_num_seqs} sequences, {LIMITS.max_num_batched_tokens:,} tokens
            a step, {LIMITS.max_model_len:,} tokens a request, {LIMITS.num_blocks:,} blocks of
            {LIMITS.block_size}. Tables are planned for at most {NUM_GRAPHS} buckets, from
            {NUM_RECORDED:,} steps of one seed, and measured on {NUM_MEASURED:,} steps of another.
            *Default* is the thinned exponential table, *no recording* is planned for the stated
            workload. *Padding* is the cost of the padded steps over their exact cost, less 1; *in
            vain* are the steps without prompts that run in a bucket with parts that they lack.
            """
        ),
        "",
        "| traffic | table | buckets | padding | worst step | decode-only steps | in vain |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    )
    tables = {
        "default": BucketTable.exponential(LIMITS, cost=COST),
        "no recording": plan_buckets(LIMITS, NUM_GRAPHS, COST),
    }
    recorded = {
        traffic.name: plan_buckets(
            LIMITS, NUM_GRAPHS, COST, traffic.steps(LIMITS, NUM_RECORDED, RECORDED_SEED)
        )
        for traffic in TRAFFICS
    }
    for traffic in TRAFFICS:
        steps = traffic.steps(LIMITS, NUM_MEASURED, MEASURED_SEED)
        own = {**tables, "**its own recording**": recorded[traffic.name]}
        others = {f"recording of {name}": t for name, t in recorded.items() if name != traffic.name}
        for name, table in {**own, **others}.items():
            yield _row(traffic.name, name, table, steps)


def _row(traffic: str, name: str, table: BucketTable, steps: Steps) -> str:
    found = evaluate(table.buckets, LIMITS, COST, steps)
    decodes = {shape: count for shape, count in steps.items() if not shape.phase.causal}
    in_vain = sum(count for shape, count in decodes.items() if not _has_just_its_parts(table, shape))
    total = sum(decodes.values())
    cells = (
        traffic,
        name,
        str(len(table)),
        f"{found.mean:.1%}",
        f"{found.worst:.0%}",
        f"{total:,}",
        f"{in_vain / max(1, total):.0%}",
    )
    return f"| {' | '.join(cells)} |"


def _has_just_its_parts(table: BucketTable, shape: BatchShape) -> bool:
    bucket = table.fit(shape)
    assert not isinstance(bucket, Miss), "a planned table holds every step"
    return bucket.phase == shape.phase
