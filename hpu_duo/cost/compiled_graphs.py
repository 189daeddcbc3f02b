"""Graphs that are compiled for a bucket where layers are compiled by themselves and their loops cut out.

``kernels_ref.looped`` decides what is cut; ``tests/audit/test_compiled_graphs.py`` holds the counts to what a
compiler gets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from graphs import BatchShape, Phase
from hpu_duo.cost.attention_counts import AttentionRuns, GroupSizes, count_attention
from kernels_ref import Blocks
from kernels_ref.bodies import slices_reached
from kernels_ref.chunks import MOST_INLINE
from kernels_ref.slices import QUERY_STEP, even_size, num_parts

_SIDE_BY_SIDE = ({"causal_slices", "shared_chunks"}, {"band_slices", "rings_read_slices"})
"""Loops of a group with nothing between them that would be compiled."""


def cut_loops(runs: AttentionRuns, phase: Phase) -> frozenset[str]:
    """Return the loops of a group that the graph of its layer does not hold, by their fields of ``runs``."""
    most_shared = 0 if phase.causal else MOST_INLINE
    most_unique = 0 if phase.causal and not phase.shared else MOST_INLINE
    most = {
        "causal_slices": MOST_INLINE,
        "band_slices": MOST_INLINE,
        "shared_chunks": most_shared,
        "rings_read_slices": most_shared,
        "unique_chunks": most_unique,
    }
    return frozenset(name for name, held in most.items() if getattr(runs, name) > held)


def traced_runs(runs: AttentionRuns, phase: Phase) -> AttentionRuns:
    """Return the runs that are traced and compiled: those in the graph, and one of each loop outside."""
    cut = cut_loops(runs, phase)
    once = dict.fromkeys(cut, 1.0)
    if "band_slices" in cut:
        once["band_sinks"] = min(1.0, runs.band_sinks)
    return runs._replace(**once)


def num_compiled(layers: Iterable[Sequence[GroupSizes]], bucket: BatchShape) -> int:
    """Count the graphs that are compiled for a bucket.

    These are the region that derives from a message what layers take, the pieces of each layer, the body of
    each loop, which layers with equal groups share, and copies to the scratch.

    Args:
        layers: the groups of heads of each kind of layer.
    """
    phase, pieces = bucket.phase, 0
    bodies: set[tuple[GroupSizes, str]] = set()
    copied: set[GroupSizes] = set()
    for groups in layers:
        pieces += 1
        for sizes in groups:
            runs = count_attention(sizes, bucket)[1]
            cut = cut_loops(runs, phase)
            pieces += len(cut) - sum(both <= cut for both in _SIDE_BY_SIDE)
            bodies.update((sizes, name) for name in cut)
            if {"band_slices", "causal_slices"} & cut and _has_sinks_before(sizes, bucket.query_len):
                bodies.add((sizes, "band_sinks"))
            if phase.causal and phase.shared and sizes.heads.kind.keeps_scratch:
                copied.add(sizes)
    return 1 + pieces + len(bodies) + len(copied)


def _has_sinks_before(sizes: GroupSizes, query_len: int) -> bool:
    kind = sizes.heads.kind
    rule = kind.rule if isinstance(kind, Blocks) else sizes.window
    if rule is None or not rule.sink:
        return False
    size = even_size(query_len, sizes.query_slice, QUERY_STEP)
    num_slices = num_parts(query_len, size)
    return num_slices > slices_reached(rule, size, num_slices) + 1
