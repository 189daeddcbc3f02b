"""The graphs that a compiler of regions gets for a bucket, without a compiler, a device or data.

Regions are traced and functionalised as they are for the vendor's compiler; their operators are counted, and
copies of whole stores are looked for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from graphs import BatchShape
from graphs.backends.compile import CompileBackend
from graphs.buffers import pack
from hpu_duo.engine.executor import STAGED, staged_step
from hpu_duo.engine.step_input import message_fields
from hpu_duo.lab.audit.fake_tensors import aot_backend
from hpu_duo.lab.audit.findings import Finding, FindingKey, Severity
from hpu_duo.lab.audit.structure import HPU, Structure
from hpu_duo.lab.audit.tracer import Like, without_memory
from hpu_duo.lab.rules import REGION_NODES, Rule, StoreCopy, store_copies
from hpu_duo.modeling.step_model import run_layer


@dataclass(frozen=True)
class LoweredGraph:
    """One graph that is compiled by itself.

    Attributes:
        region: what it is part of.
        num_nodes: operators, views included.
        trace_s: seconds until the compiler has it, those of the graphs before it in the same region excluded.
        num_writes: writes of vectors by index.
        store_copies: copies of whole stores in it.
    """

    region: str
    num_nodes: int
    trace_s: float
    num_writes: int
    store_copies: tuple[StoreCopy, ...]


class Lowering:
    """A compiler that keeps what is to be known of graphs, and runs them as they are.

    Args:
        stores: of keys and values, whose copies are looked for.

    Attributes:
        backend: captures regions with it, as the vendor's compiler captures them.
        graphs: so far.
        calls: of regions by the host, by name. The loops of a kind of layer are run, and counted, once.
    """

    def __init__(self, stores: Iterable[torch.Tensor]) -> None:
        self._layouts = {(store.shape, store.dtype) for store in stores}
        self.graphs: list[LoweredGraph] = []
        self.calls: Counter[str] = Counter()
        self.backend = CompileBackend(aot_backend(self._keep), guards=True)
        self._region, self._began = "", 0.0
        self._runners: dict[Hashable, Callable[..., Any]] = {}

    @property
    def num_calls(self) -> int:
        """Regions that the host calls if each kind of layer occurs once, pieces of cut layers among them."""
        layer = run_layer.__name__
        pieces = sum(graph.region == layer for graph in self.graphs)
        return self.calls.total() - self.calls[layer] + pieces

    def runner(self, bucket: BatchShape, key: Hashable, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A region that is lowered in its first call, and gives tensors like its first results after it."""
        if key not in self._runners:
            self._runners[key] = self._runner(bucket, key, fn)
        return self._runners[key]

    def _runner(self, bucket: BatchShape, key: Hashable, fn: Callable[..., Any]) -> Callable[..., Any]:
        region = self.backend.region(bucket, key, fn)
        name = fn.__name__.strip("_")
        templates: list[Any] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            if not templates:
                outer, self._region, self._began = self._region, name, time.perf_counter()
                result = region(*args, **kwargs)
                self._region, self._began = outer, time.perf_counter()
                templates.append(without_memory(result))
                return result
            return Like.make_all(templates[0])

        return run

    def _keep(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        now = time.perf_counter()
        operators = [node.target for node in module.graph.nodes if node.op == "call_function"]
        num_writes = operators.count(torch.ops.aten.index_copy.default)
        copies = store_copies(module.graph, layouts=self._layouts)
        self.graphs.append(LoweredGraph(self._region, len(operators), now - self._began, num_writes, copies))
        self._began = time.perf_counter()
        forward: Callable[..., Any] = module.forward
        return forward


def lower_bucket(structure: Structure, bucket: BatchShape) -> tuple[LoweredGraph, ...]:
    """Trace the regions of a bucket, each kind of layer once.

    Returns:
        The graphs in the order in which they are compiled.
    """
    return tuple(lower_step(structure, bucket).graphs)


def lower_step(structure: Structure, bucket: BatchShape) -> Lowering:
    """Trace the regions of a bucket, each kind of layer once, and count their calls."""
    lowering = Lowering(structure.stores)
    with structure.mode, torch.no_grad():
        runners: dict[Hashable, Callable[..., Any]] = {
            kind: lowering.runner(bucket, kind, run_layer) for kind in structure.model.kinds
        }
        layout = pack(message_fields(structure.geometry, bucket))
        region_of = partial(lowering.runner, bucket)
        step = staged_step(structure.model, structure.geometry, bucket, layout, runners, region_of)
        step({STAGED: torch.empty(layout.num_items, dtype=torch.int32, device=HPU)})
    return lowering


def lowering_findings(
    structure: Structure, bucket: BatchShape, *, most_nodes: int = REGION_NODES
) -> tuple[Finding, ...]:
    """Trace the regions of a bucket, and tell of graphs that are too large and of stores that they copy.

    Args:
        most_nodes: operators of a graph that is compiled by itself; more of them are noted.
    """
    found: dict[FindingKey, Finding] = {}
    for graph in lower_bucket(structure, bucket):
        source = f"a graph of {graph.region}"
        if graph.num_nodes > most_nodes:
            detail = f"in {bucket} it has {graph.num_nodes:,} operators; at most {most_nodes:,} are expected"
            size = Finding(Rule.GRAPH_SIZE, graph.region, source, detail, Severity.NOTE)
            found.setdefault(size.key, size)
        for copy in graph.store_copies:
            detail = f"in {bucket} it copies {copy.num_bytes:,} bytes of {copy.store}: {copy.reason}"
            copied = Finding(Rule.STORE_COPY, copy.operator, source, detail)
            found.setdefault(copied.key, copied)
    return tuple(found.values())
