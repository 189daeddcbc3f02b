"""Capture of buckets one by one, and further processes that compile some of them side by side.

Buckets do not depend on each other, so each of these processes takes the next one that none has taken, and
leaves its code in the compiler's cache on disk. The first process captures too, writes the manifest, and
starts the others; a process that loses it ends.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Lock, Thread

import torch

from graphs import BatchShape, BucketTable
from graphs.backends.inductor import traced_seconds
from graphs.compile_cache import CompileCache
from graphs.manifest import Configuration, GraphRecord, Manifest
from hpu_duo.config.engine import EngineConfig
from hpu_duo.device import process_environments
from hpu_duo.device.plain import decode, encode
from hpu_duo.device.runtime import host_memory
from hpu_duo.engine.engine import Engine
from hpu_duo.garbage import collector_paused
from hpu_duo.modeling.loading import load_tokenizer
from hpu_duo.startup.assembly import assemble
from hpu_duo.startup.warm_up_estimate import configuration_of

_COMPILER_BYTES = 1 << 30
"""Host memory of a compiler and of the processes that it starts; g++ takes some hundred MiB for a layer."""
_END_S = 5.0


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


@dataclass(frozen=True)
class JobTask:
    """Arguments with which another process captures buckets as the first one would.

    Attributes:
        engine: configuration of its engine, with everything that follows from free memory filled in.
        graphs: configuration that shapes graphs, which its engine must have too.
        num_threads: threads of torch, for which code is compiled.
        compile_only: see ``WarmUp``.
    """

    engine: EngineConfig
    graphs: Configuration
    num_threads: int
    compile_only: bool

    @classmethod
    def of(
        cls,
        engine: Engine,
        config: EngineConfig,
        table: BucketTable,
        graphs: Configuration,
        *,
        compile_only: bool,
    ) -> JobTask:
        """Return the task for an engine that was made from a configuration."""
        limits = engine.scheduler.limits
        own = replace(
            config,
            graph=replace(config.graph, table=table, own_cost=False),
            cache=replace(config.cache, num_blocks=limits.num_blocks or None, kv_cache_bytes=None),
            scheduler=replace(config.scheduler, max_model_len=limits.max_model_len),
        )
        return cls(own, graphs, torch.get_num_threads(), compile_only)


def check_jobs(num_jobs: int, engine: Engine, config: EngineConfig, cache: CompileCache | None) -> None:
    """Raise ValueError if a warm-up cannot be shared by a number of processes.

    Args:
        num_jobs: processes, this one included.
        engine, config: the loaded engine, and what it was made from.
        cache: the compiler's cache on disk.

    Raises:
        ValueError: the number is not positive, graphs end with the process that captured them, ranks share
            the model, the backend has no name that another process knows, there are fewer cards, or host
            memory does not suffice.
    """
    if num_jobs < 1:
        raise ValueError(f"expected at least 1 job, got {num_jobs}")
    if num_jobs == 1:
        return
    runner = engine.runner
    backend, kind = runner.graphs.backend.name, runner.device.type
    if cache is None:
        raise ValueError(
            f"expected a compiler with a cache on disk for {num_jobs} jobs, got {backend}: its graphs end "
            "with the process that captured them, so other processes cannot help"
        )
    num_ranks = config.parallel.tensor_parallel_size
    if num_ranks > 1:
        raise ValueError(
            f"expected one rank for {num_jobs} jobs, got tensor_parallel_size={num_ranks}: all ranks take "
            "part in each capture"
        )
    if not isinstance(config.graph.backend, str):
        raise ValueError(f"expected the name of a capture backend for {num_jobs} jobs, got an object")
    if kind == "hpu":
        process_environments(kind, num_jobs)
    elif kind != "cpu":
        raise ValueError(f"expected a CPU, or a card for each of {num_jobs} jobs, got {kind}")
    _check_memory(num_jobs)


def peak_bytes() -> int:
    """Most host memory that this process has had, in which it loaded the model."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _check_memory(num_jobs: int) -> None:
    each, free = peak_bytes() + _COMPILER_BYTES, host_memory().free
    fitting = 1 + free // each
    if num_jobs > fitting:
        gib = 1 << 30
        raise ValueError(
            f"expected at most {fitting} jobs within the free host memory, got {num_jobs}: each further one "
            f"takes about {each / gib:.1f} GiB, as much as this process took at most and "
            f"{_COMPILER_BYTES / gib:g} GiB for its compiler, and {free / gib:.1f} GiB are free"
        )


