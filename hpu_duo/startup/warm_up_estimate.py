"""Estimates of a warm-up before it starts, and the configuration that determines graphs."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import transformers

from graphs import BatchShape, GraphCache
from graphs.backends import CHOSEN_LATER
from graphs.manifest import Configuration, Manifest
from hpu_duo.config.engine import EngineConfig
from hpu_duo.device import PLUGGED, DeviceRuntime
from hpu_duo.engine.batch import StepGeometry
from hpu_duo.engine.engine import Engine
from hpu_duo.modeling.loading import read_config
from hpu_duo.modeling.precision import Precision, name_of
from hpu_duo.modeling.step_model import StepModel
from hpu_duo.modeling.transformers_internals import NAME_OR_PATH
from hpu_duo.parallel.config import NARROWED
from hpu_duo.planning.attention_counts import GroupSizes
from hpu_duo.planning.engine_work import SECONDS_PER_GRAPH, TRACE_S_PER_OPERATOR, graph_scale, mean_launches
from hpu_duo.planning.engine_work import UNKNOWN as UNKNOWN_SECONDS
from hpu_duo.planning.work import FUSED, PORTABLE, PUBLISHED_LAYER_LAUNCHES
from hpu_duo.startup.tables import KEPT, GraphMemory, Kept, StepSizes
from hpu_duo.startup.tables import UNKNOWN as UNKNOWN_KEPT
from hpu_duo.version import __version__
from kernels_ref import PLAIN, Blocks, Implementation, LayerSpec, Softmax

_GIB = 1 << 30


@dataclass(frozen=True)
class Prior:
    """Assumed cost of one graph, where nothing has been measured.

    Attributes:
        low_s, high_s: seconds of one graph, or of one kind of layer in it where ``kept.is_per_kind``.
        kept: memory that it retains.
        source: origin of the seconds.
        num_operators: operators of such a unit; time is proportional to it. None: no known dependency.
        trace_s: further seconds of each operator, in which torch traces it.
        unknown: which part of the seconds is not measured; empty if none.
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
    # Lazy graphs are of whole steps and are not traced by torch's compiler.
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
"""Seconds of one route of sampling, low and high, if each operator is compiled: 1 to 3 s for 12 of them on
Gaudi (vllm-gaudi, pull request 129)."""


