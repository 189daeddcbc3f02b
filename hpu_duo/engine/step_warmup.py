"""Warm-up of single buckets: capture them, and compile operators, before there are requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from graphs import BatchShape
from hpu_duo.engine.batch import RowCounts
from hpu_duo.engine.executor import Executor, bucket_step, read
from hpu_duo.engine.message import most_copies
from hpu_duo.engine.orders import Capture, FinishWarmUp, Touch
from hpu_duo.engine.step_builder import StepBuilder
from hpu_duo.kv.copies import copy_sizes
from hpu_duo.sampling import SamplingBatch, SamplingRoute, static_routes


class StepWarmUp:
    """Runs padding through steps.

    Args:
        builder: makes steps of padding.
        executor: runs them.
        vocab_size: width of the logits.
        max_model_len: most tokens of a request.
    """

    def __init__(self, builder: StepBuilder, executor: Executor, vocab_size: int, max_model_len: int) -> None:
        self._builder, self._executor = builder, executor
        self._vocab_size, self._max_model_len = vocab_size, max_model_len

    def routes(self, bucket: BatchShape) -> tuple[SamplingRoute, ...]:
        """The ways of sampling from a bucket's logits that are run; none where nothing is compiled."""
        if not self._executor.runtime.compiles_operators:
            return ()
        num_rows = RowCounts.of(bucket, self._executor.geometry.decode_len).logits
        return tuple(static_routes(num_rows, self._vocab_size, self._max_model_len))

    @torch.inference_mode()
    def touch(self, bucket: BatchShape) -> None:
        """Run padding through an uncaptured step, so that tables that are made at their first use exist."""
        executor = self._executor
        with executor.leading(Touch(bucket)), executor.runtime.step():
            bucket_step(executor.model, executor.geometry, bucket, {})(self._fields(bucket))

    @torch.inference_mode()
    def capture(self, bucket: BatchShape) -> bool:
        """Capture a bucket of the table; False if it has been captured before."""
        executor = self._executor
        padding = executor.model.live.none_of(bucket, executor.geometry.decode_len)
        # As in a step: what a lazy device has collected is built before the caller goes on.
        with executor.leading(Capture(bucket)), executor.runtime.step(), padding:
            return executor.graphs.warm_up(bucket, executor.step_of, self._padding)

    @torch.inference_mode()
    def finish(self, captured: Iterable[BatchShape]) -> None:
        """End the warm-up, after running the operators around graphs where the device compiles each of them.

        Args:
            captured: the captured buckets; one for each number of rows is run.
        """
        executor, captured = self._executor, tuple(captured)
        with executor.leading(FinishWarmUp(captured)):
            if executor.runtime.compiles_operators and executor.uses_table:
                self._run_operators(tuple({bucket.num_logits: bucket for bucket in captured}.values()))
            executor.graphs.seal()

    def _run_operators(self, buckets: tuple[BatchShape, ...]) -> None:
        executor = self._executor
        for bucket in buckets[:1]:
            for size in copy_sizes(most_copies(executor.geometry)):
                executor.copy_units(executor.copy_in(self._builder.padding(bucket, size)), size, size)
        for bucket in buckets:
            logits = executor.graphs.run_uncounted(bucket, executor.step_of(bucket), self._padding(bucket))
            for route in self.routes(bucket):
                read(executor.sample(logits, SamplingBatch.padding(route)))

    def _padding(self, bucket: BatchShape) -> Mapping[str, torch.Tensor]:
        """Inputs of a step without rows: only trash is read and written."""
        return self._executor.step_inputs(self._fields(bucket))

    def _fields(self, bucket: BatchShape) -> Mapping[str, torch.Tensor]:
        return self._executor.copy_in(self._builder.padding(bucket))
