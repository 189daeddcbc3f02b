"""The device side of a step: copy in, copies within the stores, captured forward, sampling, one read back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from graphs import BatchShape, BucketTable, DeviceInputs, GraphCache, Layout, MissPolicy
from graphs.interrupts import interrupts_deferred
from hpu_duo.device import DeviceRuntime
from hpu_duo.device.ranks import WorkerRanks
from hpu_duo.engine.batch import StepGeometry
from hpu_duo.engine.compile_watch import CacheSource, CompileWatch, Counts
from hpu_duo.engine.orders import Capture, CarryOut, Exchange, Execute, FinishWarmUp, Order, SetTable, Touch
from hpu_duo.engine.step_input import (
    BLOCK_COPIES,
    ROW_COPIES,
    RunsDrafts,
    StepBuilder,
    StepInput,
    apart,
    extra_places,
    message_fields,
    most_copies,
    put_tokens,
)
from hpu_duo.kv.pool import copy_sizes
from hpu_duo.kv.store import KVStore
from hpu_duo.kv.tiers.link import Link
from hpu_duo.modeling.step_model import StepModel, run_layer
from hpu_duo.not_picklable import NotPicklable
from hpu_duo.parallel import Exchanged, SpreadLogits, StepExchanges
from hpu_duo.sampling import SampledTokens, SamplingBatch, SamplingRoute, TokenLogprobs, sample, static_routes
from hpu_duo.sampling.sampler import packed, unpacked
from kernels_ref import Step, StepParts, StepTensors
from kernels_ref.loops import RegionOf, in_regions
from kernels_ref.step import PlanKey

# N rows of logits, V tokens of the vocabulary, T ranks

STAGED = "staged"
"""Name of the only input of a step."""

Prepared: TypeAlias = tuple[
    torch.Tensor, torch.Tensor, StepTensors, torch.Tensor, torch.Tensor, tuple[Any, ...]
]
"""Token ids, index of logits, and the parts of a ``Step``; plans in the order of the model's stores."""


