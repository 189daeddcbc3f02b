"""The graphs that estimates of warm-ups count are those that a compiler gets."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from benchmarks.kernel_work import work_of
from graphs import BatchShape
from hpu_duo.config.engine import CacheConfig, EngineConfig, HeadConfig, ModelConfig, SchedulerConfig
from hpu_duo.heads import HeadPattern
from hpu_duo.lab.audit import Structure, build_structure, lower_bucket, lower_step
from hpu_duo.planning import GAUDI3, kernels_of
from hpu_duo.planning.read_model import read_model
from tests.audit.test_cost_agrees import GROUPED, config_dir

BUCKETS = (
    *("--u/q1/s0/u64/l1", "--u/q4/s0/u512/l4", "c--/q100/s0/u0/l1", "c--/q2048/s0/u0/l4"),
    *("c--/q4096/s0/u0/l4", "cs-/q256/s40/u0/l1", "cs-/q1200/s0/u0/l1", "cs-/q3000/s600/u0/l1"),
    *("-su/q16/s1000/u16/l16", "c-u/q600/s0/u64/l9", "csu/q272/s64/u0/l17", "csu/q2048/s64/u2048/l17"),
)


def build(path: Path, attention: str, retrieval: list[list[bool]], rule: str | None = None) -> Structure:
    kept = np.array(retrieval)
    pattern = HeadPattern(kept.astype(np.float32), sink=128, recent=256, retrieval=kept)
    return build_structure(
        EngineConfig(
            model=ModelConfig(path=path, attention=attention),
            heads=HeadConfig(pattern=pattern, attention_rule=rule),
            cache=CacheConfig(block_size=128, num_blocks=4096),
            scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=8192),
        ),
        GAUDI3,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "shapes"),
    [
        ("hpu", BUCKETS[1:3]),
        pytest.param("reference", ("cs-/q3000/s600/u0/l1",), marks=pytest.mark.exhaustive),
        *(
            pytest.param(attention, BUCKETS[first::3], marks=pytest.mark.exhaustive)
            for attention in ("reference", "hpu")
            for first in range(3)
        ),
    ],
)
def test_as_many_graphs_are_counted_as_are_compiled(
    tmp_path: Path, attention: str, shapes: tuple[str, ...]
) -> None:
    path = config_dir(tmp_path, GROUPED)
    structure = build(path, attention, [[True, True, False, False], [True] * 4])
    work = work_of(structure, read_model(path), kernels_of(attention))
    counted, traced = {}, {}
    for text in shapes:
        bucket = BatchShape.parse(text)
        lowering, num_calls = lower_step(structure, bucket), work.of(bucket).num_region_calls
        traced[text] = len(lowering.graphs), lowering.num_calls
        counted[text] = work.compiled(bucket).num_recipes, 1 + len(work.kv_layers) + num_calls
    assert counted == traced


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "rule", "shapes"),
    [
        pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in product(
            ("reference", "hpu"),
            ("sink_band:sink=8,band=600", "fixed:stride=512,summary=64"),
            (BUCKETS[1:2] + BUCKETS[4:5], BUCKETS[7:8] + BUCKETS[-1:]),
        )
    ],
)
def test_as_many_graphs_are_counted_under_a_rule_as_are_compiled(
    tmp_path: Path, attention: str, rule: str, shapes: tuple[str, ...]
) -> None:
    path = config_dir(tmp_path, GROUPED)
    structure = build(path, attention, [[True, True, False, False], [True] * 4], rule)
    work = work_of(structure, read_model(path), kernels_of(attention))
    counted = {text: work.compiled(BatchShape.parse(text)).num_recipes for text in shapes}
    assert counted == {text: len(lower_bucket(structure, BatchShape.parse(text))) for text in shapes}
