"""Carry out planned steps: arrays, bucket, copy, captured forward, sampling."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from graphs import BatchShape, BucketTable, GraphCache, MissPolicy, StagedInputs
from graphs.buffers import FieldSpec
from hpu_duo.device import DeviceRuntime
from hpu_duo.engine.batch import RowCounts, StepGeometry, batch_of, empty_batch, fill
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.kv.store import KVStore
from hpu_duo.modeling.step_model import StepModel, run_layer
from hpu_duo.sampling import (
    RowError,
    SampledTokens,
    SamplingBatch,
    SamplingRow,
    TokenLogprobs,
    choose_on_host,
    hosted_rows,
    sample,
    static_routes,
    without,
)
from hpu_duo.uncopied import Uncopied
from hpu_duo.watch import CompileWatch
from kernels_ref import StepParts, StepTensors, prepare_step


@dataclass(frozen=True)
class StepResult:
    """What a step gave.

    Attributes:
        shape, bucket: the exact shape and the one it was padded to.
        token_ids: int32 ``[plan.num_samples]``, row after row.
        logprobs: CPU tensors with one entry per ``token_ids``, when some request asked.
        build_s: seconds spent on the host to build the step's arrays.
        errors: by ring row, of those that could not be sampled; their tokens mean nothing.
    """

    shape: BatchShape
    bucket: BatchShape
    token_ids: np.ndarray
    logprobs: TokenLogprobs | None
    build_s: float
    errors: Mapping[int, Exception] = field(default_factory=dict)


class Runner(Uncopied):
    """Owns the device side: model, stores, staged inputs and captured graphs.

    Args:
        graphs: executables by bucket.
        use_table: pad steps to the buckets of ``graphs``; otherwise each runs at its exact shape.
            ``uses_table`` says so later.
        largest: the shape that the staged inputs must hold.
        runtime: what is particular about the device.
        max_model_len: most tokens of a request.
        fail_on_recompile: a step that compiles anything raises; warm-up does not.
    Attributes:
        watch: counts what is compiled.
    """

    def __init__(
        self,
        model: StepModel,
        store: KVStore,
        geometry: StepGeometry,
        graphs: GraphCache,
        *,
        use_table: bool,
        largest: BatchShape,
        device: torch.device,
        runtime: DeviceRuntime,
        max_model_len: int,
        fail_on_recompile: bool = False,
    ) -> None:
        self.model, self.store, self.geometry, self.graphs = model, store, geometry, graphs
        self.device, self.runtime = device, runtime
        # No part of a runner refers back to it, so that its memory is free as soon as it is let go.
        this = weakref.proxy(self)
        self.watch = CompileWatch.of(lambda: this.graphs, runtime)
        self._watching: Callable[[], AbstractContextManager[None]] = (
            self.watch.forbidding if fail_on_recompile else nullcontext
        )
        self.max_model_len = max_model_len
        self._largest = largest
        fields = tuple(
            FieldSpec(name, lambda bucket, name=name: geometry.field_shapes(bucket)[name])  # type: ignore[misc]
            for name in geometry.field_shapes(largest)
        )
        self.inputs = StagedInputs(fields, [largest], device)
        self._pad_to_table(use_table)

    def _pad_to_table(self, is_padding: bool) -> None:
        self.uses_table = is_padding
        # Shapes that miss the table, any number of them, share one place.
        make_step = partial(_make_step, self.model, self.geometry, self.graphs)
        self._step_of = lru_cache(maxsize=len(self.graphs.table) + 1 if is_padding else 1)(make_step)

    @torch.inference_mode()
    def run(
        self, plan: StepPlan, sampling: Mapping[int, Sequence[SamplingRow]], vocab_size: int
    ) -> StepResult:
        """Carry out one plan.

        Args:
            sampling: how to sample each token of the ring rows of ``plan.sampled_rows``; tokens of those that
                are left out mean nothing.

        Raises:
            RecompileError: the step has compiled something, and may not.
        """
        with self._watching(), self.runtime.step():
            shape, bucket, logits, build_s = self._forward(plan)
            decode_len = self.geometry.decode_len
            wanted = [
                row.ring_row * decode_len + number
                for row in plan.sampled_rows
                for number in range(row.num_samples)
            ]
            if not wanted:
                return StepResult(shape, bucket, np.zeros(0, np.int32), None, build_s)
            began = time.perf_counter()
            rows: list[SamplingRow | None] = [None] * RowCounts.of(bucket, decode_len).logits
            for row, each in sampling.items():
                rows[row * decode_len : row * decode_len + len(each)] = each
            hosted = hosted_rows(rows)
            batch, errors = _build(
                without(rows, hosted), vocab_size, is_static=self.runtime.compiles_operators
            )
            build_s += time.perf_counter() - began
            tokens = _read(sample(logits, batch))
            if hosted:
                errors |= choose_on_host(rows, hosted, logits, tokens.token_ids)
        logprobs = None if tokens.logprobs is None else TokenLogprobs(*(x[wanted] for x in tokens.logprobs))
        errors = {place // decode_len: error for place, error in errors.items()}
        return StepResult(shape, bucket, tokens.token_ids.numpy()[wanted], logprobs, build_s, errors)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """The logits of one plan, float ``[N * M, V]``, ring row after ring row; nothing is sampled."""
        return self._forward(plan)[2]

    def set_table(self, table: BucketTable, policy: MissPolicy) -> None:
        """Pad steps to other buckets from now on; nothing may have been captured yet.

        Raises:
            ValueError: something has been captured, or a bucket does not fit the staged inputs.
        """
        num_captured = self.graphs.counters.captures
        if num_captured:
            raise ValueError(f"a table is chosen before graphs are captured, got {num_captured} graphs")
        if not self._largest.holds(table.envelope):
            raise ValueError(f"expected buckets within {self._largest}, got {table.envelope}")
        self.graphs = self.graphs.with_table(table, policy)
        self._pad_to_table(True)

    @torch.inference_mode()
    def touch(self, bucket: BatchShape) -> None:
        """Run padding through an uncaptured step, so that what is made at its first use is made."""
        with self.runtime.step():
            bucket_step(self.model, self.geometry, bucket, {})(self._padding_only(bucket))

    @torch.inference_mode()
    def capture(self, bucket: BatchShape) -> bool:
        """Capture a bucket of the table; False if it has been captured before."""
        # As in a step: what a lazy device has collected is built before the caller goes on.
        with self.runtime.step():
            return self.graphs.warm_up(self._step_of, self._padding_only, [bucket]) > 0

    @torch.inference_mode()
    def finish_warm_up(self, captured: Iterable[BatchShape]) -> None:
        """Run what steps do around their graphs, where each operator is compiled, and end the warm-up.

        Args:
            captured: buckets to run it with; one for each number of rows is enough.
        """
        if self.runtime.compiles_operators and self.uses_table:
            self._warm_up_operators({bucket.num_logits: bucket for bucket in captured}.values())
        self.graphs.seal()

    def _warm_up_operators(self, buckets: Iterable[BatchShape]) -> None:
        vocab_size = self.model.model.config.get_text_config().vocab_size
        self.store.warm_up()
        for bucket in buckets:
            logits = self.graphs.rehearse(bucket, self._step_of(bucket), self._padding_only(bucket))
            num_rows = RowCounts.of(bucket, self.geometry.decode_len).logits
            for route in static_routes(num_rows, vocab_size, self.max_model_len):
                _read(sample(logits, SamplingBatch.padding(route)))

    def _forward(self, plan: StepPlan) -> tuple[BatchShape, BatchShape, torch.Tensor, float]:
        self.store.carry_out(plan.moves)
        began = time.perf_counter()
        batch = batch_of(plan, self.geometry.block_size)
        bucket = self.graphs.resolve(batch.shape) if self.uses_table else batch.shape
        fill(self.inputs.stage(bucket), batch, bucket, self.geometry)
        self.model.live.set(batch.shape, bucket, self.geometry.decode_len)
        build_s = time.perf_counter() - began
        logits = self.graphs.run(bucket, self._step_of(bucket), self.inputs.copy_in(bucket))
        return batch.shape, bucket, logits, build_s

    def _padding_only(self, bucket: BatchShape) -> Mapping[str, torch.Tensor]:
        """Inputs of a step without rows: only trash is read and written."""
        fill(self.inputs.stage(bucket), empty_batch(), bucket, self.geometry)
        return self.inputs.copy_in(bucket)


def _make_step(
    model: StepModel, geometry: StepGeometry, graphs: GraphCache, bucket: BatchShape
) -> Callable[[Mapping[str, torch.Tensor]], torch.Tensor]:
    runners: dict[Hashable, Callable[..., Any]] = {
        kind: graphs.region(bucket, kind, run_layer) for kind in model.kinds
    }
    return bucket_step(model, geometry, bucket, runners)


def bucket_step(
    model: StepModel,
    geometry: StepGeometry,
    bucket: BatchShape,
    runners: Mapping[Hashable, Callable[..., Any]],
) -> Callable[[Mapping[str, torch.Tensor]], torch.Tensor]:
    """What is captured for a bucket: staged inputs on the device to logits ``[N * M, V]``.

    Args:
        runners: what runs the layers of each kind of ``model.kinds``.
    """
    parts = StepParts(bucket.phase.causal, bucket.phase.shared, bucket.phase.unique)

    def step(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        tensors = StepTensors(**{name: inputs[name] for name in StepTensors._fields})
        prepared = prepare_step(
            parts,
            tensors,
            decode_len=geometry.decode_len,
            block_layouts=model.block_layouts,
            ring_kinds=model.ring_kinds,
        )
        return model.logits(inputs["token_ids"], prepared, inputs["logit_index"], runners)

    return step


def _build(
    rows: Sequence[SamplingRow | None], vocab_size: int, *, is_static: bool
) -> tuple[SamplingBatch, dict[int, Exception]]:
    """The batch of all rows but those that fail, and why they do."""
    rows, errors = list(rows), dict[int, Exception]()
    while True:
        try:
            return SamplingBatch.build(rows, vocab_size, is_static=is_static), errors
        except RowError as error:
            rows[error.row], errors[error.row] = None, error.cause


def _read(tokens: SampledTokens) -> SampledTokens:
    """The same on the host, by one device-to-host copy."""
    if tokens.logprobs is None:
        return SampledTokens(tokens.token_ids.cpu(), None)
    sampled, rank, top_ids, top = tokens.logprobs
    # Token ids and ranks are exact in float32: both are at most the vocabulary's size.
    columns = (tokens.token_ids[:, None], rank[:, None], sampled[:, None], top_ids, top)
    table = torch.cat([column.float() for column in columns], dim=1).cpu()
    ids, rank, top_ids = (
        part.to(torch.int32) for part in (table[:, 0], table[:, 1], table[:, 3 : 3 + top_ids.shape[1]])
    )
    return SampledTokens(ids, TokenLogprobs(table[:, 2], rank, top_ids, table[:, 3 + top_ids.shape[1] :]))
