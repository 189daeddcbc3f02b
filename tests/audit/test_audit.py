"""An audit of a tiny model against closed forms and its own parts, and of models that cannot be served."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from bias_builders import Window
from graphs import BatchShape
from hpu_duo.engine.executor import bucket_step
from hpu_duo.heads import HeadPattern
from hpu_duo.lab.audit import (
    Engine,
    LayerRecipe,
    Severity,
    StepTracer,
    Structure,
    audit,
    audit_bucket,
    build_structure,
    native_operators,
    native_sources,
)
from hpu_duo.lab.rules import Rule
from hpu_duo.modeling.step_model import run_layer
from hpu_duo.planning import GAUDI2
from kernels_ref import Blocks, HeadGroup, Rings
from tests.audit.conftest import BUCKETS, TINY, edit_config, engine_config
from tests.modeling.families import BASE, LENGTH_DEPENDENT
from tests.modeling.test_value_sizes import FAMILIES
from tests.tiers import crossed


@pytest.mark.slow
def test_a_config_alone_is_audited_without_forbidden_or_unknown_operators(structure: Structure) -> None:
    seen: list[tuple[int, int]] = []
    report = audit(structure, lambda done, total, name: seen.append((done, total)))
    assert not report.violations
    assert report.unknown == ()
    assert {step.name for step in report.buckets} == set(BUCKETS)
    assert seen == [(done, len(report.steps)) for done in range(len(report.steps))]
    assert report.recipes == (
        LayerRecipe((HeadGroup(1, Blocks()), HeadGroup(1, Rings(Window(8, 24)))), 2),
        LayerRecipe((HeadGroup(2, Blocks()),), 1),
    )
    assert report.num_layer_kinds == 2
    assert report.peak_transient_bytes == max(step.peak_transient_bytes for step in report.steps)


def test_matrix_operations_are_those_of_the_weights_and_the_scores(config_dir: Path) -> None:
    structure = build_structure(engine_config(config_dir), GAUDI2)
    step = audit_bucket(structure, BatchShape.parse("c--/q16/s0/u0/l2"))
    hidden, inner, layers, head_dim, vocab = 32, 48, 3, 8, 64
    projections = hidden * (2 * 4 * head_dim + 2 * 2 * head_dim) + 3 * hidden * inner
    scores = 2 * 16 * 16 * 4 * head_dim
    expected = 2 * (layers * (16 * projections + scores) + 2 * hidden * vocab)
    # Versions of transformers multiply rotary angles on one engine or the other.
    angles = 2 * 16 * head_dim // 2
    assert step.on(Engine.MATRIX).num_operations in (expected, expected + angles)


@pytest.mark.parametrize("name", ["deepseek_v2", "longcat_flash"])
def test_parts_have_the_form_that_an_hpu_runs(name: str, tmp_path: Path) -> None:
    """Rotary embeddings by complex numbers and experts in a loop, in transformers' code."""
    AutoConfig.for_model(name, **{**BASE, **FAMILIES[name], "max_position_embeddings": 512}).save_pretrained(
        tmp_path
    )
    structure = build_structure(engine_config(tmp_path), GAUDI2)
    step = audit_bucket(structure, BatchShape.parse("c--/q16/s0/u0/l2"))
    assert not {"polar", "view_as_complex", "nonzero"}.intersection(step.operators)


@pytest.mark.slow
def test_fused_operators_are_the_same_products_with_less_around_them(
    config_dir: Path, pattern: HeadPattern
) -> None:
    config = engine_config(config_dir, pattern)
    portable, fused = (
        build_structure(replace(config, model=replace(config.model, attention=attention)), GAUDI2)
        for attention in ("reference", "hpu")
    )
    for text in BUCKETS:
        before, after = (audit_bucket(each, BatchShape.parse(text)) for each in (portable, fused))
        assert not after.findings
        assert any(name.startswith("hpu.") for name in after.operators)
        assert set(after.operators) <= set(native_operators())
        assert after.on(Engine.MATRIX).num_operations == before.on(Engine.MATRIX).num_operations
        assert after.on(Engine.VECTOR).num_operations < before.on(Engine.VECTOR).num_operations


def test_kernels_of_other_devices_are_refused(config_dir: Path) -> None:
    config = engine_config(config_dir)
    with pytest.raises(ValueError, match="expected attention that an HPU runs, reference or hpu, got 'sdpa'"):
        build_structure(replace(config, model=replace(config.model, attention="sdpa")), GAUDI2)


def test_a_step_with_more_operators_than_are_captured_whole_is_noted(structure: Structure) -> None:
    bucket = BatchShape.parse(BUCKETS[0])
    fine = audit_bucket(structure, bucket)
    num_operators = sum(fine.operators.values())
    assert audit_bucket(structure, bucket, most_operators=num_operators).findings == fine.findings
    (added,) = set(audit_bucket(structure, bucket, most_operators=num_operators - 1).findings) - set(
        fine.findings
    )
    assert (added.rule, added.severity, added.operator) == (Rule.GRAPH_SIZE, Severity.NOTE, str(bucket))
    assert f"{num_operators:,} operators; at most {num_operators - 1:,}" in added.detail


