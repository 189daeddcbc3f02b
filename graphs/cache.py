"""Executables by bucket, the policy for misses, and counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from graphs.shape import BatchShape, Phase
from graphs.table import BucketTable, Miss, PlannedPadding

if TYPE_CHECKING:
    from graphs.backends.base import CaptureBackend, Inputs, Outputs, Region


@runtime_checkable
class KeepsRegions(Protocol):
    """A capture backend that stores the compiled regions of each bucket."""

    def forget(self, shape: BatchShape) -> None:
        """Free the regions of a bucket that is not in the table any more."""
        ...


class MissPolicy(Enum):
    """Policy for a step that no bucket holds.

    ``ERROR`` raises. ``CAPTURE`` adds the exact shape to the table, at the cost of a compilation in the
    request path and of a table that grows with the traffic. ``EAGER`` runs the exact shape uncaptured.
    """

    ERROR = "error"
    CAPTURE = "capture"
    EAGER = "eager"

    @classmethod
    def parse(cls, name: str) -> MissPolicy:
        """Return the policy of a name.

        Raises:
            ValueError: there is none.
        """
        try:
            return cls(name)
        except ValueError:
            known = ", ".join(policy.value for policy in cls)
            raise ValueError(f"expected on_miss to be one of {known}, got {name!r}") from None


class GraphMissError(LookupError):
    """No bucket holds a step, and the policy is ``ERROR``.

    Args:
        miss: the shape, and the buckets that come nearest.
    """

    def __init__(self, miss: Miss) -> None:
        super().__init__(str(miss))
        self.miss = miss


@dataclass(frozen=True)
class GraphCounters:
    """Counts of a cache up to the moment of the snapshot; warm-up counts as captures only.

    Args:
        hits, misses: shapes resolved to a bucket, and shapes that no bucket held.
        captures: captured executables, in warm-up and after it.
        late_captures: those of planned buckets that a sealed cache captured while serving: compilations that
            warm-up should have done.
        eager_runs: steps outside the table that ran uncaptured.
        bypasses: steps of a bucket that is too long to be captured.
        runs: steps per bucket, without eager runs.
        steps: steps per phase string of the shape that ran, eager runs included.
    """

    hits: int
    misses: int
    captures: int
    late_captures: int
    eager_runs: int
    bypasses: int
    runs: Mapping[BatchShape, int]
    steps: Mapping[str, int]


class GraphCache:
    """Runs steps through a captured executable per bucket.

    The caller pads a step to its bucket (``resolve``), and passes both to ``run``.

    Args:
        backend: captures what is not captured yet.
        table: the planned buckets.
        policy: for shapes outside the table.
        max_captured_tokens: buckets with more query tokens run uncaptured, though padded: a graph owns the
            working memory of its step, and a long prefill gains least from capture. None captures all.
        scope: of the keys of regions, where several caches of one backend have equal buckets.

    Raises:
        ValueError: ``max_captured_tokens`` below 1.
    """

    def __init__(
        self,
        backend: CaptureBackend,
        table: BucketTable,
        policy: MissPolicy = MissPolicy.ERROR,
        max_captured_tokens: int | None = None,
        scope: Hashable = None,
    ) -> None:
        if max_captured_tokens is not None and max_captured_tokens < 1:
            raise ValueError(f"expected max_captured_tokens >= 1 or None, got {max_captured_tokens}")
        self.backend = backend
        self.policy = policy
        self.max_captured_tokens = max_captured_tokens
        self._scope = scope
        self._planned = table
        self._table = table
        self._executables: dict[BatchShape, Callable[[Inputs], Any]] = {}
        self._is_sealed = False
        self._hits = self._misses = self._captures = self._late_captures = self._eager_runs = 0
        self._bypasses = 0
        # Uncaptured buckets that have run.
        self._run_before: set[BatchShape] = set()
        self._captured_late: Counter[BatchShape] = Counter()
        self._runs: Counter[BatchShape] = Counter()
        self._steps: Counter[Phase] = Counter()

    @property
    def table(self) -> BucketTable:
        """The planned buckets, and those that misses have added."""
        return self._table

    @property
    def counters(self) -> GraphCounters:
        """A snapshot of the counters."""
        return GraphCounters(
            self._hits,
            self._misses,
            self._captures,
            self._late_captures,
            self._eager_runs,
            self._bypasses,
            MappingProxyType(dict(self._runs)),
            MappingProxyType({str(phase): count for phase, count in self._steps.items()}),
        )

    @property
    def captured(self) -> tuple[BatchShape, ...]:
        """Captured buckets, in order of capture."""
        return tuple(self._executables)

    @property
    def captured_late(self) -> Mapping[BatchShape, int]:
        """Buckets captured after ``seal``, those added by misses included, and how often."""
        return MappingProxyType(dict(self._captured_late))

    def with_table(self, table: BucketTable, policy: MissPolicy) -> GraphCache:
        """Return an empty cache with the same backend and limit."""
        return GraphCache(self.backend, table, policy, self.max_captured_tokens, self._scope)

    def captures(self, bucket: BatchShape) -> bool:
        """Whether steps of a bucket are captured, because it is in the table and not too long."""
        limit = self.max_captured_tokens
        return bucket in self._table and (limit is None or bucket.query_len <= limit)

    def seal(self) -> None:
        """Declare warm-up over: capturing a planned bucket from now on counts as late."""
        self._is_sealed = True

    def resolve(self, shape: BatchShape) -> BatchShape:
        """Return the shape to pad a step to: the cheapest bucket that holds it, on a miss by the policy.

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
        """Return the function for a repeated region of ``bucket``: ``fn`` itself if nothing is captured."""
        return self.regions_of(bucket)(key, fn)

    def regions_of(self, bucket: BatchShape) -> Callable[[Hashable, Region], Region]:
        """Return a function that captures the regions of a bucket.

        It has no reference to the cache, which would be a cycle.
        """
        if not self.captures(bucket):
            return _uncaptured
        region = partial(self.backend.region, bucket)
        return region if self._scope is None else partial(_in_scope, region, self._scope)

    def run(self, bucket: BatchShape, fn: Callable[[Inputs], Outputs], inputs: Inputs) -> Outputs:
        """Run one step at a shape that ``resolve`` returned.

        Args:
            bucket: the shape that ``inputs`` are padded to.
            fn: the whole step. Captured at the bucket's first run and ignored later, so it must compute the
                same function of ``inputs`` each time.
            inputs: device tensors by name, at addresses that are fixed for the bucket.

        Raises:
            GraphMissError: ``bucket`` is not in the table, and the policy is not ``EAGER``.
        """
        if bucket in self._executables or bucket in self._table:
            outputs = self.run_uncounted(bucket, fn, inputs)
            self._runs[bucket] += 1
            self._bypasses += bucket not in self._executables
        elif self.policy is MissPolicy.EAGER:
            outputs = fn(inputs)
            self._eager_runs += 1
        else:
            raise GraphMissError(Miss(bucket, self._table.nearest(bucket)))
        self._steps[bucket.phase] += 1
        return outputs

    def run_uncounted(self, bucket: BatchShape, fn: Callable[[Inputs], Outputs], inputs: Inputs) -> Outputs:
        """Run a step of a bucket as ``run`` does, without counting it: for warm-up."""
        executable = self._executables.get(bucket)
        return self._run_first(bucket, fn, inputs) if executable is None else executable(inputs)

    def warm_up(
        self,
        bucket: BatchShape,
        fn_of: Callable[[BatchShape], Callable[[Inputs], Any]],
        make_inputs: Callable[[BatchShape], Inputs],
    ) -> bool:
        """Capture a bucket ahead of traffic by running it; one that is too long for capture runs too.

        Its operators may have to be compiled.

        Args:
            fn_of: returns the step at the bucket, as passed to ``run`` later.
            make_inputs: inputs that are safe to run: they touch the null block and null row only.

        Returns:
            False for a bucket that has been captured or run before, which does not run again.

        Raises:
            ValueError: a shape that is no bucket.
        """
        if bucket not in self._table:
            raise ValueError(f"expected a bucket of the table to warm up, got {bucket}")
        if bucket in self._executables or bucket in self._run_before:
            return False
        fn, inputs = fn_of(bucket), make_inputs(bucket)
        self._run_first(bucket, fn, inputs)
        for _ in range(1, self.backend.num_first_runs if self.captures(bucket) else 1):
            self.run_uncounted(bucket, fn, inputs)
        return True

    def exchange(
        self,
        added: BatchShape,
        dropped: BatchShape,
        fn_of: Callable[[BatchShape], Callable[[Inputs], Any]],
        make_inputs: Callable[[BatchShape], Inputs],
        padding: float | None = None,
    ) -> None:
        """Capture another bucket, then drop one; no late capture, and if it fails, nothing has changed.

        Args:
            added: the new bucket.
            dropped: a bucket of the table, whose executable and regions are freed.
            padding: planned padding of the table afterwards; None if unknown.
            fn_of, make_inputs: see ``warm_up``.

        Raises:
            ValueError: the new bucket is in the table, or the old one is not.
        """
        before, is_sealed = self._table, self._is_sealed
        if added in before or dropped not in before:
            raise ValueError(f"expected a new bucket for one of the table, got {added} for {dropped}")
        self._table, self._is_sealed = before.with_buckets([added]), False
        try:
            self.warm_up(added, fn_of, make_inputs)
        except BaseException:
            self._table = before
            self._free(added)
            raise
        finally:
            self._is_sealed = is_sealed
        kept = (bucket for bucket in (*before, added) if bucket != dropped)
        planned = None if padding is None else PlannedPadding.by(before.cost, padding)
        self._table = self._planned = replace(before, buckets=tuple(kept), planned_padding=planned)
        self._free(dropped)

    def _free(self, bucket: BatchShape) -> None:
        """Free the executable and the regions of a bucket that is not in the table."""
        self._executables.pop(bucket, None)
        self._run_before.discard(bucket)
        if isinstance(self.backend, KeepsRegions):
            self.backend.forget(bucket)

    def _run_first(self, bucket: BatchShape, fn: Callable[[Inputs], Outputs], inputs: Inputs) -> Outputs:
        """Run a bucket without an executable, and store one unless it is too long."""
        if not self.captures(bucket):
            outputs = fn(inputs)
            self._run_before.add(bucket)
            return outputs
        executable = self.backend.capture(fn, bucket)
        # Backends may record at the first call: only an executable that has run is stored.
        outputs = executable(inputs)
        self._executables[bucket] = executable
        self._captures += 1
        if self._is_sealed:
            self._captured_late[bucket] += 1
            self._late_captures += bucket in self._planned
        return outputs


def _in_scope(
    region: Callable[[Hashable, Region], Region], scope: Hashable, key: Hashable, fn: Region
) -> Region:
    """Return a captured region whose key names the scope too."""
    return region((scope, key), fn)


def _uncaptured(key: Hashable, fn: Region) -> Region:
    """Return a region as it is."""
    return fn


class RecompileError(RuntimeError):
    """Something was compiled where compilation is forbidden.

    Args:
        findings: what was compiled, one short text each.
    Attributes:
        findings: the same, as a tuple.
    """

    def __init__(self, findings: Iterable[str]) -> None:
        self.findings = tuple(findings)
        super().__init__(f"expected nothing new to compile after warm-up, got {'; '.join(self.findings)}")
