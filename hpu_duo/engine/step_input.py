"""The input of one step as plain data, its builder, and the result of the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from graphs import BatchShape, BucketTable, DeviceInputs, GraphCache, HostInputs, MissPolicy
from hpu_duo.engine.batch import StepBatch, StepGeometry, fill
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.kv.pool import NO_COPIES, Copy, CopyLists, padded_size
from hpu_duo.kv.tiers.link import Transfers
from hpu_duo.modeling.step_model import StepModel
from hpu_duo.parallel import Exchanged
from hpu_duo.request import Request
from hpu_duo.sampling import RowError, SampledTokens, SamplingBatch, SamplingRoute, SamplingRow, TokenLogprobs
from kernels_ref.units import index_dtype

BLOCK_COPIES = "block_copies"
"""Name of a field of the integers, like the next constant."""
ROW_COPIES = "row_copies"


@dataclass(frozen=True, eq=False)
class StepInput:
    """A step, padded to its bucket; plain data, see ``hpu_duo.device.plain``.

    Attributes:
        shape, bucket: the exact shape and the one it was padded to.
        ints: int32, the arrays of ``message_fields`` one after the other: copies within the stores, and the
            step itself.
        num_block_copies, num_row_copies: how many of the copies in ``ints`` to execute before the step writes
            anything, padding included; the rest of these fields is undefined.
        sampling: sampling parameters, with one float32 array, and one int32 array of masks if a row has a
            grammar; None = no sampling.
        sampled: rows of logits whose tokens are returned, int32 ``[S]``, in order.
        host_sampled: rows of logits whose tokens are sampled on the host, to which logits are copied then.
        has_sources: whether ``token_source`` is behind the fields of ``ints``: for each query token -1, or
            the place of its id among the ids that were sampled last, which stay on the device. Those are the
            drafts of this message, draft after draft, if it has any, else the tokens of the previous step.
        num_drafts: drafts of each row that are computed before the step, whose fields are behind that; see
            ``model_drafts``.
        transfers: between device and host, that begin after the copies; None = there are none.
    """

    shape: BatchShape
    bucket: BatchShape
    ints: npt.NDArray[np.int32]
    num_block_copies: int
    num_row_copies: int
    sampling: SamplingBatch | None
    sampled: npt.NDArray[np.int32]
    host_sampled: tuple[int, ...] = ()
    has_sources: bool = False
    num_drafts: int = 0
    transfers: Transfers | None = None


def with_sources(
    message: StepInput, sources: npt.NDArray[np.int32], drafts: npt.NDArray[np.int32] | None = None
) -> StepInput:
    """Return a message whose tokens come from the device where ``token_source`` is no -1.

    Args:
        sources: ``token_source`` of the leading query tokens, int32.
        drafts: fields of each draft of the message, int32 ``[g, items]``.
    """
    begin, end, stop = extra_places(len(message.ints), message.bucket, 0 if drafts is None else drafts.size)
    ints = np.zeros(stop, np.int32)
    ints[: len(message.ints)] = message.ints
    ints[begin : begin + len(sources)], ints[begin + len(sources) : end] = sources, -1
    if drafts is not None:
        ints[end:] = drafts.ravel()
    return replace(message, ints=ints, has_sources=True, num_drafts=0 if drafts is None else len(drafts))


def extra_places(num_items: int, bucket: BatchShape, num_drafted: int = 0) -> tuple[int, int, int]:
    """Return where ``token_source`` begins behind the fields of a step, where it ends, and where all ends.

    Args:
        num_items: of the fields.
        num_drafted: items of drafts, which begin where ``token_source`` ends.
    """
    begin = num_items + -num_items % _ALIGNED
    end = begin + bucket.query_len + -bucket.query_len % _ALIGNED
    return begin, end, end + num_drafted


_ALIGNED = 16
"""Items of 64 bytes."""


def put_tokens(inputs: DeviceInputs, bucket: BatchShape, tokens: torch.Tensor) -> None:
    """Replace the token ids of a step on the device, int32 ``[Q]``.

    They are written to the buffer as a whole: writes of a part of a tensor are no operation of some devices.
    """
    place, device = inputs.layout(bucket).slots["token_ids"].offset, inputs.device
    places = torch.arange(place, place + len(tokens), dtype=index_dtype(device), device=device)
    inputs.buffer.index_copy_(0, places, tokens)


def message_fields(geometry: StepGeometry, bucket: BatchShape) -> dict[str, tuple[int, ...]]:
    """Shape of every array among a message's integers, by name.

    Copies come first, so that their offsets are equal in every bucket: a device may compile operators by the
    offsets of views.
    """
    most = most_copies(geometry)
    return {BLOCK_COPIES: (2, most), ROW_COPIES: (2, most), **geometry.field_shapes(bucket)}


def most_copies(geometry: StepGeometry) -> int:
    """Return the maximum numbers of blocks and of rows that are copied in a step.

    A row is a destination when it moves, when a sample forks or when a prefix is reused, and a snapshot when
    it is stored. A fork copies a block as well, and a block that moves may swap its content with another. So
    is each unit that transfers between device and host use.
    """
    return geometry.null_row + 2 * geometry.max_block_moves + geometry.num_staged


def write_copies(
    fields: Mapping[str, npt.NDArray[np.int32]], copies: CopyLists, geometry: StepGeometry
) -> tuple[int, int]:
    """Write copies into their fields, padded by copies of null units; returns both padded numbers.

    The rest of the fields is not read.
    """
    return (
        _write(fields[BLOCK_COPIES], copies.blocks, geometry.null_block),
        _write(fields[ROW_COPIES], copies.rows, geometry.null_row),
    )


def _write(field: npt.NDArray[np.int32], copies: npt.NDArray[np.int32], null: int) -> int:
    num_copies = copies.shape[1]
    if not num_copies:
        return 0
    size = padded_size(num_copies, field.shape[1])
    field[:, :num_copies] = copies
    field[:, num_copies:size] = null
    return size


@dataclass(frozen=True)
class BuiltStep:
    """The input of a step, and the data that stays on the host.

    Attributes:
        host_sampled: sampling parameters of the rows in ``message.host_sampled``.
        errors: of rows that cannot be sampled, by row of logits; their tokens are undefined.
    """

    message: StepInput
    host_sampled: Mapping[int, SamplingRow]
    errors: Mapping[int, Exception]


@dataclass(frozen=True)
class StepResult:
    """Result of a step.

    Attributes:
        message: the step.
        token_ids: int32 ``[plan.num_samples]``, row after row.
        logprobs: CPU tensors with one entry per ``token_ids``, if some request has them enabled.
        device_s: seconds of the device, both phases together.
        errors: errors of rows that could not be sampled, by ring row, each with the number of its first
            token that is undefined: 0, or more behind drafts.
        drafted: tokens that the drafts of the message sampled for each row, int32 ``[g, N]``; None without.
    """

    message: StepInput
    token_ids: npt.NDArray[np.int32]
    logprobs: TokenLogprobs | None
    device_s: float
    errors: Mapping[int, tuple[int, Exception]] = field(default_factory=dict)
    drafted: npt.NDArray[np.int32] | None = None

    @property
    def shape(self) -> BatchShape:
        """The exact shape."""
        return self.message.shape

    @property
    def bucket(self) -> BatchShape:
        """The bucket that it was padded to."""
        return self.message.bucket


def apart(table: torch.Tensor, message: StepInput) -> tuple[torch.Tensor, npt.NDArray[np.int32]]:
    """Return the sampled tokens, or what ``packed`` returned, and the drafts that were appended to it."""
    assert message.sampling is not None, "tokens were read"
    num_drafted = message.num_drafts * message.bucket.num_logits
    sampled, drafted = table[:-num_drafted], table[-num_drafted:].to(torch.int32)
    if message.sampling.route.num_logprobs >= 0:
        sampled = sampled.view(message.sampling.route.num_rows, -1)
    return sampled, drafted.numpy().reshape(message.num_drafts, -1)


class AddsDrafts(Protocol):
    """Interface of tables of model drafts to the builder of messages; see ``model_drafts``.

    Attributes:
        geometry: of drafts.
    """

    geometry: StepGeometry

    def add_to(
        self, message: StepInput, plan: StepPlan, token_ids: npt.NDArray[np.int32], decode_len: int
    ) -> StepInput:
        """Return the message of a plan with the drafts of its rows."""
        ...

    def can_begin(self, request: Request) -> bool:
        """Whether the model can draft for a request behind the last step that was built."""
        ...

    def note(self, message: StepInput, plan: StepPlan, token_ids: npt.NDArray[np.int32]) -> None:
        """Write what a model that drafts needs besides, in place, and remember what its next drafts need."""
        ...

    def add_padding(self, message: StepInput, decode_len: int) -> StepInput:
        """Return a message of padding with drafts of padding."""
        ...

    def num_extra(self, largest: BatchShape, decode_len: int) -> int:
        """Most items that drafts add to a message."""
        ...

    def bucket(self, step: BatchShape) -> BatchShape:
        """The bucket of drafts for a step."""
        ...


class RunsDrafts(Protocol):
    """Interface of what runs model drafts to the executor; see ``model_drafts``.

    Attributes:
        graphs: captured drafts.
        tables: of their fields.
    """

    graphs: GraphCache

    @property
    def tables(self) -> AddsDrafts:
        """Tables of their fields."""
        ...

    @property
    def model(self) -> StepModel:
        """The model that drafts."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the stores of the model that drafts, if it has its own."""
        ...

    @property
    def description(self) -> str:
        """Facts that the graphs of drafts depend on."""
        ...

    @property
    def has_own_head(self) -> bool:
        """Whether the model that drafts has a head of its own, all of it on each rank."""
        ...

    def exchanged(self, step: BatchShape, num_drafts: int = 0) -> Exchanged:
        """Bytes that a rank sends for the drafts in front of a step; without drafts, to follow the step."""
        ...

    def run(
        self,
        drafts: torch.Tensor,
        step: BatchShape,
        num_drafts: int,
        sampling: SamplingBatch | None,
        floats: torch.Tensor | None,
        sample: Callable[[torch.Tensor, SamplingBatch, torch.Tensor], SampledTokens],
    ) -> torch.Tensor:
        """Draft, and return the sampled tokens."""
        ...

    def attach(self, inputs: DeviceInputs) -> None:
        """Read the steps from these inputs from now on."""
        ...

    def follow(self, shape: BatchShape, bucket: BatchShape, sampled: torch.Tensor | None) -> None:
        """Compute a step that has been sampled in the stores of the model that drafts, if it has its own."""
        ...

    def carry_out(self, blocks: torch.Tensor, rows: torch.Tensor) -> None:
        """Carry out copies in these stores."""
        ...

    def warm_up(
        self, bucket: BatchShape, fields_of: Callable[[BatchShape], Mapping[str, torch.Tensor]]
    ) -> None:
        """Capture the steps of a bucket by padding."""
        ...

    def exchange(
        self,
        added: BatchShape,
        dropped: BatchShape,
        fields_of: Callable[[BatchShape], Mapping[str, torch.Tensor]],
    ) -> None:
        """Exchange a bucket of the steps in these stores."""
        ...

    def seal(self) -> None:
        """End the warm-up."""
        ...

    def set_table(self, table: BucketTable, row_len: Callable[[BatchShape], int], policy: MissPolicy) -> None:
        """Replace the buckets by those of drafts for a table of steps."""
        ...


