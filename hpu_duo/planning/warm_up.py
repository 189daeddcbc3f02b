"""Predicted seconds of a warm-up, from the operators that it traces and compiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from graphs import BatchShape, Phase
from hpu_duo.planning.work import PUBLISHED_LAYER_LAUNCHES, AttentionRuns, GroupSizes, count_attention
from kernels_ref import Blocks
from kernels_ref.chunks import MOST_INLINE, QUERY_STEP, even_size, num_parts
from kernels_ref.loops import slices_reached

SECONDS_PER_GRAPH = (0.7, 14.0)
"""Seconds of warm-up of one graph with one kind of layer: from 49 s for 72 graphs (Llama 8B, bf16, Gaudi 2,
documentation of vllm-gaudi) to 14 s each for 126 (vllm-gaudi, pull request 1160)."""

TRACE_S_PER_NODE = 0.0039
"""Seconds in which torch traces one node of a layer's graph on a CPU core, views included; measured, with
machine and command in ``benchmarks/results/hpu-first-contact.md``."""

NODES_PER_OPERATOR = 2.0
"""Nodes of such a graph for each operator that is not a view; from the same table and the audit."""

TRACE_S_PER_OPERATOR = TRACE_S_PER_NODE * NODES_PER_OPERATOR

UNKNOWN = (
    "Tracing was measured on a CPU. What Synapse takes to compile a region of so many operators is unknown "
    "until a Gaudi has run: published seconds per graph do not say how many operators theirs have"
)


def graph_scale(num_operators: float, num_published: float = PUBLISHED_LAYER_LAUNCHES) -> float:
    """Return the seconds of a graph over the published ones: in proportion to its operators, at least 1."""
    return max(1.0, num_operators / num_published)


class BucketGraphs(NamedTuple):
    """Compilations of one bucket.

    Attributes:
        num_recipes: graphs that are compiled, each by itself.
        operators: of a layer, the mean of its kinds.
    """

    num_recipes: int
    operators: float


@dataclass(frozen=True)
class WarmUp:
    """Graphs to capture, and their seconds.

    Seconds are proportional to the operators of layers: there are no published times of small graphs.

    Attributes:
        num_graphs: buckets of the table, or the most that one may have.
        num_layer_kinds: kinds of layers, each of which is compiled for every bucket.
        recipes: compilations, if all buckets were like the one with fewest and like the one with most; the
            same number twice if the table is known.
        operators: of a layer, in the bucket with fewest and in that with most.
        trace_s: seconds in which torch traces them, low and high.
        low_s, high_s: seconds of the warm-up, tracing included.
        is_bound: whether the table has not been planned, so that ``num_graphs`` is its budget.
    """

    num_graphs: int
    num_layer_kinds: int
    recipes: tuple[int, int]
    operators: tuple[int, int]
    trace_s: tuple[float, float]
    low_s: float
    high_s: float
    is_bound: bool

    @classmethod
    def of(cls, graphs: Iterable[BucketGraphs], num_layer_kinds: int) -> WarmUp:
        """Estimate the warm-up of a table.

        Args:
            graphs: of each bucket.

        Raises:
            ValueError: no bucket.
        """
        each = list(graphs)
        if not each:
            raise ValueError("expected a bucket to warm up, got none")
        return cls._sum(num_layer_kinds, each, each, is_bound=False)

    @classmethod
    def within(
        cls, num_graphs: int, num_layer_kinds: int, fewest: BucketGraphs, most: BucketGraphs
    ) -> WarmUp:
        """Bound the warm-up of a table that has not been planned: all its layers are small, or all large."""
        return cls._sum(num_layer_kinds, [fewest] * num_graphs, [most] * num_graphs, is_bound=True)

    @classmethod
    def _sum(
        cls, num_kinds: int, few: list[BucketGraphs], many: list[BucketGraphs], *, is_bound: bool
    ) -> WarmUp:
        traced = tuple(
            num_kinds * TRACE_S_PER_OPERATOR * sum(each.operators for each in graphs)
            for graphs in (few, many)
        )
        compiled = tuple(
            num_kinds * seconds * sum(graph_scale(each.operators) for each in graphs)
            for seconds, graphs in zip(SECONDS_PER_GRAPH, (few, many))
        )
        recipes = tuple(sum(each.num_recipes for each in graphs) for graphs in (few, many))
        return cls(
            len(few),
            num_kinds,
            (recipes[0], recipes[1]),
            (round(min(each.operators for each in few)), round(max(each.operators for each in many))),
            (traced[0], traced[1]),
            compiled[0] + traced[0],
            compiled[1] + traced[1],
            is_bound,
        )


_SIDE_BY_SIDE = ({"causal_slices", "shared_chunks"}, {"band_slices", "rings_read_slices"})
"""Loops of a group with nothing between them that would be compiled."""


def cut_loops(runs: AttentionRuns, phase: Phase) -> frozenset[str]:
    """Return the loops of a group outside the graph of its layer, by their fields of ``runs``."""
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

    These are the region that derives the inputs of layers from a message, the pieces of each layer, the body
    of each loop, which layers with equal groups share, and copies to the scratch.

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
