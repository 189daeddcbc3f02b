"""The DuoAttention curves: decode against context, prefill against chunk size, both in this engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from benchmarks.gpu_suite.clock import Clock, Timing
from benchmarks.gpu_suite.engines import (
    Setup,
    add_prompt,
    engine_of,
    free_unused,
    make_model,
    place_context,
)
from benchmarks.gpu_suite.memory import SYSTEMS
from benchmarks.gpu_suite.results import Key, Point, Results
from benchmarks.gpu_suite.shapes import ModelShape, Sizes
from hpu_duo.engine.engine import Engine

_WARM_STEPS = 3


@dataclass
class Budget:
    """Seconds of this run; a point that is begun is finished."""

    seconds: float
    began: float

    @classmethod
    def start(cls, seconds: float) -> Budget:
        """Count from now."""
        return cls(seconds, time.monotonic())

    @property
    def is_spent(self) -> bool:
        """Whether no further point should be begun."""
        return time.monotonic() - self.began >= self.seconds


def prefill_tokens(model: ModelShape, sizes: Sizes) -> int:
    """Prompt tokens of the prefill curve."""
    return model.published.prefill_context if sizes.prefill_context is None else sizes.prefill_context


def measure_decode(clock: Clock, sizes: Sizes, setup: Setup, results: Results, budget: Budget) -> bool:
    """Time decode steps at every context; False when the budget ended it early."""
    points = [
        (shape, partial(_decode_point, shape, system, context, sizes, setup, clock), key)
        for shape in sizes.models
        for context in sizes.decode_contexts
        for system in SYSTEMS
        if not results.is_measured(key := Key("decode", f"{shape.name} at {context}", system))
    ]
    return _measure(points, max(sizes.decode_contexts) + sizes.decode_steps + 8, setup, results, budget)


def measure_prefill(clock: Clock, sizes: Sizes, setup: Setup, results: Results, budget: Budget) -> bool:
    """Time whole prefills at every chunk size; False when the budget ended it early."""
    points = [
        (shape, partial(_prefill_point, shape, system, chunk, sizes, setup, clock), key)
        for shape in sizes.models
        for chunk in reversed(sizes.prefill_chunks)
        for system in SYSTEMS
        if not results.is_measured(key := Key("prefill", f"{shape.name} in chunks of {chunk}", system))
    ]
    longest = max(prefill_tokens(shape, sizes) for shape in sizes.models)
    return _measure(points, longest + 8, setup, results, budget)


_Work = Callable[[PreTrainedModel], dict[str, float]]


def _measure(
    points: Sequence[tuple[ModelShape, _Work, Key]],
    max_positions: int,
    setup: Setup,
    results: Results,
    budget: Budget,
) -> bool:
    model: PreTrainedModel | None = None
    of: ModelShape | None = None
    # What has failed before comes last, so that it does not use up the time of what was never begun.
    for shape, work, key in sorted(points, key=lambda point: results.get(point[2]) is not None):
        if budget.is_spent:
            return False
        if shape != of:
            model = None
            free_unused(setup.device)  # the old weights go before the new ones come
            model, of = make_model(shape, max_positions, setup), shape
        assert model is not None
        try:
            results.add(Point(key, work(model)))
        except torch.OutOfMemoryError:
            results.add(Point(key, note="out of memory"))
        except ValueError as refusal:
            # An engine refuses caches that do not fit before it allocates them.
            results.add(Point(key, note=str(refusal)))
        free_unused(setup.device)
    return True


def _decode_point(
    shape: ModelShape,
    system: str,
    context: int,
    sizes: Sizes,
    setup: Setup,
    clock: Clock,
    model: PreTrainedModel,
) -> dict[str, float]:
    num_tokens = context + _WARM_STEPS + sizes.decode_steps + 1
    with engine_of(
        model, shape, system, setup, num_tokens=num_tokens, chunk=max(1024, context // 16), is_captured=True
    ) as engine:
        request = place_context(engine, context, num_tokens - context)
        for _ in range(_WARM_STEPS):
            engine.step()
        _reset_peak(setup.device)
        before = engine.stats().host_s
        timing = Timing.of([clock.wall(engine.step) for _ in range(sizes.decode_steps)])
        host_s = (engine.stats().host_s - before) / sizes.decode_steps
        engine.abort(request)
        return {
            **timing.values(),
            "context": context,
            "host_s": host_s,
            **_memory(model, engine, setup.device),
        }


def _prefill_point(
    shape: ModelShape,
    system: str,
    chunk: int,
    sizes: Sizes,
    setup: Setup,
    clock: Clock,
    model: PreTrainedModel,
) -> dict[str, float]:
    length = prefill_tokens(shape, sizes)
    with engine_of(model, shape, system, setup, num_tokens=length, chunk=chunk) as engine:
        # The first and a later chunk run every kernel once, which compiles it.
        add_prompt(engine, min(length, 2 * chunk), 1)
        _drain(engine)
        _reset_peak(setup.device)
        add_prompt(engine, length, 1)
        timing = Timing.of([clock.wall(partial(_drain, engine))])
        values = {**timing.values(), "chunk": chunk, "prompt": length}
        return {**values, **_memory(model, engine, setup.device)}


def _drain(engine: Engine) -> None:
    while engine.has_unfinished:
        engine.step()


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _memory(model: PreTrainedModel, engine: Engine, device: torch.device) -> dict[str, float]:
    """Bytes of weights and stores, and on CUDA the most that torch had allocated meanwhile."""
    values = {
        "weights_bytes": float(sum(x.nbytes for x in (*model.parameters(), *model.buffers()))),
        "kv_bytes": float(engine.runner.store.num_bytes),
    }
    if device.type == "cuda":
        values["peak_bytes"] = float(torch.cuda.max_memory_allocated(device))
    return values
