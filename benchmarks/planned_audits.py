"""Graphs, nodes and host calls of all planned buckets with decodes on Gaudi 3, and speeds that are predicted.

    python -m benchmarks.planned_audits --patterns DIR --out benchmarks/results/planned-audits.md

Tables of 64 graphs are planned for four models and three lengths. Graphs and calls of every bucket are
counted by the cost model; one bucket of each structure is traced region by region on tensors without data,
and its graphs and calls must be those that were counted. Nothing here ran on a Gaudi. Needs no weights.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen3MoeConfig

from benchmarks.kernel_work import work_of
from graphs import BatchShape, BucketTable
from hpu_duo.config.engine import CacheConfig, EngineConfig, HeadConfig, ModelConfig, SchedulerConfig
from hpu_duo.heads import HeadPattern
from hpu_duo.kv.plan import LayerKV
from hpu_duo.lab.audit import Structure, build_structure, lower_step
from hpu_duo.lab.rules import REGION_NODES
from hpu_duo.planning import (
    GAUDI3,
    Deployment,
    EngineWork,
    ModelSize,
    Serving,
    busiest_rank,
    capacity,
    kernels_of,
    step_cost,
    step_limits,
)
from hpu_duo.planning.attention_counts import GroupSizes, count_attention
from hpu_duo.planning.read_model import read_model
from hpu_duo.planning.region_calls import cut_loops, traced_runs
from hpu_duo.planning.simulation import plan_buckets
from kernels_ref import PLAIN, Owner
from kernels_ref.units import SCRATCH_STORES

CONTEXTS = (8_192, 32_768, 131_072)
NUM_GRAPHS, MOST_RECIPES = 64, 4
SPARSITY = 0.5
SINK, RECENT = 128, 256
_COMMON = {"max_position_embeddings": 131_072, "dtype": "bfloat16"}


class Model(NamedTuple):
    """A model as it is served.

    Attributes:
        name: of the model.
        config: its configuration.
        num_devices: that share it.
        pattern: name of the published pattern of its heads; empty = drawn.
    """

    name: str
    config: PretrainedConfig
    num_devices: int = 1
    pattern: str = ""


def _llama(hidden: int, inner: int, layers: int, heads: int) -> PretrainedConfig:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    return LlamaConfig(
        **_COMMON,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128_256,
        rope_theta=500_000.0,
        rope_scaling={**scaling, "original_max_position_embeddings": 8_192},
    )


MODELS = (
    Model("Llama-3.1-8B", _llama(4096, 14_336, 32, 32), 1, "Meta-Llama-3.1-8B-Instruct"),
    Model("Llama-3.3-70B", _llama(8192, 28_672, 80, 64), 8),
    Model(
        "Qwen3-30B-A3B",
        Qwen3MoeConfig(
            **_COMMON,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            vocab_size=151_936,
            rope_theta=1e6,
        ),
    ),
    Model(
        "Mistral-Small-24B",
        MistralConfig(
            **_COMMON,
            hidden_size=5120,
            intermediate_size=32_768,
            num_hidden_layers=40,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=131_072,
            sliding_window=None,
        ),
    ),
)


def main() -> None:
    """Plan, count, trace and predict, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--patterns", type=Path, help="directory of published patterns; default: drawn ones")
    parser.add_argument("--only", nargs="*", help="names of models; default: all")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"), help="of the page")
    parser.add_argument("--no-trace", action="store_true", help="count only")
    parser.add_argument("--out", type=Path, help="Markdown file; default: standard output")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        chosen = [each for each in MODELS if not options.only or each.name in options.only]
        served = [Served.of(each, Path(folder), options.patterns) for each in chosen]
        text = "\n".join(_page(served, options.date, traces=not options.no_trace)) + "\n"
    if options.out is None:
        print(text, end="")
    else:
        options.out.write_text(text)


