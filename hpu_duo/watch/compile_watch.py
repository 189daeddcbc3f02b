"""One object that tells what was compiled, whoever compiled it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from graphs import GraphCache, RecompileError
from hpu_duo.device import DeviceRuntime, Metered
from hpu_duo.watch.counts import Counts
from hpu_duo.watch.sources import CacheSource, DeviceSource, DynamoSource, Source


class CompileWatch:
    """Reads all sources at once.

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
        """Every source that there is for an engine on a device.

        Args:
            graphs: the engine's cache, asked for each time.
        """
        sources: list[Source] = [CacheSource(graphs)]
        if graphs().backend.name != "eager" or "torch._dynamo" in sys.modules:
            sources.append(DynamoSource())
        if isinstance(runtime, Metered):
            sources.append(DeviceSource(runtime))
        return cls(sources)

    def snapshot(self) -> Counts:
        """What has been seen so far."""
        return Counts({source.name: source.read() for source in self.sources})

    @contextmanager
    def forbidding(self) -> Iterator[None]:
        """Nothing may be compiled, or fall back to the host's CPU, inside.

        Raises:
            RecompileError: when the context ends, if something was; the error names it.
        """
        before = self.snapshot()
        yield
        findings = (self.snapshot() - before).findings
        if findings:
            raise RecompileError(findings)
