"""Layers write their stores in place, by the conditions of Gaudi's compiler, in every phase."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from graphs import BatchShape
from hpu_duo.heads import HeadPattern
from hpu_duo.lab.audit import (
    Severity,
    Structure,
    audit,
    audit_bucket,
    build_structure,
    lower_bucket,
    lowering,
)
from hpu_duo.lab.audit.fake_tensors import aot_backend
from hpu_duo.lab.audit.lowering import lowering_findings
from hpu_duo.lab.rules import Rule, StoreCopy, store_copies
from hpu_duo.planning import GAUDI2
from kernels_ref import KVRecord, KVUnits, reference
from kernels_ref.partial import Partial
from kernels_ref.step import PartInputs
from kernels_ref.units import write, write_kv
from tests.audit.conftest import engine_config
from tests.tiers import every

PHASES = {
    "c--/q16/s0/u0/l1": None,
    "--u/q4/s0/u16/l4": 3,
    "csu/q32/s8/u16/l4": 3,
    "-su/q4/s8/u16/l4": None,
    "cs-/q32/s8/u0/l1": None,
    "c-u/q32/s0/u16/l4": None,
}
"""Steps, and the tokens of a decode row with which ``make slow`` tries them."""
STORE, INDEX, NEW = torch.zeros(64, 4), torch.arange(3), torch.ones(3, 4)


@pytest.fixture(scope="module")
def either(request: pytest.FixtureRequest, config_dir: Path, pattern: HeadPattern) -> Structure:
    """Of steps whose rows decode so many tokens."""
    config = engine_config(config_dir, pattern)
    return build_structure(
        replace(config, scheduler=replace(config.scheduler, decode_len=request.param)), GAUDI2
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("either", "shape"),
    [
        pytest.param(decode_len, shape, marks=() if own == decode_len else pytest.mark.exhaustive)
        for decode_len, (shape, own) in product([1, 3], PHASES.items())
    ],
    indirect=["either"],
)
def test_a_layer_writes_its_stores_in_place(either: Structure, shape: str) -> None:
    graphs = lower_bucket(either, BatchShape.parse(shape))
    assert graphs[0].region == "prepare"
    has_chunks = shape.startswith("cs")
    assert [graph.region for graph in graphs].count("copy_units") == has_chunks
    assert not any(graph.store_copies for graph in graphs)
    # Keys and values of a layer of blocks and rings, and of one of blocks only.
    writes = [graph for graph in graphs if graph.num_writes]
    assert {graph.region for graph in writes} == {"run_layer"}
    assert sum(graph.num_writes for graph in writes) == 4 + 2


def lowered(function: Callable[..., object]) -> fx.Graph:
    found: list[fx.Graph] = []

    def keep(module: fx.GraphModule, inputs: object) -> Callable[..., object]:
        found.append(module.graph)
        return module.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=aot_backend(keep), fullgraph=True)(STORE.clone(), INDEX, NEW)
    (graph,) = found
    return graph


def write_and_read(store: torch.Tensor, index: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    store.index_copy_(0, index, new)
    return store.view(8, 8, 4)[:2] * 2


def write_a_view(store: torch.Tensor, index: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    store.view(-1, 4).index_copy_(0, index, new)
    return new + 1


def read_and_write(store: torch.Tensor, index: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    before = store.index_select(0, index)
    store.index_copy_(0, index, new)
    return before


def write_twice(store: torch.Tensor, index: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    store.index_copy_(0, index, new)
    store.index_copy_(0, index + 3, new)
    return new + 1


def write_and_copy(store: torch.Tensor, index: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    store.index_copy_(0, index, new)
    return (store.view(8, 8, 4) * 2).sum(0)


@pytest.mark.parametrize(
    ("function", "strict", "later"),
    [
        (write_and_read, (), ()),
        (write_a_view, ("a view",), ("a view",)),
        (read_and_write, ("3 users",), ()),
        (write_twice, ("the result of another write",), ()),
        (write_and_copy, ("as large as the store",), ("as large as the store",)),
    ],
)
def test_the_conditions_of_the_compiler(
    function: Callable[..., object], strict: tuple[str, ...], later: tuple[str, ...]
) -> None:
    graph = lowered(function)
    for reasons, copies in (
        (strict, store_copies(graph)),
        (later, store_copies(graph, strict=False)),
    ):
        assert len(copies) == len(reasons)
        for reason, copy in zip(reasons, copies):
            assert reason in copy.reason
            assert copy == StoreCopy(copy.store, copy.operator, STORE.nbytes, copy.reason)


def test_only_inputs_of_a_stores_layout_are_stores() -> None:
    graph = lowered(write_a_view)
    assert store_copies(graph, layouts={(STORE.shape, STORE.dtype)}) == store_copies(graph)
    assert not store_copies(graph, layouts={(STORE.shape, torch.bfloat16), (STORE.shape[1:], STORE.dtype)})


def write_views(units: KVUnits, index: torch.Tensor, record: KVRecord) -> None:
    for flat, each in zip(units.tensors, record.tensors):
        write(flat.view(-1, flat.shape[-1]), index, each)


def write_twice_each(units: KVUnits, index: torch.Tensor, record: KVRecord) -> None:
    write_kv(units, index, record)
    write_kv(units, index, record)


def read_first(units: KVUnits, index: torch.Tensor, record: KVRecord) -> None:
    units.tensors[0].index_select(0, index)
    write_kv(units, index, record)


@pytest.mark.parametrize(
    ("writes", "what"),
    [
        (write_views, "a view of a store"),
        (write_twice_each, "the same graph has written before"),
        (read_first, "the same graph has read before"),
    ],
)
def test_the_audit_finds_copies_of_stores(
    structure: Structure, monkeypatch: pytest.MonkeyPatch, writes: Callable[..., None], what: str
) -> None:
    bucket = BatchShape.parse("csu/q32/s8/u16/l4")
    assert not audit_bucket(structure, bucket).findings
    monkeypatch.setattr(reference, "write_kv", writes)
    findings = audit_bucket(structure, bucket).findings
    assert [finding.rule for finding in findings] == [Rule.STORE_COPY]
    assert what in findings[0].detail
    assert findings[0].severity is Severity.FORBIDDEN


@pytest.mark.slow
def test_a_report_tells_of_stores_that_only_the_compiler_would_copy(
    config_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unique_blocks = reference.unique_blocks

    def double_the_store(inputs: PartInputs, *rest: Any) -> Partial:
        found = unique_blocks(inputs, *rest)
        return found._replace(sum=found.sum + (inputs.units.tensors[0] * 2).amax())

    monkeypatch.setattr(reference, "unique_blocks", double_the_store)
    config = engine_config(config_dir, table="--u/q4/s0/u16/l4")
    (found,) = audit(build_structure(config, GAUDI2)).findings
    assert (found.rule, found.operator) == (Rule.STORE_COPY, "aten.mul.Tensor")
    assert found.severity is Severity.FORBIDDEN
    assert "as large as the store" in found.detail


@pytest.mark.slow
@pytest.mark.parametrize("shape", every(2, ["--u/q4/s0/u16/l4", "csu/q32/s8/u16/l4"]))
def test_graphs_of_too_many_operators_are_noted(
    structure: Structure, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = BatchShape.parse(shape)
    graphs = lower_bucket(structure, bucket)
    monkeypatch.setattr(lowering, "lower_bucket", lambda *_: graphs)
    sizes = [graph.num_nodes for graph in graphs]
    assert lowering_findings(structure, bucket, most_nodes=max(sizes)) == ()
    (found,) = lowering_findings(structure, bucket, most_nodes=max(sizes) - 1)
    assert (found.rule, found.severity, found.operator) == (Rule.GRAPH_SIZE, Severity.NOTE, "run_layer")
    assert f"in {bucket} it has {max(sizes):,} operators; at most {max(sizes) - 1:,}" in found.detail
