"""Capacity of devices: requests that fit into memory, predicted speed, and predicted warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphs import CARD_STEP_TOKENS, BatchShape, Phase, StepCost, StepLimits
from graphs.planner import GraphBudget
from hpu_duo.cost.deployment import Deployment, Serving
from hpu_duo.cost.fitted import FITTED
from hpu_duo.cost.hardware import Format
from hpu_duo.cost.model import ModelSize
from hpu_duo.cost.warm_up import WarmUp
from hpu_duo.kv.leases import block_moves
from hpu_duo.kv.plan import widest_row

SMALLEST_DECODE = BatchShape(Phase(unique=True), 1, 0, 1, 1)
"""The step with fewest operators among those with context."""


@dataclass(frozen=True)
class CapacityPoint:
    """One length of context.

    Attributes:
        context: tokens of each request in the cache.
        num_requests: requests that fit at once.
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
        num_promoted: further retrieval heads, so that layers are of few kinds.
        points: one for each context, in the order asked for.
        warm_up: of a table for the longest of these contexts; None when not one request of it fits.
        not_served: what of it the engine of this version cannot run, so that it is priced only.
        error_factor: the most that predicted speeds are off by, either way; it is in their ranges.
        kept: what these heads keep if they have a KV budget, or all heads by a plan; "" for rings.
    """

    sparsity: float
    kv_format: Format
    num_promoted: int
    points: tuple[CapacityPoint, ...]
    warm_up: WarmUp | None
    not_served: tuple[str, ...] = ()
    error_factor: float = 1.0
    kept: str = ""

    def describe(self) -> str:
        """Describe the choice in words."""
        heads = "full attention" if self.sparsity == 0 else f"{self.sparsity:.0%} of heads streaming"
        if self.num_promoted:
            heads += f" less {self.num_promoted} promoted ones"
        if self.kept:
            heads = f"heads by {self.kept}" if not self.sparsity else f"{heads} by {self.kept}"
        return f"{heads}, {self.kv_format.value} keys and values"


def capacity(
    model: ModelSize,
    serving: Serving,
    sparsity: float,
    kv_format: Format,
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
        ValueError: no contexts, one below 1 token, a budget of no graph, or what ``Deployment`` refuses.
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
    )


def _point(deployment: Deployment, context: int) -> CapacityPoint:
    fits = deployment.count_requests(context)
    running = min(fits, deployment.serving.max_num_seqs)
    sizes = context, fits, deployment.plan(1, 1).bytes_per_request(context), running
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
    # More blocks than so many requests of that length take would never be used.
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


def step_cost(deployment: Deployment) -> StepCost:
    """Return the relative cost of steps of the deployment, with the figures of its hardware."""
    model, hardware = deployment.model, deployment.serving.hardware
    return StepCost(
        block_size=deployment.serving.engine_block_size,
        ring_width=widest_row(group for layer in deployment.kv_layers for group in layer.groups),
        hidden_size=model.hidden_size,
        num_layers=len(model.layers),
        vocab_size=model.vocab_size,
        kv_ratio=model.layers[0].num_kv_heads / model.layers[0].num_heads,
        operations_per_byte=hardware.nominal_bf16 / hardware.memory_bytes_per_s,
        operations_per_launch=hardware.nominal_bf16 * FITTED.launch_s,
        launches=deployment.engine_work.kernels.step_cost_launches,
    )


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
