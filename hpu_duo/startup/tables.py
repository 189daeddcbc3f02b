"""The buckets of an engine, the sizes of its steps, and the device memory that captured steps keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from graphs import (
    BatchShape,
    BucketTable,
    CaptureBackend,
    CostFunction,
    ExponentialRule,
    SkippingCost,
    StepCost,
    StepLimits,
)
from graphs.buffers import pack
from graphs.planner import Resolution
from graphs.shape import row_len
from hpu_duo.config.engine import EngineConfig
from hpu_duo.device.habana_environment import card_type
from hpu_duo.engine.batch import RowCounts, StepGeometry
from hpu_duo.engine.model_drafts.tables import DraftTables
from hpu_duo.engine.step_input import message_fields
from hpu_duo.kv.plan import MemoryPlan, chunk_grid, last_chunk, widest_row
from hpu_duo.modeling.experts import EXPERTS_PER_TOKEN, HELD, NUM_EXPERTS, expert_bytes
from hpu_duo.planning.engine_work import EngineWork
from hpu_duo.planning.model import GAUDI2, GAUDI3, AttentionSize, ModelSize
from hpu_duo.planning.roofline import StepSeconds
from hpu_duo.planning.simulation import plan_buckets
from hpu_duo.startup.step_limits import resolve_limits
from kernels_ref import GroupKind, HeadGroup, Implementation, LayerSpec, Recurrence, StepParts
from kernels_ref.chunks import DEFAULT_BOUNDS, ChunkBounds
from kernels_ref.groups import HeadSizes, PartSizes

_FLOAT32 = 4
_PARTIAL_COPIES = 4
"""Copies of a partial sum: it is merged with the next one into a third, and then normalised."""


class LayerHeads(NamedTuple):
    """Heads of a layer, as far as sizes follow from them.

    Attributes:
        groups: its key/value heads.
        group_size: query heads of each.
        head_dim: of keys and values, the larger of both.
    """

    groups: tuple[HeadGroup, ...]
    group_size: int
    head_dim: int

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of all groups."""
        return sum(group.num_heads for group in self.groups)


