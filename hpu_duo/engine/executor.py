"""The device side of a step: copy in, copies within the stores, captured forward, sampling, one read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from graphs import BatchShape, BucketTable, DeviceInputs, GraphCache, MissPolicy
from graphs.interrupts import interrupts_deferred
from hpu_duo.device import DeviceRuntime
from hpu_duo.device.ranks import Followers
from hpu_duo.engine.batch import StepGeometry
from hpu_duo.engine.gathering import SpreadLogits
from hpu_duo.engine.message import BLOCK_COPIES, ROW_COPIES, StepMessage, message_fields
from hpu_duo.engine.orders import Execute, Order, SetTable
from hpu_duo.engine.staged_step import STAGED, staged_step
from hpu_duo.kv.store import KVStore
from hpu_duo.modeling.step_model import StepModel, run_layer
from hpu_duo.sampling import SampledTokens, SamplingBatch, TokenLogprobs, sample
from hpu_duo.sharded import Exchanged, StepExchanges
from hpu_duo.uncopied import Uncopied
from hpu_duo.watch import CompileWatch
from kernels_ref import StepParts, StepTensors, prepare_step
from kernels_ref.loops import RegionOf, in_regions


class StepOutput(NamedTuple):
    """Results of a message, on the host.

    Attributes:
        token_ids: tokens of ``message.sampled``, int32 ``[S]``; those of ``message.hosted`` are undefined.
        logprobs: one entry per token, if the message asks for them.
        logits: of all rows, float ``[N * M, V]``, if the message has rows for the host.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: TokenLogprobs | None = None
    logits: torch.Tensor | None = None


_NOTHING = StepOutput(np.zeros(0, np.int32))


