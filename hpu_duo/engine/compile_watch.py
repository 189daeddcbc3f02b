"""Compilations of an engine, counted by several sources: graph cache, compiler, device."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import CodeType
from typing import Protocol

from graphs import GraphCache, RecompileError
from graphs.backends import inductor
from hpu_duo.device import DeviceRuntime, Metered


@dataclass(frozen=True)
class Tally:
    """Counts of one source, by name.

    Attributes:
        graphs: first compilations and captures.
        recompiles: later compilations of the same code, and captures after warm-up had ended.
        fallbacks: operators that ran on the host's CPU because the device has no kernel.
        misses: shapes that fit no bucket.
    """

    graphs: Mapping[str, int] = field(default_factory=dict)
    recompiles: Mapping[str, int] = field(default_factory=dict)
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    misses: int = 0

    def __sub__(self, earlier: Tally) -> Tally:
        """Return the counts since ``earlier``, a tally of the same source."""
        return Tally(
            _less(self.graphs, earlier.graphs),
            _less(self.recompiles, earlier.recompiles),
            _less(self.fallbacks, earlier.fallbacks),
            self.misses - earlier.misses,
        )


def _less(later: Mapping[str, int], earlier: Mapping[str, int]) -> dict[str, int]:
    counts = {name: count - earlier.get(name, 0) for name, count in later.items()}
    return {name: count for name, count in counts.items() if count}


@dataclass(frozen=True)
class Counts:
    """Counts of all sources.

    Sources count the same events at different levels: one captured bucket may be one graph of the cache,
    twelve of the compiler and forty of the device. So a total is not a sum, but the largest count of any
    source.

    Attributes:
        tallies: by the name of the source.
    """

    tallies: Mapping[str, Tally]

    def __sub__(self, earlier: Counts) -> Counts:
        """Return the counts since ``earlier``."""
        before = earlier.tallies
        return Counts({name: tally - before.get(name, Tally()) for name, tally in self.tallies.items()})

    @property
    def num_graphs(self) -> int:
        """Graphs compiled or captured for the first time."""
        return self._most(lambda tally: sum(tally.graphs.values()))

    @property
    def num_recompiles(self) -> int:
        """Graphs compiled again, or captured after warm-up."""
        return self._most(lambda tally: sum(tally.recompiles.values()))

    @property
    def num_fallbacks(self) -> int:
        """Operators run on the host's CPU."""
        return self._most(lambda tally: sum(tally.fallbacks.values()))

    @property
    def findings(self) -> tuple[str, ...]:
        """Compilations and fallbacks, one line each. A miss alone compiles nothing."""
        return tuple(self._findings())

    def _findings(self) -> Iterator[str]:
        for source, tally in self.tallies.items():
            for verb, counts in (
                ("compiled", tally.graphs),
                ("recompiled", tally.recompiles),
                ("ran on the host's CPU:", tally.fallbacks),
            ):
                for name, count in counts.items():
                    yield f"{source} {verb} {name}" + (f" {count} times" if count > 1 else "")

    def _most(self, of: Callable[[Tally], int]) -> int:
        return max(map(of, self.tallies.values()), default=0)


class Source(Protocol):
    """A cumulative count; a watch reads differences of it."""

    @property
    def name(self) -> str:
        """Name of the source in findings."""
        ...

    def read(self) -> Tally:
        """The counts now."""
        ...


class CacheSource:
    """Buckets that were captured, those that came after warm-up, and misses.

    Args:
        current: the cache in use; a new table may replace it.
        name: of the source.
    """

    def __init__(self, current: Callable[[], GraphCache], name: str = "the graph cache") -> None:
        self._current, self.name = current, name

    def read(self) -> Tally:
        """Buckets by name; captured after warm-up counts as recompiled."""
        graphs = self._current()
        late = {str(bucket): count for bucket, count in graphs.captured_late.items()}
        early = {str(bucket): 1 for bucket in graphs.captured if bucket not in graphs.captured_late}
        return Tally(early, late, misses=graphs.counters.misses)


class DynamoSource:
    """Functions that ``torch.compile`` compiled in this process since the first instance was created.

    Regions are named after their bucket, so a recompilation names its bucket.
    """

    name = "torch.compile"

    def __init__(self) -> None:
        self._log = _dynamo_log()

    def read(self) -> Tally:
        """Functions by name; a second variant of the same code counts as recompiled."""
        return Tally(dict(self._log.compiled), dict(self._log.recompiled))


class _DynamoLog:
    def __init__(self) -> None:
        self.compiled: Counter[str] = Counter()
        self.recompiled: Counter[str] = Counter()
        # Compared by identity: equal code of two models counts as two functions.
        self._seen: dict[int, weakref.ref[CodeType]] = {}

    def note(self, code: CodeType, new_code: CodeType) -> None:
        """Callback of the compiler: ``code`` was compiled to ``new_code``."""
        seen = self._seen.get(id(code))
        is_again = seen is not None and seen() is code
        self._seen[id(code)] = weakref.ref(code)
        (self.recompiled if is_again else self.compiled)[code.co_name] += 1


@cache
def _dynamo_log() -> _DynamoLog:
    log = _DynamoLog()
    inductor.on_bytecode(log.note)
    return log


class DeviceSource:
    """Counters of the device's runtime.

    Args:
        runtime: of the device.
    """

    def __init__(self, runtime: Metered) -> None:
        self.name = runtime.counted_by
        self._runtime = runtime

    def read(self) -> Tally:
        """Graphs and fallbacks by the device's names."""
        metrics = self._runtime.metrics()
        return Tally(dict(metrics.compiled), fallbacks=dict(metrics.fallbacks))


class CompileWatch:
    """Sources of counts, read together.

        before = watch.snapshot()
        ...
        print((watch.snapshot() - before).findings)

    Args:
        sources: with different names.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)

    @classmethod
    def of(cls, graphs: Callable[[], GraphCache], runtime: DeviceRuntime) -> CompileWatch:
        """Return a watch with all sources available for an engine on a device.

        Args:
            graphs: returns the engine's current cache.
        """
        sources: list[Source] = [CacheSource(graphs)]
        if graphs().backend.name != "eager" or inductor.is_loaded():
            sources.append(DynamoSource())
        if isinstance(runtime, Metered):
            sources.append(DeviceSource(runtime))
        return cls(sources)

    def snapshot(self) -> Counts:
        """Read the counts of all sources."""
        return Counts({source.name: source.read() for source in self.sources})

    def forbid_since(self, before: Counts) -> None:
        """Raise RecompileError if there was a compilation, or a fallback, since a snapshot."""
        findings = (self.snapshot() - before).findings
        if findings:
            raise RecompileError(findings)


__all__ = [
    "CacheSource",
    "CompileWatch",
    "Counts",
    "DeviceSource",
    "DynamoSource",
    "RecompileError",
    "Source",
    "Tally",
]