@dataclass(frozen=True)
class StepSizes:
    """The sizes of a model that decide the memory of a step's intermediates.

    Attributes:
        hidden_size, vocab_size: of the model.
        intermediate_size: widest activation between two layers' norms, for all experts of a token together.
        num_heads, num_kv_heads, head_dim: of the layer with most heads.
        groups: the distinct groups of heads of all layers, with their sizes.
        block_size: slots of a block.
        dtype_bytes: of an activation.
        decode_len, draft_lens: see ``StepLimits``.
        num_experts, experts_per_token, expert_size: of a mixture of experts and of one of them, 0 without.
        chunks: bounds of chunks of context.
        is_fused: whether dense attention is one operator.
        recurrences: the distinct ones of all layers.
    """

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    groups: frozenset[tuple[GroupKind, HeadSizes]]
    block_size: int
    dtype_bytes: int
    decode_len: int = 1
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    chunks: ChunkBounds = DEFAULT_BOUNDS
    is_fused: bool = False
    draft_lens: tuple[int, ...] = ()
    recurrences: frozenset[Recurrence] = frozenset()

    @classmethod
    def of(
        cls,
        specs: Sequence[LayerSpec],
        config: Any,
        block_size: int,
        dtype_bytes: int,
        *,
        decode_len: int = 1,
        draft_lens: tuple[int, ...] = (),
        recurrences: Iterable[Recurrence] = (),
    ) -> StepSizes:
        """Return the sizes of an engine's model.

        Args:
            specs: of its layers.
            config: transformers' configuration of its text part.
            decode_len, draft_lens: see ``StepLimits``.
            recurrences: of its layers.
        """
        heads = [
            LayerHeads(spec.groups, spec.group_size, max(spec.head_dim, spec.value_dim)) for spec in specs
        ]
        first = specs[0]
        sizes = cls.of_heads(
            heads,
            config,
            block_size,
            dtype_bytes,
            decode_len=decode_len,
            chunks=first.chunks,
            is_fused=first.impl is Implementation.HPU and first.softcap is None,
        )
        return replace(sizes, draft_lens=draft_lens, recurrences=frozenset(recurrences))

    def _counts(self, shape: BatchShape) -> RowCounts:
        return RowCounts.of(shape, row_len(shape, self.decode_len, self.draft_lens))

    @classmethod
    def of_heads(
        cls,
        layers: Sequence[LayerHeads],
        config: Any,
        block_size: int,
        dtype_bytes: int,
        *,
        decode_len: int,
        chunks: ChunkBounds,
        is_fused: bool = False,
    ) -> StepSizes:
        """Return the sizes of a model from its heads and configuration.

        Args:
            layers: heads of each layer.
            config, decode_len: see ``of``.
            chunks: bounds of chunks of context.
            is_fused: whether dense attention is one operator.
        """
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=_intermediate_size(config),
            vocab_size=config.vocab_size,
            num_heads=max(layer.num_kv_heads * layer.group_size for layer in layers),
            num_kv_heads=max(layer.num_kv_heads for layer in layers),
            head_dim=max(layer.head_dim for layer in layers),
            groups=frozenset(
                (group.kind, HeadSizes(group.num_heads, layer.group_size, layer.head_dim, dtype_bytes))
                for layer in layers
                for group in layer.groups
            ),
            block_size=block_size,
            dtype_bytes=dtype_bytes,
            decode_len=decode_len,
            chunks=chunks,
            is_fused=is_fused,
            **_experts(config),
        )

    def transient_bytes(self, shape: BatchShape) -> int:
        """The peak of the intermediates of one step.

        A layer has its residual stream, and either the activations of its MLP or those of its attention:
        queries, keys, values and partial sums, and one bounded block of scores with its gathered keys and
        values; or those of a recurrence. After the last layer the logits are there instead.
        """
        query_len, num_logits = shape.query_len, self._counts(shape).logits
        stream = query_len * self.hidden_size * (3 * self.dtype_bytes + _FLOAT32)
        mlp = max(3 * query_len * self.intermediate_size * self.dtype_bytes, self._expert_bytes(query_len))
        logits = num_logits * self.vocab_size * (self.dtype_bytes + _FLOAT32)
        return stream + max(mlp, self._attention_bytes(shape), self._recurrent_bytes(shape), logits)

    def output_bytes(self, shape: BatchShape) -> int:
        """The logits, which have a fixed address in a captured step."""
        return self._counts(shape).logits * self.vocab_size * self.dtype_bytes

    def _expert_bytes(self, query_len: int) -> int:
        if not self.num_experts:
            return 0
        sizes = self.expert_size, self.hidden_size, self.dtype_bytes
        # Only an HPU has one pass.
        return expert_bytes(
            query_len, self.experts_per_token, self.num_experts, *sizes, is_hpu=self.chunks.one_pass
        )

    def _recurrent_bytes(self, shape: BatchShape) -> int:
        num_rows, has_prompts = self._counts(shape).rows, shape.phase.causal
        return max(
            (
                each.transient_bytes(shape.query_len, num_rows, has_prompts=has_prompts)
                for each in self.recurrences
            ),
            default=0,
        )

    def _attention_bytes(self, shape: BatchShape) -> int:
        query_len, heads, dim = shape.query_len, self.num_heads, self.head_dim
        projected = 2 * query_len * (heads + 2 * self.num_kv_heads) * dim * self.dtype_bytes
        partials = _PARTIAL_COPIES * query_len * heads * (dim + 2) * _FLOAT32
        # Heads of one group are done before those of the next begin.
        sizes = PartSizes(
            StepParts(shape.phase.causal, shape.phase.shared, shape.phase.unique),
            query_len,
            shape.num_shared_blocks,
            shape.num_unique_blocks,
            self._counts(shape).ring_rows,
            row_len(shape, self.decode_len, self.draft_lens),
            self.block_size,
            self.chunks,
            self.is_fused,
        )
        return projected + partials + max(kind.transient_bytes(each, sizes) for kind, each in self.groups)


def _experts(config: Any) -> dict[str, Any]:
    num_experts, per_token = (_first(config, names) for names in (NUM_EXPERTS, EXPERTS_PER_TOKEN))
    if not (num_experts and per_token):
        return {}
    held = getattr(config, HELD, num_experts)
    size = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    # Fewer whole experts are stored than a share of the width suggests.
    size = size * num_experts // held
    return {"num_experts": held, "experts_per_token": per_token, "expert_size": size}


def _first(config: Any, names: Sequence[str]) -> int:
    """The first number of these names in a configuration, 0 without."""
    return next((n for n in (getattr(config, name, None) for name in names) if n), 0)


def _intermediate_size(config: Any) -> int:
    dense = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    if isinstance(dense, list | tuple):
        dense = max(dense)
    if dense is None:
        dense = 4 * config.hidden_size
    expert = getattr(config, "moe_intermediate_size", None) or dense
    num_experts = _first(config, EXPERTS_PER_TOKEN)
    return int(max(dense, num_experts * expert)) if num_experts else int(dense)


