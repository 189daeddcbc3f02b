"""A model on accelerators, and the requests that fit: memory, predicted speed and warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from graphs import CARD_STEP_TOKENS, BatchShape, Phase, StepLimits
from graphs.planner import GraphBudget
from hpu_duo.config.limits import (
    DeviceBudget,
)
from hpu_duo.kv.allocations import block_moves
from hpu_duo.kv.plan import LayerKV, MemoryPlan, chunk_grid, in_format, last_chunk
from hpu_duo.kv.snapshots import default_snapshots_within
from hpu_duo.planning.engine_work import EngineWork
from hpu_duo.planning.fit import Step
from hpu_duo.planning.kv_formats import name_of
from hpu_duo.planning.model import Format, ModelSize, TableMemory
from hpu_duo.planning.predictions import ERROR_FACTORS, Prediction, WarmUp
from hpu_duo.planning.retrieval_choice import (
    ChoiceCosts,
    RetrievalChoice,
    SharedHeads,
    choose_retrieval,
    obstacle_to_context,
)
from hpu_duo.planning.roofline import StepSeconds
from hpu_duo.planning.serving import Serving
from hpu_duo.planning.work import Formats, kernels_of
from kernels_ref import KVFormat, Owner

_GIB = 1 << 30


@dataclass(frozen=True)
class Deployment:
    """A model as it is served.

    Attributes:
        model: sizes of the model.
        serving: its devices; "auto" of ``retrieval_parallel`` becomes the choice for requests of ``max_len``
            tokens.
        sparsity: share of KV heads that stream, in layers without a sliding window.
        kv_format: of keys and values in blocks; rings and heads with a budget keep bf16.
        max_len: tokens of the longest request.

    Raises:
        ValueError: the model does not fit or split, the sparsity is not between 0 and 1, or ``max_len`` is
            not between 1 and the positions of the model.
    """

    model: ModelSize
    serving: Serving
    sparsity: float
    kv_format: KVFormat
    max_len: int

    def __post_init__(self) -> None:
        if not 1 <= self.max_len <= self.model.max_positions:
            raise ValueError(
                f"expected contexts of 1 to {self.model.max_positions} tokens, the positions of "
                f"{self.model.name}, got {self.max_len}"
            )
        if self.serving.retrieval_parallel == "auto":
            chosen = "heads" if self.choice is None else self.choice.chosen
            object.__setattr__(self, "serving", self.serving.shared_by(chosen))
        # Each may raise an error; better here than at first use.
        _ = self.kv_bytes, self.kv_layers

    @cached_property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache on all devices together, by ``num_copies``."""
        return self.serving.kv_budget_bytes(self.model) // self.num_copies

    @property
    def num_copies(self) -> int:
        """Devices that each store all of a request: those of a model with latents, by heads, else 1."""
        is_copied = not self.serving.deals_blocks and any(each.stores_latents for each in self.kv_layers)
        return self.serving.num_devices if is_copied else 1

    @cached_property
    def kv_layers(self) -> tuple[LayerKV, ...]:
        """Keys and values that each layer stores, in their formats."""
        return self._kv_layers_of(self._counts)

    def _kv_layers_of(self, counts: Sequence[int]) -> tuple[LayerKV, ...]:
        serving, model = self.serving, self.model
        if serving.kept is not None:
            found = serving.kept.kv_layers(model, counts, self.max_len)
        else:
            sizes = serving.sink, serving.recent, self.max_len, serving.ring_slack
            found = model.kv_layers_of(counts, *sizes)
        return tuple(replace(each, groups=in_format(each.groups, self.kv_format)) for each in found)

    @property
    def latent_ratio(self) -> float:
        """Keys and values of all heads of a token, in units of the stored latents; 1 without them."""
        layers = [each for each in self.kv_layers if each.stores_latents]
        stored = sum(each.groups[0].kind.stored_dims(0, 0)[0] for each in layers)
        return sum(each.num_heads * each.elements_per_head for each in layers) / stored if layers else 1.0

    @cached_property
    def choice(self) -> RetrievalChoice | None:
        """The choice of "auto" for retrieval heads, with its reason, as an engine with these limits makes it.

        None where ``retrieval_parallel`` was not "auto", and with one device.
        """
        serving = self.serving
        if serving.retrieval_parallel != "auto" or serving.num_devices == 1:
            return None

        def shared(retrieval_parallel: str) -> SharedHeads:
            one = replace(self, serving=serving.shared_by(retrieval_parallel))
            return SharedHeads(one.kv_layers, one.num_promoted)

        costs = ChoiceCosts(
            self.model,
            serving.hardware,
            serving.num_devices,
            Serving(serving.hardware, serving.num_devices, weights=serving.weights).kv_budget_bytes(
                self.model
            ),
            serving.block_size,
            serving.max_num_seqs,
            serving.max_chunk_rows,
            self.max_len,
        )
        obstacle = obstacle_to_context(
            is_uneven=any(layer.num_kv_heads % serving.num_devices for layer in self.model.layers),
            pools_heads=serving.kept is not None and serving.kept.pools_heads,
        )
        num_kv_heads = min(layer.num_kv_heads for layer in self.model.layers)
        return choose_retrieval(serving.num_devices, num_kv_heads, shared, costs.faster, obstacle)

    def promoted_bytes(self, context: int) -> int:
        """Bytes of a request of ``context`` tokens that promoted heads take beyond those of their rings."""
        unpromoted = replace(self._units, layers=self._stored(self._kv_layers_of(self._cut)))
        return self._units.bytes_per_request(context) - unpromoted.bytes_per_request(context)

    @property
    def chunk_grid(self) -> int:
        """Positions between the ends of chunks that heads with a budget need; 0 without them."""
        return chunk_grid(group for layer in self.kv_layers for group in layer.groups)

    @property
    def last_chunk(self) -> int:
        """Fewest tokens of the last chunk of a prompt; see ``StepLimits``."""
        return last_chunk(group for layer in self.kv_layers for group in layer.groups)

    @cached_property
    def num_layer_kinds(self) -> int:
        """Kinds of layers, each of which is compiled for every bucket."""
        return self.model.num_kinds(self.kv_layers)

    @property
    def not_served(self) -> tuple[str, ...]:
        """Names of what is priced and cannot be run by the engine of this version."""
        return self.serving.not_served

    @property
    def num_promoted(self) -> int:
        """Retrieval heads that would stream by the share alone."""
        return sum(self._counts) - sum(self._cut)

    @cached_property
    def _cut(self) -> tuple[int, ...]:
        """Retrieval heads of each layer by the share alone."""
        pattern = self.serving.pattern
        if pattern is None:
            return self.model.spread(self.sparsity)
        stored, numbers = sorted(set(self.model.sources)), self.model.numbers
        if numbers and pattern.num_layers == self.model.num_all:
            # Rows of layers with states only say nothing.
            pattern = pattern.of_layers([numbers[place] for place in stored])
        for layer in self.model.layers:
            pattern.check_shape(len(stored), layer.num_kv_heads)
        row_of = {number: row for row, number in enumerate(stored)}
        counts = pattern.binarise(sparsity=self.sparsity).head_counts
        return tuple(counts[row_of[number]][0] for number in self.model.sources)

    @cached_property
    def _counts(self) -> tuple[int, ...]:
        serving = self.serving
        num_ranks = 1 if serving.deals_blocks else serving.num_devices
        return self.model.few_kinds(self._cut, serving.max_layer_kinds, self.max_len, num_ranks)

    def plan(self, num_rows: int, num_blocks: int) -> MemoryPlan:
        """Plan the KV tensors, all devices together, for ``num_rows`` ring rows and ``num_blocks`` blocks.

        Snapshots are those of this number of rows.
        """
        sizes = self._units
        return replace(
            sizes,
            max_num_seqs=num_rows,
            num_blocks=num_blocks,
            num_snapshots=self.count_snapshots(num_rows),
        )

    @property
    def _states(self) -> tuple[LayerKV, ...]:
        """Layers of the model with states only."""
        slack = self.serving.ring_slack
        return tuple(
            LayerKV((), 0, rows=tuple(replace(kind, slack=slack) for kind in kinds))
            for kinds in self.model.states
        )

    def _stored(self, kv_layers: tuple[LayerKV, ...]) -> tuple[LayerKV, ...]:
        """Return all that devices store, by ``num_copies``: these layers, states, and those of what drafts.

        Every device has the rings of latents.
        """
        rings = [(each, [g for g in each.groups if g.kind.owner is Owner.ROW]) for each in kv_layers]
        num_more = self.serving.num_devices - 1 if self.serving.deals_blocks else 0
        copies = [replace(each, groups=tuple(of)) for each, of in rings if of and each.stores_latents]
        return (*kv_layers, *copies * num_more, *self._states, *self._drafting)

    @property
    def _drafting(self) -> tuple[LayerKV, ...]:
        """Layers of what drafts, on all devices, by ``num_copies``."""
        if self.serving.draft is None:
            return ()
        num_times = self.serving.num_devices // self.num_copies
        return self.of_draft(self.max_len).kv_layers * num_times

    def of_draft(self, max_len: int) -> Deployment:
        """Deployment of the model that drafts, for requests of ``max_len`` tokens, on one device.

        Raises:
            ValueError: it has layers with a window or states, or fewer positions.
        """
        draft = self.serving.draft
        assert draft is not None, "something drafts"
        if draft.states or any(layer.has_window(max_len) for layer in draft.layers):
            raise ValueError(
                f"expected {draft.name} to have heads that store all tokens, to draft, got layers with a "
                "sliding window or states"
            )
        return Deployment(draft, self.serving.of_draft, 0.0, self.kv_format, max_len)

    @cached_property
    def _units(self) -> MemoryPlan:
        """The smallest plan, which has the sizes of a block and of a row."""
        serving = self.serving
        return MemoryPlan(
            self._stored(self.kv_layers),
            int(Format.BF16.num_bytes),
            serving.engine_block_size,
            max_num_seqs=1,
            num_blocks=1,
            max_chunk_rows=serving.max_chunk_rows,
        )

    def count_requests(self, context: int) -> int:
        """Requests of ``context`` tokens that fit, with snapshots, the null unit of both and the scratch."""
        one = self._units
        left = self.kv_bytes - one.block_bytes - one.row_bytes - one.scratch_bytes
        each, most = one.bytes_per_request(context), self.count_snapshots(self.serving.max_num_seqs)
        beside_all = (left - most * one.row_bytes) // each
        if beside_all >= most:
            return beside_all
        # There are as many snapshots as requests then, unless a number is set.
        asked = self.serving.num_prefix_snapshots
        return max(0, beside_all if asked is not None else left // (each + one.row_bytes))

    def count_snapshots(self, num_rows: int) -> int:
        """Number of snapshots of an engine with ``num_rows`` ring rows."""
        serving, row_bytes = self.serving, self._units.row_bytes
        if not (serving.enable_prefix_caching and row_bytes):
            return 0
        if serving.num_prefix_snapshots is not None:
            return serving.num_prefix_snapshots
        return default_snapshots_within(self.kv_bytes, row_bytes, min(num_rows, serving.max_num_seqs))

    def count_blocks(self, num_rows: int) -> int:
        """Blocks that fit next to ``num_rows`` ring rows, their snapshots, both null units and the scratch.

        0 where no head needs any.
        """
        one = self._units
        if not one.uses_blocks:
            return 0
        rows = (num_rows + self.count_snapshots(num_rows) + 1) * one.row_bytes + one.scratch_bytes
        return max(0, (self.kv_bytes - rows) // one.block_bytes - 1)

    def graph_memory(self, num_graphs: int, kept_bytes: int, fused_bytes: int) -> TableMemory:
        """Compare what graphs keep with what is reserved for them.

        Args:
            num_graphs: their number.
            kept_bytes, fused_bytes: on one device, with the portable kernels and with fused operators.
        """
        serving, one, num = self.serving, self._units, self.serving.num_devices
        memory, weights = num * serving.hardware.memory_bytes, serving.weight_bytes(self.model)
        budget = DeviceBudget.of_own_device(memory, weights, serving.device_memory_utilization)
        blocks = num // self.num_copies if one.uses_blocks else 0
        kept, fused = (blocks * each // max(1, one.block_bytes) for each in (kept_bytes, fused_bytes))
        reserved = budget.graph_bytes(serving.graph_memory) // num
        return TableMemory(num_graphs, kept_bytes, kept, fused_bytes, fused, reserved)

    @cached_property
    def engine_work(self) -> EngineWork:
        """The work of every bucket."""
        serving = self.serving
        return EngineWork(
            self.model,
            self.kv_layers,
            Formats(serving.weights),
            kernels_of(serving.attention),
            serving.block_size,
            max_chunk_rows=serving.max_chunk_rows,
            decode_len=min(serving.draft_lens, default=serving.decode_len),
            num_devices=serving.num_devices,
            deals_blocks=serving.deals_blocks,
            chunks=serving.chunks,
            on_chip_bytes=serving.hardware.on_chip_bytes,
        )

    def bucket_seconds(self, bucket: BatchShape) -> Prediction:
        """Predicted seconds of a step in ``bucket``."""
        serving = self.serving
        computed = Prediction.of(
            self.engine_work.of(bucket), serving.hardware, serving.num_devices, self.error_factor
        )
        return computed.at_least(serving.streaming_s(self.model))

    @property
    def error_factor(self) -> float:
        """The most that a prediction is off by, either way; see ``hpu_duo.planning.roofline``."""
        return max(ERROR_FACTORS[self.serving.weights.arithmetic], ERROR_FACTORS[Format.BF16])

    def shape_of(self, step: Step) -> BatchShape:
        """The exact shape of a step: decodes, or chunks of prompts that share no block."""
        size, rows, uses_blocks = self.serving.engine_block_size, step.num_rows, self.plan(1, 1).uses_blocks
        if step.new_tokens == 1 and step.context:
            whole = rows * ((step.context + 1) // size) if uses_blocks else 0
            return BatchShape(Phase(unique=True), rows, 0, whole, rows)
        num_blocks = rows * -(-step.context // size) if uses_blocks else 0
        phase = Phase(causal=True, shared=step.context > 0)
        return BatchShape(phase, step.num_tokens, num_blocks, 0, rows)

    def step_seconds(self, step: Step) -> Prediction:
        """Predicted seconds of a step at its exact shape."""
        return self.bucket_seconds(self.shape_of(step))

    def decode_tokens_per_s(self, num_requests: int, context: int) -> Prediction:
        """Predicted tokens per second of all requests, each of ``context`` tokens with the new one."""
        return self.step_seconds(Step(num_requests, context - 1)).rate(num_requests)

    def first_token_s(self, num_tokens: int) -> Prediction:
        """Predicted seconds to compute one prompt, alone, in the chunks that a step or a budget allows."""
        size = min(self.serving.max_num_batched_tokens, self.chunk_grid or num_tokens)
        steps = (Step(1, start, min(size, num_tokens - start)) for start in range(0, num_tokens, size))
        return Prediction.total(map(self.step_seconds, steps))


SMALLEST_DECODE = BatchShape(Phase(unique=True), 1, 0, 1, 1)
"""The step with fewest operators among those with context."""


@dataclass(frozen=True)
class CapacityPoint:
    """One length of context.

    Attributes:
        context: tokens of each request in the cache.
        num_requests: requests that fit at the same time.
        bytes_per_request: whole blocks and the ring row.
        num_running: those of them that run, at most ``max_num_seqs``.
        tokens_per_s: predicted for all running requests together while decoding; None when none fits.
        tokens_per_s_alone: predicted for a single request; None when none fits.
        first_token_s: predicted to compute a prompt of that length, alone and in chunks; None when none fits.
        tokens_per_s_range, tokens_per_s_alone_range, first_token_s_range: bounds of each, see ``Prediction``.
    """

    context: int
    num_requests: int
    bytes_per_request: int
    num_running: int
    tokens_per_s: float | None
    tokens_per_s_alone: float | None
    first_token_s: float | None
    tokens_per_s_range: tuple[float, float] | None = None
    tokens_per_s_alone_range: tuple[float, float] | None = None
    first_token_s_range: tuple[float, float] | None = None


@dataclass(frozen=True)
class Capacity:
    """Capacity with one choice of streaming heads and KV format.

    Attributes:
        sparsity: share of KV heads that stream, in layers without a sliding window.
        kv_format: of keys and values.
        num_promoted: further retrieval heads, so that layers are of few kinds and devices have equally many.
        points: one for each context, in the given order.
        warm_up: of a table for the longest of these contexts; None when not one request of it fits.
        not_served: what the engine of this version does not support of it, so that it is priced only.
        error_factor: the most that predicted speeds are off by, either way; it is in their ranges.
        kept: what these heads store if they have a KV budget, or all heads by a plan; "" for rings.
        retrieval_parallel: what devices share of retrieval heads.
        choice: that and why, in words; "" where it was not left open.
        promoted_bytes: of a request of the longest context, which promoted heads take beyond their rings.
        latent_ratio: keys and values of all heads of a token, in units of the latents that are stored.
    """

    sparsity: float
    kv_format: KVFormat
    num_promoted: int
    points: tuple[CapacityPoint, ...]
    warm_up: WarmUp | None
    not_served: tuple[str, ...] = ()
    error_factor: float = 1.0
    kept: str = ""
    retrieval_parallel: str = "heads"
    choice: str = ""
    promoted_bytes: int = 0
    latent_ratio: float = 1.0

    def describe(self) -> str:
        """Describe the choice in words."""
        heads = "full attention" if self.sparsity == 0 else f"{self.sparsity:.0%} of heads streaming"
        if self.num_promoted:
            heads += f" less {self.num_promoted} promoted ones"
        if self.kept:
            heads = f"heads by {self.kept}" if not self.sparsity else f"{heads} by {self.kept}"
        return f"{heads}, {name_of(self.kv_format)} keys and values"


def capacity(
    model: ModelSize,
    serving: Serving,
    sparsity: float,
    kv_format: KVFormat,
    contexts: Sequence[int],
    *,
    num_graphs: int = 64,
) -> Capacity:
    """Requests that fit, predicted speeds and warm-up, for each length of context.

    The longest context is also the longest request that memory and graphs are planned for.

    Args:
        num_graphs: budget of a bucket table. No table is planned, which would take seconds, so the warm-up is
            the upper bound for this budget.

    Raises:
        ValueError: no contexts, one below 1 token, a budget of no graph, or see ``Deployment``.
    """
    if not contexts or min(contexts) < 1:
        raise ValueError(f"expected contexts of 1 token or more, got {list(contexts)}")
    deployment = Deployment(model, serving, sparsity, kv_format, max(contexts))
    points = tuple(_point(deployment, context) for context in contexts)
    return Capacity(
        sparsity,
        kv_format,
        deployment.num_promoted,
        points,
        _warm_up(deployment, num_graphs),
        deployment.not_served,
        deployment.error_factor,
        "" if serving.kept is None or not (sparsity or serving.kept.is_plan) else serving.kept.name,
        deployment.serving.retrieval_parallel,
        "" if deployment.choice is None else str(deployment.choice),
        deployment.promoted_bytes(max(contexts)),
        deployment.latent_ratio,
    )


def _point(deployment: Deployment, context: int) -> CapacityPoint:
    fits = deployment.count_requests(context)
    running = min(fits, deployment.serving.max_num_seqs)
    num_bytes = deployment.num_copies * deployment.plan(1, 1).bytes_per_request(context)
    sizes = context, fits, num_bytes, running
    if not fits:
        return CapacityPoint(*sizes, None, None, None)
    together = deployment.decode_tokens_per_s(running, context)
    alone = deployment.decode_tokens_per_s(1, context)
    first = deployment.first_token_s(context)
    values = together.value, alone.value, first.value
    return CapacityPoint(*sizes, *values, together.range, alone.range, first.range)


def step_limits(deployment: Deployment) -> StepLimits:
    """Return the limits of steps with as many rows and blocks as fit.

    Raises:
        ValueError: not one request of the longest length fits.
    """
    if deployment.count_requests(deployment.max_len) < 1:
        raise ValueError(
            f"expected memory for one request of {deployment.max_len} tokens, "
            f"{deployment.serving.num_devices} x {deployment.serving.hardware.title} have less"
        )
    serving = deployment.serving
    num_rows = min(serving.max_num_seqs, deployment.count_requests(serving.engine_block_size))
    # More blocks than those of the requests of that length are never used.
    num_blocks = min(
        deployment.count_blocks(num_rows), num_rows * -(-deployment.max_len // serving.engine_block_size)
    )
    moves = block_moves(serving.max_num_batched_tokens, serving.engine_block_size)
    return StepLimits(
        max_num_seqs=num_rows,
        max_num_batched_tokens=serving.max_num_batched_tokens,
        max_model_len=deployment.max_len,
        block_size=serving.engine_block_size,
        num_blocks=num_blocks,
        uses_blocks=num_blocks > 0,
        uses_rows=deployment.plan(1, 1).uses_rows,
        caches_prefixes=serving.enable_prefix_caching,
        num_snapshots=deployment.count_snapshots(num_rows),
        max_block_moves=moves if serving.enable_prefix_caching and num_blocks else 0,
        decode_len=1,
        max_chunk_rows=serving.max_chunk_rows,
        step_tokens=CARD_STEP_TOKENS,
        chunk_grid=deployment.chunk_grid,
        last_chunk=deployment.last_chunk,
        num_regions=deployment.plan(1, 1).num_regions,
    )


def step_cost(deployment: Deployment) -> StepSeconds:
    """Return the cost of steps of the deployment."""
    return StepSeconds(deployment.engine_work, deployment.serving.hardware)


def _warm_up(deployment: Deployment, num_graphs: int) -> WarmUp | None:
    if deployment.count_requests(deployment.max_len) < 1:
        return None
    # A planned table may be smaller: nothing is gained by buckets that no step would use.
    largest = step_limits(deployment).largest
    work = deployment.engine_work
    return WarmUp.within(
        GraphBudget(num_graphs).most_graphs,
        deployment.num_layer_kinds,
        work.compiled(SMALLEST_DECODE),
        work.compiled(largest),
    )
