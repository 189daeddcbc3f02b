"""Capacity of devices: requests that fit into memory, predicted speed, and predicted warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphs import StepCost, StepLimits
from graphs.planner import GraphBudget
from hpu_duo.cost.deployment import Deployment, Serving
from hpu_duo.cost.hardware import Format
from hpu_duo.cost.model import ModelSize
from hpu_duo.kv.plan import widest_row
from hpu_duo.limit_config import SchedulerConfig

SECONDS_PER_GRAPH = (0.7, 14.0)
"""Seconds of warm-up of one graph with one kind of layer: from 49 s for 72 graphs (Llama 8B, bf16, Gaudi 2,
documentation of vllm-gaudi) to 14 s each for 126 (vllm-gaudi, pull request 1160)."""


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
    """

    context: int
    num_requests: int
    bytes_per_request: int
    num_running: int
    tokens_per_s: float | None
    tokens_per_s_alone: float | None
    first_token_s: float | None


@dataclass(frozen=True)
class WarmUp:
    """Graphs to capture, and their seconds at published rates.

    Attributes:
        num_graphs: buckets of the table, or the most that one may have.
        num_layer_kinds: kinds of layers, each of which is compiled for every bucket.
        low_s, high_s: seconds of the warm-up.
        is_bound: whether the table has not been planned, so that ``num_graphs`` is its budget.
    """

    num_graphs: int
    num_layer_kinds: int
    low_s: float
    high_s: float
    is_bound: bool

    @classmethod
    def of(cls, num_graphs: int, num_layer_kinds: int, *, is_bound: bool) -> WarmUp:
        """Estimate the seconds of ``num_graphs`` graphs."""
        low, high = SECONDS_PER_GRAPH
        num_recipes = num_graphs * num_layer_kinds
        return cls(num_graphs, num_layer_kinds, num_recipes * low, num_recipes * high, is_bound)

    @property
    def num_recipes(self) -> int:
        """Number of compilations."""
        return self.num_graphs * self.num_layer_kinds


@dataclass(frozen=True)
class Capacity:
    """Capacity with one choice of streaming heads and KV format.

    Attributes:
        sparsity: share of KV heads that stream, in layers without a sliding window.
        kv_format: of keys and values.
        num_promoted: further retrieval heads, so that layers are of few kinds.
        points: one for each context, in the order asked for.
        warm_up: of a table for the longest of these contexts; None when not one request of it fits.
    """

    sparsity: float
    kv_format: Format
    num_promoted: int
    points: tuple[CapacityPoint, ...]
    warm_up: WarmUp | None

    def describe(self) -> str:
        """Describe the choice in words."""
        heads = "full attention" if self.sparsity == 0 else f"{self.sparsity:.0%} of heads streaming"
        if self.num_promoted:
            heads += f" less {self.num_promoted} promoted ones"
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
    return Capacity(sparsity, kv_format, deployment.num_promoted, points, _warm_up(deployment, num_graphs))


def _point(deployment: Deployment, context: int) -> CapacityPoint:
    fits = deployment.count_requests(context)
    running = min(fits, deployment.serving.max_num_seqs)
    return CapacityPoint(
        context=context,
        num_requests=fits,
        bytes_per_request=deployment.plan(1, 1).bytes_per_request(context),
        num_running=running,
        tokens_per_s=deployment.decode_tokens_per_s(running, context) if fits else None,
        tokens_per_s_alone=deployment.decode_tokens_per_s(1, context) if fits else None,
        first_token_s=deployment.first_token_s(context) if fits else None,
    )


def step_limits(deployment: Deployment, max_chunk_rows: int = SchedulerConfig.max_chunk_rows) -> StepLimits:
    """Return the limits of steps with as many rows and blocks as fit.

    Args:
        max_chunk_rows: prompts that may continue with several tokens in the same step.

    Raises:
        ValueError: not one request of the longest length fits.
    """
    if deployment.count_requests(deployment.max_len) < 1:
        raise ValueError(
            f"expected memory for one request of {deployment.max_len} tokens, "
            f"{deployment.serving.num_devices} x {deployment.serving.hardware.title} have less"
        )
    serving = deployment.serving
    num_rows = min(serving.max_num_seqs, deployment.count_requests(serving.block_size))
    # More blocks than so many requests of that length take would never be used.
    num_blocks = min(
        deployment.count_blocks(num_rows), num_rows * -(-deployment.max_len // serving.block_size)
    )
    return StepLimits(
        max_num_seqs=num_rows,
        max_num_batched_tokens=serving.max_num_batched_tokens,
        max_model_len=deployment.max_len,
        block_size=serving.block_size,
        num_blocks=num_blocks,
        uses_blocks=num_blocks > 0,
        decode_len=1,
        max_chunk_rows=max_chunk_rows,
    )


def step_cost(deployment: Deployment) -> StepCost:
    """Return the relative cost of steps of the deployment, with the figures of its hardware."""
    model, hardware = deployment.model, deployment.serving.hardware
    return StepCost(
        block_size=deployment.serving.block_size,
        ring_width=widest_row(group for layer in deployment.kv_layers for group in layer.groups),
        hidden_size=model.hidden_size,
        num_layers=len(model.layers),
        vocab_size=model.vocab_size,
        kv_ratio=model.layers[0].num_kv_heads / model.layers[0].num_heads,
        operations_per_byte=hardware.nominal_bf16 / hardware.memory_bytes_per_s,
    )


def _warm_up(deployment: Deployment, num_graphs: int) -> WarmUp | None:
    if deployment.count_requests(deployment.max_len) < 1:
        return None
    # A planned table may be smaller: nothing is gained by buckets that no step would use.
    return WarmUp.of(GraphBudget(num_graphs).most_graphs, deployment.num_layer_kinds, is_bound=True)