class StepBuilder:
    """Builds the inputs of steps, one at a time; needs no device.

    Args:
        geometry: the sizes of the stores.
        largest: a bucket whose arrays are the largest.
        bucket_of: returns the bucket to pad a step to.
        vocab_size: width of the logits.
        is_static: the device compiles each route of sampling; see ``static_route``.

    Attributes:
        vocab_size: as given.
        class_of: class of each token of the vocabulary, for heads that prefer to store some classes; to be
            set before the first step of such a model.
        drafts: tables of model drafts; None without them.
    """

    def __init__(
        self,
        geometry: StepGeometry,
        largest: BatchShape,
        bucket_of: Callable[[BatchShape], BatchShape],
        vocab_size: int,
        *,
        is_static: bool,
    ) -> None:
        self._geometry, self._bucket_of = geometry, bucket_of
        self.vocab_size, self._is_static = vocab_size, is_static
        self.class_of: np.ndarray | None = None
        self.drafts: AddsDrafts | None = None
        self._host = HostInputs(partial(message_fields, geometry), message_fields(geometry.longest, largest))

    def build(self, plan: StepPlan, sampling: Mapping[int, Sequence[SamplingRow]]) -> BuiltStep:
        """Build the input of a planned step.

        Args:
            sampling: sampling parameters of each token, by the ring rows of ``plan.sampled_rows``; tokens of
                ring rows without it are undefined.

        Raises:
            GraphMissError: the step fits no bucket, and ``on_miss`` is "error".
        """
        batch = StepBatch.of(plan, self._geometry.block_size)
        bucket = self._bucket_of(batch.shape)
        decode_len = self._geometry.row_len(bucket)
        sampled = [
            row.ring_row * decode_len + number
            for row in plan.sampled_rows
            for number in range(row.num_samples)
        ]
        rows: list[SamplingRow | None] = [None] * (bucket.num_logits * decode_len)
        for ring_row, each in sampling.items():
            rows[ring_row * decode_len : ring_row * decode_len + len(each)] = each
        host_sampled = {
            index: row for index, row in enumerate(rows) if row is not None and row.choose is not None
        }
        how, errors = None, dict[int, Exception]()
        if sampled:
            for row in host_sampled:
                rows[row] = None  # sampled on the host
            how, errors = self._sampling(rows)
        copies = CopyLists.of(plan.moves) if plan.moves else NO_COPIES
        message = self._message(batch, bucket, copies, how, sampled, tuple(host_sampled), plan.transfers)
        if plan.has_model_drafts:
            assert self.drafts is not None, "a model drafts"
            message = self.drafts.add_to(message, plan, batch.token_ids, decode_len)
        if self.drafts is not None:
            self.drafts.note(message, plan, batch.token_ids)
        return BuiltStep(message, host_sampled, errors)

    def padding(self, bucket: BatchShape, num_copies: int = 0) -> StepInput:
        """Build a step of padding, which reads and writes null units only, to warm a bucket up.

        Args:
            num_copies: number of copies of each kind, from null units to null units.
        """
        null = (self._geometry.null_block, self._geometry.null_row)
        copies = CopyLists(*(np.full((2, num_copies), unit, np.int32) for unit in null))
        return self._message(StepBatch.empty(), bucket, copies, None, (), ())

    def padding_with_drafts(self, bucket: BatchShape, route: SamplingRoute) -> StepInput:
        """Build a step of padding with drafts that are sampled by a route, to warm them up."""
        assert self.drafts is not None, "a model drafts"
        message = replace(self.padding(bucket), sampling=SamplingBatch.padding(route))
        return self.drafts.add_padding(message, self._geometry.row_len(bucket))

    def copying(
        self, copies: Sequence[Copy], bucket: BatchShape, transfers: Transfers | None = None
    ) -> StepInput:
        """Build the input of a step with copies and transfers, and no rows."""
        return self._message(StepBatch.empty(), bucket, CopyLists.of(copies), None, (), (), transfers)

    def _message(
        self,
        batch: StepBatch,
        bucket: BatchShape,
        copies: CopyLists,
        sampling: SamplingBatch | None,
        sampled: Sequence[int],
        host_sampled: tuple[int, ...],
        transfers: Transfers | None = None,
    ) -> StepInput:
        fields = self._host.stage(bucket)
        fill(fields, batch, bucket, self._geometry, self.class_of)
        num_copies = write_copies(fields, copies, self._geometry)
        ints = self._host.take(bucket)
        return StepInput(
            batch.shape,
            bucket,
            ints,
            *num_copies,
            sampling,
            np.array(sampled, np.int32),
            host_sampled,
            transfers=transfers,
        )

    def _sampling(self, rows: list[SamplingRow | None]) -> tuple[SamplingBatch, dict[int, Exception]]:
        """Build the sampling parameters of all rows; returns also the errors of rows, which are omitted."""
        errors = dict[int, Exception]()
        while True:
            try:
                return SamplingBatch.build(rows, self.vocab_size, is_static=self._is_static), errors
            except RowError as error:
                rows[error.row], errors[error.row] = None, error.cause
