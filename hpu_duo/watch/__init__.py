"""Compile watch: graphs, recompilations, CPU fallbacks and misses, counted wherever they can be seen."""

from graphs import RecompileError
from hpu_duo.watch.compile_watch import CompileWatch
from hpu_duo.watch.counts import Counts, Tally
from hpu_duo.watch.sources import CacheSource, DeviceSource, DynamoSource, Source

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
