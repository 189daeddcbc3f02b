"""Cost of a step, by which buckets are compared, and the operators that a layer launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from graphs.shape import BatchShape, Phase


@dataclass(frozen=True)
class Launches:
    """Operators that a layer launches, by what a step runs.

    The defaults are those of the portable kernels for an eight-billion-parameter Llama, as ``hpu-duo audit``
    counts them. A part without work launches its operators too.

    Attributes:
        layer: in any step. causal, causal_slice: for the causal part, and for each ``query_slice`` query
            tokens of it.
        shared, shared_chunk: for the shared part, and for each chunk of gathered blocks: as many blocks as
            have ``shared_pairs`` pairs with query tokens, at most ``shared_blocks``, and at least one.
        unique, unique_chunk: for the unique part, and for each ``unique_blocks`` blocks of it.
        query_slice, shared_pairs, shared_blocks, unique_blocks: see there.
    """

    layer: float = 33.0
    causal: float = 8.0
    causal_slice: float = 26.0
    shared: float = 16.0
    shared_chunk: float = 45.0
    unique: float = 47.0
    unique_chunk: float = 31.0
    query_slice: int = 512
    shared_pairs: int = 4096
    shared_blocks: int = 64
    unique_blocks: int = 64

    def at(self, phase: Phase, query_len: Any, num_shared_blocks: Any, num_unique_blocks: Any) -> Any:
        """Operators of a layer, or of each of many steps when sizes are arrays that broadcast together.

        Chunks after the first count fractionally, so that the count is continuous; it is monotonic in all
        sizes.
        """
        count: Any = self.layer
        if phase.causal:
            count = count + self.causal + self.causal_slice * np.maximum(query_len / self.query_slice, 1.0)
        if phase.shared:
            blocks = np.clip(self.shared_pairs / query_len, 1.0, self.shared_blocks)
            count = count + self.shared + self.shared_chunk * _chunks(num_shared_blocks, blocks)
        if phase.unique:
            chunks = _chunks(num_unique_blocks, self.unique_blocks)
            count = count + self.unique + self.unique_chunk * chunks
        return count


def _chunks(num_blocks: Any, size: Any) -> Any:
    return np.where(num_blocks > 0, np.maximum(num_blocks / size, 1.0), 0.0)


CostFunction: TypeAlias = Callable[[BatchShape], float]
"""The cost of one step at a shape: positive, in any unit, never lower for a shape that holds another."""


@runtime_checkable
class BroadcastCost(Protocol):
    """A cost function that also prices many shapes of one phase at once."""

    def __call__(self, shape: BatchShape) -> float:
        """Cost of one step at ``shape``."""

    def at(
        self, phase: Phase, query_len: Any, num_shared_blocks: Any, num_unique_blocks: Any, num_logits: Any
    ) -> Any:
        """Cost of a step, or of every combination when the sizes are arrays that broadcast together.

        The result broadcasts to the shape of all sizes; an axis that only sizes without influence have may
        be missing from it.
        """


@dataclass(frozen=True)
class StepCost:
    """Work of a step, in units of one query-key pair of one layer, which is ``4 * hidden_size`` operations.

    Matrix work counts as arithmetic. Memory traffic (reading the weights once per step, and cached slots once
    per decoded token) and launches count as arithmetic of the same duration. The defaults are those of an
    eight-billion-parameter dense model in bf16 on Gaudi 2 (432 TFLOP/s, 2.45 TB/s, and 1 µs to launch an
    operator). The result ranks buckets and predicts no time.

    Args:
        block_size: tokens of one block.
        ring_width: entries of one ring (sink + recent); 0 = no rings.
        hidden_size, num_layers, vocab_size: of the model.
        kv_ratio: KV heads over query heads.
        operations_per_byte: arithmetic that fits into the time of reading one byte; near 0 for a device
            that arithmetic always bounds.
        operations_per_launch: arithmetic that fits into the time of launching one operator.
        launches: operators of a layer.
    """

    block_size: int = 128
    ring_width: int = 0
    hidden_size: int = 4096
    num_layers: int = 32
    vocab_size: int = 131_072
    kv_ratio: float = 0.25
    operations_per_byte: float = 176.0
    operations_per_launch: float = 432e6
    launches: Launches = field(default_factory=Launches)

    @property
    def token(self) -> float:
        """Projections and MLP of one query token: about ``12 * hidden_size**2`` weights per layer."""
        return 6.0 * self.hidden_size

    @property
    def step(self) -> float:
        """Reading the weights, two bytes each, once per step."""
        return self.operations_per_byte * self.token

    @property
    def logit(self) -> float:
        """One row of logits."""
        return self.vocab_size / (2 * self.num_layers)

    @property
    def slot(self) -> float:
        """One cached slot of the unique part: its pair, and reading a key and a value of two bytes each."""
        return 1.0 + self.operations_per_byte * self.kv_ratio

    @property
    def launch(self) -> float:
        """Launching one operator in each layer."""
        return self.operations_per_launch / (4 * self.hidden_size)

    def at(
        self, phase: Phase, query_len: Any, num_shared_blocks: Any, num_unique_blocks: Any, num_logits: Any
    ) -> Any:
        """Cost of a step, or of each of many when sizes are arrays that broadcast together."""
        launches = self.launches.at(phase, query_len, num_shared_blocks, num_unique_blocks)
        cost = self.step + self.launch * launches + self.token * query_len + self.logit * num_logits
        ring_slots = num_logits * self.ring_width
        if phase.causal:
            cost = cost + query_len**2 / 2
        if phase.shared:
            cost = cost + query_len * (num_shared_blocks * self.block_size + ring_slots)
        if phase.unique:
            cost = cost + self.slot * (num_unique_blocks * self.block_size + ring_slots)
        return cost

    def __call__(self, shape: BatchShape) -> float:
        """Cost of one step at ``shape``."""
        return self.at(shape.phase, *shape.levels[3:])


@dataclass(frozen=True)
class SkippingCost:
    """Work of a step whose attention skips padded blocks, in units of one query token.

    That is the CPU path: its attention reads the plan, so a bucket adds padded query tokens in the
    projections and padded rows of logits. Padded blocks cost only the copy of a longer plan, which is counted
    so that equal buckets rank by size.

    Args:
        logit: one row of logits, over one query token.
        step: reading the weights once, over one query token.
    """

    logit: float = 0.3
    step: float = 32.0

    def at(
        self, phase: Phase, query_len: Any, num_shared_blocks: Any, num_unique_blocks: Any, num_logits: Any
    ) -> Any:
        """Cost of a step, or of each of many when sizes are arrays that broadcast together."""
        plan_items = num_unique_blocks + num_shared_blocks * (num_logits + 2)
        parts = phase.causal + phase.shared + phase.unique
        work = self.step + query_len + self.logit * num_logits
        return work + 1e-2 * parts + 1e-6 * plan_items

    def __call__(self, shape: BatchShape) -> float:
        """Cost of one step at ``shape``."""
        return self.at(shape.phase, *shape.levels[3:])