@dataclass(frozen=True)
class GraphEstimate:
    """Estimate of one bucket: ``low_s`` to ``high_s`` seconds, ``trace_s`` of them traced, and its bytes."""

    shape: BatchShape
    low_s: float
    high_s: float
    num_bytes: int
    is_measured: bool
    trace_s: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """Estimate of a whole warm-up.

    Attributes:
        graphs: estimates in the order of capture.
        other_s: seconds for the work of steps around their graphs, low and high.
        transient_bytes: peak size of the intermediates of one step.
        source: origin of the seconds of graphs that have not been measured.
        unknown: which part of these seconds is not measured; empty if none.
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
    def trace_s(self) -> float:
        """Seconds in which torch traces all graphs; 0 if that is not known."""
        return sum(graph.trace_s for graph in self.graphs)

    @property
    def kept_bytes(self) -> int:
        """Bytes of all graphs."""
        return sum(graph.num_bytes for graph in self.graphs)

    @property
    def peak_bytes(self) -> int:
        """Bytes of all graphs, and of the largest step on top of them."""
        return self.kept_bytes + self.transient_bytes

    @property
    def num_measured(self) -> int:
        """Graphs with measurements of an earlier warm-up."""
        return sum(graph.is_measured for graph in self.graphs)


@dataclass(frozen=True)
class WarmUpBudget:
    """Bounds on a warm-up; None is no bound.

    Args:
        max_graphs: captured buckets.
        max_seconds: seconds of the whole warm-up.
        max_gib: GiB of graphs, with the intermediates of the largest step.

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
        """Raise ValueError for a warm-up that may exceed the budget.

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
    """Cost of one graph of an engine, estimated before capture.

    Attributes:
        prior: of the backend.
        num_units: factor of the prior's figures: the kinds of layers, where each is captured on its own.
        sizes: sizes of a step.
        max_captured_tokens: longer buckets run uncaptured, so they retain nothing; None = no limit.
        operators: operators of one unit in a bucket; None without a known dependency on their number.
        others: graphs of drafts that are captured with a bucket, and their costs.
    """

    prior: Prior
    num_units: int
    sizes: StepSizes
    max_captured_tokens: int | None = None
    operators: Callable[[BatchShape], float] | None = None
    others: Mapping[BatchShape, Sequence[tuple[GraphCosts, BatchShape]]] = field(default_factory=dict)

    @classmethod
    def of(cls, engine: Engine, buckets: Iterable[BatchShape] | None = None) -> GraphCosts:
        """Return the costs for an engine.

        Args:
            buckets: to be captured; None = those of its table.
        """
        executor = engine.runner.executor
        geometry, drafts = executor.geometry, executor.drafts
        costs = cls._of_model(executor.graphs, executor.model, geometry)
        if drafts is None:
            return costs
        whole = cls._of_model(executor.graphs, drafts.model, geometry)
        chain = cls._of_model(drafts.graphs, drafts.model, drafts.tables.geometry)
        others: dict[BatchShape, list[tuple[GraphCosts, BatchShape]]] = {}
        seen = set[BatchShape]()
        for bucket in executor.graphs.table if buckets is None else buckets:
            others[bucket] = [(whole, bucket)] if drafts.num_bytes else []
            drafted = drafts.tables.bucket(bucket)
            if geometry.row_len(bucket) > 1 and drafted not in seen:
                seen.add(drafted)
                others[bucket].append((chain, drafted))
        return replace(costs, others=others)

    @classmethod
    def _of_model(cls, graphs: GraphCache, model: StepModel, geometry: StepGeometry) -> GraphCosts:
        kinds = model.kinds
        prior = PRIORS.get(graphs.backend.name, UNKNOWN)
        num_units = len(kinds) if prior.kept.is_per_kind else 1
        config, dtype = model.model.config.get_text_config(), model.model.dtype
        sizes = StepSizes.of(
            model.specs,
            config,
            geometry.block_size,
            dtype.itemsize,
            decode_len=geometry.decode_len,
            draft_lens=geometry.draft_lens,
            recurrences=model.recurrences,
        )
        operators = None
        if prior.num_operators is not None:
            layers = 1 if prior.kept.is_per_kind else len(model.specs)
            operators = partial(_operators, model.specs, geometry, layers)
        return cls(prior, num_units, sizes, graphs.max_captured_tokens, operators)

    def seconds(self, shape: BatchShape) -> tuple[float, float]:
        """Seconds of the graph of a bucket, low and high."""
        scale, trace_s = 1.0, self._own_trace_s(shape)
        if self.operators is not None and self.prior.num_operators is not None:
            scale = graph_scale(self.operators(shape), self.prior.num_operators)
        low = self.num_units * self.prior.low_s * scale + trace_s
        high = self.num_units * self.prior.high_s * scale + trace_s
        drafts = [costs.seconds(other) for costs, other in self.others.get(shape, ())]
        return low + sum(each for each, _ in drafts), high + sum(each for _, each in drafts)

    def trace_s(self, shape: BatchShape) -> float:
        """Seconds in which torch traces the graph of a bucket, each kind of layer once; 0 if not known."""
        drafts = sum(costs.trace_s(other) for costs, other in self.others.get(shape, ()))
        return self._own_trace_s(shape) + drafts

    def _own_trace_s(self, shape: BatchShape) -> float:
        return 0.0 if self.operators is None else self.num_units * self.operators(shape) * self.prior.trace_s

    def kept_bytes(self, shape: BatchShape) -> int:
        """Bytes of the graph of a bucket: code, results, and its own working memory."""
        memory = GraphMemory(self.prior.kept, self.num_units, self.sizes, self.max_captured_tokens)
        drafts = sum(costs.kept_bytes(other) for costs, other in self.others.get(shape, ()))
        return memory.kept_bytes(shape) + drafts


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
            return GraphEstimate(shape, low, high, kept, False, costs.trace_s(shape))
        measured = kept if record.num_bytes is None else max(0, record.num_bytes)
        traced = costs.trace_s(shape) if record.trace_s is None else record.trace_s
        return GraphEstimate(shape, record.seconds, record.seconds, measured, True, traced)

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
    sizes = geometry.block_size, geometry.max_chunk_rows, geometry.row_len(bucket)
    layers = [GroupSizes.of_layer(spec, *sizes) for spec in set(specs)]
    is_fused = specs[0].impl is Implementation.HPU
    kernels, is_whole = FUSED if is_fused else PORTABLE, num_layers > 1
    return num_layers * mean_launches(kernels, layers, bucket, is_whole=is_whole)


_SHAPE_NO_GRAPH = frozenset(
    {NAME_OR_PATH, "name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
    | {"bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"}
    | {"initializer_range", "id2label", "label2id", "attention_dropout", "return_dict", "is_decoder"}
    | {"output_attentions", "output_hidden_states", "problem_type", "chunk_size_feed_forward"}
)


def configuration_of(engine: Engine) -> Configuration:
    """Collect the settings of an engine that shape a graph, as a flat mapping of JSON values.

    Where ranks share a model, sizes are those of one share.
    """
    runner = engine.runner
    model = runner.model.model
    limits = engine.scheduler.limits
    found = {
        **_model_entries(model.config),
        "dtype": name_of(model.dtype),
        "device": runner.device.type,
        "backend": runner.graphs.backend.name,
        "limits.max_num_seqs": limits.max_num_seqs,
        "limits.max_num_batched_tokens": limits.max_num_batched_tokens,
        "limits.max_model_len": limits.max_model_len,
        "limits.max_chunk_rows": limits.max_chunk_rows,
        "limits.decode_len": limits.decode_len,
        "limits.block_size": limits.block_size,
        "limits.num_blocks": limits.num_blocks,
        "limits.num_snapshots": limits.num_snapshots,
        "limits.max_block_moves": limits.max_block_moves,
        "limits.max_captured_tokens": runner.graphs.max_captured_tokens,
        "linear_layers": sorted({type(m).__name__ for m in model.modules() if "Linear" in type(m).__name__}),
    }
    if limits.draft_lens:
        found["limits.draft_lens"] = list(limits.draft_lens)
    if runner.executor.drafts is not None:
        found["drafts"] = runner.executor.drafts.description
    if runner.executor.spread is not None:
        found["parallel.tensor_parallel_size"] = runner.executor.spread.num_ranks
    for number, spec in enumerate(runner.model.specs):
        found[f"attention.layer_{number}"] = _attention_text(spec)
    return found


def known_before_loading(config: EngineConfig) -> Configuration:
    """Return the part of ``configuration_of`` that does not need weights.

    Raises:
        ValueError: the checkpoint's configuration cannot be read.
    """
    hf_config = read_config(config.model.path)
    scheduler, cache = config.scheduler, config.cache
    known: dict[str, Any] = {
        **_model_entries(hf_config),
        "limits.max_num_seqs": scheduler.max_num_seqs,
        "limits.max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "limits.max_chunk_rows": scheduler.max_chunk_rows,
        "limits.decode_len": scheduler.decode_len,
        "limits.block_size": config.block_size,
    }
    num_ranks = config.parallel.tensor_parallel_size
    if num_ranks > 1:
        known = {name: value for name, value in known.items() if not _is_narrowed(name)}
        known["parallel.tensor_parallel_size"] = num_ranks
    device = str(config.model.device)
    if config.model.dtype != "auto" or device != "auto":
        kind = device.partition(":")[0].partition("-")[0]
        known["dtype"] = name_of(Precision.choose(config.model.dtype, hf_config, kind).arithmetic)
    backend = config.graph.backend
    if isinstance(backend, str) and backend not in CHOSEN_LATER and device not in PLUGGED:
        known["backend"] = backend
    if scheduler.max_model_len is not None:
        known["limits.max_model_len"] = scheduler.max_model_len
    if cache.num_blocks is not None:
        known["limits.num_blocks"] = cache.num_blocks
    return known


def _is_narrowed(entry: str) -> bool:
    """Whether ranks have another value of an entry than the whole model."""
    return entry.removeprefix("model.").partition(".")[0] in NARROWED


def versions_of(runtime: DeviceRuntime) -> dict[str, str]:
    """The software that costs depend on, and the device."""
    return {
        "hpu_duo": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
        "device": runtime.version(),
    }


def _model_entries(config: Any) -> dict[str, Any]:
    """The configuration of the decoder, flat; lists become JSON text, so that any two compare."""
    text = config.get_text_config()
    entries: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key in value:
                add(f"{name}.{key}", value[key])
        elif value is None or isinstance(value, bool | int | float | str):
            entries[name] = value if value is None or isinstance(value, bool | str) else _plain(value)
        else:
            entries[name] = json.dumps(value, default=str)

    for key, value in text.to_dict().items():
        if key not in _SHAPE_NO_GRAPH and not key.startswith("_"):
            add(f"model.{key}", value)
    return entries


def _plain(value: float) -> float | str:
    # JSON has no infinity, and 1.0 and 1 are the same number to a reader.
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if value == value and abs(value) != float("inf") else str(value)


def _attention_text(spec: LayerSpec) -> str:
    softmax = "" if spec.softmax is Softmax.EXACT else f", {spec.softmax.value} softmax"
    softcap = "" if spec.softcap is None else f", softcap {spec.softcap:g}"
    streaming = [group for group in spec.groups if group.kind.reach is not None]
    counts = "+".join(str(group.num_heads) for group in streaming) or "0"
    kept = {group.kind.name for group in spec.groups if group.kind.reach is None} - {Blocks.name}
    dealt = "".join(f" in {name}" for name in sorted(kept))
    seen = "".join(f", {text}" for group in spec.groups if (text := group.kind.describe()))
    formats = sorted({group.format.name for group in spec.groups} - {PLAIN.name})
    stored = "".join(f", kv_cache_dtype {name}" for name in formats)
    return (
        f"{spec.impl.value}: {spec.num_retrieval} retrieval{dealt} and {counts} streaming heads x "
        f"{spec.group_size} queries x {spec.head_dim}, scale {spec.scale:.6g}{seen}{softcap}{softmax}{stored}"
    )
