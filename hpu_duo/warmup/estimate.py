"""Estimates of a warm-up, made before it starts, and its budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from graphs import BatchShape
from graphs.manifest import Manifest
from hpu_duo.cost.attention_counts import GroupSizes
from hpu_duo.cost.engine_work import mean_launches
from hpu_duo.cost.kernel_work import PUBLISHED_LAYER_LAUNCHES
from hpu_duo.cost.kernels import FUSED, PORTABLE
from hpu_duo.cost.warm_up import SECONDS_PER_GRAPH, TRACE_S_PER_OPERATOR, graph_scale
from hpu_duo.cost.warm_up import UNKNOWN as UNKNOWN_SECONDS
from hpu_duo.engine.batch import StepGeometry
from hpu_duo.engine.engine import Engine
from hpu_duo.startup.graph_memory import KEPT, GraphMemory, Kept
from hpu_duo.startup.graph_memory import UNKNOWN as UNKNOWN_KEPT
from hpu_duo.startup.sizes import StepSizes
from kernels_ref import Implementation, LayerSpec

_GIB = 1 << 30


@dataclass(frozen=True)
class Prior:
    """Assumed cost of one graph, where nothing has been measured.

    Attributes:
        low_s, high_s: seconds of one graph, or of one kind of layer in it where ``kept.is_per_kind``.
        kept: memory that it keeps.
        source: origin of the seconds.
        num_operators: operators of such a unit; larger ones take proportionally longer. None: the number is
            not known to matter.
        trace_s: further seconds of each operator, in which torch traces it.
        unknown: what of the seconds nobody has measured; empty where that is nothing.
    """

    low_s: float
    high_s: float
    kept: Kept
    source: str
    num_operators: float | None = None
    trace_s: float = 0.0
    unknown: str = ""

    @property
    def code_bytes(self) -> int:
        """Host or device memory for the code of one unit."""
        return self.kept.code_bytes


_GAUDI = (
    "49 s for 72 graphs (vllm-gaudi's documentation) to 14 s each for 126 (its pull request 1160), "
    "models of 8 billion parameters and more"
)

_PUBLISHED_LAYERS = 32
"""Layers of the models of the published seconds."""

PRIORS = {
    "eager": Prior(0.0, 0.5, KEPT["eager"], "nothing is captured; a step of padding runs"),
    "replay": Prior(0.0, 0.5, KEPT["replay"], "nothing is compiled; a step of padding runs"),
    "compile": Prior(2.0, 20.0, KEPT["compile"], "runs of small Llamas on two CPU cores"),
    "cuda": Prior(0.05, 2.0, KEPT["cuda"], "a few eager steps and a recording; graphs share a pool"),
    "hpu-sim": Prior(0.01, 1.0, KEPT["hpu-sim"], "a step of padding runs on the host"),
    "hpu-compile": Prior(
        *SECONDS_PER_GRAPH,
        KEPT["hpu-compile"],
        _GAUDI,
        PUBLISHED_LAYER_LAUNCHES,
        TRACE_S_PER_OPERATOR,
        UNKNOWN_SECONDS,
    ),
    # Lazy graphs hold whole steps and are not traced by torch's compiler.
    "hpu-graph": Prior(
        *SECONDS_PER_GRAPH,
        KEPT["hpu-graph"],
        _GAUDI,
        _PUBLISHED_LAYERS * PUBLISHED_LAYER_LAUNCHES,
        unknown=UNKNOWN_SECONDS,
    ),
}
"""Priors by the name of the capture backend."""

UNKNOWN = Prior(0.7, 14.0, UNKNOWN_KEPT, "nothing is known of this backend; the figures of Gaudi")

ROUTE_S = (0.02, 0.25)
"""Seconds of one way of sampling, low and high, where each operator is compiled: 12 of them take 1 to 3 s on
Gaudi (vllm-gaudi, pull request 129)."""


@dataclass(frozen=True)
class GraphEstimate:
    """Estimate of one bucket: ``low_s`` to ``high_s`` seconds, and the bytes that its graph keeps."""

    shape: BatchShape
    low_s: float
    high_s: float
    num_bytes: int
    is_measured: bool


@dataclass(frozen=True)
class Estimate:
    """Estimate of a whole warm-up.

    Attributes:
        graphs: estimates in the order of capture.
        other_s: seconds for the work of steps around their graphs, low and high.
        transient_bytes: peak size of the intermediates of one step.
        source: origin of the seconds of graphs that have not been measured.
        unknown: what of these seconds nobody has measured; empty where that is nothing.
    """

    graphs: tuple[GraphEstimate, ...]
    other_s: tuple[float, float]
    transient_bytes: int
    source: str
    unknown: str = ""

    @property
    def low_s(self) -> float:
        """Seconds in all, by the low figures."""
        return sum(graph.low_s for graph in self.graphs) + self.other_s[0]

    @property
    def high_s(self) -> float:
        """Seconds in all, by the high figures, which are compared with budgets."""
        return sum(graph.high_s for graph in self.graphs) + self.other_s[1]

    @property
    def kept_bytes(self) -> int:
        """Bytes that all graphs keep."""
        return sum(graph.num_bytes for graph in self.graphs)

    @property
    def peak_bytes(self) -> int:
        """Bytes that graphs keep, and the largest step on top of them."""
        return self.kept_bytes + self.transient_bytes

    @property
    def num_measured(self) -> int:
        """Graphs whose figures were measured in an earlier warm-up."""
        return sum(graph.is_measured for graph in self.graphs)


@dataclass(frozen=True)
class WarmUpBudget:
    """Bounds on a warm-up; None is no bound.

    Args:
        max_graphs: captured buckets.
        max_seconds: seconds of the whole warm-up.
        max_gib: GiB that graphs keep, with the intermediates of the largest step.

    Raises:
        ValueError: a bound that is not positive.
    """

    max_graphs: int | None = None
    max_seconds: float | None = None
    max_gib: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_graphs", "max_seconds", "max_gib"):
            value = getattr(self, name)
            is_number = (
                isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            )
            if value is not None and not (is_number and value > 0):
                raise ValueError(f"expected {name} to be a number above 0, got {value!r}")

    def check(self, estimate: Estimate) -> None:
        """Refuse a warm-up that may exceed the budget.

        Raises:
            ValueError: it may; the message names each bound that is exceeded, with the estimate.
        """
        beyond = []
        if self.max_graphs is not None and len(estimate.graphs) > self.max_graphs:
            beyond.append(f"{len(estimate.graphs)} graphs, expected at most {self.max_graphs}")
        if self.max_seconds is not None and estimate.high_s > self.max_seconds:
            beyond.append(
                f"{estimate.low_s:.0f} to {estimate.high_s:.0f} s, expected at most {self.max_seconds:g} s"
            )
        if self.max_gib is not None and estimate.peak_bytes > self.max_gib * _GIB:
            beyond.append(f"{estimate.peak_bytes / _GIB:.3f} GiB, expected at most {self.max_gib:g} GiB")
        if beyond:
            raise ValueError(
                f"the warm-up does not fit its budget: {'; '.join(beyond)}. Nothing has been captured. "
                "Plan a smaller table, lower the limits, warm up some phases only, or raise the budget"
            )


@dataclass(frozen=True)
class GraphCosts:
    """Cost of one graph of an engine, as far as it is known before any has been captured.

    Attributes:
        prior: of the backend.
        num_units: factor of the prior's figures: the kinds of layers, where each is captured on its own.
        sizes: sizes of a step.
        max_captured_tokens: longer buckets are run and not captured, so they keep nothing; None = no limit.
        operators: operators of one unit in a bucket; None where their number is not known to matter.
    """

    prior: Prior
    num_units: int
    sizes: StepSizes
    max_captured_tokens: int | None = None
    operators: Callable[[BatchShape], float] | None = None

    @classmethod
    def of(cls, engine: Engine) -> GraphCosts:
        """Return the costs for an engine."""
        graphs, kinds = engine.runner.graphs, engine.runner.model.kinds
        prior = PRIORS.get(graphs.backend.name, UNKNOWN)
        num_units = len(kinds) if prior.kept.is_per_kind else 1
        model, geometry = engine.runner.model, engine.runner.executor.geometry
        config, dtype = model.model.config.get_text_config(), model.model.dtype
        sizes = StepSizes.of(
            model.specs, config, geometry.block_size, dtype.itemsize, decode_len=geometry.decode_len
        )
        operators = None
        if prior.num_operators is not None:
            layers = 1 if prior.kept.is_per_kind else len(model.specs)
            operators = partial(_operators, model.specs, geometry, layers)
        return cls(prior, num_units, sizes, graphs.max_captured_tokens, operators)

    def seconds(self, shape: BatchShape) -> tuple[float, float]:
        """Seconds of the graph of a bucket, low and high."""
        scale, trace_s = 1.0, 0.0
        if self.operators is not None and self.prior.num_operators is not None:
            num = self.operators(shape)
            scale, trace_s = graph_scale(num, self.prior.num_operators), num * self.prior.trace_s
        low, high = self.prior.low_s, self.prior.high_s
        return self.num_units * (low * scale + trace_s), self.num_units * (high * scale + trace_s)

    def kept_bytes(self, shape: BatchShape) -> int:
        """Bytes that the graph of a bucket keeps: code, results, and working memory of its own."""
        memory = GraphMemory(self.prior.kept, self.num_units, self.sizes, self.max_captured_tokens)
        return memory.kept_bytes(shape)


def estimate_of(
    buckets: Sequence[BatchShape], costs: GraphCosts, num_routes: int = 0, earlier: Manifest | None = None
) -> Estimate:
    """Estimate a warm-up.

    A bucket that an earlier warm-up measured has those seconds and bytes. The seconds of other buckets lie
    between the mean and the largest measured ones, or, if none was measured, between those of the prior.

    Args:
        num_routes: ways of sampling that are run, over all numbers of rows.
        earlier: an earlier warm-up of the same configuration and software.
    """
    records = earlier.graphs if earlier is not None else ()
    seen = [record.seconds for record in records if record.seconds is not None]
    of_seen = (sum(seen) / len(seen), max(seen)) if seen else None

    def one(shape: BatchShape) -> GraphEstimate:
        low, high = of_seen or costs.seconds(shape)
        kept = costs.kept_bytes(shape)
        record = earlier.record_of(shape) if earlier is not None else None
        if record is None or record.seconds is None:
            return GraphEstimate(shape, low, high, kept, False)
        measured = kept if record.num_bytes is None else max(0, record.num_bytes)
        return GraphEstimate(shape, record.seconds, record.seconds, measured, True)

    return Estimate(
        tuple(map(one, buckets)),
        (ROUTE_S[0] * num_routes, ROUTE_S[1] * num_routes),
        max(map(costs.sizes.transient_bytes, buckets), default=0),
        "other graphs of the manifest" if seen else costs.prior.source,
        "" if seen else costs.prior.unknown,
    )


def _operators(
    specs: Sequence[LayerSpec], geometry: StepGeometry, num_layers: int, bucket: BatchShape
) -> float:
    """Operators of ``num_layers`` layers in a bucket, the mean of those that differ."""
    is_fused = specs[0].impl is Implementation.HPU
    layers = [
        [
            GroupSizes(
                group,
                spec.group_size,
                spec.head_dim,
                geometry.block_size,
                geometry.max_chunk_rows,
                geometry.decode_len,
                is_fused,
            )
            for group in spec.groups
        ]
        for spec in set(specs)
    ]
    kernels, is_whole = FUSED if is_fused else PORTABLE, num_layers > 1
    return num_layers * mean_launches(kernels, layers, bucket, is_whole=is_whole)
