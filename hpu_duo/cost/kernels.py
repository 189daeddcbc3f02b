"""Operators and bytes of the kernel implementations of an HPU.

``python -m benchmarks.kernel_work`` fits them to audits of steps of several models; here they are rounded.
"""

from __future__ import annotations

from hpu_duo.cost.attention_counts import AttentionCounts, AttentionRuns
from hpu_duo.cost.kernel_work import KernelWork
from kernels_ref import Implementation

PORTABLE = KernelWork(
    is_fused=False,
    step_launches=0.0,
    layer_launches=45.8,
    launches=AttentionRuns(
        causal=12.2,
        causal_slices=22.8,
        causal_cuts=4.2,
        band=5.6,
        band_slices=43.9,
        band_cuts=4.2,
        shared=18.3,
        shared_chunks=44.2,
        rings_read=27.9,
        rings_read_slices=28.0,
        unique=47.4,
        unique_chunks=33.0,
        rings_own=49.2,
    ),
    bytes_of=AttentionCounts(
        pairs=18.9,
        scores=47.5,
        list_elements=15.1,
        partial_elements=52.4,
        own_elements=16.2,
        owner_pairs=1.4,
        merged_elements=76.1,
        tail_scores=3.8,
        tail_elements=4.7,
        token_elements=98.1,
    ),
    hidden_bytes=0.0,
    width_bytes=8.6,
)
"""``reference``: scores are in memory, in float32."""

FUSED = KernelWork(
    is_fused=True,
    step_launches=0.0,
    layer_launches=45.5,
    launches=AttentionRuns(
        causal=12.3,
        causal_slices=25.0,
        causal_cuts=3.0,
        band=5.9,
        band_slices=46.0,
        band_cuts=2.8,
        shared=16.4,
        shared_chunks=46.9,
        rings_read=27.8,
        rings_read_slices=28.0,
        unique=46.8,
        unique_chunks=35.0,
        rings_own=48.6,
    ),
    bytes_of=AttentionCounts(
        pairs=7.6,
        list_elements=18.5,
        partial_elements=62.1,
        own_scores=33.3,
        own_elements=29.3,
        merged_elements=81.8,
        tail_scores=47.8,
        tail_elements=4.9,
        token_elements=82.8,
    ),
    hidden_bytes=0.0,
    width_bytes=9.1,
)
"""``hpu``: dense attention is one operator."""


def kernels_of(attention: str) -> KernelWork:
    """Return the kernels of an attention by its name; ValueError for one that no HPU runs."""
    if attention == Implementation.HPU.value:
        return FUSED
    if attention == Implementation.REFERENCE.value:
        return PORTABLE
    raise ValueError(f"expected attention that an HPU runs, reference or hpu, got {attention!r}")
