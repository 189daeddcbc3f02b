"""Work of a step of the engine on an HPU, from the sizes of its bucket alone.

It counts what ``hpu-duo audit`` traces, without tracing: ``tests/audit/test_cost_agrees.py`` compares both.

The seconds of a warm-up are predicted from the operators that it traces and compiles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from graphs import BatchShape, Phase, StepLimits
from hpu_duo.config.limits import CacheConfig, SchedulerConfig
from hpu_duo.kv.plan import LayerKV, ring_slack
from hpu_duo.modeling.experts import copies_weights, elements_per_token, experts_at_a_time, weighs_inner
from hpu_duo.parallel import HeadExchanges, head_exchanges, summed_score_bytes
from hpu_duo.planning.attention_counts import (
    AttentionCounts,
    AttentionRuns,
    Bucket,
    GroupSizes,
    Shapes,
    Size,
    by_size,
    count_attention,
)
from hpu_duo.planning.model import AttentionSize, Format, ModelSize
from hpu_duo.planning.region_calls import num_compiled, num_region_calls, scratch_copies, traced_runs
from hpu_duo.planning.work import (
    ACTIVATION_BYTES,
    ALL_REDUCES_PER_LAYER,
    FUSED,
    OPERATIONS_PER_SCORE,
    PORTABLE,
    PUBLISHED_LAYER_LAUNCHES,
    Formats,
    KernelWork,
    Work,
)
from kernels_ref import Budget, HeadGroup, Implementation, LayerSpec, Owner
from kernels_ref.chunks import DEFAULT_BOUNDS, ChunkBounds, num_parts
from kernels_ref.formats import LATENT

SECONDS_PER_GRAPH = (0.7, 14.0)
"""Seconds of warm-up of one graph with one kind of layer: from 49 s for 72 graphs (Llama 8B, bf16, Gaudi 2,
documentation of vllm-gaudi) to 14 s each for 126 (vllm-gaudi, pull request 1160)."""

TRACE_S_PER_NODE = 0.0039
"""Seconds in which torch traces one node of a layer's graph on a CPU core, views included; measured, with
machine and command in ``benchmarks/results/hpu-first-contact.md``."""

NODES_PER_OPERATOR = 2.0
"""Nodes of such a graph for each operator that is not a view; from the same table and the audit."""

TRACE_S_PER_OPERATOR = TRACE_S_PER_NODE * NODES_PER_OPERATOR

UNKNOWN = (
    "Tracing was measured on a CPU. What Synapse takes to compile a region of so many operators is unknown "
    "until a Gaudi has run: published seconds per graph do not say how many operators theirs have"
)


def graph_scale(num_operators: float, num_published: float = PUBLISHED_LAYER_LAUNCHES) -> float:
    """Return the seconds of a graph over the published ones: in proportion to its operators, at least 1."""
    return max(1.0, num_operators / num_published)


class BucketGraphs(NamedTuple):
    """Compilations of one bucket.

    Attributes:
        num_recipes: graphs that are compiled, each by itself.
        operators: of a layer, the mean of its kinds.
    """

    num_recipes: int
    operators: float


_EXPERT_MATRICES = 3
"""Matrices of an expert: gate, up and down."""

_MOVED = 8, 10
"""Elements that operators read and write for each token of an expert, by its inner and by the hidden size:
products, gate, share of the token, and the sum in float32 (``hpu_duo/modeling/experts.py``)."""

_MOVED_WEIGHED = 13, 2
"""The same where activations are weighed before the last product."""

_EXCHANGE_COPIES, _EXCHANGE_LAUNCHES = 4, 12
"""Additional reads and writes of exchanged data, and operators around each exchange: packing, receiving,
reordering and merging (``hpu_duo/parallel/head_exchange.py``)."""

_ROUTING_LAUNCHES, _GROUP_LAUNCHES = 8, 12
"""Operators of a layer's routing, and of each group of experts, as the audit counts them."""


_KV_BYTES = int(Format.BF16.num_bytes)


