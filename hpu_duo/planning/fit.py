"""Efficiencies fitted to published and measured speeds of Gaudi, and the errors of the model on them."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpu_duo.kv.plan import LayerKV
from hpu_duo.planning.model import AttentionSize, Format, Hardware, ModelSize, find_hardware
from hpu_duo.planning.roofline import Efficiency, predict_seconds, roof_seconds
from hpu_duo.planning.work import (
    ACTIVATION_BYTES,
    ALL_REDUCES_PER_LAYER,
    OPERATIONS_PER_SCORE,
    PUBLISHED_LAYER_LAUNCHES,
    Formats,
    Work,
)


@dataclass(frozen=True)
class Step:
    """Rows that all compute the same number of new tokens on top of the same context.

    Attributes:
        num_rows: requests.
        context: tokens of each that are in the cache already.
        new_tokens: tokens of each that the step computes, 1 for decoding.
    """

    num_rows: int
    context: int
    new_tokens: int = 1

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.context < 0 or self.new_tokens < 1:
            raise ValueError(f"expected num_rows >= 1, context >= 0 and new_tokens >= 1, got {self}")

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return self.num_rows * self.new_tokens

    def scores(self, window: int | None) -> int:
        """Query-key pairs of one head of one row, when a token sees ``window`` newest ones or all."""
        first, last = self.context + 1, self.context + self.new_tokens
        if window is None or last <= window:
            return (first + last) * self.new_tokens // 2
        rising = max(0, window - first + 1)
        return (first + first + rising - 1) * rising // 2 + window * (self.new_tokens - rising)

    def keys(self, window: int | None) -> int:
        """Tokens of one row that a head reads."""
        last = self.context + self.new_tokens
        return last if window is None else min(last, window + self.new_tokens - 1)


def step_work(model: ModelSize, kv_layers: tuple[LayerKV, ...], formats: Formats, step: Step) -> Work:
    """The work of one step of software that fuses; one row of logits is computed for each request.

    It is what published runs are compared by; ``EngineWork`` counts the engine's own steps.

    Attention is multiplied in the format of keys and values, the output head in bf16.

    Raises:
        ValueError: ``kv_layers`` is not one entry for each layer of the model.
    """
    if len(kv_layers) != len(model.layers):
        raise ValueError(f"expected {len(model.layers)} KV layers, got {len(kv_layers)}")
    tokens, experts = step.num_tokens, model.experts
    ops = {Format.BF16: 2.0 * model.head_params * step.num_rows, Format.FP8: 0.0}
    ops[formats.weights.arithmetic] += (
        2.0 * tokens * (model.matrix_params + experts.num_params * experts.share_per_token)
    )
    weights = formats.weights.num_bytes * (
        model.matrix_params + experts.num_params * experts.share_read(tokens)
    )
    scores = kv_bytes = 0.0
    for (layer, kv), count in Counter(zip(model.layers, kv_layers)).items():
        group = layer.num_heads // layer.num_kv_heads
        reaches = [(each.num_heads, each.kind.reach) for each in kv.groups]
        layer_scores = step.num_rows * group * sum(num * step.scores(reach) for num, reach in reaches)
        stored = [(1 if kv.stores_latents else num, reach) for num, reach in reaches]
        keys = step.num_rows * sum(num * step.keys(reach) for num, reach in stored)
        # One product of head_dim for the score, one for the value it weighs.
        dims = (kv.head_dim, kv.value_dim)
        if kv.stores_latents and step.context:
            dims = kv.groups[0].kind.stored_dims(*dims)
        ops[formats.kv.arithmetic] += count * 2.0 * layer_scores * sum(dims)
        scores += count * layer_scores
        size = kv.groups[0].kind.stored_dims(0, 0)[0] if kv.stores_latents else kv.elements_per_head
        kv_bytes += count * keys * size * formats.kv.num_bytes
    return Work(
        bf16_ops=ops[Format.BF16],
        fp8_ops=ops[Format.FP8],
        vector_ops=scores * OPERATIONS_PER_SCORE,
        weight_bytes=weights + model.head_params * Format.BF16.num_bytes,
        kv_bytes=kv_bytes,
        reduced_bytes=ALL_REDUCES_PER_LAYER
        * len(model.layers)
        * tokens
        * model.hidden_size
        * ACTIVATION_BYTES,
        num_launches=len(model.layers) * PUBLISHED_LAYER_LAUNCHES,
    )


@dataclass(frozen=True)
class PublishedRow:
    """One published figure: the output tokens per second of a batch, or the latency of its first token.

    Every request has ``input_len`` tokens and ``output_len`` generated ones, all run as one batch, and the
    throughput includes the time of the prompts.

    Attributes:
        source: key of ``published_sources``.
        hardware: the accelerator.
        num_devices: accelerators.
        model: sizes of the model.
        format: of weights, and of keys and values.
        input_len, output_len: tokens of each request.
        batch: requests.
        tokens_per_s: None for a latency.
        latency_ms: None for a throughput.
    """

    source: str
    hardware: Hardware
    num_devices: int
    model: ModelSize
    format: Format
    input_len: int
    output_len: int
    batch: int
    tokens_per_s: float | None
    latency_ms: float | None

    @property
    def kind(self) -> str:
        """Kind of measurement for reports, with the format if that is not fp8."""
        what = "throughput" if self.latency_ms is None else "first token"
        return what if self.format is Format.FP8 else f"{what}, {self.format.value}"

    @property
    def group(self) -> tuple[str, str, str, int]:
        """Key of rows that differ in lengths and batch only."""
        return self.kind, self.hardware.name, self.model.name, self.num_devices

    @property
    def seconds(self) -> float:
        """Time of the run, from the published figure."""
        if self.latency_ms is not None:
            return self.latency_ms / 1e3
        assert self.tokens_per_s is not None, "a row has one figure or the other"
        return self.batch * self.output_len / self.tokens_per_s

    def work(self) -> Work:
        """The work of the run: all prompts in one step, which samples the first tokens, then decode steps."""
        model, formats = self.model, Formats(self.format, self.format)
        kv_layers = model.kv_layers(0.0, 0, 1, self.input_len + self.output_len)
        prompts = step_work(model, kv_layers, formats, Step(self.batch, 0, self.input_len))
        num_decodes = self.output_len - 1
        if num_decodes == 0:
            return prompts
        # Bytes and operations are linear in the context, so the middle step is the mean of all.
        first = step_work(model, kv_layers, formats, Step(self.batch, self.input_len))
        last = step_work(model, kv_layers, formats, Step(self.batch, self.input_len + num_decodes - 1))
        return prompts + (first + last) * (num_decodes / 2)


def dense_model(
    name: str,
    *,
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    num_kv_heads: int,
    vocab_size: int,
    max_positions: int = 4096,
) -> ModelSize:
    """The size of a Llama-like model: gated MLP, no biases, an output head of its own."""
    head_dim = hidden_size // num_heads
    projections = hidden_size * head_dim * (2 * num_heads + 2 * num_kv_heads)
    return ModelSize(
        name=name,
        layers=(AttentionSize(num_heads, num_kv_heads, head_dim),) * num_layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        matrix_params=num_layers * (projections + 3 * hidden_size * intermediate_size),
        other_params=vocab_size * hidden_size + (2 * num_layers + 1) * hidden_size,
        max_positions=max_positions,
        matrix_outputs=num_layers
        * (head_dim * (num_heads + 2 * num_kv_heads) + 2 * hidden_size + 2 * intermediate_size),
    )


@cache
def published_sources() -> dict[str, str]:
    """Sources by their keys, with their addresses."""
    return dict(_document()["sources"])


@cache
def published_rows() -> tuple[PublishedRow, ...]:
    """All rows of ``published.json``, in its order."""
    document = _document()
    models = {name: dense_model(name, **sizes) for name, sizes in document["models"].items()}
    rows = []
    for values in document["rows"]:
        row = dict(zip(document["columns"], values))
        row["hardware"] = find_hardware(row["hardware"])
        row["model"] = models[row["model"]]
        row["format"] = Format.parse(row["format"])
        rows.append(PublishedRow(**row))
    return tuple(rows)


def split_rows(
    rows: tuple[PublishedRow, ...],
) -> tuple[tuple[PublishedRow, ...], tuple[PublishedRow, ...]]:
    """Split into two halves in a checkerboard pattern, one to fit and one held out.

    Groups of one kind, hardware, model and number of devices are sorted, and so are the lengths in them;
    row ``k`` of group ``g`` is fitted when ``g + k`` is even. So every group and every pair of lengths is
    in both halves as far as there are enough rows, and the split does not depend on any figure.
    """
    halves: tuple[list[PublishedRow], list[PublishedRow]] = ([], [])
    ordered = sorted(rows, key=lambda row: (row.group, row.input_len, row.output_len))
    for group, (_, members) in enumerate(groupby(ordered, key=lambda row: row.group)):
        for index, row in enumerate(members):
            halves[(group + index) % 2].append(row)
    return tuple(halves[0]), tuple(halves[1])


def _document() -> dict:
    text = files("hpu_duo.planning").joinpath("published.json").read_text(encoding="utf-8")
    return json.loads(text)


_START = Efficiency(compute=0.5, memory=0.5, link=0.5, launch_s=0.2e-6)
_CEILING = Efficiency(compute=1.0, memory=1.0, link=1.0, launch_s=1e-5)
_FLOOR = Efficiency(compute=0.01, memory=0.01, link=0.01, launch_s=1e-11)
_KNEE = 0.1
"""Errors of a logarithm beyond this value count linearly, smaller ones by their square."""
_SMALLEST_STEP = 1e-5


def fit(rows: Sequence[PublishedRow]) -> Efficiency:
    """Fit the efficiencies with which the roofline is closest to the published times.

    The mean pseudo-Huber loss of log(predicted / published) is minimised, so that outliers count little, over
    efficiencies between 1 % and 100 %, by a pattern search in the logarithms, which has no random part.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("expected at least one published row to fit, got none")
    times = [roof_seconds(row.work(), row.hardware, row.num_devices) for row in rows]
    # Published software calls no regions in loops, so that the host's time is no part of the fit.
    roofs = np.array([(each.compute, each.memory, each.link, each.launch) for each in times])
    published = np.log([row.seconds for row in rows])
    low, high = np.log(astuple(_FLOOR)), np.log(astuple(_CEILING))

    def loss(point: NDArray[np.float64]) -> float:
        error = np.log(roofs @ _slowdown(point)) - published
        return float(np.mean(np.sqrt(1.0 + (error / _KNEE) ** 2) - 1.0))

    point = np.log(astuple(_START))
    best, step = loss(point), 0.5
    while step > _SMALLEST_STEP:
        moves = [np.clip(point + sign * step * axis, low, high) for axis in np.eye(4) for sign in (1, -1)]
        losses = [loss(move) for move in moves]
        if min(losses) < best:
            best = min(losses)
            point = moves[losses.index(best)]
        else:
            step /= 2
    return Efficiency(*np.exp(point).tolist())


