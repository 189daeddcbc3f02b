"""Executables by bucket, what to do when no bucket fits, and counts of both."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

from graphs.backends.base import CaptureBackend, Inputs, Outputs, Region
from graphs.shape import BatchShape
from graphs.table import BucketTable, Miss


class MissPolicy(Enum):
    """What happens to a step that no bucket holds.

    ``ERROR`` raises. ``CAPTURE`` makes the exact shape a bucket, at the price of a compilation in the
    request path and of a table that grows with the traffic. ``EAGER`` runs the exact shape uncaptured.
    """

    ERROR = "error"
    CAPTURE = "capture"
    EAGER = "eager"


class GraphMissError(LookupError):
    """A step has no bucket and the policy allows no other way to run it.

    Args:
        miss: the shape, and the buckets that come nearest.
    """

    def __init__(self, miss: Miss) -> None:
        super().__init__(str(miss))
        self.miss = miss


@dataclass(frozen=True)
class GraphCounters:
    """What a cache has done up to the moment of the snapshot; warm-up counts as captures only.

    Args:
        hits, misses: shapes resolved to a bucket, and shapes that no bucket held.
        captures: executables made, in warm-up and after it.
        late_captures: those of planned buckets that a sealed cache made while serving: each is a
            compilation that warm-up should have done.
        eager_runs: steps that ran uncaptured.
        runs: steps per bucket, eager runs left out.
        steps: steps per phase string of the shape that ran, eager runs included.
    """

    hits: int
    misses: int
    captures: int
    late_captures: int
    eager_runs: int
    runs: Mapping[BatchShape, int]
    steps: Mapping[str, int]


class GraphCache:
    """Runs steps through a captured executable per bucket.

    A step asks ``resolve`` for its bucket, pads its inputs to it, and gives both to ``run``.

    Args:
        backend: captures what is not captured yet.
        table: the planned buckets.
        policy: what to do with shapes outside the table.
    """

    def __init__(
        self, backend: CaptureBackend, table: BucketTable, policy: MissPolicy = MissPolicy.ERROR
    ) -> None:
        self.backend = backend
        self.policy = policy
        self._planned = table
        self._table = table
        self._executables: dict[BatchShape, Callable[[Inputs], Any]] = {}
        self._is_sealed = False
        self._hits = self._misses = self._captures = self._late_captures = self._eager_runs = 0
        self._runs: Counter[BatchShape] = Counter()
        self._steps: Counter[str] = Counter()

    @property
    def table(self) -> BucketTable:
        """The planned buckets, and those that misses have added."""
        return self._table

    @property
    def is_warm(self) -> bool:
        """Whether every planned bucket has been captured."""
        return all(bucket in self._executables for bucket in self._planned)

    @property
    def counters(self) -> GraphCounters:
        """A snapshot, which later steps leave as it is."""
        return GraphCounters(
            self._hits,
            self._misses,
            self._captures,
            self._late_captures,
            self._eager_runs,
            MappingProxyType(dict(self._runs)),
            MappingProxyType(dict(self._steps)),
        )

    def seal(self) -> None:
        """Declare warm-up over: capturing a planned bucket from now on counts as late."""
        self._is_sealed = True

    def resolve(self, shape: BatchShape) -> BatchShape:
        """The shape to pad a step to: the cheapest bucket that holds it, or on a miss what the policy says.

        Raises:
            GraphMissError: no bucket holds ``shape`` and the policy is ``ERROR``.
        """
        found = self._table.fit(shape)
        if not isinstance(found, Miss):
            self._hits += 1
            return found
        self._misses += 1
        match self.policy:
            case MissPolicy.ERROR:
                raise GraphMissError(found)
            case MissPolicy.CAPTURE:
                self._table = self._table.with_buckets([shape])
            case MissPolicy.EAGER:
                pass
        return shape

    def region(self, bucket: BatchShape, key: Hashable, fn: Region) -> Region:
        """What to call for a repeated region of the step at ``bucket``: ``fn`` itself in an eager run."""
        return self.backend.region(bucket, key, fn) if bucket in self._table else fn

    def run(self, bucket: BatchShape, fn: Callable[[Inputs], Outputs], inputs: Inputs) -> Outputs:
        """Run one step at a shape that ``resolve`` returned.

        Args:
            bucket: the shape that ``inputs`` are padded to.
            fn: the whole step. Captured at the bucket's first run and not looked at again, so it must
                compute the same function of ``inputs`` each time.
            inputs: device tensors by name, at addresses that are fixed for the bucket.

        Raises:
            GraphMissError: ``bucket`` is not in the table, and the policy is not ``EAGER``.
        """
        if bucket in self._table:
            outputs = self._run_captured(bucket, fn, inputs)
            self._runs[bucket] += 1
        elif self.policy is MissPolicy.EAGER:
            outputs = fn(inputs)
            self._eager_runs += 1
        else:
            raise GraphMissError(Miss(bucket, self._table.nearest(bucket)))
        self._steps[str(bucket.phase)] += 1
        return outputs

    def warm_up(
        self,
        fn_of: Callable[[BatchShape], Callable[[Inputs], Any]],
        make_inputs: Callable[[BatchShape], Inputs],
        shapes: Iterable[BatchShape] | None = None,
        progress: Callable[[int, int, BatchShape], None] | None = None,
    ) -> int:
        """Capture buckets ahead of traffic by running each once; those already captured are left alone.

        By default the most expensive bucket comes first, so that what does not fit in memory fails at
        once and the rest reuses its allocations.

        Args:
            fn_of: the step at a bucket, as given to ``run`` later.
            make_inputs: inputs that are safe to run: they touch the trash block and trash row only.
            shapes: buckets to capture, in this order; default all of the table.
            progress: called after each bucket with (done, total, bucket).

        Returns:
            The number of buckets captured.

        Raises:
            ValueError: a shape that is no bucket.
        """
        buckets = tuple(reversed(self._table.by_cost)) if shapes is None else tuple(shapes)
        unknown = [str(bucket) for bucket in buckets if bucket not in self._table]
        if unknown:
            raise ValueError(f"expected buckets of the table to warm up, got {', '.join(unknown)}")
        before = self._captures
        for done, bucket in enumerate(buckets, start=1):
            if bucket not in self._executables:
                self._run_captured(bucket, fn_of(bucket), make_inputs(bucket))
            if progress is not None:
                progress(done, len(buckets), bucket)
        return self._captures - before

    def _run_captured(self, bucket: BatchShape, fn: Callable[[Inputs], Outputs], inputs: Inputs) -> Outputs:
        executable = self._executables.get(bucket)
        if executable is not None:
            return executable(inputs)
        executable = self.backend.capture(fn, bucket)
        # Backends may record at the first call: only an executable that has run once is worth keeping.
        outputs = executable(inputs)
        self._executables[bucket] = executable
        self._captures += 1
        self._late_captures += self._is_sealed and bucket in self._planned
        return outputs
