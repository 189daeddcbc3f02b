"""Drafts of a layer of multi-token prediction, which reads hidden states of the served model.

Its entry at a position is computed from the hidden state there and from the token behind it, so it follows
each step once that is sampled. A chain begins with the result for the last accepted token, which stays on the
device; each further draft computes the layer for the token drafted last, with its own result in place of a
hidden state. The step that verifies replaces these entries.

Shapes: Q tokens of a step, N rows, M tokens of each, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from graphs import BatchShape, DeviceInputs, Layout
from graphs.buffers import pack
from hpu_duo.engine.batch import StepGeometry
from hpu_duo.engine.model_drafts.steps import DraftSteps
from hpu_duo.engine.model_drafts.tables import DraftTables, drafts_of
from hpu_duo.engine.step_input import StepInput, message_fields, put_tokens
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.modeling.mtp import write_rows
from hpu_duo.parallel import Exchanged
from hpu_duo.request import Request
from kernels_ref.units import index_dtype

KEPT = "kept"
"""Name of a field of drafts: the result that a row's chain begins with, among those of the last step."""


class HiddenStates(NamedTuple):
    """Tensors that stay on the device between steps.

    Attributes:
        served: last hidden states of the served model in a step, ``[Q, D]``.
        kept: results of the layer at the step's rows of logits, ``[N * M, D]``.
        sampled: tokens of these rows, int32 ``[N * M]``.
    """

    served: torch.Tensor
    kept: torch.Tensor
    sampled: torch.Tensor

    @classmethod
    def zeros(
        cls, largest: BatchShape, decode_len: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> HiddenStates:
        """Allocate them for the largest step."""
        num_logits = largest.num_logits * decode_len
        return cls(
            torch.zeros(
                (max(largest.query_len, largest.num_logits), hidden_size), dtype=dtype, device=device
            ),
            torch.zeros((num_logits, hidden_size), dtype=dtype, device=device),
            torch.zeros(num_logits, dtype=torch.int32, device=device),
        )


class MtpTables(DraftTables):
    """Builds the fields of drafts, and the tokens that follow those of each step."""

    def __init__(self, geometry: StepGeometry) -> None:
        super().__init__(geometry, None)
        # Where the last step has sampled: first position of a request, its row of logits, number of samples.
        self._sampled: dict[Request, tuple[int, int, int]] = {}
        self._slot_of = lru_cache(1024)(lambda step: pack(message_fields(geometry, step)).slots["next_token"])

    def _layout(self, bucket: BatchShape) -> Layout:
        return pack({**self.geometry.field_shapes(bucket), KEPT: (bucket.num_logits,)})

    def add_to(
        self, message: StepInput, plan: StepPlan, token_ids: npt.NDArray[np.int32], decode_len: int
    ) -> StepInput:
        """Return the message of a plan with the drafts of its rows, and the results that they begin with."""
        message = super().add_to(message, plan, token_ids, decode_len)
        begin = len(message.ints) - message.num_drafts * self.num_items(self.bucket(message.bucket))
        slot = self.layout_of(self.bucket(message.bucket)).slots[KEPT]
        kept = message.ints[begin + slot.offset : begin + slot.stop]
        for row in plan.rows:
            if drafts_of(row):
                first, place, _ = self._sampled[row.request]
                kept[row.ring_row] = place + row.start - 1 - first
        return message

    def can_begin(self, request: Request) -> bool:
        """Whether the last step has sampled a token of the request, behind which a chain begins."""
        found = self._sampled.get(request)
        return found is not None and 0 < request.num_computed_tokens - found[0] <= found[2]

    def note(self, message: StepInput, plan: StepPlan, token_ids: npt.NDArray[np.int32]) -> None:
        """Write the tokens that follow those of a step, and remember where it samples."""
        row_len = self._steps.row_len(message.bucket)
        slot = self._slot_of(message.bucket)
        following = message.ints[slot.offset : slot.offset + len(token_ids)]
        following[:-1], end = token_ids[1:], 0
        sampled = {}
        for row in plan.rows:
            end += row.num_new_tokens
            if row.num_samples:
                place = row.ring_row * row_len
                following[end - row.num_samples : end] = -1 - np.arange(place, place + row.num_samples)
                sampled[row.request] = (row.end - row.num_samples, place, row.num_samples)
            else:
                following[end - 1] = row.request.tokens[row.end]
        self._sampled = sampled


class MtpSteps(DraftSteps):
    """Runs the layer behind steps, and the drafts of a message.

    Args:
        states: which the layer and the served model are attached to.
        given, named: see ``DraftSteps``.
    """

    def __init__(self, states: HiddenStates, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._states, self._chained = states, states.kept[:0]

    @property
    def has_own_head(self) -> bool:
        """False: ranks share the head of the model, and sample from the columns of all."""
        return False

    def exchanged(self, step: BatchShape, num_drafts: int = 0) -> Exchanged:
        """Return the bytes of a rank; see ``DraftSteps``. The first draft computes no layer."""
        return Exchanged() if num_drafts == 1 else super().exchanged(step, max(0, num_drafts - 1))

    def follow(self, shape: BatchShape, bucket: BatchShape, sampled: torch.Tensor | None) -> None:
        """Compute the layer for a step: for its tokens and those that follow them."""
        self._take_next(bucket, sampled)
        super().follow(shape, bucket, sampled)

    def _take_next(self, bucket: BatchShape, sampled: torch.Tensor | None) -> None:
        inputs = self._step_inputs
        assert isinstance(inputs, DeviceInputs), "they are attached"
        if sampled is not None:
            write_rows(self._states.sampled, sampled)
        given = inputs.fields(bucket)["next_token"]
        taken = self._states.sampled.index_select(0, (-1 - given).clamp(min=0))
        put_tokens(inputs, bucket, torch.where(given < 0, taken, given))

    def warm_up(
        self, bucket: BatchShape, fields_of: Callable[[BatchShape], Mapping[str, torch.Tensor]]
    ) -> None:
        """Capture the steps of a bucket by padding, and run the operators in front of them."""
        super().warm_up(bucket, fields_of)
        self._run_operators(bucket)

    def exchange(
        self,
        added: BatchShape,
        dropped: BatchShape,
        fields_of: Callable[[BatchShape], Mapping[str, torch.Tensor]],
    ) -> None:
        """Exchange a bucket; see ``DraftSteps``."""
        super().exchange(added, dropped, fields_of)
        self._run_operators(added)

    def _run_operators(self, bucket: BatchShape) -> None:
        if self._stages:
            assert self._own is not None, "it has stores"
            num_logits = self._own.geometry.counts(bucket).logits
            self._take_next(bucket, self._states.sampled.new_zeros(num_logits))

    def _draft(
        self, bucket: BatchShape, source: torch.Tensor, number: int, last: torch.Tensor | None
    ) -> torch.Tensor:
        if last is None:
            slot = self._tables.layout_of(bucket).slots[KEPT]
            places = source[0, slot.offset : slot.stop]
        else:
            # The layer's own entries are one position behind those of the step that verifies.
            write_rows(self._states.served, self._chained)
            super()._draft(bucket, source, number - 1, last)
            device = source.device
            places = torch.arange(bucket.num_logits, dtype=index_dtype(device), device=device)
        self._chained = self._states.kept.index_select(0, places)
        layer: Any = self._model.model
        logits: torch.Tensor = layer.head(self._chained)
        return logits
