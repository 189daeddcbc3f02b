"""Published speeds of Gaudi, and predictions of the roofline for the same runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import groupby

from hpu_duo.cost.hardware import Format, Hardware, find_hardware
from hpu_duo.cost.model import AttentionSize, ModelSize
from hpu_duo.cost.work import Formats, Step, Work, step_work


@dataclass(frozen=True)
class PublishedRow:
    """One published figure: the output tokens per second of a batch, or the latency of its first token.

    Every request has ``input_len`` tokens and gets ``output_len``, all run together as one batch, and the
    throughput counts the time of the prompts.

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
        """The work of the run: all prompts in one step, which gives the first tokens, then decode steps."""
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
    """Two halves, one to fit and one held out, like the fields of a chessboard.

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
    text = files("hpu_duo.cost").joinpath("published.json").read_text(encoding="utf-8")
    return json.loads(text)