class WorkingMemory(Enum):
    """Memory of the intermediates of a graph's step.

    ``NONE``: they are allocated in each step. ``SHARED``: in a pool as large as the largest graph needs.
    ``OWN``: each graph has its own.
    """

    NONE = "none"
    SHARED = "shared"
    OWN = "own"


@dataclass(frozen=True)
class Kept:
    """Memory of one kind of graph besides its results.

    Attributes:
        code_bytes: bytes of the code of one unit.
        is_per_kind: whether each kind of layer is a unit, captured on its own; else the whole step is one.
        working: memory of intermediates.
    """

    code_bytes: int
    is_per_kind: bool
    working: WorkingMemory


KEPT = {
    "eager": Kept(0, False, WorkingMemory.NONE),
    # Measured with small Llamas on a CPU, with generated code in host memory. A list of calls and the
    # programs in it; less than 1 MiB for small Llamas.
    "replay": Kept(1 << 20, False, WorkingMemory.NONE),
    "compile": Kept(12 << 20, True, WorkingMemory.NONE),
    # A graph has some 64 KiB of kernel arguments per launch with older drivers, far less with newer ones.
    "cuda": Kept(4 << 20, False, WorkingMemory.SHARED),
    "hpu-sim": Kept(0, False, WorkingMemory.NONE),
    "hpu-compile": Kept(0, False, WorkingMemory.OWN),
    "hpu-graph": Kept(0, False, WorkingMemory.OWN),
}
"""Memory by the name of the capture backend."""

UNKNOWN = Kept(0, False, WorkingMemory.OWN)
"""Memory of an unknown backend: the worst of the known ones."""


@dataclass(frozen=True)
class GraphMemory:
    """The graphs of one model in one backend.

    Attributes:
        kept: memory of graphs of the backend.
        num_units: units that are captured on their own: kinds of layers, or one whole step.
        sizes: sizes of a step.
        max_captured_tokens: longer buckets run uncaptured, so they retain nothing; None = no limit.
    """

    kept: Kept
    num_units: int
    sizes: StepSizes
    max_captured_tokens: int | None = None

    def captures(self, shape: BatchShape) -> bool:
        """Whether steps of a bucket are captured."""
        return self.max_captured_tokens is None or shape.query_len <= self.max_captured_tokens

    def kept_bytes(self, shape: BatchShape) -> int:
        """Bytes of the graph of one bucket: code, results, and its own working memory."""
        if not self.captures(shape):
            return 0
        kept = self.kept.code_bytes * self.num_units + self.sizes.output_bytes(shape)
        is_own = self.kept.working is WorkingMemory.OWN
        return kept + (self.sizes.transient_bytes(shape) if is_own else 0)

    def total_bytes(self, buckets: Iterable[BatchShape]) -> int:
        """Bytes of the graphs of all buckets, with the pool if they share one."""
        captured = [bucket for bucket in buckets if self.captures(bucket)]
        is_shared = self.kept.working is WorkingMemory.SHARED
        pool = max(map(self.sizes.transient_bytes, captured), default=0) if is_shared else 0
        return sum(map(self.kept_bytes, captured)) + pool


def staged_bytes(geometry: StepGeometry, largest: BatchShape) -> int:
    """Bytes of the device buffer that inputs of steps are copied to, see ``graphs.DeviceInputs``."""
    return pack(message_fields(geometry.longest, largest)).num_bytes


def plan_with_graphs(
    plan_of: Callable[[int], MemoryPlan], needed_of: Callable[[MemoryPlan], int]
) -> MemoryPlan:
    """Find the memory plan that leaves enough memory for its own graphs.

    The memory of graphs depends on the number of blocks, which bounds the buckets, and the number of blocks
    on the memory that graphs leave. The reserve only grows from one plan to the next, so that this ends.

    Args:
        plan_of: returns the plan that leaves some bytes for graphs.
        needed_of: returns the bytes that the graphs of a plan need; bounded.
    """
    plan = plan_of(0)
    while (needed := needed_of(plan)) > plan.graph_bytes:
        plan = plan_of(needed)
    return plan


_PLANNED_FOR = ("cuda", "hpu")
_QUICK = Resolution(num_cells=800, num_points=150, num_rows=3000, rounds=8)
"""As good as the finest within a few percent of padding, in a third of its time."""