def staged_step(
    model: StepModel,
    geometry: StepGeometry,
    bucket: BatchShape,
    layout: Layout,
    runners: Mapping[Hashable, Callable[..., Any]],
    region_of: RegionOf,
) -> Callable[[Mapping[str, torch.Tensor]], torch.Tensor]:
    """Return the function that is captured for a bucket: from the staging buffer to logits ``[N * M, V]``.

    Args:
        layout: places of the bucket's arrays in the buffer.
        runners: functions that run the layers of each kind of ``model.kinds``.
        region_of: returns the function that runs a region.
    """
    parts = StepParts(bucket.phase.causal, bucket.phase.shared, bucket.phase.unique)
    prepare = region_of(("prepare",), _preparing(model, geometry.row_len(bucket), layout, parts))
    keys: list[PlanKey] = [(kind.key, layout) for kind, layouts in model.stores.items() for layout in layouts]
    keys += [kind.key for kind in model.recurrences]
    decode_len, keeps_rows = geometry.row_len(bucket), model.mask_dtype is not None and parts.has_decodes_only

    def step(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        token_ids, logit_index, tensors, token, slot, plans = prepare(inputs[STAGED])
        if parts.causal and parts.shared:
            model.copy_to_scratch(tensors.chunk_row, region_of)
        of_layers, of_drafts = dict(zip(keys, plans)), geometry.is_draft
        prepared = Step(parts, tensors, decode_len, token, slot, of_layers, keeps_rows, is_draft=of_drafts)
        with in_regions(region_of):
            return model.logits(token_ids, prepared, logit_index, runners)

    return step


def _preparing(
    model: StepModel, decode_len: int, layout: Layout, parts: StepParts
) -> Callable[[torch.Tensor], Prepared]:
    """Return a function of the staging buffer."""
    places = tuple((name, slot.offset, slot.stop, slot.shape) for name, slot in layout.slots.items())
    wanted = ("token_ids", "logit_index", *StepTensors._fields)
    prepare_step = model.prepare

    def prepare(staged: torch.Tensor) -> Prepared:
        # Copies: a view of the buffer would be an input of every layer.
        fields = {
            name: staged[begin:end].view(shape).clone()
            for name, begin, end, shape in places
            if name in wanted
        }
        tensors = StepTensors(**{name: fields[name] for name in StepTensors._fields})
        step = prepare_step(parts, tensors, decode_len=decode_len)
        plans = tuple(step.plans.values())
        return fields["token_ids"], fields["logit_index"], tensors, step.row_token, step.decode_slot, plans

    return prepare


class LaunchedStep(NamedTuple):
    """A message that is on its way through the device; nothing of it has been read.

    Attributes:
        message: the step.
        tokens: sampled tokens, as ``packed`` returned them, on the device; None where nothing is sampled.
        logits: of all rows, float ``[N * M, V]``, on the device, if the message has rows for the host.
        compiled: counts of compilations before it, where none may be added.
    """

    message: StepInput
    tokens: torch.Tensor | None
    logits: torch.Tensor | None
    compiled: Counts | None


class StepOutput(NamedTuple):
    """Results of a step, on the host.

    Attributes:
        token_ids: tokens of ``message.sampled``, int32 ``[S]``; those of ``host_sampled`` are undefined.
        logprobs: one entry per token, if the message requests them.
        logits: of all rows, float ``[N * M, V]``, if the message has rows for the host.
        drafted: tokens of the drafts of the message, int32 ``[g, N]``, if it has any.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: TokenLogprobs | None = None
    logits: torch.Tensor | None = None
    drafted: npt.NDArray[np.int32] | None = None


_NOTHING = StepOutput(np.zeros(0, np.int32))


class Executor(NotPicklable):
    """Owns model, stores, input buffer and captured graphs; independent of requests.

    Args:
        graphs: executables by bucket.
        use_table: messages are padded to the buckets of ``graphs``; otherwise they have exact shapes. Stored
            as ``uses_table``.
        largest: the bucket that the input buffer is allocated for.
        runtime: the device's runtime.
        fail_on_recompile: a step that compiles anything raises; warm-up does not.
        spread: sampler for logits that are sharded over ranks; None = all are here.
        followers: worker ranks, to which this one broadcasts each step; None = there are none, or this is
            one.
        exchanges: of a step with other ranks; None without other ranks.
        drafts: runs the drafts of messages; None without a model that drafts.
        link: to records in host memory; None without a tier there.

    Attributes:
        watch: counts what is compiled.
        bytes_copied: bytes of all messages so far.
        exchanged: bytes that this rank has sent in exchanges of steps so far.
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
        followers: WorkerRanks | None = None,
        exchanges: StepExchanges | None = None,
        drafts: RunsDrafts | None = None,
        link: Link | None = None,
    ) -> None:
        self.spread, self.followers, self.link = spread, followers, link
        self.drafts, self._sampled = drafts, torch.zeros(1, dtype=torch.int32, device=device)
        self._exchanges, self.exchanged, self.bytes_copied = exchanges, Exchanged(), 0
        self.model, self.store, self.geometry, self.graphs = model, store, geometry, graphs
        self.device, self.runtime, self.largest = device, runtime, largest
        this = weakref.proxy(self)  # so that its memory is freed with the last reference
        self.watch = CompileWatch.of(lambda: this.graphs, runtime)
        num_extra = extra_places(0, largest)[-1]
        if drafts is not None:
            num_extra = drafts.tables.num_extra(largest, geometry.decode_len)
            drafted = CacheSource(lambda: drafts.graphs, "the graph cache of drafts")
            self.watch = CompileWatch((*self.watch.sources, drafted))
        self._fails_on_recompile = fail_on_recompile
        fields = message_fields(geometry.longest, largest)
        self.inputs = DeviceInputs(partial(message_fields, geometry), fields, device, num_extra)
        if drafts is not None:
            drafts.attach(self.inputs)
        self._run_in(use_table)

    def _run_in(self, uses_table: bool) -> None:
        self.uses_table = uses_table
        stages = self.inputs.layout if self.runtime.compiles_operators else None
        make = partial(make_step, self.model, self.geometry, self.graphs, stages)
        graphs = self.graphs
        self.step_of = StepFunctions(make, lambda shape: uses_table and shape in graphs.table).__getitem__

    def bucket_of(self, shape: BatchShape) -> BatchShape:
        """The shape to pad a step to.

        Raises:
            GraphMissError: the step fits no bucket, and ``on_miss`` is "error".
        """
        return self.graphs.resolve(shape) if self.uses_table else shape

    def set_table(self, table: BucketTable, policy: MissPolicy) -> None:
        """Replace the bucket table, before anything is captured.

        Raises:
            ValueError: something has been captured, or a bucket does not fit the input buffer.
        """
        if num_captured := self.graphs.counters.captures:
            raise ValueError(f"expected a table before graphs are captured, got {num_captured} graphs")
        if not self.largest.holds(table.envelope):
            raise ValueError(f"expected buckets within {self.largest}, got {table.envelope}")
        with self.leading(SetTable(table, policy)):
            self._set_table(table, policy)

    def _set_table(self, table: BucketTable, policy: MissPolicy) -> None:
        self.graphs = self.graphs.with_table(table, policy)
        if self.drafts is not None:
            self.drafts.set_table(table, self.geometry.row_len, policy)
        self._run_in(True)

    def execute(self, message: StepInput) -> StepOutput:
        """Launch a message and wait for its results; see ``launch`` and ``finish``."""
        return self.finish(self.launch(message))

    @torch.inference_mode()
    def launch(self, message: StepInput) -> LaunchedStep:
        """Put all work of a message on the device, sampling included; nothing is read back.

        Raises:
            RankError: other ranks do not follow.
        """
        compiled = self.watch.snapshot() if self._fails_on_recompile else None
        tokens = on_device = None
        with self.leading(Execute(message)), self.runtime.step():
            logits, floats, drafted = self._forward(message)
            if message.sampling is not None:
                tokens = self.tokens(logits, message.sampling, floats, drafted)
                on_device = self.whole(logits) if message.host_sampled else None
            if self.drafts is not None:
                self._follow(self.drafts, message)
        return LaunchedStep(message, tokens, on_device, compiled)

    @torch.inference_mode()
    def finish(self, launched: LaunchedStep) -> StepOutput:
        """Read the results of a launched message, in one copy, and one more for logits.

        Raises:
            RecompileError: the step compiled something although ``fail_on_recompile`` is set.
            RankError: the same, or a failure of the device, where other ranks follow.
        """
        message, tokens, logits, compiled = launched
        try:
            output = _NOTHING
            if tokens is not None:
                with self.runtime.results():
                    table = tokens.cpu()
                    on_host = None if logits is None else logits.cpu()
                table, drafted = (table, None) if not message.num_drafts else apart(table, message)
                token_ids, logprobs = (table, None) if table.ndim == 1 else unpacked(table, message.sampled)
                output = StepOutput(token_ids.numpy()[message.sampled], logprobs, on_host, drafted)
            if compiled is not None:
                self.watch.forbid_since(compiled)
        except Exception as error:
            if self.followers is None:
                raise
            raise self.followers.failed(error) from error
        return output

    def tokens(
        self,
        logits: torch.Tensor,
        sampling: SamplingBatch,
        floats: torch.Tensor | None = None,
        drafted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sample, and return all that is read of a step: see ``packed``; behind it the drafted tokens."""
        self.bytes_copied += sampling.num_bytes
        found = self.sample(logits, sampling, floats)
        self._sampled = found.token_ids
        tokens = found.token_ids if found.logprobs is None else packed(found.token_ids, found.logprobs)
        return tokens if drafted is None else torch.cat([tokens.view(-1), drafted.to(tokens.dtype)])

    def run_drafts(self, message: StepInput) -> None:
        """Run a message of padding with drafts, to its tokens, without counting it: for warm-up."""
        inputs = self.copy_in(message)
        floats, drafted = self._take_sampled(message, inputs)
        step = self.step_of(message.bucket)
        logits = self.graphs.run_uncounted(message.bucket, step, self.step_inputs(inputs))
        assert message.sampling is not None, "padding is sampled"
        self.tokens(logits, message.sampling, floats, drafted).cpu()

    @torch.inference_mode()
    def logits(self, message: StepInput) -> torch.Tensor:
        """The logits of a message, float ``[N * M, V]``, on the device; nothing is sampled."""
        with self.leading(Execute(message, is_sampled=False)):
            logits = self._forward(message)[0]
            if self.drafts is not None:
                self._follow(self.drafts, message)
            return self.whole(logits)

    def _follow(self, drafts: RunsDrafts, message: StepInput) -> None:
        drafts.follow(message.shape, message.bucket, None if message.sampling is None else self._sampled)
        self.exchanged = self.exchanged.plus(drafts.exchanged(message.bucket))

    def sample(
        self, logits: torch.Tensor, batch: SamplingBatch, floats: torch.Tensor | None = None
    ) -> SampledTokens:
        """Sample from the logits that a step returns, sharded or not.

        Args:
            floats: those of the batch, if they are on the device already.
        """
        if self.spread is None:
            return sample(logits, batch, floats)
        return self.spread.sample(logits, batch, floats)

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of all tokens, gathered from ranks if sharded."""
        return logits if self.spread is None else self.spread.whole(logits)

    @contextmanager
    def leading(self, order: Order) -> Iterator[None]:
        """Broadcast an order to the worker ranks, if any; the body executes it here.

        Raises:
            RankError: worker ranks are lost, or the body failed, so that ranks are out of sync.
        """
        if self.followers is None:
            yield
            return
        self.followers.tell(order)
        try:
            # The others would wait for ever in an exchange that is not completed.
            with interrupts_deferred(only_first=True):
                yield
        except BaseException as error:
            raise self.followers.failed(error) from error

    def copy_in(self, message: StepInput) -> dict[str, torch.Tensor]:
        """Copy the integers of a message to the device; returns them by field name."""
        self.bytes_copied += message.ints.nbytes
        return self.inputs.copy_in(message.bucket, message.ints)

    def copy_units(self, inputs: Mapping[str, torch.Tensor], num_blocks: int, num_rows: int) -> None:
        """Execute the copies of a message, which come first in its integers."""
        copies = inputs[BLOCK_COPIES][:, :num_blocks], inputs[ROW_COPIES][:, :num_rows]
        self.store.carry_out(*copies)
        if self.drafts is not None:
            self.drafts.carry_out(*copies)

    @torch.inference_mode()
    def carry_out(self, message: StepInput) -> None:
        """Execute the copies of a message, and begin its transfers; nothing else of it runs."""
        with self.leading(CarryOut(message)), self.runtime.step():
            self.prepare(message)

    def prepare(self, message: StepInput) -> dict[str, torch.Tensor]:
        """Copy a message to the device, execute its copies, and begin its transfers; returns its fields."""
        inputs, transfers = self.copy_in(message), message.transfers
        if self.link is not None:
            self.link.wait(() if transfers is None else transfers.landed)
        if message.num_block_copies or message.num_row_copies:
            self.copy_units(inputs, message.num_block_copies, message.num_row_copies)
        if transfers is not None:
            assert self.link is not None, "expected a link for transfers"
            self.link.begin(transfers)
        return inputs

    def _forward(self, message: StepInput) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return logits; with drafts also the floats of sampling on the device, and the drafted tokens."""
        inputs, floats, drafted = self.prepare(message), None, None
        if message.has_sources:
            floats, drafted = self._take_sampled(message, inputs)
        if self._exchanges is not None:
            self.exchanged = self.exchanged.plus(self._exchanges.of(message.bucket))
        self.model.live.set(message.shape, message.bucket, self.geometry.row_len(message.bucket))
        step = self.step_of(message.bucket)
        return self.graphs.run(message.bucket, step, self.step_inputs(inputs)), floats, drafted

    def _take_sampled(
        self, message: StepInput, inputs: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Run the drafts of a message, if any, and take tokens that were sampled last as its tokens."""
        bucket, floats, drafted, buffer = message.bucket, None, None, self.inputs.buffer
        begin, end, _ = extra_places(self.inputs.layout(bucket).num_items, bucket)
        if message.num_drafts:
            assert self.drafts is not None, "a model drafts"
            if message.sampling is not None and message.sampling.floats.size:
                floats = torch.from_numpy(message.sampling.floats).to(self.device)
            spread = self.spread if self.drafts.has_own_head else None
            drafted = self.drafts.run(
                *(buffer[end : len(message.ints)], bucket, message.num_drafts),
                *(message.sampling, floats, self.sample if spread is None else spread.sample_whole),
            )
            self.exchanged = self.exchanged.plus(self.drafts.exchanged(bucket, message.num_drafts))
            self._sampled = drafted
        source = buffer[begin : begin + bucket.query_len]
        sampled = self._sampled.index_select(0, source.clamp(min=0))
        put_tokens(self.inputs, bucket, torch.where(source >= 0, sampled, inputs["token_ids"]))
        return floats, drafted

    def step_inputs(self, fields: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the inputs of a step: the views that ``copy_in`` returned, or the buffer behind them."""
        return {STAGED: self.inputs.buffer} if self.runtime.compiles_operators else fields


class StepFunctions(dict[BatchShape, Callable[[Mapping[str, torch.Tensor]], torch.Tensor]]):
    """Step functions by shape: those of buckets, and that of the last shape that is none."""

    def __init__(
        self,
        make: Callable[[BatchShape], Callable[[Mapping[str, torch.Tensor]], torch.Tensor]],
        is_bucket: Callable[[BatchShape], bool],
    ) -> None:
        super().__init__()
        self._make, self._is_bucket = make, is_bucket

    def __missing__(self, shape: BatchShape) -> Callable[[Mapping[str, torch.Tensor]], torch.Tensor]:
        for other in [other for other in self if not self._is_bucket(other)]:
            del self[other]
        made = self[shape] = self._make(shape)
        return made


def make_step(
    model: StepModel,
    geometry: StepGeometry,
    graphs: GraphCache,
    layout_of: Callable[[BatchShape], Layout] | None,
    bucket: BatchShape,
) -> Callable[[Mapping[str, torch.Tensor]], torch.Tensor]:
    """Return the function that is captured for a bucket."""
    runners: dict[Hashable, Callable[..., Any]] = {
        kind: graphs.region(bucket, kind, run_layer) for kind in model.kinds
    }
    region_of = graphs.regions_of(bucket)
    if layout_of is not None:
        return staged_step(model, geometry, bucket, layout_of(bucket), runners, region_of)
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
        region_of: returns the function that runs a loop body outside the regions of layers.
    """
    parts = StepParts(bucket.phase.causal, bucket.phase.shared, bucket.phase.unique)
    decode_len = geometry.row_len(bucket)

    def step(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        tensors = StepTensors(**{name: inputs[name] for name in StepTensors._fields})
        if parts.causal and parts.shared:
            model.copy_to_scratch(tensors.chunk_row)
        prepared = model.prepare(parts, tensors, decode_len=decode_len)._replace(is_draft=geometry.is_draft)
        with nullcontext() if region_of is None else in_regions(region_of):
            return model.logits(inputs["token_ids"], prepared, inputs["logit_index"], runners)

    return step


class StepWarmUp:
    """Runs padding through steps.

    Args:
        builder: builds steps of padding.
        executor: runs them.
        vocab_size: width of the logits.
        max_model_len: most tokens of a request.
    """

    def __init__(self, builder: StepBuilder, executor: Executor, vocab_size: int, max_model_len: int) -> None:
        self._builder, self._executor = builder, executor
        self._vocab_size, self._max_model_len = vocab_size, max_model_len

    def routes(self, bucket: BatchShape) -> tuple[SamplingRoute, ...]:
        """The routes of sampling to run for a bucket's logits; none where nothing is compiled."""
        if not self._executor.runtime.compiles_operators:
            return ()
        num_rows = self._executor.geometry.counts(bucket).logits
        return tuple(static_routes(num_rows, self._vocab_size, self._max_model_len))

    @torch.inference_mode()
    def touch(self, bucket: BatchShape) -> None:
        """Run padding through an uncaptured step, which creates tables that are built lazily."""
        executor = self._executor
        with executor.leading(Touch(bucket)), executor.runtime.step():
            bucket_step(executor.model, executor.geometry, bucket, {})(self._fields(bucket))

    @torch.inference_mode()
    def capture(self, bucket: BatchShape) -> bool:
        """Capture a bucket of the table; False if it is captured already."""
        executor = self._executor
        padding = executor.model.live.none_of(bucket, executor.geometry.row_len(bucket))
        # As in a step: a lazy device compiles its collected operators here.
        with executor.leading(Capture(bucket)), executor.runtime.step(), padding:
            is_new = executor.graphs.warm_up(bucket, executor.step_of, self._padding)
            if is_new and executor.drafts is not None:
                executor.drafts.warm_up(bucket, self._padding)
                if executor.geometry.row_len(bucket) > 1:
                    self._run_drafts(bucket)
        return is_new

    @torch.inference_mode()
    def exchange(self, added: BatchShape, dropped: BatchShape, padding: float | None = None) -> None:
        """Capture a bucket between steps, and drop another one from the table.

        Args:
            padding: planned padding of the table afterwards; None if unknown.

        Raises:
            ValueError: the new bucket is in the table, or the old one is not.
        """
        executor = self._executor
        none_live = executor.model.live.none_of(added, executor.geometry.row_len(added))
        with executor.leading(Exchange(added, dropped, padding)):
            with executor.runtime.step(), none_live:
                executor.graphs.exchange(added, dropped, executor.step_of, self._padding, padding)
                if executor.drafts is not None:
                    try:
                        executor.drafts.exchange(added, dropped, self._padding)
                    except BaseException:  # both models have the same buckets
                        executor.graphs.exchange(dropped, added, executor.step_of, self._padding)
                        raise
            if executor.runtime.compiles_operators:
                self._run_operators((added,))

    @torch.inference_mode()
    def finish(self, captured: Iterable[BatchShape]) -> None:
        """End the warm-up, after running the operators around graphs where the device compiles each of them.

        Args:
            captured: the captured buckets; one for each number of rows is run.
        """
        executor, captured = self._executor, tuple(captured)
        with executor.leading(FinishWarmUp(captured)):
            if executor.runtime.compiles_operators and executor.uses_table:
                num_logits = {executor.geometry.counts(bucket).logits: bucket for bucket in captured}
                self._run_operators(tuple(num_logits.values()))
            executor.graphs.seal()
            if executor.drafts is not None:
                executor.drafts.seal()

    def _run_operators(self, buckets: tuple[BatchShape, ...]) -> None:
        executor = self._executor
        for bucket in buckets[:1]:
            for size in copy_sizes(most_copies(executor.geometry)):
                executor.copy_units(executor.copy_in(self._builder.padding(bucket, size)), size, size)
        if executor.link is not None:
            executor.link.warm_up()
        for bucket in buckets:
            logits = executor.graphs.run_uncounted(bucket, executor.step_of(bucket), self._padding(bucket))
            for route in self.routes(bucket):
                found = executor.sample(logits, SamplingBatch.padding(route))
                (found.token_ids if found.logprobs is None else packed(found.token_ids, found.logprobs)).cpu()

    def _run_drafts(self, bucket: BatchShape) -> None:
        """Run drafts of padding in front of a step: greedy, drawn, and with logprobs of the step."""
        plain = SamplingRoute(self._executor.geometry.counts(bucket).logits, self._vocab_size)
        routes = [each for each in self.routes(bucket) if each.has_random]
        for route in (plain, *routes[:1], *[each for each in routes if each.num_logprobs >= 0][:1]):
            message = self._builder.padding_with_drafts(bucket, route)
            for _ in range(self._executor.graphs.backend.num_first_runs):
                self._executor.run_drafts(message)

    def _padding(self, bucket: BatchShape) -> Mapping[str, torch.Tensor]:
        """Inputs of a step of padding: only null units are read and written."""
        return self._executor.step_inputs(self._fields(bucket))

    def _fields(self, bucket: BatchShape) -> Mapping[str, torch.Tensor]:
        return self._executor.copy_in(self._builder.padding(bucket))