class BucketQueue:
    """Buckets in order, each taken once, by any thread.

    Args:
        buckets: in order.
    """

    def __init__(self, buckets: Sequence[BatchShape]) -> None:
        self._left = iter(tuple(buckets))
        self._lock = Lock()
        self._is_stopped = False

    def __iter__(self) -> Iterator[BatchShape]:
        while True:
            with self._lock:
                bucket = None if self._is_stopped else next(self._left, None)
            if bucket is None:
                return
            yield bucket

    def stop(self) -> None:
        """Let nothing be taken any more."""
        with self._lock:
            self._is_stopped = True


class Jobs:
    """The further processes, and a thread for each of them here.

    Args:
        num_more: number of them; with 0 there is nothing to do.
        task: what each needs.
        queue: the buckets, which the caller takes from as well.
        note: called with each record, by a thread of this class.
    """

    def __init__(
        self, num_more: int, task: JobTask | None, queue: BucketQueue, note: Callable[[GraphRecord], None]
    ) -> None:
        self._queue, self._note = queue, note
        self._error: BaseException | None = None
        self._threads: list[Thread] = []
        self._processes = []
        for number in range(2, num_more + 2):
            context = get_context("spawn")
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, task), name=f"job {number}", daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._threads.append(Thread(target=self._feed, args=(process.name, ours), daemon=True))
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.stop()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(_END_S)

    def wait(self) -> None:
        """Wait until all have done what they had taken.

        Raises:
            BaseException: of ``note``, if it raised one.
            ValueError: a process has failed, with its error, or ended.
        """
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _feed(self, name: str, connection: Connection) -> None:
        """Let a process capture one bucket after the other."""
        try:
            with connection:
                _raise_if_failed(name, decode(connection.recv_bytes()))
                for bucket in self._queue:
                    connection.send_bytes(encode(bucket))
                    answer = decode(connection.recv_bytes())
                    _raise_if_failed(f"{name}, {bucket}", answer)
                    self._note(answer)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._fail(ValueError(f"{name} of the warm-up has ended: see its output above"))
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._queue.stop()


def _raise_if_failed(what: str, answer: object) -> None:
    if isinstance(answer, str):
        raise ValueError(f"{what} of the warm-up: {answer}")


def _work(connection: Connection, task: JobTask) -> None:
    """Main function of a further process: capture each bucket received, until the other end closes."""
    # Of Ctrl-C the first process hears too, and ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(task.num_threads)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            config = task.engine
            engine = assemble(config, frozenset(), load_tokenizer(config.model.path), config.run.seed)
            differing = Manifest(task.graphs, {}, ()).differing(configuration_of(engine))
            if differing:
                raise ValueError(f"its engine is {differing}")
            graphs = engine.runner.graphs
            cache = CompileCache.of(graphs.backend)
            capturing = Capturing(engine, cache, compile_only=task.compile_only)
            capturing.fill_tables(reversed(graphs.table.by_cost))
            connection.send_bytes(encode(None))
            while True:
                connection.send_bytes(encode(capturing.capture(decode(connection.recv_bytes()))))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:
            connection.send_bytes(encode(f"{type(error).__name__}: {error}"))
    connection.close()
    # Compilers leave threads that would be waited for.
    sys.stdout.flush()
    os._exit(0)
