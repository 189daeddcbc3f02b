"""Recipes and promoted heads of published patterns.

    python -m benchmarks.first_contact heads

Takes a second, and needs the patterns that the tests read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.first_contact.page import paragraph
from hpu_duo.heads import CountRule, HeadPattern, fewest_promotions
from hpu_duo.limit_config import HPU_LAYER_KINDS

TITLE = "Recipes and promoted heads of the published patterns"
PATTERNS = Path(__file__).parents[2] / "tests" / "data" / "attn_patterns"
SPARSITIES = (0.25, 0.5, 0.75)
NUM_BUCKETS = 64


def report() -> Iterator[str]:
    """Lines of the section."""
    bounds = (None, 8, HPU_LAYER_KINDS, 2, 1)
    yield from (
        paragraph(
            f"""
            `python -m benchmarks.first_contact heads`. Every number of retrieval heads that a layer
            may have is a kind of layer, and a recipe of its own for each of {NUM_BUCKETS} buckets.
            `max_layer_kinds` promotes the fewest streaming heads (`hpu_duo/heads/counts.py`,
            exact); {HPU_LAYER_KINDS} is the default on HPU. Heads are KV heads; *more KV* are the
            bytes of blocks at a long context, over those without promotion.
            """
        ),
        "",
        "| pattern | sparsity | heads | retrieve | kinds | recipes | "
        + " | ".join(f"promoted, at most {bound}" for bound in bounds[1:])
        + f" | recipes at {HPU_LAYER_KINDS} | more KV at {HPU_LAYER_KINDS} |",
        "| --- | ---: | ---: | ---: | ---: | ---: |" + " ---: |" * (len(bounds) + 1),
    )
    for directory in sorted(path for path in PATTERNS.iterdir() if path.is_dir()):
        for sparsity in SPARSITIES:
            yield _row(directory.name, HeadPattern.load(directory), sparsity, bounds)


def _row(name: str, pattern: HeadPattern, sparsity: float, bounds: tuple[int | None, ...]) -> str:
    cut = pattern.binarise(sparsity=sparsity)
    needed = [kept for kept, _ in cut.head_counts]
    promoted = {bound: sum(fewest_promotions(needed, CountRule(bound))) - sum(needed) for bound in bounds[1:]}
    kinds = len(set(needed))
    few = len(set(fewest_promotions(needed, CountRule(HPU_LAYER_KINDS))))
    cells = (
        name,
        f"{sparsity:.0%}",
        str(cut.mask.size),
        str(sum(needed)),
        str(kinds),
        f"{kinds * NUM_BUCKETS:,}",
        *(str(promoted[bound]) for bound in bounds[1:]),
        f"{few * NUM_BUCKETS:,}",
        f"{promoted[HPU_LAYER_KINDS] / sum(needed):.1%}",
    )
    return f"| {' | '.join(cells)} |"
