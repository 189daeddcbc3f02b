"""Operators and bytes of the two kernel implementations of an HPU, by what their parts count.

The numbers are those of ``python -m benchmarks.kernel_work``, which fits them to audits of steps of several
models, and are rounded. They count operators of torch: a compiler that fuses them launches and moves less.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphs import Launches
from hpu_duo.cost.attention_counts import AttentionCounts, AttentionRuns
from hpu_duo.limit_config import CacheConfig
from kernels_ref.chunks import DEFAULT_BOUNDS
from kernels_ref.slices import DEFAULT_SLICES

PUBLISHED_LAYER_LAUNCHES = 111
"""Operators of a layer in the runs of published figures, none of which says it: those of a plain decode of
the portable kernels."""


_MASK_BYTES_PER_SLOT = 3
"""Of a mask in bfloat16, with the booleans that it is made from."""


@dataclass(frozen=True)
class KernelWork:
    """Operators and bytes of one implementation.

    Attributes:
        is_fused: whether dense attention is one operator.
        step_launches: operators of a step outside of its layers.
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

    @property
    def step_cost_launches(self) -> Launches:
        """The same operators, as ``graphs.StepCost`` ranks buckets by, which knows blocks only."""
        each, slices = self.launches, DEFAULT_SLICES
        pairs = DEFAULT_BOUNDS.mask_bytes / _MASK_BYTES_PER_SLOT if self.is_fused else None
        return Launches(
            layer=self.layer_launches,
            causal=each.causal,
            causal_slice=each.causal_slices,
            shared=each.shared,
            shared_chunk=each.shared_chunks,
            unique=each.unique,
            unique_chunk=each.unique_chunks,
            query_slice=slices.masked_queries if self.is_fused else slices.queries,
            shared_pairs=Launches.shared_pairs if pairs is None else round(pairs / CacheConfig.block_size),
        )

    def attention_launches(self, runs: AttentionRuns) -> float:
        """Operators of the attention of a group."""
        return sum(each * times for each, times in zip(self.launches, runs))

    def attention_bytes(self, counts: AttentionCounts) -> float:
        """Bytes that the attention of a group moves, keys and values of whole blocks not among them."""
        return sum(each * times for each, times in zip(self.bytes_of, counts))
