"""Build the message of a planned step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from graphs import BatchShape, HostInputs
from hpu_duo.engine.batch import StepBatch, StepGeometry, fill
from hpu_duo.engine.message import StepMessage, message_fields, write_copies
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.kv.copies import NO_COPIES, Copy, CopyLists
from hpu_duo.sampling import RowError, SamplingBatch, SamplingRow


@dataclass(frozen=True)
class BuiltStep:
    """A message, and the data that stays on the host.

    Attributes:
        hosted: sampling of the rows in ``message.hosted``.
        errors: errors of rows that cannot be sampled, by row of logits; their tokens are undefined.
    """

    message: StepMessage
    hosted: Mapping[int, SamplingRow]
    errors: Mapping[int, Exception]


class StepBuilder:
    """Builds messages, one at a time; needs no device.

    Args:
        geometry: the sizes of the stores.
        largest: a bucket whose arrays are the largest.
        bucket_of: returns the shape to pad a step to.
        vocab_size: width of the logits.
        is_static: the device compiles each route of sampling; see ``static_route``.

    Attributes:
        class_of: class of each token of the vocabulary, for heads that keep some classes first; to be set
            before the first step of such a model.
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
        self._vocab_size, self._is_static = vocab_size, is_static
        self.class_of: np.ndarray | None = None
        self._host = HostInputs(partial(message_fields, geometry), largest)

    def build(self, plan: StepPlan, sampling: Mapping[int, Sequence[SamplingRow]]) -> BuiltStep:
        """Build the message of a plan.

        Args:
            sampling: sampling of each token, by the ring rows of ``plan.sampled_rows``; tokens of ring rows
                without it are undefined.

        Raises:
            GraphMissError: no bucket holds the step, and that is an error.
        """
        batch = StepBatch.of(plan, self._geometry.block_size)
        bucket = self._bucket_of(batch.shape)
        decode_len = self._geometry.decode_len
        sampled = [
            row.ring_row * decode_len + number
            for row in plan.sampled_rows
            for number in range(row.num_samples)
        ]
        rows: list[SamplingRow | None] = [None] * (bucket.num_logits * decode_len)
        for ring_row, each in sampling.items():
            rows[ring_row * decode_len : ring_row * decode_len + len(each)] = each
        hosted = {index: row for index, row in enumerate(rows) if row is not None and row.choose is not None}
        how, errors = None, dict[int, Exception]()
        if sampled:
            for row in hosted:
                rows[row] = None  # not for the device's sampler
            how, errors = self._sampling(rows)
        copies = CopyLists.of(plan.moves) if plan.moves else NO_COPIES
        message = self._message(batch, bucket, copies, how, sampled, tuple(hosted))
        return BuiltStep(message, hosted, errors)

    def padding(self, bucket: BatchShape, num_copies: int = 0) -> StepMessage:
        """Build a step without rows, which reads and writes trash only, to warm a bucket up.

        Args:
            num_copies: number of copies of each kind, from trash to trash.
        """
        trash = (self._geometry.trash_block, self._geometry.trash_row)
        copies = CopyLists(*(np.full((2, num_copies), unit, np.int32) for unit in trash))
        return self._message(StepBatch.empty(), bucket, copies, None, (), ())

    def copying(self, copies: Sequence[Copy], bucket: BatchShape) -> StepMessage:
        """Build a message of copies, and a step without rows."""
        return self._message(StepBatch.empty(), bucket, CopyLists.of(copies), None, (), ())

    def _message(
        self,
        batch: StepBatch,
        bucket: BatchShape,
        copies: CopyLists,
        sampling: SamplingBatch | None,
        sampled: Sequence[int],
        hosted: tuple[int, ...],
    ) -> StepMessage:
        fields = self._host.stage(bucket)
        fill(fields, batch, bucket, self._geometry, self.class_of)
        num_copies = write_copies(fields, copies, self._geometry)
        ints = self._host.take(bucket)
        return StepMessage(
            batch.shape, bucket, ints, *num_copies, sampling, np.array(sampled, np.int32), hosted
        )

    def _sampling(self, rows: list[SamplingRow | None]) -> tuple[SamplingBatch, dict[int, Exception]]:
        """Build the sampling of all rows; returns also the errors of rows, which are then left out."""
        errors = dict[int, Exception]()
        while True:
            try:
                return SamplingBatch.build(rows, self._vocab_size, is_static=self._is_static), errors
            except RowError as error:
                rows[error.row], errors[error.row] = None, error.cause