@dataclass(frozen=True)
class Served:
    """A model with a pattern and a directory of its ``config.json``.

    Attributes:
        model: its name, configuration and devices.
        path: of the directory.
        pattern: of its heads.
        is_published: whether it is, or drawn.
    """

    model: Model
    path: Path
    pattern: HeadPattern
    is_published: bool

    @classmethod
    def of(cls, model: Model, folder: Path, patterns: Path | None) -> Served:
        """Write the configuration to a folder, and load or draw the pattern."""
        path = folder / model.name
        model.config.save_pretrained(path)
        published = patterns is not None and model.pattern
        if published:
            assert patterns is not None, "just checked"
            return cls(model, path, HeadPattern.load(patterns / model.pattern), True)
        sizes = model.config.num_hidden_layers, model.config.num_key_value_heads
        return cls(model, path, HeadPattern.random(*sizes, seed=0, sink=SINK, recent=RECENT), False)

    @cached_property
    def size(self) -> ModelSize:
        """Sizes of the model."""
        return read_model(self.path)

    @cached_property
    def planned(self) -> dict[int, Planned]:
        """Deployments and tables by length."""
        found = {}
        for context in CONTEXTS:
            deployment = self.deployment(SPARSITY, context)
            table = plan_buckets(step_limits(deployment), NUM_GRAPHS, step_cost(deployment))
            found[context] = Planned(deployment, table)
        return found

    def serving(self, by: str = "auto") -> Serving:
        """Serving on Gaudi 3 with fused kernels."""
        sizes = {"sink": self.pattern.sink, "recent": self.pattern.recent}
        return Serving(GAUDI3, self.model.num_devices, retrieval_parallel=by, pattern=self.pattern, **sizes)

    def deployment(self, sparsity: float, context: int, by: str = "auto") -> Deployment:
        """The model with a share of streaming heads."""
        return Deployment(self.size, self.serving(by), sparsity, PLAIN, context)


class Planned(NamedTuple):
    """A deployment and its table."""

    deployment: Deployment
    table: BucketTable

    @property
    def decodes(self) -> list[BatchShape]:
        """Buckets with decodes."""
        return [bucket for bucket in self.table if bucket.phase.unique]


class Counted(NamedTuple):
    """Counts of a bucket by the cost model.

    Attributes:
        recipes: most graphs of a kind of layer: pieces, bodies of loops, copies to the scratch.
        calls_a_layer: most regions that the host calls for a layer.
        calls: of the step: layers, and the region that derives their inputs.
    """

    recipes: int
    calls_a_layer: float
    calls: float


def count(work: EngineWork, bucket: BatchShape) -> Counted:
    """Count a bucket by the cost model."""
    model, num = work.model, SCRATCH_STORES
    # As many layers as share a copy to the scratch.
    kinds = [
        replace(work, model=replace(model, layers=(layer,) * num, structures=()), kv_layers=(kv,) * num)
        for layer, kv in model.kinds(work.kv_layers)
    ]
    return Counted(
        max(alike.compiled(bucket).num_recipes - 1 for alike in kinds),
        max(1 + alike.of(bucket).num_region_calls / num for alike in kinds),
        1 + len(work.kv_layers) + work.of(bucket).num_region_calls,
    )


class Traced(NamedTuple):
    """A bucket that was traced region by region.

    Attributes:
        bucket: as it is printed.
        nodes: of the largest graph of a layer, a piece of one, or the body of a loop.
        graphs, calls: traced, of one layer of each kind.
        counted_graphs, counted_calls: of the same layers, by the cost model.
    """

    bucket: BatchShape
    nodes: int
    graphs: int
    calls: int
    counted_graphs: int
    counted_calls: float

    @property
    def agrees(self) -> bool:
        """Whether graphs and calls are those that are counted."""
        return (self.graphs, self.calls) == (self.counted_graphs, self.counted_calls)


