"""The device's part of model drafts: a chain of decodes, each of the token that the one before sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from graphs import BatchShape, BucketTable, GraphCache, MissPolicy
from hpu_duo.engine.executor import STAGED, StepFunctions, make_step
from hpu_duo.engine.model_drafts.tables import DraftTables
from hpu_duo.modeling.step_model import StepModel
from hpu_duo.not_picklable import NotPicklable
from hpu_duo.sampling import SampledTokens, SamplingBatch, SamplingRoute

Sample = Callable[[torch.Tensor, SamplingBatch, torch.Tensor], SampledTokens]


class DraftSteps(NotPicklable):
    """Runs the drafts of a message; nothing of them is read back before the step that verifies them.

    Args:
        model: drafts over its own stores.
        tables: of the fields of drafts.
        graphs: captured drafts.
        device: of the steps.
        stages: whether a step reads its fields from one buffer, see ``DeviceRuntime.compiles_operators``.

    Attributes:
        graphs: captured drafts, by number of rows.
    """

    def __init__(
        self,
        model: StepModel,
        tables: DraftTables,
        graphs: GraphCache,
        device: torch.device,
        *,
        stages: bool,
    ) -> None:
        self._model, self._tables, self._stages = model, tables, stages
        self._device = device
        self._inputs: dict[int, dict[str, torch.Tensor]] = {}
        self._capture_in(graphs)

    @property
    def tables(self) -> DraftTables:
        """Tables of the fields of drafts."""
        return self._tables

    def _capture_in(self, graphs: GraphCache) -> None:
        self.graphs = graphs
        layout_of = self.tables.layout_of if self._stages else None
        make = partial(make_step, self._model, self.tables.geometry, graphs, layout_of)
        self._step_of = StepFunctions(make, lambda shape: shape in graphs.table).__getitem__

    def set_table(self, table: BucketTable, row_len: Callable[[BatchShape], int], policy: MissPolicy) -> None:
        """Replace the buckets by those of drafts for a table of steps, before anything is captured."""
        self._capture_in(self.graphs.with_table(draft_table(table, row_len), policy))

    def run(
        self,
        drafts: torch.Tensor,
        num_rows: int,
        num_drafts: int,
        sampling: SamplingBatch | None,
        floats: torch.Tensor | None,
        sample: Sample,
    ) -> torch.Tensor:
        """Draft, and return the sampled tokens, draft after draft, int32 ``[g * N]``.

        Args:
            drafts: fields of all drafts, as ``DraftTables`` has written them, int32.
            num_rows, num_drafts: N and g.
            sampling, floats: of the step that verifies them; each draft is drawn with the number of the row
                that verifies it. None = the likeliest tokens.
            sample: from the logits of a step.
        """
        bucket = self.tables.bucket(num_rows)
        source, inputs = drafts.view(num_drafts, -1), self._inputs_of(num_rows)
        fields = {STAGED: inputs[STAGED]} if self._stages else inputs
        self._model.live.set(bucket, bucket, 1)
        batch = _of_drafts(sampling, num_rows)
        values = None
        if floats is not None and batch.route.has_row_values:
            values = floats[: sampling.route.num_row_floats].view(-1, num_rows, num_drafts + 1)  # type: ignore[union-attr]
        found: list[torch.Tensor] = []
        for number in range(num_drafts):
            items = source[number]
            if found:
                # Token ids come first.
                items = torch.cat([found[-1], items[num_rows:]])
            inputs[STAGED].copy_(items)
            logits = self.graphs.run(bucket, self._step_of(bucket), fields)
            own = torch.empty(0) if values is None else values[:, :, number].reshape(-1)
            found.append(sample(logits, batch, own).token_ids)
        return torch.cat(found)

    def _inputs_of(self, num_rows: int) -> dict[str, torch.Tensor]:
        """The fields of a draft at fixed addresses, and the buffer that they are views of."""
        if num_rows not in self._inputs:
            num_items = self.tables.num_items(num_rows)
            buffer = torch.zeros(num_items, dtype=torch.int32, device=self._device)
            slots = self.tables.layout(num_rows).slots.items()
            views = {name: buffer[slot.offset : slot.stop].view(slot.shape) for name, slot in slots}
            self._inputs[num_rows] = {**views, STAGED: buffer}
        return self._inputs[num_rows]


def draft_table(table: BucketTable, row_len: Callable[[BatchShape], int]) -> BucketTable:
    """The buckets of drafts: one for each number of rows of the steps that verify them."""
    rows = {bucket.num_logits for bucket in table if row_len(bucket) > 1}
    return BucketTable(tuple(map(DraftTables.bucket, sorted(rows))))


def _of_drafts(sampling: SamplingBatch | None, num_rows: int) -> SamplingBatch:
    """The sampling of a draft: temperature and filters of the rows, without anything else."""
    assert sampling is not None, "drafts are sampled"
    route = sampling.route
    plain = SamplingRoute(num_rows, route.vocab_size)
    if route.has_random:
        plain = replace(route, num_rows=num_rows, num_edits=0, num_seen=0, num_logprobs=-1, has_masks=False)
    return SamplingBatch(plain, sampling.floats[:0])
