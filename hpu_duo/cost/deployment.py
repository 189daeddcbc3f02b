"""A model on accelerators, with some of its heads streaming."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from graphs import BatchShape, Phase
from hpu_duo.budget import GRAPH_MEMORY_SHARE, DeviceBudget
from hpu_duo.config import ParallelConfig
from hpu_duo.cost.engine_work import EngineWork
from hpu_duo.cost.fitted import ERROR_FACTORS
from hpu_duo.cost.hardware import Format, Hardware
from hpu_duo.cost.kept import KeptByHeads
from hpu_duo.cost.kernels import kernels_of
from hpu_duo.cost.model import ModelSize
from hpu_duo.cost.prediction import Prediction
from hpu_duo.cost.work import Formats, Step
from hpu_duo.heads import HeadPattern
from hpu_duo.kv.plan import LayerKV, MemoryPlan, chunk_grid, last_chunk, ring_slack
from hpu_duo.kv.snapshots import default_snapshots_within
from hpu_duo.limit_config import CARD_LIMITS, HPU_LAYER_KINDS, CacheConfig, SchedulerConfig
from kernels_ref import Implementation

_GIB = 1 << 30


@dataclass(frozen=True)
class Serving:
    """The devices that serve a model, and the division of their memory.

    Attributes:
        hardware: of each device.
        num_devices: devices that share weights, heads and work evenly (tensor parallel).
        retrieval_parallel: what they share of retrieval heads, see ``ParallelConfig``.
        weights: format of the weights of layers.
        block_size: tokens of a KV block, on one device.
        max_num_seqs: requests that run at once even if more fit.
        max_num_batched_tokens: of one step; longer prompts are cut into chunks.
        device_memory_utilization: share of the devices' memory that weights, graphs and KV cache may take
            together; see ``hpu_duo.budget``.
        graph_memory: share of that beside weights, for graphs instead of the KV cache.
        enable_prefix_caching, num_prefix_snapshots: see ``CacheConfig``.
        sink, recent: tokens that streaming heads keep.
        pattern: scores by which heads stream; None spreads them evenly over the layers.
        max_layer_kinds: see ``HeadConfig``; None is no bound.
        attention: kernels, ``hpu`` on the fused operators of Gaudi's software or ``reference``.
        decode_len: most tokens of a request that are decoded together.
        max_chunk_rows: prompts that may continue with several tokens in the same step.
        kept: what heads that stream keep instead of rings, or, with a plan, all heads.
    """

    hardware: Hardware
    num_devices: int = 1
    retrieval_parallel: str = ParallelConfig.retrieval_parallel
    weights: Format = Format.BF16
    block_size: int = CacheConfig.block_size
    max_num_seqs: int = CARD_LIMITS.max_num_seqs
    max_num_batched_tokens: int = CARD_LIMITS.max_num_batched_tokens
    device_memory_utilization: float = CacheConfig.device_memory_utilization
    graph_memory: float = GRAPH_MEMORY_SHARE
    enable_prefix_caching: bool = CacheConfig.enable_prefix_caching
    num_prefix_snapshots: int | None = None
    sink: int = 128
    recent: int = 256
    pattern: HeadPattern | None = None
    max_layer_kinds: int | None = HPU_LAYER_KINDS
    attention: str = Implementation.HPU.value
    decode_len: int = SchedulerConfig.decode_len
    max_chunk_rows: int = SchedulerConfig.max_chunk_rows
    kept: KeptByHeads | None = None

    def __post_init__(self) -> None:
        self.hardware.check_devices(self.num_devices)
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "decode_len", "max_chunk_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        # Refuses what an engine would.
        CacheConfig(
            block_size=self.block_size,
            enable_prefix_caching=self.enable_prefix_caching,
            num_prefix_snapshots=self.num_prefix_snapshots,
            device_memory_utilization=self.device_memory_utilization,
        )
        if not 0.0 <= self.graph_memory < 1.0:
            raise ValueError(f"expected graph_memory in [0, 1), got {self.graph_memory}")
        kernels_of(self.attention)
        ParallelConfig(tensor_parallel_size=self.num_devices, retrieval_parallel=self.retrieval_parallel)

    @property
    def deals_blocks(self) -> bool:
        """Whether a block of tokens lies on several devices, a part on each."""
        return self.retrieval_parallel == "context" and self.num_devices > 1

    @property
    def engine_block_size(self) -> int:
        """Tokens of a block of the engine: on each device, where blocks are dealt over them."""
        return self.block_size * (self.num_devices if self.deals_blocks else 1)

    @property
    def ring_slack(self) -> int:
        """Slots of a ring beside those of its window."""
        return ring_slack(self.decode_len)

    @property
    def not_served(self) -> tuple[str, ...]:
        """Names of what is priced and cannot be run by the engine of this version."""
        return (f"{self.weights.value} weights",) if self.weights is not Format.BF16 else ()

    def kv_budget_bytes(self, model: ModelSize) -> int:
        """Bytes for the KV cache on all devices together.

        Raises:
            ValueError: the weights alone do not fit, or KV heads do not divide among the devices.
        """
        model.check_split(self.num_devices)
        memory = self.num_devices * self.hardware.memory_bytes
        weight_bytes = model.weight_bytes(self.weights)
        if weight_bytes >= memory:
            raise ValueError(
                f"the {self.weights.value} weights of {model.name} take {weight_bytes / _GIB:.1f} GiB, "
                f"{self.num_devices} x {self.hardware.title} have {memory / _GIB:.1f} GiB"
            )
        budget = DeviceBudget.of_own_device(memory, weight_bytes, self.device_memory_utilization)
        return budget.kv_bytes(budget.graph_bytes(self.graph_memory))


@dataclass(frozen=True)
class Deployment:
    """A model as it is served.

    Attributes:
        model: sizes of the model.
        serving: its devices.
        sparsity: share of KV heads that stream, in layers without a sliding window.
        kv_format: of keys and values.
        max_len: tokens of the longest request.

    Raises:
        ValueError: the model does not fit or split, the sparsity is not between 0 and 1, or ``max_len`` is
            not between 1 and the positions of the model.
    """

    model: ModelSize
    serving: Serving
    sparsity: float
    kv_format: Format
    max_len: int

    def __post_init__(self) -> None:
        if not 1 <= self.max_len <= self.model.max_positions:
            raise ValueError(
                f"expected contexts of 1 to {self.model.max_positions} tokens, the positions of "
                f"{self.model.name}, got {self.max_len}"
            )
        # Each refuses what cannot be served; better here than at first use.
        _ = self.kv_bytes, self.kv_layers

    @cached_property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache on all devices together."""
        return self.serving.kv_budget_bytes(self.model)

    @cached_property
    def kv_layers(self) -> tuple[LayerKV, ...]:
        """Keys and values that each layer keeps."""
        serving = self.serving
        if serving.kept is not None:
            return serving.kept.kv_layers(self.model, self._counts, self.max_len)
        return self.model.kv_layers_of(
            self._counts, serving.sink, serving.recent, self.max_len, serving.ring_slack
        )

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
        served = self.serving.not_served
        return (
            served if self.kv_format is Format.BF16 else (*served, f"{self.kv_format.value} keys and values")
        )

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
        for layer in self.model.layers:
            pattern.check_shape(len(self.model.layers), layer.num_kv_heads)
        return tuple(kept for kept, _ in pattern.binarise(sparsity=self.sparsity).head_counts)

    @cached_property
    def _counts(self) -> tuple[int, ...]:
        serving = self.serving
        num_ranks = 1 if serving.deals_blocks else serving.num_devices
        return self.model.few_kinds(self._cut, serving.max_layer_kinds, self.max_len, num_ranks)

    def plan(self, num_rows: int, num_blocks: int) -> MemoryPlan:
        """Plan the KV tensors, all devices together, for ``num_rows`` ring rows and ``num_blocks`` blocks.

        Snapshots are those of so many rows.
        """
        sizes = self._units
        return replace(
            sizes,
            max_num_seqs=num_rows,
            num_blocks=num_blocks,
            num_snapshots=self.count_snapshots(num_rows),
        )

    @cached_property
    def _units(self) -> MemoryPlan:
        """The smallest plan, which has the sizes of a block and of a row."""
        serving = self.serving
        return MemoryPlan(
            self.kv_layers,
            self.kv_format.num_bytes,
            serving.engine_block_size,
            max_num_seqs=1,
            num_blocks=1,
            max_chunk_rows=serving.max_chunk_rows,
        )

    def count_requests(self, context: int) -> int:
        """Requests of ``context`` tokens that fit, with snapshots, the trash of both and the scratch."""
        one = self._units
        left = self.kv_bytes - one.block_bytes - one.row_bytes - one.scratch_bytes
        each, most = one.bytes_per_request(context), self.count_snapshots(self.serving.max_num_seqs)
        beside_all = (left - most * one.row_bytes) // each
        if beside_all >= most:
            return beside_all
        # There are as many snapshots as requests then, unless a number was asked for.
        asked = self.serving.num_prefix_snapshots
        return max(0, beside_all if asked is not None else left // (each + one.row_bytes))

    def count_snapshots(self, num_rows: int) -> int:
        """Snapshots that an engine of ``num_rows`` ring rows keeps of cached prefixes."""
        serving, row_bytes = self.serving, self._units.row_bytes
        if not (serving.enable_prefix_caching and row_bytes):
            return 0
        if serving.num_prefix_snapshots is not None:
            return serving.num_prefix_snapshots
        return default_snapshots_within(self.kv_bytes, row_bytes, min(num_rows, serving.max_num_seqs))

    def count_blocks(self, num_rows: int) -> int:
        """Blocks that fit next to ``num_rows`` ring rows, their snapshots, both trash and the scratch.

        0 where no head needs any.
        """
        one = self._units
        if not one.uses_blocks:
            return 0
        rows = (num_rows + self.count_snapshots(num_rows) + 1) * one.row_bytes + one.scratch_bytes
        return max(0, (self.kv_bytes - rows) // one.block_bytes - 1)

    @cached_property
    def engine_work(self) -> EngineWork:
        """The work of every bucket."""
        serving = self.serving
        return EngineWork(
            self.model,
            self.kv_layers,
            Formats(serving.weights, self.kv_format),
            kernels_of(serving.attention),
            serving.block_size,
            max_chunk_rows=serving.max_chunk_rows,
            decode_len=serving.decode_len,
            num_devices=serving.num_devices,
            deals_blocks=serving.deals_blocks,
        )

    def bucket_seconds(self, bucket: BatchShape) -> Prediction:
        """Predicted seconds of a step in ``bucket``."""
        serving = self.serving
        return Prediction.of(
            self.engine_work.of(bucket), serving.hardware, serving.num_devices, self.error_factor
        )

    @property
    def error_factor(self) -> float:
        """The most that a prediction is off by, either way; see ``hpu_duo.cost.fitted``."""
        return max(ERROR_FACTORS[self.serving.weights], ERROR_FACTORS[self.kv_format])

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