class Tracer:
    """One layer of each kind of a model, by its groups of heads, as a rank has it.

    Args:
        served: the model.
        deployment: for the longest requests.
    """

    def __init__(self, served: Served, deployment: Deployment) -> None:
        kinds: dict[frozenset[Owner], LayerKV] = {}
        for kv in deployment.kv_layers:
            one = busiest_rank(kv, served.model.num_devices)
            kinds.setdefault(frozenset(group.kind.owner for group in one.groups), one)
        config, num = type(served.model.config)(**served.model.config.to_dict()), served.model.num_devices
        config.num_hidden_layers = len(kinds)
        config.num_attention_heads //= num
        config.num_key_value_heads //= num
        config.intermediate_size //= num
        path = served.path / "traced"
        config.save_pretrained(path)
        retrieval = np.zeros((len(kinds), config.num_key_value_heads), np.bool_)
        for row, kv in zip(retrieval, kinds.values()):
            row[: sum(group.num_heads for group in kv.groups if group.kind.owner is Owner.BLOCK)] = True
        limits = step_limits(deployment)
        self._structure = _structure(path, retrieval, served.pattern, limits.num_blocks)
        self._work = work_of(self._structure, read_model(path), kernels_of("hpu"))

    def structure_of(self, bucket: BatchShape) -> tuple[object, ...]:
        """Key of the graphs of a bucket: equal for buckets that differ in sizes alone."""
        geometry, found = self._structure.geometry, []
        for spec in self._structure.model.specs:
            sizes = geometry.block_size, geometry.max_chunk_rows, geometry.decode_len
            for group in GroupSizes.of_layer(spec, *sizes):
                runs = count_attention(group, bucket)[1]
                held = traced_runs(group, runs, bucket.phase)
                found.append((held._replace(band_sinks=0.0), cut_loops(group, runs, bucket.phase)))
        return bucket.phase, tuple(found)

    def trace(self, bucket: BatchShape) -> Traced:
        """Trace a bucket, and count it."""
        lowering = lower_step(self._structure, bucket)
        of_layers = [graph for graph in lowering.graphs if graph.region != "prepare"]
        return Traced(
            bucket,
            max(graph.num_nodes for graph in of_layers),
            len(lowering.graphs),
            lowering.num_calls,
            self._work.compiled(bucket).num_recipes,
            count(self._work, bucket).calls,
        )


def _structure(path: Path, retrieval: Any, pattern: HeadPattern, num_blocks: int) -> Structure:
    scores = retrieval.astype(np.float32)
    heads = HeadPattern(scores, sink=pattern.sink, recent=pattern.recent, retrieval=retrieval)
    limits = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192)
    config = EngineConfig(
        model=ModelConfig(path=path, attention="hpu"),
        heads=HeadConfig(pattern=None if retrieval.all() else heads),
        cache=CacheConfig(block_size=128, num_blocks=num_blocks),
        scheduler=limits,
    )
    # The table of an engine is planned, which takes longer than a trace.
    any_bucket = BucketTable.from_strings([f"csu/q8192/s{num_blocks}/u{num_blocks}/l256"])
    return build_structure(config.override(buckets=any_bucket), GAUDI3)