def _slowdown(point: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds per second at the roof of compute, memory and link, and seconds of an operator."""
    return np.exp(point * np.array([-1.0, -1.0, -1.0, 1.0]))


def relative_error(row: PublishedRow, efficiency: Efficiency) -> float:
    """Relative error of the prediction of a published figure: above 0 when it is too high.

    The figure is tokens per second, or for latencies milliseconds.
    """
    predicted = predict_seconds(row.work(), row.hardware, row.num_devices, efficiency).total
    return predicted / row.seconds - 1.0 if row.tokens_per_s is None else row.seconds / predicted - 1.0


def median_error(rows: Sequence[PublishedRow], efficiency: Efficiency) -> float:
    """Median of the absolute relative errors; NaN without rows."""
    if not rows:
        return math.nan
    return float(np.median([abs(relative_error(row, efficiency)) for row in rows]))


def leave_one_model_out(rows: Sequence[PublishedRow]) -> dict[str, float]:
    """Median absolute error on each model's rows, when all rows of the other models were fitted."""
    errors: dict[str, float] = {}
    for name in sorted({row.model.name for row in rows}):
        efficiency = fit([row for row in rows if row.model.name != name])
        errors[name] = median_error([row for row in rows if row.model.name == name], efficiency)
    return errors


def worst_factor(rows: Sequence[PublishedRow], efficiency: Efficiency) -> float:
    """The most that a prediction of these rows is too high or too low by, as a factor of 1 or more."""
    errors = (1.0 + relative_error(row, efficiency) for row in rows)
    return max((max(error, 1.0 / error) for error in errors), default=1.0)


def worst_unseen(rows: Sequence[PublishedRow]) -> float:
    """``worst_factor`` over all rows, each predicted by a fit of the rows of other models."""
    factors = [1.0]
    for name in sorted({row.model.name for row in rows}):
        efficiency = fit([row for row in rows if row.model.name != name])
        factors.append(worst_factor([row for row in rows if row.model.name == name], efficiency))
    return max(factors)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit to the published rows and those of files, and print what changes."""
    # The constants in use are the result of this module.
    from hpu_duo.planning.roofline import FITTED

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("files", nargs="+", help="JSON reports of hpu-duo selftest")
    measured: list[PublishedRow] = []
    try:
        for row in [row for file in parser.parse_args(arguments).files for row in read_rows(file)]:
            try:
                measured.append(row.published())
            except ValueError as error:
                print(f"left out: {error}")
    except ValueError as error:
        parser.error(str(error))
    print(f"constants in use: {FITTED}")
    for each in measured:
        off = relative_error(each, FITTED)
        print(
            f"{each.model.name}, {each.batch} x ({each.input_len} + {each.output_len}): predicted {off:+.0%}"
        )
    if measured:
        print(f"fitted with them: {fit([*published_rows(), *measured])}")


if __name__ == "__main__":
    main()

SOURCE = "hpu-duo selftest"
_SIZES = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "vocab_size")


@dataclass(frozen=True)
class MeasuredRow:
    """Output tokens per second of a batch of equal requests, in bfloat16, on one device.

    Attributes:
        device: of the engine, such as ``hpu``.
        hardware: name of the accelerator, None where it is unknown.
        model: for reports.
        sizes: of a dense model by the names of ``dense_model``.
        input_len, output_len: tokens of each request.
        batch: requests.
        tokens_per_s: output tokens of all requests by the time of the whole run, prompts included.
    """

    device: str
    hardware: str | None
    model: str
    sizes: Mapping[str, int]
    input_len: int
    output_len: int
    batch: int
    tokens_per_s: float

    @classmethod
    def of(cls, config: Any, *, name: str, **measured: Any) -> MeasuredRow:
        """Create the row of a model with this configuration.

        Args:
            config: of transformers, for text.
        """
        sizes = {
            "num_layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_heads": config.num_attention_heads,
            "num_kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            "vocab_size": config.vocab_size,
        }
        return cls(model=name, sizes=sizes, **measured)

    def as_json(self) -> dict[str, Any]:
        """The row as JSON values."""
        return asdict(self)

    def published(self) -> PublishedRow:
        """Convert the row to a published one, to which the cost model can be fitted.

        Raises:
            ValueError: the accelerator is unknown to the cost model.
        """
        if self.device.partition(":")[0] != "hpu":
            raise ValueError(f"a row of {self.model} was measured on {self.device}, which is no Gaudi")
        return PublishedRow(
            source=SOURCE,
            hardware=find_hardware(self.hardware or "unknown"),
            num_devices=1,
            model=dense_model(self.model, **self.sizes),
            format=Format.BF16,
            input_len=self.input_len,
            output_len=self.output_len,
            batch=self.batch,
            tokens_per_s=self.tokens_per_s,
            latency_ms=None,
        )


def read_rows(path: str | Path) -> tuple[MeasuredRow, ...]:
    """Read the rows of a self-test's JSON report.

    Raises:
        ValueError: the file cannot be read, or is no such report.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        rows = tuple(MeasuredRow(**row) for row in document["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"expected measured rows of hpu-duo selftest in {path}: {error}") from error
    for row in rows:
        if sorted(row.sizes) != sorted(_SIZES):
            raise ValueError(f"expected the sizes {', '.join(_SIZES)} of a model in {path}, got {row.sizes}")
    return rows