@pytest.mark.parametrize("text", BUCKETS)
def test_following_one_layer_of_a_kind_counts_like_following_all(structure: Structure, text: str) -> None:
    bucket = BatchShape.parse(text)
    folded = audit_bucket(structure, bucket)
    with structure.mode, torch.no_grad():
        inputs = structure.inputs(bucket)
        tracer = StepTracer((*structure.held, *inputs.values()))
        runners: dict[Hashable, Callable[..., Any]] = dict.fromkeys(structure.model.kinds, run_layer)
        with tracer:
            bucket_step(structure.model, structure.geometry, bucket, runners)(inputs)
    assert folded.operators == dict(tracer.tally.operators)
    assert folded.work == tracer.tally.work
    assert folded.peak_transient_bytes == tracer.peak_bytes


def test_every_operator_of_the_table_exists_and_names_its_sources() -> None:
    sources = native_sources()
    for name, operator in native_operators().items():
        namespace, _, own = name.rpartition(".")
        assert hasattr(getattr(torch.ops, namespace or "aten"), own), name
        assert operator.sources
        assert set(operator.sources) <= set(sources)
    assert "nonzero" not in native_operators()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"model_type": "t5"}, "decoder-only"),
        ({"hidden_act": "nonsense"}, "nonsense"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(
    config_dir: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    path = edit_config(config_dir, tmp_path / "broken", **changes)
    with pytest.raises(ValueError, match=message):
        build_structure(engine_config(path), GAUDI2)


@pytest.mark.parametrize(
    ("rope", "max_model_len"),
    crossed({rope["rope_type"]: rope for rope in LENGTH_DEPENDENT}, [64, 1024]),
)
def test_frequencies_that_depend_on_the_length_are_fixed_for_the_longest_request(
    config_dir: Path, tmp_path: Path, rope: dict[str, Any], max_model_len: int
) -> None:
    path = edit_config(config_dir, tmp_path / "long", rope_scaling=rope, rope_parameters=rope)
    bucket = BatchShape.parse(BUCKETS[1])
    config = engine_config(path)
    as_long = replace(config, scheduler=replace(config.scheduler, max_model_len=max_model_len))
    with_it = audit_bucket(build_structure(as_long, GAUDI2), bucket)
    without = audit_bucket(build_structure(engine_config(config_dir), GAUDI2), bucket)
    assert with_it.findings == ()
    # Only the scale of cosines and sines may come on top.
    assert sum(with_it.operators.values()) == sum(without.operators.values())
    longest = 4096 if rope["rope_type"] == "dynamic" else 1024
    too_long = replace(config, scheduler=replace(config.scheduler, max_model_len=longest + 1))
    with pytest.raises(ValueError, match=f"max_model_len of at most {longest}"):
        build_structure(too_long, GAUDI2)


def test_what_does_not_fit_together_is_refused(config_dir: Path) -> None:
    config = engine_config(config_dir)
    too_long = replace(config, scheduler=replace(config.scheduler, max_model_len=4096))
    with pytest.raises(ValueError, match=f"at most {TINY['max_position_embeddings']}"):
        build_structure(too_long, GAUDI2)
    with pytest.raises(ValueError, match="64 unique blocks"):
        build_structure(engine_config(config_dir, table="--u/q4/s0/u65/l4"), GAUDI2)
    wrong = HeadPattern.all_retrieval(5, 2, sink=1, recent=1)
    with pytest.raises(ValueError, match="5"):
        build_structure(engine_config(config_dir, wrong), GAUDI2)
    small = replace(GAUDI2, memory_bytes=1000)
    with pytest.raises(ValueError, match="weights take"):
        build_structure(replace(config, cache=replace(config.cache, num_blocks=None)), small)


def test_blocks_follow_from_the_hardware_when_they_are_not_given(config_dir: Path) -> None:
    config = engine_config(config_dir)
    structure = build_structure(replace(config, cache=replace(config.cache, num_blocks=None)), GAUDI2)
    # Four requests of 512 tokens: more would never be used, and all of them fit.
    assert structure.memory.num_blocks == 4 * 512 // 16
    assert structure.limits.num_blocks == structure.memory.num_blocks


def test_requests_are_as_long_as_the_blocks_hold_them_and_longer_ones_are_refused(config_dir: Path) -> None:
    config = engine_config(config_dir)
    few = replace(config, cache=replace(config.cache, num_blocks=4))
    no_table = replace(few, graph=replace(few.graph, table=None))
    with pytest.raises(ValueError, match="max_model_len=512 needs 511 cached tokens, but 4 blocks of 16"):
        build_structure(no_table, GAUDI2)
    left_open = replace(no_table, scheduler=replace(config.scheduler, max_model_len=None))
    # The last token of a request is never cached.
    assert build_structure(left_open, GAUDI2).limits.max_model_len == 4 * 16 + 1


def test_streaming_heads_need_less_than_retrieval_heads(config_dir: Path, structure: Structure) -> None:
    full = build_structure(engine_config(config_dir), GAUDI2)
    assert structure.memory.block_bytes < full.memory.block_bytes
    # Blocks that only two heads of three layers read.
    bucket = BatchShape.parse("--u/q4/s0/u64/l4")
    few, all_heads = (audit_bucket(each, bucket).on(Engine.MATRIX) for each in (structure, full))
    assert few.num_operations < all_heads.num_operations
    assert np.isclose(few.num_bytes / all_heads.num_bytes, 1, atol=0.5)