@dataclass(frozen=True)
class EngineWork:
    """The work of every bucket of an engine.

    Attributes:
        model: its sizes.
        kv_layers: keys and values of each layer.
        formats: of weights; keys and values are multiplied in bf16, and stored as their groups say.
        kernels: those of attention.
        block_size: slots of a block.
        max_chunk_rows, decode_len: see ``SchedulerConfig``.
        num_devices: devices that share heads and weights; work is that of all of them, as if each had as
            many retrieval heads of a layer as the one with most, for which the others wait.
        deals_blocks: whether each of them reads its part of the tokens of all retrieval heads instead; slots
            are then those of a block on one device, and blocks of a bucket lie on all of them.
        chunks: bounds of chunks of context.
        on_chip_bytes: what operators keep on the chip; None = everything, so that nothing spills.

    Raises:
        ValueError: ``kv_layers`` is not one entry for each layer of the model.
    """

    model: ModelSize
    kv_layers: tuple[LayerKV, ...]
    formats: Formats = field(default_factory=Formats)
    kernels: KernelWork = FUSED
    block_size: int = CacheConfig.block_size
    max_chunk_rows: int = SchedulerConfig.max_chunk_rows
    decode_len: int = 1
    num_devices: int = 1
    deals_blocks: bool = False
    chunks: ChunkBounds = DEFAULT_BOUNDS
    on_chip_bytes: int | None = None

    @classmethod
    def of_specs(cls, model: ModelSize, specs: Sequence[LayerSpec], limits: StepLimits) -> EngineWork:
        """Return the work of one device of an engine, by the kernels that it has chosen.

        Args:
            model: as it is on the device.
            specs: of its layers there.
        """
        return cls(
            model,
            tuple(LayerKV(spec.groups, spec.head_dim, spec.value_dim, rows=spec.rows) for spec in specs),
            kernels=FUSED if specs[0].impl is Implementation.HPU else PORTABLE,
            block_size=limits.block_size,
            max_chunk_rows=limits.max_chunk_rows,
            decode_len=limits.decode_len,
            chunks=specs[0].chunks,
        )

    def __post_init__(self) -> None:
        if len(self.kv_layers) != len(self.model.layers):
            raise ValueError(f"expected {len(self.model.layers)} KV layers, got {len(self.kv_layers)}")

    @property
    def has_rings(self) -> bool:
        """Whether any heads have rings."""
        return any(group.kind.owner is not Owner.BLOCK for kv in self.kv_layers for group in kv.groups)

    def of(self, bucket: Bucket) -> Work:
        """Return the work of a step in ``bucket``, padding included; that of each of many is in arrays."""
        total = self._linear(bucket) + self._states(bucket)
        for layer in self._attending:
            total = total + self._attention(layer, bucket) * layer.number
        return replace(
            total,
            num_region_calls=total.num_region_calls + len(scratch_copies(self._stores, bucket)),
        )

    def traced_launches(self, bucket: BatchShape) -> float:
        """Operators that are traced and compiled of a layer in ``bucket``, the mean of those that differ."""
        return mean_launches(self.kernels, [self._sizes(layer, kv) for layer, kv in self._layers], bucket)

    def block_groups(self) -> list[GroupSizes]:
        """Return the groups of heads that store blocks, of one device, in each distinct layer."""
        found = []
        for layer, kv in self._layers:
            met = self._context_parallel_sizes(layer, kv)
            found += self._sizes(layer, kv) if met is None else [met]
        return [sizes for sizes in found if sizes.window is None]

    def compiled(self, bucket: BatchShape) -> BucketGraphs:
        """Return what is compiled for ``bucket`` where layers are compiled by themselves."""
        kinds = [self._sizes(layer, kv) for layer, kv in self.model.kinds(self.kv_layers)]
        return BucketGraphs(num_compiled(kinds, bucket, self._stores), self.traced_launches(bucket))

    def attention_of(self, bucket: BatchShape) -> Iterator[tuple[AttentionCounts, AttentionRuns, int]]:
        """Yield the counts of each group of heads of each distinct layer, and the number of such layers."""
        for layer in self._attending:
            for sizes, met in self._attended(layer, bucket):
                yield *count_attention(sizes, met), layer.number

    @cached_property
    def _attending(self) -> tuple[_Attending, ...]:
        """Each distinct layer."""
        return tuple(
            _Attending(kv, number, self._sizes(layer, kv), self._context_parallel_sizes(layer, kv))
            for (layer, kv), number in self._layers.items()
        )

    @cached_property
    def _layers(self) -> Counter[tuple[AttentionSize, LayerKV]]:
        return Counter(zip(self.model.layers, self.kv_layers))

    @cached_property
    def _stores(self) -> Counter[GroupSizes]:
        """Layers with each group of heads."""
        found: Counter[GroupSizes] = Counter()
        for (layer, kv), num in self._layers.items():
            for sizes in self._sizes(layer, kv):
                found[sizes] += num
        return found

    def _attended(self, layer: _Attending, bucket: Bucket) -> Iterator[tuple[GroupSizes, Bucket]]:
        """Groups of a layer, with the part of the bucket that each attends to."""
        phase, own = bucket.phase, layer.own
        stored = replace(bucket, phase=replace(phase, causal=False))
        reads = phase.shared or phase.unique
        if layer.dealt is not None and reads:
            yield layer.dealt, stored
        causal = replace(bucket, phase=Phase(causal=True), num_shared_blocks=0, num_unique_blocks=0)
        for sizes in own:
            is_absorbed = sizes.heads.format == LATENT
            if sizes.window is not None or (layer.dealt is None and not is_absorbed):
                yield sizes, bucket
                continue
            if phase.causal:
                yield sizes, causal
            if is_absorbed and reads and layer.dealt is None:
                yield self._absorbed(sizes), stored

    def _sizes(self, layer: AttentionSize, kv: LayerKV) -> list[GroupSizes]:
        if self.deals_blocks:
            return [self._of_group(layer, kv, group) for group in most_of_each(kv, self.num_devices)]
        return [self._of_group(layer, kv, group) for group in busiest_rank(kv, self.num_devices).groups]

    def _absorbed(self, sizes: GroupSizes) -> GroupSizes:
        """A group that stores latents as the kernels see it that read those: one head of all queries."""
        key_dim, value_dim = sizes.heads.kind.stored_dims(sizes.head_dim, sizes.value_dim)
        heads = replace(sizes.heads, num_heads=1)
        of_all = sizes.num_query_heads
        return replace(sizes, heads=heads, group_size=of_all, head_dim=key_dim, value_head_dim=value_dim)

    def _context_parallel_sizes(self, layer: AttentionSize, kv: LayerKV) -> GroupSizes | None:
        """Heads with context-parallel blocks: each device attends to its part of the context."""
        dealt = [group for group in kv.groups if group.kind.owner is Owner.BLOCK]
        if not (self.deals_blocks and dealt):
            return None
        sizes = self._of_group(layer, kv, dealt[0])
        return self._absorbed(sizes) if sizes.heads.format == LATENT else sizes

    def _of_group(self, layer: AttentionSize, kv: LayerKV, group: HeadGroup) -> GroupSizes:
        return GroupSizes(
            group,
            layer.num_heads // layer.num_kv_heads,
            kv.head_dim,
            self.block_size,
            self.max_chunk_rows,
            self.decode_len,
            self.kernels.is_fused,
            self.chunks,
            kv.value_dim,
        )

    def _exchanges(self, layer: _Attending, bucket: Bucket) -> HeadExchanges:
        met = layer.dealt
        if met is None:
            return HeadExchanges()
        of_latents = met.heads.format == LATENT
        # Each head has a latent query of its own.
        num_heads, group_size = met.heads.num_heads, met.group_size
        if of_latents:
            num_heads, group_size = group_size, num_heads
        sizes = num_heads, group_size, (met.head_dim, met.value_dim), ACTIVATION_BYTES

        def exchanged(num_shared_blocks: int) -> HeadExchanges:
            like: Any = replace(bucket, num_shared_blocks=num_shared_blocks)
            return head_exchanges(*sizes, like, self.decode_len, self.num_devices, of_latents=of_latents)

        num_shared = bucket.num_shared_blocks
        if not isinstance(num_shared, np.ndarray):
            return exchanged(num_shared)
        # They depend on whether there are any.
        either: Any = [np.where(num_shared > 0, *both) for both in zip(exchanged(1), exchanged(0))]
        return HeadExchanges(*either)

    def _attention(self, layer: _Attending, bucket: Bucket) -> Work:
        kv = layer.kv
        products: Any = 0.0
        scores: Any = 0.0
        kv_bytes: Any = 0.0
        moved: Any = 0.0
        launches: Any = 0.0
        spilled: Any = 0.0
        calls: Any = 0.0
        for sizes, met in self._attended(layer, bucket):
            counts, runs = count_attention(sizes, met)
            spilled = spilled + self._spilled_share(sizes, met) * self.kernels.whole_block_bytes(counts)
            # What is cut depends on all parts of the step, whichever of them the group runs by itself.
            calls = calls + num_region_calls(sizes, replace(met, phase=bucket.phase), runs)
            # A score is a product of one head size, and the value that it weighs is another one.
            elements = sizes.head_dim + sizes.value_dim
            products = products + 2.0 * elements * counts.scores
            products = products + 2.0 * counts.owner_pairs * (sizes.value_dim + 1)
            scores = scores + counts.scores
            stored = kv.token_bytes(sizes.heads, _KV_BYTES) / elements
            kv_bytes = kv_bytes + counts.block_elements * stored
            if not sizes.heads.format.is_plain:
                # Chunks are written decoded, and read again.
                moved = moved + 2 * _KV_BYTES * counts.block_elements
            moved = moved + self.kernels.attention_bytes(counts)
            launches = launches + self.kernels.attention_launches(runs)
        ranks, exchanges = self.num_devices, self._exchanges(layer, bucket)
        sent = exchanges.bytes_to_each(ranks)
        return Work(
            bf16_ops=ranks * products,
            vector_ops=ranks * scores * OPERATIONS_PER_SCORE,
            kv_bytes=ranks * kv_bytes,
            moved_bytes=ranks * (moved + _EXCHANGE_COPIES * ranks * sent),
            reduced_bytes=self._score_bytes(kv, bucket),
            num_launches=launches + _EXCHANGE_LAUNCHES * exchanges.number,
            sent_bytes=sent,
            spilled_bytes=ranks * spilled,
            num_region_calls=calls,
        )

    def _spilled_share(self, sizes: GroupSizes, bucket: Bucket) -> Any:
        """Share of the intermediates of whole blocks that on-chip memory cannot store."""
        if self.on_chip_bytes is None or not bucket.phase.unique:
            return 0.0
        made = sizes.unique_bytes(bucket.num_logits, bucket.num_unique_blocks)
        return np.maximum(0.0, 1.0 - self.on_chip_bytes / np.maximum(1, made))

    def _score_bytes(self, kv: LayerKV, bucket: Bucket) -> Any:
        """Scores that devices sum, of policies that average over all heads of a layer."""
        budgets = [group.kind for group in kv.own_groups if isinstance(group.kind, Budget)]
        pooled = [kind for kind in budgets if kind.policy.pools_heads]
        if not pooled:
            return 0.0

        def summed(*sizes: int) -> float:
            shape = BatchShape(bucket.phase, *sizes)
            return float(sum(summed_score_bytes(kind, 1, shape, self.decode_len) for kind in pooled))

        sizes = (
            bucket.query_len,
            bucket.num_shared_blocks,
            bucket.num_unique_blocks,
            bucket.num_logits,
        )
        return np.vectorize(summed)(*sizes) if isinstance(bucket, Shapes) else summed(*sizes)

    def _states(self, bucket: Bucket) -> Work:
        """Updates of the states of rows: those of all devices, which split heads and channels."""
        total, slack = Work(), ring_slack(self.decode_len)
        for kinds, number in Counter(self.model.states).items():
            for kind in (replace(each, slack=slack) for each in kinds):
                counts = kind.count(bucket.query_len, bucket.num_logits, has_prompts=bucket.phase.causal)
                of_layer = Work(
                    bf16_ops=counts.products,
                    vector_ops=counts.vector_ops,
                    kv_bytes=2.0 * kind.row_bytes * counts.updates,
                    num_launches=counts.launches,
                )
                total = total + of_layer * number
        return total

    def _linear(self, bucket: Bucket) -> Work:
        model, tokens, num_layers = self.model, bucket.query_len, self.model.num_layers
        logits = bucket.num_logits * self.decode_len
        experts = model.experts
        num_chosen = tokens * experts.num_per_token
        copies = experts.num_params > 0 and copies_weights(num_chosen, experts.num_experts)
        # Experts of few tokens are gathered: read, written and read again. More tokens run through all of
        # them.
        met = _where(copies, num_chosen / experts.num_experts, tokens)
        read = _where(copies, 3.0 * met, 1.0)
        in_layers = 2.0 * (tokens * model.matrix_params + met * experts.num_params)
        is_fp8 = self.formats.weights is Format.FP8
        head = 2.0 * logits * model.head_params
        width = model.matrix_params / model.hidden_size
        return Work(
            bf16_ops=head + (0.0 if is_fp8 else in_layers),
            fp8_ops=in_layers if is_fp8 else 0.0,
            weight_bytes=self.formats.weights.num_bytes * (model.matrix_params + read * experts.num_params)
            + model.head_params * Format.BF16.num_bytes,
            moved_bytes=tokens
            * (self.kernels.hidden_bytes * num_layers * model.hidden_size + self.kernels.width_bytes * width)
            + met * self._expert_bytes,
            reduced_bytes=ALL_REDUCES_PER_LAYER * num_layers * tokens * model.hidden_size * ACTIVATION_BYTES,
            num_launches=self.kernels.step_launches
            + self.kernels.ring_step_launches * self.has_rings
            + (self.kernels.layer_launches + self._expert_launches(tokens, copies)) * num_layers,
        )

    @property
    def _expert_bytes(self) -> float:
        """Bytes that one token moves through every expert of every layer, weights apart."""
        model, inner = self.model, self._expert_inner
        if not inner:
            return 0.0
        num_experts = model.num_layers * model.experts.num_experts
        of_inner, of_hidden = _MOVED_WEIGHED if weighs_inner(inner, model.hidden_size) else _MOVED
        return ACTIVATION_BYTES * num_experts * (of_inner * inner + of_hidden * model.hidden_size)

    @property
    def _expert_inner(self) -> int:
        """Inner size of an expert, 0 without experts."""
        model, experts = self.model, self.model.experts
        num_rows = model.num_layers * experts.num_experts * _EXPERT_MATRICES * model.hidden_size
        return round(experts.num_params / num_rows) if experts.num_params else 0

    def _expert_launches(self, tokens: Size, copies: Any) -> Any:
        """Additional operators of a layer with experts."""
        experts, hidden = self.model.experts, self.model.hidden_size
        if not experts.num_params:
            return 0.0
        inner = self._expert_inner
        made = elements_per_token(2 * inner, inner, hidden) * ACTIVATION_BYTES
        num_groups = _where(copies, 1, by_size(_expert_groups, tokens, experts.num_experts, made))
        return _ROUTING_LAUNCHES + _GROUP_LAUNCHES * num_groups


