"""Seconds of captured steps beside the prediction, and a row of measured speed for the cost model."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from graphs import BatchShape
from hpu_duo.lab.selftest.finding import Notes
from hpu_duo.lab.selftest.subject import SIMULATED, Subject
from hpu_duo.planning import (
    ERROR_FACTORS,
    EngineWork,
    Format,
    ModelSize,
    Prediction,
    find_hardware,
)
from hpu_duo.planning.fit import MeasuredRow
from hpu_duo.planning.read_model import read_model

if TYPE_CHECKING:
    from hpu_duo.llm import HPUDuoModel

ROW = "row"
"""Name of the value that holds a measured row."""


class _Effort(NamedTuple):
    num_buckets: int
    num_repeats: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    input_len: int
    output_len: int

    @property
    def limits(self) -> dict[str, Any]:
        """Limits of the engine whose steps are timed."""
        names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
        return {name: getattr(self, name) for name in names}


_EFFORT = _Effort(8, 5, 8, 512, 2048, 128, 64)
_SMALL_EFFORT = _Effort(3, 2, 4, 64, 512, 16, 4)
"""Effort on the simulated device, which is slow and whose times mean nothing."""


def time_steps(subject: Subject, notes: Notes) -> None:
    """Capture a few buckets of the default table, cheap ones and dear ones, and time their replays.

    Steps of padding are timed: the work of a captured step follows from shapes alone. Predictions are the
    cost model's, if the accelerator is known; they are reported and not checked.
    """
    from hpu_duo.llm import HPUDuoModel

    notes.begin(f"loading {subject.model}")
    effort = _EFFORT if subject.kind != SIMULATED else _SMALL_EFFORT
    options: dict[str, Any] = {"graphs": "auto", "on_miss": "capture", **effort.limits}
    model = HPUDuoModel.from_pretrained(subject.model, device=subject.device, dtype="bfloat16", **options)
    size = read_model(subject.model)
    runner = model.engine.runner
    work = _work_of(model, size)
    for bucket in _spread(runner.graphs.table.by_cost or (runner.executor.largest,), effort.num_buckets):
        notes.begin(f"bucket {bucket}")
        seconds = _replay_seconds(model, bucket, effort.num_repeats)
        predicted = _prediction(subject, work, bucket)
        detail = f"{seconds * 1e3:.2f} ms"
        if predicted is not None:
            low, high = predicted.range
            detail += f"; predicted {predicted.value * 1e3:.2f} ms ({low * 1e3:.2f} to {high * 1e3:.2f})"
            detail += f", {seconds / predicted.value:.2f} times"
        value = None if predicted is None else predicted.value
        notes.fact(str(bucket), detail, seconds=seconds, predicted_s=value)
    if size.experts.num_params:
        notes.fact("throughput", "not measured: rows of the cost model are of dense models")
        return
    notes.begin("a batch of equal requests")
    row = _throughput_row(subject, model, effort)
    batch = f"{row.batch} requests of {row.input_len} + {row.output_len} tokens"
    notes.fact("throughput", f"{row.tokens_per_s:.0f} output tokens/s: {batch}", **{ROW: row.as_json()})


def _work_of(model: HPUDuoModel, size: ModelSize) -> EngineWork:
    """The work of the engine's steps, by the kernels it has chosen."""
    engine = model.engine
    return EngineWork.of_specs(size, engine.runner.model.specs, engine.scheduler.limits)


def _spread(buckets: tuple[BatchShape, ...], num: int) -> list[BatchShape]:
    """Return at most ``num`` buckets, evenly spaced from the cheapest to the most expensive."""
    most = min(len(buckets), num)
    places = {round(place * (len(buckets) - 1) / max(1, most - 1)) for place in range(most)}
    return [buckets[place] for place in sorted(places)]


def _replay_seconds(model: HPUDuoModel, bucket: BatchShape, num_repeats: int) -> float:
    runner = model.engine.runner
    message = runner.builder.padding(bucket)

    def step() -> None:
        runner.executor.execute(message)
        runner.runtime.synchronize()

    step()
    return median(_timed(step) for _ in range(num_repeats))


def _timed(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def _prediction(subject: Subject, work: EngineWork, bucket: BatchShape) -> Prediction | None:
    if subject.hardware is None:
        return None
    return Prediction.of(work.of(bucket), find_hardware(subject.hardware), 1, ERROR_FACTORS[Format.BF16])


def _throughput_row(subject: Subject, model: HPUDuoModel, effort: _Effort) -> MeasuredRow:
    from hpu_duo.sampling import SamplingParams

    engine = model.engine
    batch = engine.scheduler.limits.max_num_seqs
    params = SamplingParams(max_tokens=effort.output_len, temperature=0.0, ignore_eos=True)

    def serve() -> None:
        for _ in range(batch):
            engine.add_request([3] * effort.input_len, params)
        while engine.has_unfinished:
            engine.step()

    serve()  # what is compiled at its first use is compiled now
    seconds = _timed(serve)
    config = engine.runner.model.model.config.get_text_config()
    return MeasuredRow.of(
        config,
        device=subject.device,
        hardware=subject.hardware,
        name=subject.model.resolve().name,
        input_len=effort.input_len,
        output_len=effort.output_len,
        batch=batch,
        tokens_per_s=batch * effort.output_len / seconds,
    )
