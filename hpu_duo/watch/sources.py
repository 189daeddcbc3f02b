"""Sources of counts of compilations: the graph cache, the compiler, the device."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from functools import cache
from types import CodeType
from typing import Protocol

from graphs import GraphCache
from graphs.backends import inductor
from hpu_duo.device import Metered
from hpu_duo.watch.counts import Tally


class Source(Protocol):
    """Counts since some moment in the past; a watch looks at differences."""

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
    """

    name = "the graph cache"

    def __init__(self, current: Callable[[], GraphCache]) -> None:
        self._current = current

    def read(self) -> Tally:
        """Buckets by name; captured after warm-up counts as recompiled."""
        graphs = self._current()
        late = {str(bucket): count for bucket, count in graphs.captured_late.items()}
        early = {str(bucket): 1 for bucket in graphs.captured if bucket not in graphs.captured_late}
        return Tally(early, late, misses=graphs.counters.misses)


class DynamoSource:
    """Functions that ``torch.compile`` compiled in this process since the first of these was made.

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
        # Equal code of two models is not the same code, hence by identity.
        self._seen: dict[int, weakref.ref[CodeType]] = {}

    def note(self, code: CodeType, new_code: CodeType) -> None:
        """The compiler has made ``new_code`` of ``code``."""
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
    """Counts that the device itself keeps.

    Args:
        runtime: of the device.
    """

    def __init__(self, runtime: Metered) -> None:
        self.name = runtime.counted_by
        self._runtime = runtime

    def read(self) -> Tally:
        """Graphs and fallbacks, each by the name that the device has for it."""
        metrics = self._runtime.metrics()
        return Tally(dict(metrics.compiled), fallbacks=dict(metrics.fallbacks))
