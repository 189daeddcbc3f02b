"""Drafts of layers of multi-token prediction, which read hidden states of the served model.

Their entries at a position are computed from the token behind it too, so they follow each step once that is
sampled. A chain begins with the first layer's result for the last accepted token, which stays on the device;
each further draft computes the layers for the token drafted last, and is that of the next layer. Behind the
last layer, its own result takes the place of that of the layer before. The step that verifies replaces these
entries.

Shapes: Q tokens of a step, N rows, M tokens of each, D hidden size, n layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from graphs import BatchShape, DeviceInputs, Layout
from graphs.buffers import pack
from hpu_duo.engine.batch import StepGeometry
from hpu_duo.engine.model_drafts.steps import DraftSteps
from hpu_duo.engine.model_drafts.tables import DraftTables, drafts_of
from hpu_duo.engine.step_input import StepInput, message_fields, put_tokens
from hpu_duo.engine.step_plan import ScheduledRow, StepPlan
from hpu_duo.modeling.mtp import HiddenStates, write_rows
from hpu_duo.parallel import Exchanged
from hpu_duo.request import Request
from kernels_ref.units import index_dtype

KEPT = "kept"
"""Name of a field of drafts: the result that a row's chain begins with, among those of the last step."""
_UNKNOWN = 2**30
"""In place of a result that is nowhere any more."""


class MtpTables(DraftTables):
    """Builds the fields of drafts, and the tokens that follow those of each step."""

    def __init__(self, geometry: StepGeometry) -> None:
        super().__init__(geometry, None)
        # Where the last step has sampled: first position of a request, its row of logits, number of samples.
        self._sampled: dict[Request, tuple[int, int, int]] = {}
        self._slots_of = lru_cache(1024)(lambda step: pack(message_fields(geometry, step)).slots)

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
                kept[row.ring_row] = self._result_before(row)
        return message

    def _result_before(self, row: ScheduledRow) -> int:
        """Find the results for the token before a row's first one.

        Returns:
            a row of logits of the last step; ``-1 - b`` for the end of block ``b``; or ``_UNKNOWN``.
        """
        first, place, number = self._sampled.get(row.request, (row.start, 0, 0))
        if 0 <= row.start - 1 - first < number:
            return place + row.start - 1 - first
        block, offset = divmod(row.start, self._steps.block_size)
        is_known = block and not offset and block > len(row.request.host_blocks)
        return -1 - int(row.request.block_table[block - 1]) if is_known else _UNKNOWN

    def can_begin(self, request: Request) -> bool:
        """Whether the last step has sampled a token of the request, behind which a chain begins."""
        found = self._sampled.get(request)
        if found is None or not request.num_output_tokens:
            return False
        return 0 < request.num_computed_tokens - found[0] <= found[2]

    def note(self, message: StepInput, plan: StepPlan, token_ids: npt.NDArray[np.int32]) -> None:
        """Write the tokens that follow those of a step, and remember where it samples.

        Also where further layers find results for the tokens before those of the step: so rows that sample
        nothing have a row of logits, of their last token.
        """
        row_len, ints = self._steps.row_len(message.bucket), message.ints
        slots = self._slots_of(message.bucket)
        following = ints[slots["next_token"].offset :][: len(token_ids)]
        before = ints[slots["result_before"].offset : slots["result_before"].stop]
        logit_index = ints[slots["logit_index"].offset : slots["logit_index"].stop]
        following[:-1], end = token_ids[1:], 0
        sampled = {}
        for row in plan.rows:
            end += row.num_new_tokens
            place = row.ring_row * row_len
            if len(before):
                before[row.ring_row] = self._result_before(row)
            if row.num_samples:
                following[end - row.num_samples : end] = -1 - np.arange(place, place + row.num_samples)
            else:
                following[end - 1], logit_index[place] = row.request.tokens[row.end], end - 1
            num_kept = max(1, row.num_samples)
            sampled[row.request] = (row.end - num_kept, place, num_kept)
        self._sampled = sampled


class MtpSteps(DraftSteps):
    """Runs the layers behind steps, and the drafts of a message.

    Args:
        states: which the layers and the served model are attached to.
        given, named: see ``DraftSteps``.
    """

    def __init__(self, states: HiddenStates, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._states, self._last = states, states.kept

    @property
    def has_own_head(self) -> bool:
        """False: ranks share the head of the model, and sample from the columns of all."""
        return False

    def exchanged(self, step: BatchShape, num_drafts: int = 0) -> Exchanged:
        """Return the bytes of a rank; see ``DraftSteps``. The first draft computes no layer."""
        return Exchanged() if num_drafts == 1 else super().exchanged(step, max(0, num_drafts - 1))

    def follow(self, shape: BatchShape, bucket: BatchShape, sampled: torch.Tensor | None) -> None:
        """Compute the layers for a step: for its tokens and those that follow them."""
        self._take_next(bucket, sampled)
        super().follow(shape, bucket, sampled)

    def _take_next(self, bucket: BatchShape, sampled: torch.Tensor | None) -> None:
        inputs = self._step_inputs
        assert isinstance(inputs, DeviceInputs), "they are attached"
        if sampled is not None:
            write_rows(self._states.sampled, sampled)
        fields, states = inputs.fields(bucket), self._states
        given = fields["next_token"]
        taken = states.sampled.index_select(0, (-1 - given).clamp(min=0))
        put_tokens(inputs, bucket, torch.where(given < 0, taken, given))
        place = fields["result_before"]
        for kept, ends, carried in zip(states.kept, states.ends, states.carried):
            of_step = kept.index_select(0, place.clamp(0, len(kept) - 1))
            of_block = ends.index_select(0, (-1 - place).clamp(min=0))
            found = torch.where((place < 0)[:, None], of_block, of_step)
            write_rows(carried, torch.where((place == _UNKNOWN)[:, None], 0, found))

    def carry_out(self, blocks: torch.Tensor, rows: torch.Tensor) -> None:
        """Carry out copies of blocks, with what is stored of their last tokens."""
        super().carry_out(blocks, rows)
        if blocks.shape[1]:
            target = blocks[1].to(index_dtype(blocks.device))
            for ends in self._states.ends:
                ends.index_copy_(0, target, ends.index_select(0, blocks[0]))

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
            results, places = self._states.kept, source[0, slot.offset : slot.stop]
        else:
            # The layers' entries are one position behind those of the step that verifies.
            for layer, chained in enumerate(self._states.chained):
                write_rows(chained, self._last[layer if layer < number else layer - 1])
            super()._draft(bucket, source, number - 1, last)
            device = source.device
            results = self._states.chained
            places = torch.arange(bucket.num_logits, dtype=index_dtype(device), device=device)
        self._last = tuple(each.index_select(0, places) for each in results)
        layers: Any = self._model.model
        logits: torch.Tensor = layers.head(self._last[min(number, len(self._last) - 1)])
        return logits
