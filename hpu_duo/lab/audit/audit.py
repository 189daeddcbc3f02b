"""Trace every step that can occur, and report its operators, memory and broken rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from graphs import BatchShape
from hpu_duo.engine.executor import bucket_step
from hpu_duo.lab.audit.findings import Finding, Severity, TraceEnded
from hpu_duo.lab.audit.lowering import lowering_findings
from hpu_duo.lab.audit.report import AuditReport, LayerRecipe, StepAudit
from hpu_duo.lab.audit.structure import HPU, Structure
from hpu_duo.lab.audit.tracer import Part, StepTracer, Tally, without_memory
from hpu_duo.lab.rules import STEP_OPERATORS, Rule
from hpu_duo.modeling.step_model import run_layer
from hpu_duo.planning.attention_counts import GroupSizes, count_attention
from hpu_duo.planning.region_calls import num_region_calls, scratch_copies
from hpu_duo.sampling import SamplingRoute, sample_tokens, static_routes
from hpu_duo.sampling.rows import num_words

Progress = Callable[[int, int, str], None]


def audit(structure: Structure, progress: Progress | None = None) -> AuditReport:
    """Trace the step of every bucket, and sampling for each of their numbers of rows.

    Nothing is computed and nothing is compiled: the report is of the operators of the code, with torch's
    decompositions, before any fusion. It does not show that a compiler for Gaudi accepts them. The largest
    bucket of each phase is also traced as its regions are for a compiler, if nothing in it is forbidden:
    graphs have at most ``REGION_NODES``, and may copy no store.

    Args:
        progress: called with steps done, steps in all, and the name of the one that comes next.
    """
    buckets = structure.table.by_cost
    routes = list(_routes(structure, buckets))
    total = len(buckets) + len(routes)
    largest = {bucket.phase: bucket for bucket in buckets}
    found: list[StepAudit] = []
    for bucket in buckets:
        if progress is not None:
            progress(len(found), total, str(bucket))
        step = audit_bucket(structure, bucket)
        # Torch's compiler may fail, with an error of its own, at what is forbidden.
        if bucket == largest[bucket.phase] and not step.is_forbidden:
            step = step.with_findings(lowering_findings(structure, bucket))
        found.append(step)
    for name, route in routes:
        if progress is not None:
            progress(len(found), total, name)
        found.append(_audit_sampling(structure, name, route))
    return AuditReport(
        model=structure.name,
        weight_bytes=structure.weight_bytes,
        store_bytes=structure.memory.total_bytes,
        num_blocks=structure.memory.num_blocks,
        recipes=_recipes(structure),
        num_layer_kinds=len(structure.model.kinds),
        buckets=tuple(found[: len(buckets)]),
        sampling=tuple(found[len(buckets) :]),
    )


def audit_bucket(
    structure: Structure, bucket: BatchShape, *, most_operators: int = STEP_OPERATORS
) -> StepAudit:
    """Trace one bucket.

    Layers of one kind run the same operators on the same shapes, so the first of each kind is traced, and its
    counts are repeated for the others.

    Args:
        most_operators: of a step that is captured whole; more of them are noted.
    """
    with structure.mode, torch.no_grad():
        inputs = structure.inputs(bucket)
        model = structure.model.model
        held = (*structure.held, *inputs.values())
        tracer = StepTracer(held, model.parameters(), model.dtype, structure.stores)
        known: dict[Hashable, tuple[Part, Any]] = {}
        runners: dict[Hashable, Callable[..., Any]] = {
            kind: partial(_run_layer, tracer, known, kind) for kind in structure.model.kinds
        }
        step = bucket_step(structure.model, structure.geometry, bucket, runners)
        _follow(tracer, lambda: step(inputs))
        _note_size(tracer.tally, str(bucket), most_operators)
        input_bytes = sum(tensor.nbytes for tensor in inputs.values())
        calls = _region_calls(structure, bucket)
        return StepAudit.of(str(bucket), tracer.tally, tracer.peak_bytes, input_bytes, calls)


def _region_calls(structure: Structure, bucket: BatchShape) -> int:
    """Calls of regions beyond one for each layer, which follow from the sizes of chunks alone."""
    geometry, calls = structure.geometry, 0.0
    stores: Counter[GroupSizes] = Counter()
    for spec, num_layers in Counter(structure.model.specs).items():
        sizes = geometry.block_size, geometry.max_chunk_rows, geometry.row_len(bucket)
        for group in GroupSizes.of_layer(spec, *sizes):
            calls += num_layers * num_region_calls(group, bucket, count_attention(group, bucket)[1])
            stores[group] += num_layers
    return round(calls) + len(scratch_copies(stores, bucket))


def _note_size(tally: Tally, name: str, most_operators: int) -> None:
    """Note a step that only a backend which compiles regions can capture."""
    num_operators = sum(tally.operators.values())
    if num_operators > most_operators:
        detail = f"captured whole, it has {num_operators:,} operators; at most {most_operators:,} are taken"
        found = Finding(Rule.GRAPH_SIZE, name, "the whole step", detail, Severity.NOTE)
        tally.findings.setdefault(found.key, found)


def _run_layer(
    tracer: StepTracer,
    known: dict[Hashable, tuple[Part, Any]],
    kind: Hashable,
    layer: nn.Module,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if kind in known:
        return tracer.repeat(*known[kind])
    with tracer.part() as part:
        result = run_layer(layer, *args, **kwargs)
    known[kind] = part, without_memory(result)
    return result


def _audit_sampling(structure: Structure, name: str, route: SamplingRoute) -> StepAudit:
    with structure.mode, torch.no_grad():
        logits = torch.empty(
            route.num_rows, route.vocab_size, dtype=next(structure.model.model.parameters()).dtype, device=HPU
        )
        floats = torch.empty(route.num_floats, dtype=torch.float32, device=HPU)
        inputs, masks = [logits, floats], None
        if route.has_masks:
            size = (route.num_rows, num_words(route.vocab_size))
            masks = torch.empty(size, dtype=torch.int32, device=HPU)
            inputs.append(masks)
        tracer = StepTracer(tuple(inputs))
        _follow(tracer, lambda: sample_tokens(logits, floats, route, masks))
        num_bytes = sum(each.nbytes for each in inputs[1:])
        return StepAudit.of(name, tracer.tally, tracer.peak_bytes, num_bytes)


def _follow(tracer: StepTracer, step: Callable[[], object]) -> None:
    try:
        with tracer:
            step()
    except TraceEnded:
        # The tally has the violation that ended it.
        return


def _routes(structure: Structure, buckets: tuple[BatchShape, ...]) -> Iterator[tuple[str, SamplingRoute]]:
    """Greedy rows, everything at once with the longest lists, and that with log-probabilities or masks."""
    for num_rows in sorted({structure.geometry.counts(bucket).logits for bucket in buckets}):
        routes = tuple(static_routes(num_rows, structure.vocab_size, structure.max_len))
        longest = max(route.num_seen for route in routes)
        for route in routes:
            what = "everything" if route.has_row_values else "greedy"
            if route.num_logprobs >= 0:
                what += " and logprobs"
            elif route.has_masks:
                what += " and masks"
            elif route.has_row_values and route.num_seen < longest:
                continue
            yield f"{what}, {num_rows} rows", route


def _recipes(structure: Structure) -> tuple[LayerRecipe, ...]:
    counts = Counter(spec.groups for spec in structure.model.specs)
    return tuple(LayerRecipe(groups, num_layers) for groups, num_layers in counts.most_common())
