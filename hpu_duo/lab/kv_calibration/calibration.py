"""From a checkpoint and prompts to a KV plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpu_duo.config.kv_plan import Keep
from hpu_duo.device import resolve_device
from hpu_duo.heads.eviction.fastgen import TokenClasses, TokenClassifier
from hpu_duo.lab.identify import GatedModel, Progress
from hpu_duo.lab.identify.gated_model import check_device
from hpu_duo.lab.kv_calibration.ada_kv import AdaKV
from hpu_duo.lab.kv_calibration.calibrated import CalibratedPlan, PlannedHead
from hpu_duo.lab.kv_calibration.collect import LayerAttention, collect
from hpu_duo.lab.kv_calibration.methods import CalibrationMethod
from hpu_duo.lab.kv_calibration.prompts import Documents, Prompt, PromptFile, check_lengths
from hpu_duo.modeling.hub import model_name
from hpu_duo.modeling.loading import load_tokenizer, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class CalibrationRequest:
    """Settings of one calibration.

    Attributes:
        model: directory of a transformers checkpoint with a tokenizer.
        method: what is measured, and what heads keep by it.
        prompts: a file of them, or documents.
        num_sizes: most different budgets; each is a kind of head group of its own.
        dtype, device: of the model; see ``HPUDuoModel``.
    """

    model: Path
    method: CalibrationMethod = field(default_factory=AdaKV)
    prompts: PromptFile | Documents = field(default_factory=Documents)
    num_sizes: int = 4
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.num_sizes < 1:
            raise ValueError(f"expected 1 size of budgets or more, got {self.num_sizes}")
        check_device(self.device)


class Calibration:
    """One calibration, checked and ready to go.

    Attributes:
        lengths: tokens of each prompt.

    Raises:
        ValueError: something asked for cannot be done: the model cannot be served, has no layer that sees the
            whole text, or prompts do not fit it or the method.
    """

    def __init__(self, request: CalibrationRequest) -> None:
        # Cheap checks first: a model of this size takes minutes to read.
        tokenizer, self._prompts = prompts_of(request)
        self.lengths = tuple(len(prompt.ids) for prompt in self._prompts)
        self._request = request
        self._classifier = TokenClassifier(tokenizer)
        self._model = GatedModel.load(request.model, request.dtype, resolve_device(request.device))
        calls = [layer.call for layer in self._model.layers]
        self._windows = tuple(call.sliding_window for call in calls)
        self._measured = [number for number, window in enumerate(self._windows) if window is None]
        if not self._measured:
            raise ValueError(
                f"expected a model with a layer that sees the whole text, got one whose {len(calls)} layers "
                "have a sliding window each, which they keep whatever a plan says"
            )
        self._measurement = request.method.measurement(len(self._measured), self.lengths)

    @property
    def total(self) -> int:
        """Prompts."""
        return len(self._prompts)

    def run(self) -> Iterator[Progress]:
        """Measure prompt after prompt, and yield the progress after each."""
        places = {number: place for place, number in enumerate(self._measured)}
        needs_classes = self._request.method.needs_classes
        for done, prompt in enumerate(self._prompts, start=1):
            classes: TokenClasses | None = None
            if needs_classes:
                classes = self._classifier.classes(prompt.ids.tolist())

            def take(layer: int, attention: LayerAttention, classes: TokenClasses | None = classes) -> None:
                self._measurement.take(places[layer], attention, classes)

            collect(self._model, torch.from_numpy(prompt.ids), self._request.method.num_queries, take)
            yield Progress(done, self.total)

    def result(self) -> CalibratedPlan:
        """Choose for each head, once ``run`` has ended."""
        planned = iter(self._measurement.planned(self._request.num_sizes))
        return CalibratedPlan(
            tuple(
                next(planned)
                if window is None
                else (PlannedHead(f"window of {window:,}", Keep()),) * self._model.num_kv_heads
                for window in self._windows
            )
        )

    @property
    def origin(self) -> tuple[str, ...]:
        """Lines that say where the plan comes from."""
        model, prompts = origin_of(self._request, self.lengths)
        return model, _told(self._request.method), prompts


def prompts_of(
    request: CalibrationRequest, shortest: int | None = None
) -> tuple[PreTrainedTokenizerBase, list[Prompt]]:
    """Read the prompts of a request, and check their lengths, before the weights of the model.

    Args:
        shortest: length of a prompt; None = that of the method.

    Raises:
        ValueError: they cannot be read, or do not fit the model or the method.
    """
    config = read_config(request.model)
    tokenizer = load_tokenizer(request.model)
    if tokenizer is None:
        raise ValueError(f"expected a tokenizer beside the model in {request.model}, found none")
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    prompts = request.prompts.read(tokenizer, positions)
    if shortest is None:
        shortest = request.method.shortest([len(prompt.ids) for prompt in prompts])
    check_lengths(prompts, shortest, positions)
    return tokenizer, prompts


def origin_of(request: CalibrationRequest, lengths: Sequence[int]) -> tuple[str, str]:
    """Return a line about model and lengths of prompts, and one about their source."""
    model = (
        f"model {model_name(request.model)}, prompts: {len(lengths)}, of {min(lengths):,} to "
        f"{max(lengths):,} tokens"
    )
    return model, _told(request.prompts)


def _told(settings: CalibrationMethod | PromptFile | Documents) -> str:
    values = {
        name: value.value if isinstance(value, Enum) else value for name, value in vars(settings).items()
    }
    return f"{type(settings).__name__}: " + ", ".join(f"{name}={value}" for name, value in values.items())
