"""Device memory that captured steps keep, estimated before the first one is captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from graphs import BatchShape
from graphs.buffers import pack
from hpu_duo.engine.batch import StepGeometry
from hpu_duo.engine.message import message_fields
from hpu_duo.kv.plan import MemoryPlan
from hpu_duo.startup.sizes import StepSizes


class WorkingMemory(Enum):
    """Memory of the intermediates of a graph's step.

    ``NONE``: they are allocated in each step. ``SHARED``: in a pool as large as the largest graph needs.
    ``OWN``: each graph keeps its own.
    """

    NONE = "none"
    SHARED = "shared"
    OWN = "own"


@dataclass(frozen=True)
class Kept:
    """Memory that one kind of graph keeps beside its results.

    Attributes:
        code_bytes: bytes of the code of one unit.
        is_per_kind: whether each kind of layer is a unit, captured on its own; else the whole step is one.
        working: memory of intermediates.
    """

    code_bytes: int
    is_per_kind: bool
    working: WorkingMemory


KEPT = {
    "eager": Kept(0, False, WorkingMemory.NONE),
    # Measured with small Llamas on a CPU, which holds generated code in host memory.
    # A list of calls and the programs in it; less than 1 MiB for small Llamas.
    "replay": Kept(1 << 20, False, WorkingMemory.NONE),
    "compile": Kept(12 << 20, True, WorkingMemory.NONE),
    # A graph holds some 64 KiB of kernel arguments per launch with older drivers, far less with newer ones.
    "cuda": Kept(4 << 20, False, WorkingMemory.SHARED),
    "hpu-sim": Kept(0, False, WorkingMemory.NONE),
    "hpu-compile": Kept(0, False, WorkingMemory.OWN),
    "hpu-graph": Kept(0, False, WorkingMemory.OWN),
}
"""Memory by the name of the capture backend."""

UNKNOWN = Kept(0, False, WorkingMemory.OWN)
"""Memory of an unknown backend: the worst of the known ones."""


@dataclass(frozen=True)
class GraphMemory:
    """The graphs of one model in one backend.

    Attributes:
        kept: memory of graphs of the backend.
        num_units: units that are captured on their own: kinds of layers, or one whole step.
        sizes: sizes of a step.
        max_captured_tokens: longer buckets are run and not captured, so they keep nothing; None = no limit.
    """

    kept: Kept
    num_units: int
    sizes: StepSizes
    max_captured_tokens: int | None = None

    def captures(self, shape: BatchShape) -> bool:
        """Whether steps of a bucket are captured."""
        return self.max_captured_tokens is None or shape.query_len <= self.max_captured_tokens

    def kept_bytes(self, shape: BatchShape) -> int:
        """Bytes that the graph of one bucket keeps: code, results, and working memory of its own."""
        if not self.captures(shape):
            return 0
        kept = self.kept.code_bytes * self.num_units + self.sizes.output_bytes(shape)
        is_own = self.kept.working is WorkingMemory.OWN
        return kept + (self.sizes.transient_bytes(shape) if is_own else 0)

    def total_bytes(self, buckets: Iterable[BatchShape]) -> int:
        """Bytes that the graphs of all buckets keep, with the pool if they share one."""
        captured = [bucket for bucket in buckets if self.captures(bucket)]
        is_shared = self.kept.working is WorkingMemory.SHARED
        pool = max(map(self.sizes.transient_bytes, captured), default=0) if is_shared else 0
        return sum(map(self.kept_bytes, captured)) + pool


def staged_bytes(geometry: StepGeometry, largest: BatchShape) -> int:
    """Bytes of the device buffer that inputs of steps are copied to, see ``graphs.DeviceInputs``."""
    return pack(message_fields(geometry, largest)).num_bytes


def plan_with_graphs(
    plan_of: Callable[[int], MemoryPlan], needed_of: Callable[[MemoryPlan], int]
) -> MemoryPlan:
    """Find the memory plan that leaves enough memory for its own graphs.

    The memory of graphs depends on the number of blocks, which bounds the buckets, and the number of blocks
    on the memory that graphs leave. The reserve only grows from one plan to the next, so that this ends.

    Args:
        plan_of: returns the plan that leaves some bytes for graphs.
        needed_of: returns the bytes that the graphs of a plan need; bounded.
    """
    plan = plan_of(0)
    while (needed := needed_of(plan)) > plan.graph_bytes:
        plan = plan_of(needed)
    return plan