class StepTables:
    """The buckets of an engine, as a function of its memory plan.

    Args:
        specs: of the layers.
        max_len: most tokens of a request that the model allows.
        device: tables of accelerators are planned, since each bucket costs a compilation there.
        is_padding: whether steps are padded to buckets even if the backend captures nothing.
        recurrences: of the layers.
    """

    def __init__(
        self,
        config: EngineConfig,
        specs: Sequence[LayerSpec],
        text_config: Any,
        max_len: int,
        backend: CaptureBackend,
        device: torch.device,
        is_padding: bool,
        recurrences: Iterable[Recurrence] = (),
    ) -> None:
        self.config, self.backend = config, backend
        self.uses_table = backend.name != "eager" or is_padding or config.graph.table is not None
        self._specs, self._text_config, self._max_len = specs, text_config, max_len
        self._recurrences = frozenset(recurrences)
        self._is_planned = device.type in _PLANNED_FOR
        self._made: dict[StepLimits, BucketTable] = {}

    def limits(self, memory: MemoryPlan) -> StepLimits:
        """Return the limits of steps."""
        groups = [*memory.groups_of_ranks]
        return resolve_limits(
            self.config.scheduler,
            memory,
            self._max_len,
            caches_prefixes=self.config.cache.enable_prefix_caching,
            reads_slice=self._specs[0].impl is not Implementation.SDPA,
            is_card=self._is_planned,
            chunk_grid=chunk_grid(groups),
            last_chunk=last_chunk(groups),
            shares_blocks=all(group.kind.shares_blocks for group in groups),
            cache=self.config.cache,
        )

    def table(self, memory: MemoryPlan) -> BucketTable:
        """The given buckets, or the default; none where steps run at their exact shapes.

        Raises:
            ValueError: a given bucket exceeds the stores.
        """
        limits = self.limits(memory)
        if limits not in self._made:
            self._made[limits] = self._make(limits)
        return self._made[limits]

    def adopt(self, memory: MemoryPlan, table: BucketTable) -> None:
        """Replace the buckets by those of another rank, which may differ with its heads."""
        self._made[self.limits(memory)] = table

    def _make(self, limits: StepLimits) -> BucketTable:
        if limits.draft_lens and (self.uses_table or self.config.graph.table is not None):
            return self._make(limits.without_drafts).with_drafts(limits.draft_lens)
        given = self.config.graph.table
        assert not isinstance(given, str | Path), "files are read before, see GivenBuckets"
        if given is None:
            if not self.uses_table:
                return BucketTable(())
            make = planned_table if self._is_planned else default_table
            return make(limits, self._specs, self._text_config)
        check_table(given, limits)
        if self.config.graph.own_cost:
            return given
        return replace(given, cost=model_cost(limits, self._specs, self._text_config))

    def geometry(self, memory: MemoryPlan) -> StepGeometry:
        """The sizes of the stores that steps point into."""
        speculation = self.config.scheduler.speculation
        geometry = StepGeometry.of(self.limits(memory))
        if speculation is None or speculation.method != "mtp":
            return geometry
        # It imports transformers, which commands that only plan do without.
        from hpu_duo.modeling.mtp import num_layers_of

        num_next = num_layers_of(self._text_config, speculation.num_speculative_tokens)
        # All but the first layer hide the first tokens of a text, by a rule.
        needs_positions = geometry.uses_block_positions or num_next > 1
        return replace(geometry, num_next=num_next, uses_block_positions=needs_positions)

    def largest(self, memory: MemoryPlan) -> BatchShape:
        """The shape that the staged inputs must hold: every reachable shape, and every bucket."""
        limits, table = self.limits(memory), self.table(memory)
        return limits.largest if not len(table) else limits.largest | table.envelope

    def graph_bytes(
        self,
        memory: MemoryPlan,
        dtype_bytes: int,
        drafts: tuple[DraftTables, tuple[Sequence[LayerSpec], Any] | None] | None = None,
    ) -> int:
        """Estimated device memory of the graphs of all buckets, with the staged inputs.

        Args:
            drafts: fields of drafts of a model, and its layers if it has stores of its own.
        """
        geometry, table = self.geometry(memory), self.table(memory)
        staged = staged_bytes(geometry, self.largest(memory))
        if self.backend.name == "eager":
            return staged
        found = self._graphs(geometry, dtype_bytes).total_bytes(table)
        if drafts is not None:
            fields, own = drafts
            chain = self._graphs(fields.geometry, dtype_bytes, own)
            found += chain.total_bytes(fields.table(table, geometry.row_len))
            if own is not None:
                found += self._graphs(geometry, dtype_bytes, own).total_bytes(table)
        return staged + found

    def _graphs(
        self, geometry: StepGeometry, dtype_bytes: int, own: tuple[Sequence[LayerSpec], Any] | None = None
    ) -> GraphMemory:
        """Memory of the graphs of a model's steps; with its own layers, it has no recurrences."""
        specs, text_config = own or (self._specs, self._text_config)
        kept = KEPT.get(self.backend.name, UNKNOWN)
        sizes = StepSizes.of(
            specs,
            text_config,
            geometry.block_size,
            dtype_bytes,
            decode_len=geometry.decode_len,
            draft_lens=geometry.draft_lens,
            recurrences=self._recurrences if own is None else (),
        )
        num_units = len(set(specs)) if kept.is_per_kind else 1
        return GraphMemory(kept, num_units, sizes, self.config.graph.max_captured_tokens)


