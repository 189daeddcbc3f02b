"""Compilations of an engine, counted by several sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from graphs import GraphCache, RecompileError
from graphs.backends import inductor
from hpu_duo.device import DeviceRuntime, Metered
from hpu_duo.watch.counts import Counts
from hpu_duo.watch.sources import CacheSource, DeviceSource, DynamoSource, Source


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
        """Return a watch with every source that there is for an engine on a device.

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

    @contextmanager
    def forbidding(self) -> Iterator[None]:
        """Forbid compilations, and fallbacks to the host's CPU, inside the context.

        Raises:
            RecompileError: at the end of the context, if there were any; the error names them.
        """
        before = self.snapshot()
        yield
        findings = (self.snapshot() - before).findings
        if findings:
            raise RecompileError(findings)
