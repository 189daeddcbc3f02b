"""Work of a step, computed and moved, and of the kernels that it consists of.

The numbers of the two implementations of an HPU are those of ``python -m benchmarks.kernel_work``, which fits
them to audits of steps of several models, and are rounded. They count operators of torch: a compiler that
fuses them launches and moves less.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from hpu_duo.planning.attention_counts import AttentionCounts, AttentionRuns
from hpu_duo.planning.model import Format
from kernels_ref import Implementation

PUBLISHED_LAYER_LAUNCHES = 111
"""Assumed operators of a layer in published runs, as many as a decode of the portable kernels once had."""


@dataclass(frozen=True)
class KernelWork:
    """Operators and bytes of one implementation.

    Attributes:
        is_fused: whether dense attention is one operator.
        step_launches: operators of a step outside of its layers.
        ring_step_launches: further ones of models with rings.
        layer_launches: operators of a layer outside of its attention.
        launches: operators of each run of a part.
        bytes_of: bytes moved for each count of attention.
        hidden_bytes, width_bytes: moved for each token and layer, by the hidden size, and by the weights of
            the layer over the hidden size.
    """

    is_fused: bool
    step_launches: float
    layer_launches: float
    launches: AttentionRuns
    bytes_of: AttentionCounts
    hidden_bytes: float
    width_bytes: float
    ring_step_launches: float = 0.0

    def attention_launches(self, runs: AttentionRuns) -> Any:
        """Operators of the attention of a group."""
        return sum(each * times for each, times in zip(self.launches, runs) if each)

    def attention_bytes(self, counts: AttentionCounts) -> Any:
        """Bytes that the attention of a group moves, keys and values of whole blocks not among them."""
        return sum(each * times for each, times in zip(self.bytes_of, counts) if each)

    def whole_block_bytes(self, counts: AttentionCounts) -> Any:
        """Bytes of these that whole blocks of the unique part move."""
        own = AttentionCounts(
            scores=counts.own_scores,
            own_scores=counts.own_scores,
            own_elements=counts.own_elements,
            owner_pairs=counts.owner_pairs,
            merged_elements=counts.merged_elements,
        )
        return self.attention_bytes(own)


PORTABLE = KernelWork(
    is_fused=False,
    step_launches=32.0,
    ring_step_launches=18.0,
    layer_launches=30.2,
    launches=AttentionRuns(
        rings=9.5,
        split=6.1,
        causal=11.9,
        causal_slices=22.3,
        causal_cuts=3.1,
        band=8.3,
        band_slices=15.4,
        band_sinks=27.9,
        band_cuts=2.9,
        shared=16.2,
        shared_chunks=44.3,
        rings_read=29.4,
        rings_read_slices=27.3,
        unique=44.6,
        unique_chunks=33.0,
        unique_alone=34.3,
        rings_own=43.5,
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
    step_launches=32.0,
    ring_step_launches=18.0,
    layer_launches=31.0,
    launches=AttentionRuns(
        rings=6.0,
        split=5.0,
        causal=11.4,
        causal_slices=25.0,
        causal_cuts=3.0,
        band=18.6,
        band_slices=10.0,
        band_sinks=36.0,
        band_cuts=3.0,
        one_band=25.0,
        shared=16.2,
        shared_chunks=46.8,
        rings_read=26.8,
        rings_read_slices=28.0,
        unique=42.7,
        unique_chunks=35.0,
        unique_alone=32.3,
        rings_own=41.0,
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


OPERATIONS_PER_SCORE = 15.0
"""Vector operations of one attention score: scale, mask, maximum, exponential, sum. An estimate, 10 to 20."""

ALL_REDUCES_PER_LAYER = 2
ACTIVATION_BYTES = 2


@dataclass(frozen=True)
class Work:
    """Work of a step, all devices together; additive, and scaled by a number of steps.

    Fields are numbers, or arrays of those of many steps.

    Attributes:
        bf16_ops, fp8_ops: matrix operations by format.
        vector_ops: operations of the vector engine on attention scores.
        weight_bytes: weights read.
        kv_bytes: keys and values read where they lie.
        moved_bytes: other operands and results of operators, without fusion; 0 for figures of software with
            fusion, since constants include it.
        spilled_bytes: those of them that software with fusion moves too, since a pass over whole blocks makes
            more than the on-chip memory stores.
        reduced_bytes: activations that devices sum among each other, if there are several.
        num_launches: operators that are launched, on each device.
        sent_bytes: activations that a device sends to each other one besides all-reduces.
        num_region_calls: compiled regions that the host of each device calls beyond one for each layer: more
            pieces of layers whose loops are cut out, and rounds of these loops. No published figure has any.
    """

    bf16_ops: Any = 0.0
    fp8_ops: Any = 0.0
    vector_ops: Any = 0.0
    weight_bytes: Any = 0.0
    kv_bytes: Any = 0.0
    moved_bytes: Any = 0.0
    reduced_bytes: Any = 0.0
    num_launches: Any = 0.0
    sent_bytes: Any = 0.0
    spilled_bytes: Any = 0.0
    num_region_calls: Any = 0.0

    @property
    def matrix_ops(self) -> Any:
        """Matrix operations of both formats."""
        return self.bf16_ops + self.fp8_ops

    @property
    def num_bytes(self) -> Any:
        """Bytes of device memory in all."""
        return self.weight_bytes + self.kv_bytes + self.moved_bytes

    @property
    def fused(self) -> Work:
        """The same if everything between products were fused: only weights, cache and spills are moved."""
        return replace(self, moved_bytes=self.spilled_bytes)

    def __add__(self, other: Work) -> Work:
        names = (field.name for field in fields(self))
        return Work(*(getattr(self, name) + getattr(other, name) for name in names))

    def __mul__(self, times: float) -> Work:
        return Work(*(getattr(self, field.name) * times for field in fields(self)))


@dataclass(frozen=True)
class Formats:
    """Formats of the weights of layers, and of keys and values."""

    weights: Format = Format.BF16
    kv: Format = Format.BF16