def check_table(table: BucketTable, limits: StepLimits) -> None:
    """Check that no bucket exceeds the stores; more query tokens than a step can have are allowed.

    Raises:
        ValueError: a bucket does.
    """
    for bucket in table:
        if bucket.num_unique_blocks > limits.max_unique_blocks or bucket.num_logits > limits.max_num_seqs:
            raise ValueError(
                f"expected buckets of at most {limits.max_unique_blocks} unique blocks and "
                f"{limits.max_num_seqs} logit rows, which the stores have, got {bucket}"
            )


def default_table(limits: StepLimits, specs: Sequence[LayerSpec], text_config: Any) -> BucketTable:
    """The default buckets."""
    skips = specs[0].impl is Implementation.SDPA
    rule = ExponentialRule(slack=1.25, merge_unique=True) if skips else None
    return BucketTable.exponential(limits, rule, model_cost(limits, specs, text_config))


def planned_table(limits: StepLimits, specs: Sequence[LayerSpec], text_config: Any) -> BucketTable:
    """As many buckets as the default has, planned for the stated workload: they pad a fraction of it.

    Needs seconds, less than the compilation of one of them on an accelerator, and nothing where the process
    has planned it before.
    """
    default = default_table(limits, specs, text_config)
    return _planned(limits, len(default), default.cost)


@lru_cache(maxsize=64)
def _planned(limits: StepLimits, num_buckets: int, cost: CostFunction) -> BucketTable:
    return plan_buckets(limits, num_buckets, cost, resolution=_QUICK)


def model_cost(limits: StepLimits, specs: Sequence[LayerSpec], text_config: Any) -> CostFunction:
    """Return the cost function of steps of this model with its kernels, which ranks buckets."""
    first = specs[0]
    if first.impl is Implementation.SDPA:
        return SkippingCost(text_config.vocab_size / (12 * text_config.hidden_size * len(specs)))
    if first.chunks.one_pass:
        hardware = GAUDI2 if card_type().startswith(GAUDI2.name.upper()) else GAUDI3
        return StepSeconds(EngineWork.of_specs(_size_of(text_config, specs), specs, limits), hardware)
    return StepCost(
        block_size=limits.block_size,
        ring_width=widest_row(group for spec in specs for group in spec.groups),
        hidden_size=text_config.hidden_size,
        num_layers=len(specs),
        vocab_size=text_config.vocab_size,
        kv_ratio=1 / first.group_size,
    )


def _size_of(text_config: Any, specs: Sequence[LayerSpec]) -> ModelSize:
    """The sizes of one rank's share of a model; weights of layers are estimated."""
    layers = []
    for spec in specs:
        num_heads = max(1, sum(group.num_heads for group in spec.groups))
        layers.append(
            AttentionSize(
                num_heads * spec.group_size, num_heads, spec.head_dim, value_head_dim=spec.value_dim
            )
        )
    most = max(layer.num_heads for layer in layers)
    num_ranks = max(1, getattr(text_config, "num_attention_heads", most) // most)
    hidden = text_config.hidden_size
    inner = getattr(text_config, "intermediate_size", None) or 4 * hidden
    # Gemma 3n has a size for each layer.
    inners = inner if isinstance(inner, Sequence) else [inner] * len(layers)
    heads = [
        hidden * (layer.head_dim + layer.value_dim) * (layer.num_heads + layer.num_kv_heads)
        for layer in layers
    ]
    return ModelSize(
        "",
        tuple(layers),
        hidden,
        -(-text_config.vocab_size // num_ranks),
        sum(heads) + 3 * hidden * sum(inners) // num_ranks,
        other_params=0,
        max_positions=1,
    )
