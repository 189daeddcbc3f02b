"""Bucket strategies side by side: graphs to capture, and what padding costs on recorded mixed traffic.

    python -m benchmarks.bucket_strategies --out benchmarks/results/bucket-strategies.md

Traffic comes from the real scheduler (``benchmarks.bucket_traffic``) through the recorder. The planned table
sees one recording, and all tables are measured on another one, made with another seed. Costs are
``graphs.StepCost`` units of Llama-3.1-8B, not seconds, and nothing here ran on a Gaudi.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bucket_traffic import record
from graphs import BatchShape, BucketTable, Miss, StepCost, StepLimits
from graphs.planner import (
    Grid,
    PaddingReport,
    Traffic,
    evaluate,
    exponential,
    linear,
    padding_aware,
    upstream_unified,
)
from graphs.recording import ShapeRecorder, read_shapes
from hpu_duo.simulate import plan_buckets

COST = StepCost(hidden_size=4096, num_layers=32, vocab_size=128_256, kv_ratio=0.25)

# 94.62 GiB usable, less 14.97 GiB of weights and 0.5 GiB for the profile run; 0.9 of that is used and 0.9 of
# that again, since 0.1 is kept for graphs; a block of 128 tokens takes 16 MiB in bf16.
LLAMA_BLOCKS = int((94.62 - 14.97 - 0.5) * 0.9 * 0.9 * 64)

CONFIGURATIONS = (
    StepLimits(
        max_num_seqs=128,
        max_num_batched_tokens=8192,
        max_model_len=4352,
        block_size=128,
        num_blocks=4107,
        decode_len=1,
        max_chunk_rows=1,
    ),
    StepLimits(
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        max_model_len=131_072,
        block_size=128,
        num_blocks=4000,
        decode_len=1,
        max_chunk_rows=1,
    ),
    StepLimits(
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        max_model_len=8192,
        block_size=128,
        num_blocks=1000,
        decode_len=1,
        max_chunk_rows=1,
    ),
    StepLimits(
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        max_model_len=40_960,
        block_size=128,
        num_blocks=7593,
        decode_len=1,
        max_chunk_rows=1,
    ),
    StepLimits(
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        max_model_len=262_144,
        block_size=128,
        num_blocks=LLAMA_BLOCKS,
        decode_len=1,
        max_chunk_rows=1,
    ),
)

HELD_OUT_SEEDS = (2, 3, 4)
"""The first is what all tables are measured on."""

STRATEGIES: dict[str, Callable[[StepLimits], tuple[BatchShape, ...] | Grid]] = {
    "upstream unified": upstream_unified,
    "exponential": exponential,
    "linear": linear,
    "padding-aware 25 %": padding_aware,
    "exponential, thinned (default)": lambda limits: BucketTable.exponential(limits, cost=COST).buckets,
    "planned for the prior": lambda limits: plan_buckets(limits, 64, COST).buckets,
}


def main() -> None:
    """Record, plan, measure, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12_000, help="recorded steps to plan from")
    parser.add_argument("--graphs", type=int, nargs="+", default=[64, 128], help="budgets to plan for")
    parser.add_argument("--out", type=Path, help="Markdown file; default: standard output")
    options = parser.parse_args()
    text = "\n".join(_report(options.steps, options.graphs)) + "\n"
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text)


def _report(num_steps: int, budgets: list[int]) -> Iterator[str]:
    yield from (
        "# Bucket strategies on recorded mixed traffic",
        "",
        f"Made by `python -m benchmarks.bucket_strategies --steps {num_steps}`. Costs are units of",
        "`graphs.StepCost` with the sizes of Llama-3.1-8B; nothing here was measured on a Gaudi.",
        "`mean` is the cost of the padded steps over their exact cost, less 1; `worst` the largest such",
        "ratio of one step of the traffic; `worst reachable` the same over every shape that the limits allow",
        "and the table holds, found exactly; `missed` the steps that no bucket holds. Tables are planned",
        "from one recording, and measured on another, half as long, made with another seed; for the prior",
        "from no recording. `prompts trimmed` is the same users, served with `trim_chunks`: other steps, so",
        f"what it saves is told by the cost of a token, over {len(HELD_OUT_SEEDS)} such recordings. "
        "How tables",
        "are chosen: `docs/capture.md`.",
    )
    for limits in CONFIGURATIONS:
        seen = _traffic(limits, num_steps, 1).steps
        others = [_traffic(limits, num_steps // 2, seed) for seed in HELD_OUT_SEEDS]
        held_out = others[0].steps
        yield from (
            "",
            f"## {limits.max_num_seqs} sequences, max_model_len {limits.max_model_len:,}, "
            f"chunk {limits.max_num_batched_tokens:,}, {limits.num_blocks:,} blocks",
            "",
            f"{len(seen):,} distinct shapes to plan from, {len(held_out):,} to measure on, "
            f"{len(held_out.keys() - seen.keys()):,} of these not seen before.",
            "",
            "| strategy | graphs | mean | worst | worst reachable | missed | every reachable shape held |",
            "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
        )
        notes: list[str] = []
        for name, build in STRATEGIES.items():
            yield _row(name, evaluate(build(limits), limits, COST, held_out))
        for budget in budgets:
            table = plan_buckets(limits, budget, COST, seen)
            yield _row(f"**planned from traffic, {budget}**", evaluate(table.buckets, limits, COST, held_out))
            trimmed = [_traffic(limits, num_steps // 2, seed, table) for seed in HELD_OUT_SEEDS]
            yield _row(
                f"planned from traffic, {budget}, prompts trimmed",
                evaluate(table.buckets, limits, COST, trimmed[0].steps),
            )
            saved = 1 - _cost_of_token(table, trimmed) / _cost_of_token(table, others)
            notes.append(f"{saved:+.1%} with {budget} graphs")
        yield from ("", f"Cost of a token, padding included, that trimming saves: {', '.join(notes)}.")


@dataclass(frozen=True)
class Recorded:
    """Steps, and the tokens that they computed."""

    steps: Traffic
    num_tokens: int


def _traffic(limits: StepLimits, num_steps: int, seed: int, table: BucketTable | None = None) -> Recorded:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shapes.jsonl"
        with ShapeRecorder(path) as recorder:
            num_tokens = record(limits, num_steps, seed, recorder, table)
        return Recorded(read_shapes(path), num_tokens)


def _cost_of_token(table: BucketTable, runs: list[Recorded]) -> float:
    """Padding included."""
    spent = 0.0
    for run in runs:
        for shape, count in run.steps.items():
            bucket = table.fit(shape)
            assert not isinstance(bucket, Miss), "a planned table holds every step"
            spent += COST(bucket) * count
    return spent / sum(run.num_tokens for run in runs)


def _row(name: str, report: PaddingReport) -> str:
    return (
        f"| {name} | {report.num_buckets:,} | {report.mean:.1%} | {report.worst:.0%} | "
        f"{report.worst_reachable:.0%} | {report.missed:.1%} | {'yes' if report.holds_all else 'no'} |"
    )


if __name__ == "__main__":
    main()