class Executor(Uncopied):
    """Owns model, stores, input buffer and captured graphs; knows nothing of requests.

    Args:
        graphs: executables by bucket.
        use_table: messages come in the buckets of ``graphs``; otherwise in exact shapes. ``uses_table`` says
            so later.
        largest: the bucket that the input buffer must hold.
        runtime: the device's runtime.
        fail_on_recompile: a step that compiles anything raises; warm-up does not.
        spread: samples where ranks have the logits of some tokens each; None = all are here.
        followers: ranks that do the same, told of it by this one; None = none, or this is one of them.
        exchanges: of a step with other ranks; None = there are none.

    Attributes:
        watch: counts what is compiled.
        bytes_copied: bytes of all messages so far.
        exchanged: bytes that this rank has given to exchanges of steps so far.
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
        fail_on_recompile: bool = False,
        spread: SpreadLogits | None = None,
        followers: Followers | None = None,
        exchanges: StepExchanges | None = None,
    ) -> None:
        self.spread, self.followers = spread, followers
        self._exchanges, self.exchanged = exchanges, Exchanged()
        self.model, self.store, self.geometry, self.graphs = model, store, geometry, graphs
        self.device, self.runtime, self.largest = device, runtime, largest
        # No part of an executor refers back to it, so that its memory is free as soon as it is let go.
        this = weakref.proxy(self)
        self.watch = CompileWatch.of(lambda: this.graphs, runtime)
        self._watching: Callable[[], AbstractContextManager[None]] = (
            self.watch.forbidding if fail_on_recompile else nullcontext
        )
        self.inputs = DeviceInputs(partial(message_fields, geometry), largest, device)
        self.bytes_copied = 0
        self._run_in(use_table)

    def _run_in(self, uses_table: bool) -> None:
        self.uses_table = uses_table
        # Shapes that miss the table, any number of them, share one place.
        stages = self.inputs if self.runtime.compiles_operators else None
        make_step = partial(_make_step, self.model, self.geometry, self.graphs, stages)
        self.step_of = lru_cache(maxsize=len(self.graphs.table) + 1 if uses_table else 1)(make_step)

    def bucket_of(self, shape: BatchShape) -> BatchShape:
        """The shape to pad a step to.

        Raises:
            GraphMissError: no bucket holds it, and that is an error.
        """
        return self.graphs.resolve(shape) if self.uses_table else shape

    def set_table(self, table: BucketTable, policy: MissPolicy) -> None:
        """Run in other buckets from now on; nothing may have been captured yet.

        Raises:
            ValueError: something has been captured, or a bucket does not fit the input buffer.
        """
        num_captured = self.graphs.counters.captures
        if num_captured:
            raise ValueError(f"a table is chosen before graphs are captured, got {num_captured} graphs")
        if not self.largest.holds(table.envelope):
            raise ValueError(f"expected buckets within {self.largest}, got {table.envelope}")
        with self.leading(SetTable(table, policy)):
            self._set_table(table, policy)

    def _set_table(self, table: BucketTable, policy: MissPolicy) -> None:
        self.graphs = self.graphs.with_table(table, policy)
        self._run_in(True)

    @torch.inference_mode()
    def execute(self, message: StepMessage) -> StepOutput:
        """Carry out one message.

        Raises:
            RecompileError: the step has compiled something, and may not.
            RankError: other ranks do not follow.
        """
        with self.leading(Execute(message)), self._watching(), self.runtime.step():
            logits = self._forward(message)
            if message.sampling is None:
                return _NOTHING
            self.bytes_copied += message.sampling.num_bytes
            tokens = read(self.sample(logits, message.sampling))
            on_host = self.whole(logits).cpu() if message.hosted else None
        sampled, logprobs = message.sampled, tokens.logprobs
        if logprobs is not None:
            logprobs = TokenLogprobs(*(each[sampled] for each in logprobs))
        return StepOutput(tokens.token_ids.numpy()[sampled], logprobs, on_host)

    @torch.inference_mode()
    def logits(self, message: StepMessage) -> torch.Tensor:
        """The logits of a message, float ``[N * M, V]``, on the device; nothing is sampled."""
        with self.leading(Execute(message, is_sampled=False)):
            return self.whole(self._forward(message))

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        """Sample from what a step returns, whichever ranks hold it."""
        return sample(logits, batch) if self.spread is None else self.spread.sample(logits, batch)

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of all tokens, of what a step returns."""
        return logits if self.spread is None else self.spread.whole(logits)

    @contextmanager
    def leading(self, order: Order) -> Iterator[None]:
        """Have the followers, if any, do what is done inside.

        Raises:
            RankError: they cannot follow, or it has failed here, so that ranks are no longer in step.
        """
        if self.followers is None:
            yield
            return
        self.followers.tell(order)
        try:
            # An exchange that is left in the middle would keep the others waiting.
            with interrupts_deferred(only_first=True):
                yield
        except BaseException as error:
            raise self.followers.failed(error) from error

    def copy_in(self, message: StepMessage) -> dict[str, torch.Tensor]:
        """Copy the integers of a message to the device; returns them by field name."""
        self.bytes_copied += message.ints.nbytes
        return self.inputs.copy_in(message.bucket, message.ints)

    def copy_units(self, inputs: Mapping[str, torch.Tensor], num_blocks: int, num_rows: int) -> None:
        """Carry out the first copies of each kind that a message asks for."""
        self.store.carry_out(inputs[BLOCK_COPIES][:, :num_blocks], inputs[ROW_COPIES][:, :num_rows])

    def _forward(self, message: StepMessage) -> torch.Tensor:
        inputs = self.copy_in(message)
        if message.num_block_copies or message.num_row_copies:
            self.copy_units(inputs, message.num_block_copies, message.num_row_copies)
        if self._exchanges is not None:
            self.exchanged = self.exchanged.plus(self._exchanges.of(message.bucket))
        self.model.live.set(message.shape, message.bucket, self.geometry.decode_len)
        return self.graphs.run(message.bucket, self.step_of(message.bucket), self.step_inputs(inputs))

    def step_inputs(self, fields: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return what a step takes of what ``copy_in`` returned: that, or the buffer that it lies in."""
        return {STAGED: self.inputs.buffer} if self.runtime.compiles_operators else fields


def _make_step(
    model: StepModel,
    geometry: StepGeometry,
    graphs: GraphCache,
    staged: DeviceInputs | None,
    bucket: BatchShape,
) -> Callable[[Mapping[str, torch.Tensor]], torch.Tensor]:
    runners: dict[Hashable, Callable[..., Any]] = {
        kind: graphs.region(bucket, kind, run_layer) for kind in model.kinds
    }
    region_of = graphs.regions_of(bucket)
    if staged is not None:
        return staged_step(model, geometry, bucket, staged.layout(bucket), runners, region_of)
    return bucket_step(model, geometry, bucket, runners, region_of)


def bucket_step(
    model: StepModel,
    geometry: StepGeometry,
    bucket: BatchShape,
    runners: Mapping[Hashable, Callable[..., Any]],
    region_of: RegionOf | None = None,
) -> Callable[[Mapping[str, torch.Tensor]], torch.Tensor]:
    """Return the function that is captured for a bucket: from inputs on the device to logits ``[N * M, V]``.

    Args:
        runners: functions that run the layers of each kind of ``model.kinds``.
        region_of: returns what runs the body of a loop that a region of a layer does not hold.
    """
    parts = StepParts(bucket.phase.causal, bucket.phase.shared, bucket.phase.unique)

    def step(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        tensors = StepTensors(**{name: inputs[name] for name in StepTensors._fields})
        if parts.causal and parts.shared:
            model.copy_to_scratch(tensors.chunk_row)
        prepared = prepare_step(parts, tensors, decode_len=geometry.decode_len, stores=model.stores)
        with nullcontext() if region_of is None else in_regions(region_of):
            return model.logits(inputs["token_ids"], prepared, inputs["logit_index"], runners)

    return step


def read(tokens: SampledTokens) -> SampledTokens:
    """Copy sampled tokens to the host, in one device-to-host copy."""
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