class _Attending(NamedTuple):
    """The heads of layers with equal attention.

    Attributes:
        kv: what each stores.
        number: of layers.
        own: groups of heads of one device.
        dealt: heads with context-parallel blocks; None without them.
    """

    kv: LayerKV
    number: int
    own: list[GroupSizes]
    dealt: GroupSizes | None


def _expert_groups(tokens: int, num_experts: int, bytes_of_token: int) -> int:
    size = experts_at_a_time(num_experts, max(1, tokens) * bytes_of_token, is_hpu=True)
    return num_parts(num_experts, size)


def _where(condition: Any, value: Any, other: Any) -> Any:
    """Select one of two, or element by element of arrays."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, value, other)
    return value if condition else other


def mean_launches(
    kernels: KernelWork,
    layers: Sequence[Sequence[GroupSizes]],
    bucket: BatchShape,
    *,
    is_whole: bool = False,
) -> float:
    """Operators that are compiled of a layer in ``bucket``, the mean of ``layers``.

    Args:
        layers: the groups of heads of each.
        is_whole: whether the step is captured whole, so that loops are unrolled; else they are cut out.
    """
    groups = [(sizes, count_attention(sizes, bucket)[1]) for layer in layers for sizes in layer]
    held = [runs if is_whole else traced_runs(sizes, runs, bucket.phase) for sizes, runs in groups]
    return kernels.layer_launches + sum(map(kernels.attention_launches, held)) / len(layers)


def busiest_rank(kv: LayerKV, num_devices: int) -> LayerKV:
    """Return the heads of the rank that a layer waits for, when heads are placed whole.

    Groups are distributed in order, each head to a rank of its own while possible, so the first groups, which
    see the whole text, are rounded up, and the others have the remaining places.

    Raises:
        ValueError: ranks do not divide the heads.
    """
    if kv.num_heads % num_devices:
        raise ValueError(f"expected ranks that divide {kv.num_heads} KV heads, got {num_devices}")
    free = kv.num_heads // num_devices
    groups = []
    for group in kv.groups:
        num = min(free, -(-group.num_heads // num_devices))
        if num:
            groups.append(replace(group, num_heads=num))
        free -= num
    return replace(kv, groups=tuple(groups))


def most_of_each(kv: LayerKV, num_devices: int) -> list[HeadGroup]:
    """Return the most heads of each group that a rank has, where ranks share them as evenly as they go.

    No rank may have the most of both: the first ones have more that stream, the last ones more that retrieve.
    """
    return [replace(group, num_heads=-(-group.num_heads // num_devices)) for group in kv.groups]
