"""The resolved settings of an engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from graphs import StepLimits
from hpu_duo.kv.plan import ring_slack
from hpu_duo.parallel import ContextParallelBlocks
from kernels_ref import LayerSpec

if TYPE_CHECKING:
    from hpu_duo.engine.runner import Runner
    from hpu_duo.engine.scheduler import Scheduler
    from hpu_duo.heads import HeadPattern


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The resolved settings of an engine: each "auto" and each None is replaced by the value in use.

    Attributes:
        device, dtype: of weights and stores.
        attention: implementation of the kernels.
        softmax: precision of its scores and exponentials.
        graphs: capture backend.
        num_buckets: current shapes of the table; 0 where steps run at their exact shapes.
        on_miss: what happens to a step that fits no bucket.
        max_captured_tokens: buckets with more query tokens run uncaptured; None = all are captured.
        trims_chunks: whether prompts end at the borders of buckets.
        scheduling_policy: order of admission and preemption.
        limits: of steps.
        num_retrieval_heads, num_streaming_heads: KV heads of all layers, by whether they see the whole text.
        retrieval_parallel: what is sharded of retrieval heads: heads, or the context of each.
        num_layer_kinds: kinds of layers, each of which is compiled for every bucket.
        num_promoted_heads: streaming heads of the pattern that are served as retrieval heads on this rank,
            because of ``max_layer_kinds`` or to shard heads evenly.
        promoted_bytes: bytes of the blocks of these heads, beyond those of their rings.
        kv_bytes, graph_bytes: memory of the stores, and memory set aside for graphs.
    """

    device: str
    dtype: str
    attention: str
    softmax: str
    graphs: str
    num_buckets: int
    on_miss: str
    max_captured_tokens: int | None
    trims_chunks: bool
    scheduling_policy: str
    limits: StepLimits
    num_retrieval_heads: int
    num_streaming_heads: int
    retrieval_parallel: str
    num_layer_kinds: int
    num_promoted_heads: int
    promoted_bytes: int
    kv_bytes: int
    graph_bytes: int

    @classmethod
    def of(
        cls, runner: Runner, scheduler: Scheduler, patterns: tuple[HeadPattern, HeadPattern] | None
    ) -> Resolved:
        """Collect the settings of an engine from its parts.

        Args:
            patterns: heads that retrieve, of the whole model and of this rank; None if all do.
        """
        graphs, specs = runner.graphs, runner.model.specs
        return cls(
            device=str(runner.device),
            dtype=str(runner.model.model.dtype).removeprefix("torch."),
            attention=specs[0].impl.value,
            softmax=specs[0].softmax.value,
            graphs=graphs.backend.name,
            num_buckets=len(graphs.table) if runner.executor.uses_table else 0,
            on_miss=graphs.policy.value,
            max_captured_tokens=graphs.max_captured_tokens,
            trims_chunks=scheduler.trims_chunks,
            scheduling_policy=scheduler.policy.name,
            limits=scheduler.limits,
            num_retrieval_heads=sum(spec.num_retrieval for spec in specs),
            num_streaming_heads=sum(spec.num_kv_heads - spec.num_retrieval for spec in specs),
            retrieval_parallel="context" if any(map(_is_context_parallel, specs)) else "heads",
            num_layer_kinds=len(runner.model.kinds),
            num_promoted_heads=0 if patterns is None else patterns[1].num_promoted,
            promoted_bytes=_promoted_bytes(runner, scheduler.limits, patterns),
            kv_bytes=runner.store.num_bytes,
            graph_bytes=runner.store.plan.graph_bytes,
        )

    def items(self) -> dict[str, str | int | bool | None]:
        """Return all settings by name, limits included, as values for JSON and tables."""
        plain = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "limits"}
        return {**plain, **asdict(self.limits)}

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.items().items())


def _is_context_parallel(spec: LayerSpec) -> bool:
    return any(group.kind.name == ContextParallelBlocks.name for group in spec.groups)


def _promoted_bytes(
    runner: Runner, limits: StepLimits, patterns: tuple[HeadPattern, HeadPattern] | None
) -> int:
    if patterns is None or patterns[1].promoted is None or patterns[0].promoted is None:
        return 0
    (whole, own), memory, spread = patterns, runner.store.plan, runner.executor.spread
    is_context_parallel = spread is not None and any(map(_is_context_parallel, runner.model.specs))
    # With context-parallel blocks, each rank stores its part of the tokens of all promoted heads.
    num_parts = spread.num_ranks if is_context_parallel and spread is not None else 1
    in_blocks = whole.promoted if is_context_parallel else own.promoted
    slack = ring_slack(limits.decode_len)
    ring_slots = min(own.sink + own.recent, limits.max_model_len) + slack
    # One more row is the null unit, and others are read from the scratch.
    num_rows = limits.num_ring_rows + 1 + memory.max_chunk_rows
    block_slots = (memory.num_blocks + 1) * (memory.block_size // num_parts)
    assert in_blocks is not None and own.promoted is not None, "asked before"  # noqa: PT018
    elements = sum(
        (int(blocks.sum()) * block_slots - int(rings.sum()) * num_rows * ring_slots) * layer.elements_per_head
        for blocks, rings, layer in zip(in_blocks, own.promoted, memory.layers)
    )
    return elements * memory.dtype_bytes
