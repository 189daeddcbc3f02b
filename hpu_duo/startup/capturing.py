"""Capture the buckets of an engine one by one, and measure each."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import nullcontext

from graphs import BatchShape
from graphs.backends.inductor import traced_seconds
from graphs.compile_cache import CompileCache
from graphs.manifest import GraphRecord
from hpu_duo.engine.engine import Engine
from hpu_duo.garbage import collector_paused


class Capturing:
    """The captures of one engine.

    Args:
        engine: of the buckets.
        cache: the compiler's cache on disk, which gets their code; None of backends without one.
        compile_only: build graphs without launching them.
    """

    def __init__(self, engine: Engine, cache: CompileCache | None, *, compile_only: bool) -> None:
        self._runner = engine.runner
        self._cache = None if cache is None else cache.identifier
        self._compile_only = compile_only

    def fill_tables(self, buckets: Iterable[BatchShape]) -> None:
        """Launch an uncaptured step of padding for each phase, the last bucket of it."""
        for bucket in {bucket.phase: bucket for bucket in buckets}.values():
            self._runner.warmup.touch(bucket)
        self._runner.runtime.synchronize()

    def capture(self, bucket: BatchShape) -> GraphRecord | None:
        """Capture a bucket, and return what that cost; None for one that has been captured before."""
        runtime = self._runner.runtime
        held, began, traced = runtime.used_bytes(), time.perf_counter(), traced_seconds()
        # For one graph at a time, so that memory left by a compiler is measured between them.
        with runtime.compile_only() if self._compile_only else nullcontext(), collector_paused():
            is_new = self._runner.warmup.capture(bucket)
            runtime.synchronize()
        if not is_new:
            return None
        seconds, grown = time.perf_counter() - began, runtime.used_bytes() - held
        return GraphRecord(bucket, seconds, grown, self._cache, traced_seconds() - traced)
