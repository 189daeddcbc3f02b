"""Loops of attention outside the graphs of layers, the calls of their regions, and the graphs that result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from graphs import BatchShape, Phase
from hpu_duo.planning.attention_counts import (
    AttentionRuns,
    Bucket,
    GroupSizes,
    Size,
    by_size,
    count_attention,
)
from kernels_ref.chunks import (
    MOST_CAUSAL,
    MOST_INLINE,
    MOST_RINGS,
    MOST_ROUNDS,
    QUERY_STEP,
    even_size,
    looped_rounds,
    num_parts,
)
from kernels_ref.loops import slices_reached
from kernels_ref.units import SCRATCH_STORES

_SIDE_BY_SIDE = (("causal_slices", "shared_chunks"), ("band_slices", "rings_read_slices"))
"""Loops of a group with nothing between them that would be compiled."""


def cut_loops(sizes: GroupSizes, runs: AttentionRuns, phase: Phase) -> frozenset[str]:
    """Return the loops of a group outside the graph of its layer, by their fields of ``runs``."""
    return frozenset(name for name, is_cut in _are_cut(sizes, runs, phase).items() if is_cut)


def _are_cut(sizes: GroupSizes, runs: AttentionRuns, phase: Phase) -> dict[str, Any]:
    """Whether each loop is outside the graph of its layer."""
    most_causal = MOST_CAUSAL if sizes.is_fused and sizes.rule is None else MOST_INLINE
    most_shared = 0 if phase.causal else MOST_INLINE
    most_unique = 0 if phase.causal and not phase.shared else MOST_INLINE
    most = {
        "causal_slices": most_causal,
        "band_slices": MOST_INLINE,
        "shared_chunks": most_shared,
        "rings_read_slices": MOST_RINGS,
        "unique_chunks": most_unique,
    }
    return {name: getattr(runs, name) > held for name, held in most.items()}


def traced_runs(sizes: GroupSizes, runs: AttentionRuns, phase: Phase) -> AttentionRuns:
    """Return the runs that are traced and compiled: those in the graph, and one of each loop outside."""
    cut = cut_loops(sizes, runs, phase)
    once = dict.fromkeys(cut, 1.0)
    if "shared_chunks" in cut:
        once["shared_chunks"] = float(looped_rounds(int(runs.shared_chunks)))
    if "band_slices" in cut:
        once["band_sinks"] = min(1.0, runs.band_sinks)
    return runs._replace(**once)


def num_region_calls(sizes: GroupSizes, bucket: Bucket, runs: AttentionRuns) -> Any:
    """Regions that the host calls for a group of a layer, beyond the one graph of the layer.

    A round of each loop outside the graph is a call, some chunks of the shared part together, and so is the
    piece of the layer after it. A slice of queries is a round for each slice of keys that it reaches.
    """
    are_cut = {name: cut for name, cut in _are_cut(sizes, runs, bucket.phase).items() if np.any(cut)}
    calls: Any = 0.0
    for name, is_cut in are_cut.items():
        rounds = getattr(runs, name)
        if name == "shared_chunks":
            rounds = -(-rounds // MOST_ROUNDS)
        elif name == "unique_chunks":
            rounds = sizes.looped_rounds(bucket.num_logits, bucket.num_unique_blocks)
        elif name in ("causal_slices", "band_slices"):
            rounds = _causal_rounds(sizes, bucket.query_len)
        calls = calls + is_cut * (1.0 + rounds)
    for one, other in _SIDE_BY_SIDE:
        if one in are_cut and other in are_cut:
            calls = calls - 1.0 * (are_cut[one] & are_cut[other])
    return calls


def _causal_rounds(sizes: GroupSizes, query_len: Size) -> Any:
    """Rounds over slices of keys, of all slices of queries, with those for sinks; see ``looped.causal``."""
    return by_size(_rounds, query_len, sizes)


def _rounds(query_len: int, sizes: GroupSizes) -> int:
    if not query_len:
        return 0
    rule, size = sizes.rule, even_size(query_len, sizes.causal_slice(query_len), QUERY_STEP)
    num_slices = num_parts(query_len, size)
    reached = num_slices if rule is None else slices_reached(rule, size, num_slices)
    rounds = sum(min(place, reached) + 1 for place in range(num_slices))
    has_sinks = rule is not None and rule.sink > 0
    return rounds + (max(0, num_slices - reached - 1) if has_sinks else 0)


def scratch_copies(stores: Mapping[GroupSizes, int], bucket: Bucket) -> list[int]:
    """Stores that each region copies to the scratch before a step.

    Args:
        stores: the number of layers with each group of heads.
    """
    if not (bucket.phase.causal and bucket.phase.shared):
        return []
    kept = [num for sizes, num in stores.items() if sizes.heads.kind.keeps_scratch]
    return [min(SCRATCH_STORES, num - begin) for num in kept for begin in range(0, num, SCRATCH_STORES)]


def num_compiled(
    layers: Iterable[Sequence[GroupSizes]], bucket: BatchShape, stores: Mapping[GroupSizes, int]
) -> int:
    """Count the graphs that are compiled for a bucket.

    These are the region that derives the inputs of layers from a message, the pieces of each layer, the body
    of each loop, which layers with equal groups share, and copies to the scratch.

    Args:
        layers: the groups of heads of each kind of layer.
        stores: see ``scratch_copies``.
    """
    phase, pieces = bucket.phase, 0
    bodies: set[tuple[GroupSizes, str]] = set()
    for groups in layers:
        pieces += 1
        for sizes in groups:
            runs = count_attention(sizes, bucket)[1]
            cut = cut_loops(sizes, runs, phase)
            pieces += len(cut) - sum(cut.issuperset(both) for both in _SIDE_BY_SIDE)
            bodies.update((sizes, name) for name in cut)
            if {"band_slices", "causal_slices"} & cut and _has_sinks_before(sizes, bucket.query_len):
                bodies.add((sizes, "band_sinks"))
    copies = sum(len(set(scratch_copies({sizes: num}, bucket))) for sizes, num in stores.items())
    return 1 + pieces + len(bodies) + copies


def _has_sinks_before(sizes: GroupSizes, query_len: int) -> bool:
    rule = sizes.rule
    if rule is None or not rule.sink:
        return False
    size = even_size(query_len, sizes.query_slice, QUERY_STEP)
    num_slices = num_parts(query_len, size)
    return num_slices > slices_reached(rule, size, num_slices) + 1
