"""The device's part of model drafts: a chain of decodes, each of the token that the one before sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from graphs import BatchShape, BucketTable, DeviceInputs, GraphCache, Layout, MissPolicy
from hpu_duo.engine.batch import StepGeometry
from hpu_duo.engine.executor import STAGED, StepFunctions, make_step
from hpu_duo.engine.model_drafts.tables import DraftTables
from hpu_duo.kv.store import KVStore
from hpu_duo.modeling.step_model import StepModel
from hpu_duo.not_picklable import NotPicklable
from hpu_duo.parallel import Exchanged, StepExchanges
from hpu_duo.sampling import SampledTokens, SamplingBatch, SamplingRoute

Sample = Callable[[torch.Tensor, SamplingBatch, torch.Tensor], SampledTokens]


@dataclass(frozen=True)
class OwnStores:
    """The stores of a model that drafts for another one, in which every step is computed too.

    They have the blocks of the other model's stores, so that block tables, cached prefixes, forks and what is
    rolled back are the same in both.

    Attributes:
        store: the stores.
        graphs: captured steps, with the buckets of the other model.
        geometry: of the other model's steps.
        layout_of: places of the fields of a step in the buffer of the other model's steps.
    """

    store: KVStore
    graphs: GraphCache
    geometry: StepGeometry
    layout_of: Callable[[BatchShape], Layout]


class DraftSteps(NotPicklable):
    """Runs the drafts of a message; nothing of them is read back before the step that verifies them.

    Args:
        model: drafts.
        tables: of the fields of drafts.
        graphs: captured drafts.
        device: of the steps.
        own: of a model with its own stores; None where it drafts over those that the steps use.
        stages: whether a step reads its fields from one buffer, see ``DeviceRuntime.compiles_operators``.
        is_greedy: whether drafts are the likeliest tokens, also of rows that are sampled.

    Attributes:
        graphs: captured drafts.
        exchanges: of a step of the model, where ranks share the one that it drafts for; None = no ranks.
    """

    exchanges: StepExchanges | None = None

    def __init__(
        self,
        model: StepModel,
        tables: DraftTables,
        graphs: GraphCache,
        device: torch.device,
        own: OwnStores | None = None,
        *,
        stages: bool,
        is_greedy: bool = False,
    ) -> None:
        self._model, self._tables, self._stages = model, tables, stages
        self._is_greedy = is_greedy
        self._device, self._own = device, own
        self._inputs: dict[BatchShape, dict[str, torch.Tensor]] = {}
        self._step_inputs: DeviceInputs | None = None
        self._capture_in(graphs, None if own is None else own.graphs)

    @property
    def tables(self) -> DraftTables:
        """Tables of the fields of drafts."""
        return self._tables

    @property
    def model(self) -> StepModel:
        """The model that drafts."""
        return self._model

    @property
    def num_bytes(self) -> int:
        """Bytes of the model's own stores."""
        return 0 if self._own is None else self._own.store.num_bytes

    @property
    def has_own_head(self) -> bool:
        """Whether the model has a head of its own, all of it on each rank."""
        return self._own is not None

    def exchanged(self, step: BatchShape, num_drafts: int = 0) -> Exchanged:
        """Return the bytes that a rank sends for drafts, but for those of their logits.

        Args:
            step: bucket of the step that verifies them.
            num_drafts: of each row; 0 = of ``follow``.
        """
        if self.exchanges is None or not (num_drafts or self._own):
            return Exchanged()
        bucket = self.tables.bucket(step) if num_drafts else step
        return Exchanged().plus(self.exchanges.of(bucket), num_drafts or 1)

    @property
    def description(self) -> str:
        """Facts that its graphs depend on, for manifests of warm-ups."""
        if self._own is None:
            return self.tables.description
        config = self._model.model.config.get_text_config()
        return f"{config.model_type}, {len(self._model.specs)} layers of {config.hidden_size}"

    def _capture_in(self, graphs: GraphCache, of_steps: GraphCache | None) -> None:
        self.graphs = graphs
        self._step_of = self._functions(graphs, self.tables.geometry, self.tables.layout_of)
        self._steps, self._whole_step_of = of_steps, None
        if of_steps is not None:
            assert self._own is not None, "steps are computed in stores of its own"
            self._whole_step_of = self._functions(of_steps, self._own.geometry, self._own.layout_of)

    def _functions(
        self, graphs: GraphCache, geometry: StepGeometry, layout_of: Callable[[BatchShape], Layout]
    ) -> Callable[[BatchShape], Callable[[Mapping[str, torch.Tensor]], torch.Tensor]]:
        make = partial(make_step, self._model, geometry, graphs, layout_of if self._stages else None)
        return StepFunctions(make, lambda shape: shape in graphs.table).__getitem__

    def set_table(self, table: BucketTable, row_len: Callable[[BatchShape], int], policy: MissPolicy) -> None:
        """Replace the buckets by those of drafts for a table of steps, before anything is captured."""
        drafted = self.graphs.with_table(self.tables.table(table, row_len), policy)
        self._capture_in(drafted, None if self._steps is None else self._steps.with_table(table, policy))

    def attach(self, inputs: DeviceInputs) -> None:
        """Read the steps of the model's own stores from these inputs."""
        self._step_inputs = inputs

    def follow(self, shape: BatchShape, bucket: BatchShape, sampled: torch.Tensor | None) -> None:
        """Compute a step in the model's own stores, if it has any.

        Args:
            sampled: its tokens, int32 ``[N * M]``; None where nothing was sampled.
        """
        if self._steps is not None:
            assert self._own is not None, "it has stores"
            assert self._whole_step_of is not None, "it has stores"
            assert self._step_inputs is not None, "they are attached"
            self._model.live.set(shape, bucket, self._own.geometry.row_len(bucket))
            inputs = self._step_inputs
            fields = {STAGED: inputs.buffer} if self._stages else inputs.fields(bucket)
            self._steps.run(bucket, self._whole_step_of(bucket), fields)

    def carry_out(self, blocks: torch.Tensor, rows: torch.Tensor) -> None:
        """Carry out copies of blocks in the model's own stores, if it has any; it has no rows."""
        if self._own is not None:
            self._own.store.carry_out(blocks, rows[:, :0])

    def warm_up(
        self, bucket: BatchShape, fields_of: Callable[[BatchShape], Mapping[str, torch.Tensor]]
    ) -> None:
        """Capture the steps of a bucket in the model's own stores, if it has any, by padding."""
        if self._steps is not None:
            assert self._own is not None, "it has stores"
            assert self._whole_step_of is not None, "it has stores"
            with self._model.live.none_of(bucket, self._own.geometry.row_len(bucket)):
                self._steps.warm_up(bucket, self._whole_step_of, fields_of)

    def exchange(
        self,
        added: BatchShape,
        dropped: BatchShape,
        fields_of: Callable[[BatchShape], Mapping[str, torch.Tensor]],
    ) -> None:
        """Exchange a bucket of the steps in the model's own stores, if it has any; see ``GraphCache``.

        Buckets of drafts belong to steps of longer rows, which are never exchanged.
        """
        if self._steps is not None:
            assert self._whole_step_of is not None, "it has stores"
            self._steps.exchange(added, dropped, self._whole_step_of, fields_of)

    def seal(self) -> None:
        """End the warm-up."""
        self.graphs.seal()
        if self._steps is not None:
            self._steps.seal()

    def run(
        self,
        drafts: torch.Tensor,
        step: BatchShape,
        num_drafts: int,
        sampling: SamplingBatch | None,
        floats: torch.Tensor | None,
        sample: Sample,
    ) -> torch.Tensor:
        """Draft, and return the sampled tokens, draft after draft, int32 ``[g * N]``.

        Args:
            drafts: fields of all drafts, as ``DraftTables`` has written them, int32.
            step: bucket of the step that verifies them.
            num_drafts: g.
            sampling, floats: of that step; each draft is drawn with the number of the row that verifies it.
            sample: from the logits of a step.
        """
        bucket, num_rows = self.tables.bucket(step), step.num_logits
        source = drafts.view(num_drafts, -1)
        self._model.live.set(bucket, bucket, 1)
        batch, values = _of_drafts(sampling, num_rows, is_greedy=self._is_greedy), None
        if sampling is not None and floats is not None and batch.route.has_row_values:
            values = floats[: sampling.route.num_row_floats].view(-1, num_rows, num_drafts + 1)
        found: list[torch.Tensor] = []
        for number in range(num_drafts):
            logits = self._draft(bucket, source, number, found[-1] if found else None)
            if self.has_own_head:
                # Columns of padding may be more or fewer than those of the other model.
                logits = logits[:, : batch.route.vocab_size]
                batch = replace(batch, route=replace(batch.route, vocab_size=logits.shape[1]))
            own = torch.empty(0) if values is None else values[:, :, number].reshape(-1)
            found.append(sample(logits, batch, own).token_ids)
        return torch.cat(found)

    def _draft(
        self, bucket: BatchShape, source: torch.Tensor, number: int, last: torch.Tensor | None
    ) -> torch.Tensor:
        """The logits of a draft, ``[N, V]``.

        Args:
            source: fields of all drafts, int32 ``[g, items]``.
            number: of the draft.
            last: token ids that the draft before sampled, int32 ``[N]``.
        """
        items, inputs = source[number], self._inputs_of(bucket)
        if last is not None:
            # Token ids come first.
            items = torch.cat([last, items[len(last) :]])
        inputs[STAGED].copy_(items)
        fields = {STAGED: inputs[STAGED]} if self._stages else inputs
        return self.graphs.run(bucket, self._step_of(bucket), fields)

    def _inputs_of(self, bucket: BatchShape) -> dict[str, torch.Tensor]:
        """The fields of a draft at fixed addresses, and the buffer that they are views of."""
        if bucket not in self._inputs:
            num_items = self.tables.num_items(bucket)
            buffer = torch.zeros(num_items, dtype=torch.int32, device=self._device)
            slots = self.tables.layout_of(bucket).slots.items()
            views = {name: buffer[slot.offset : slot.stop].view(slot.shape) for name, slot in slots}
            self._inputs[bucket] = {**views, STAGED: buffer}
        return self._inputs[bucket]


def _of_drafts(sampling: SamplingBatch | None, num_rows: int, *, is_greedy: bool) -> SamplingBatch:
    """The sampling of a draft: temperature and filters of the rows, without anything else."""
    assert sampling is not None, "drafts are sampled"
    route = sampling.route
    plain = SamplingRoute(num_rows, route.vocab_size)
    if route.has_random and not is_greedy:
        plain = replace(route, num_rows=num_rows, num_edits=0, num_seen=0, num_logprobs=-1, has_masks=False)
    return SamplingBatch(plain, sampling.floats[:0])