def _traced(served: Served) -> list[Traced]:
    """Trace the smallest, a middle and the largest plain decode, and one bucket of each other structure."""
    planned = served.planned
    tracer = Tracer(served, planned[CONTEXTS[-1]].deployment)
    buckets = sorted({bucket for each in planned.values() for bucket in each.decodes}, key=lambda b: b.levels)
    by_structure: dict[object, list[BatchShape]] = {}
    for bucket in buckets:
        by_structure.setdefault(tracer.structure_of(bucket), []).append(bucket)
    chosen: list[BatchShape] = []
    for found in by_structure.values():
        is_plain = not (found[0].phase.causal or found[0].phase.shared)
        chosen += dict.fromkeys((found[0], found[len(found) // 2], found[-1]) if is_plain else (found[-1],))
    return [tracer.trace(bucket) for bucket in chosen]


def _page(served: list[Served], date: str, *, traces: bool) -> Iterator[str]:
    yield from (
        "# Planned buckets on Gaudi 3: graphs, nodes, host calls",
        "",
        f"Made by `python -m benchmarks.planned_audits --patterns DIR` on {date}, {_versions()}.",
        "**Counted and traced without a Gaudi; speeds are predicted by the cost model",
        "(`docs/cost-model.md`), measured by nobody.** Weights, keys and values in bf16, fused operators,",
        f"`hpu-compile`, half of the heads stream by the pattern; {NUM_GRAPHS} graphs are planned for each",
        "length, without a recording.",
        "",
    )
    yield from _counted_table(served)
    if traces:
        yield from _traced_table(served)
    yield from _speed_tables(served)


def _counted_table(served: Iterable[Served]) -> Iterator[str]:
    yield from (
        "## All planned buckets with decodes",
        "",
        "Counted by the cost model. *Graphs* are compiled recipes of the kind of layer with most: pieces of",
        "cut layers, bodies of loops and copies to the scratch among them. *Calls* are those of regions by",
        "the host, of the layer with most and of the step.",
        "",
        "| model | cards | pattern | by | kinds | context | phase | buckets | graphs a kind | calls a layer "
        "| calls a step |",
        "| --- | ---: | --- | --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |",
    )
    for each in served:
        for context, (deployment, table) in each.planned.items():
            by_phase: dict[str, list[Counted]] = {}
            for bucket in table:
                if bucket.phase.unique:
                    found = count(deployment.engine_work, bucket)
                    by_phase.setdefault(str(bucket.phase), []).append(found)
            cells = (
                *(each.model.name, each.model.num_devices, "published" if each.is_published else "drawn"),
                *(deployment.serving.retrieval_parallel, deployment.num_layer_kinds, f"{context:,}"),
            )
            for phase, counts in by_phase.items():
                ranges = (_range(values) for values in zip(*counts))
                yield _line(*cells, f"`{phase}`", len(counts), *ranges)
    yield ""


def _traced_table(served: Iterable[Served]) -> Iterator[str]:
    yield from (
        "## Traced buckets",
        "",
        "One layer of each kind that differs by its groups of heads, traced region by region: the smallest,",
        "a middle and the largest plain decode of all three tables, and one bucket of each other structure,",
        "by the loops that are in the graph of a layer or cut out. *Counted* are the same layers by the cost",
        "model. Of a model on several cards a rank's layer is traced, with its share of heads by heads;",
        "layers by context are counted only. Experts of prompts run in the graph of a layer, a group of them",
        "at a time, so that its nodes grow with the tokens.",
        "",
        "| model | bucket | most nodes | graphs: traced | counted | host calls: traced | counted |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    )
    large, wrong = [], []
    for each in served:
        for found in _traced(each):
            numbers = found.graphs, found.counted_graphs, found.calls, f"{found.counted_calls:.0f}"
            yield _line(each.model.name, f"`{found.bucket}`", found.nodes, *numbers)
            large += [f"`{found.bucket}` of {each.model.name}"] * (found.nodes > REGION_NODES)
            wrong += [f"`{found.bucket}` of {each.model.name}"] * (not found.agrees)
    yield from (
        "",
        f"Graphs of more than {REGION_NODES} nodes: {', '.join(large) or 'none'}. Graphs or calls that "
        f"differ from those counted: {', '.join(wrong) or 'none'}.",
        "",
    )


def _speed_tables(served: Iterable[Served]) -> Iterator[str]:
    yield from (
        "## Decode tokens/s, predicted",
        "",
        "As `hpu-duo capacity --hardware gaudi3 --devices N --pattern DIR --retrieval-parallel WAY` prints",
        "them: of all requests that fit, at most 256, and of a request alone. *Promoted* are streaming heads",
        "that are served as retrieval heads, so that layers are of few kinds and ranks have equally many.",
        "",
        f"| model | cards | by | streaming | promoted | {' | '.join(f'{c:,}' for c in CONTEXTS)} "
        f"| alone: {' | '.join(f'{c:,}' for c in CONTEXTS)} |",
        f"| --- | ---: | --- | ---: | ---: |{' ---: |' * 2 * len(CONTEXTS)}",
    )
    for each in served:
        for by in ("heads", "context", "auto") if each.model.num_devices > 1 else ("heads",):
            for sparsity in (0.0, 0.5, 0.75):
                found = capacity(each.size, each.serving(by), sparsity, PLAIN, CONTEXTS)
                way = by if by != "auto" else f"auto: {found.retrieval_parallel}"
                rates = [f"{point.tokens_per_s or 0:,.0f}" for point in found.points]
                alone = [f"{point.tokens_per_s_alone or 0:,.0f}" for point in found.points]
                cells = each.model.name, each.model.num_devices, way, f"{sparsity:.0%}", found.num_promoted
                yield _line(*cells, *rates, *alone)


def _versions() -> str:
    import torch
    import transformers

    return f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"


def _range(values: Iterable[float]) -> str:
    numbers = list(values)
    least, most = (f"{value:,.1f}".removesuffix(".0") for value in (min(numbers), max(numbers)))
    return least if least == most else f"{least} to {most}"


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
