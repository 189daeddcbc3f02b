"""Ranks compare what they have to have alike before they compute anything, and name what differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from graphs import BatchShape, BucketTable, Phase
from hpu_duo.config.engine import CacheConfig, EngineConfig, GraphConfig, ModelConfig, SchedulerConfig
from hpu_duo.config.kv_plan import Keep, KVPlan
from hpu_duo.device.ranks import first_difference
from hpu_duo.device.runtime import CpuRuntime
from hpu_duo.heads import HeadPattern
from hpu_duo.startup.sharding import facts_of, pattern_digest, plan_digest
from tests.modeling.families import Zoo


def facts_on_cpu(config: EngineConfig) -> dict[str, str]:
    return facts_of(config, CpuRuntime())


Change = Callable[[EngineConfig], EngineConfig]


def with_limits(config: EngineConfig) -> EngineConfig:
    return replace(config, scheduler=SchedulerConfig(max_num_seqs=7))


def with_blocks(config: EngineConfig) -> EngineConfig:
    return replace(config, cache=CacheConfig(block_size=32))


def with_dtype(config: EngineConfig) -> EngineConfig:
    return replace(config, model=replace(config.model, dtype="bfloat16"))


def with_table(config: EngineConfig) -> EngineConfig:
    table = BucketTable([BatchShape(Phase(unique=True), 1, 0, 4, 1)])
    return replace(config, graph=GraphConfig(table=table))


@pytest.fixture
def config(zoo: Zoo) -> EngineConfig:
    return EngineConfig(model=ModelConfig(path=zoo.load("llama")[1], device="cpu", dtype="float32"))


def test_ranks_with_the_same_of_everything_agree(config: EngineConfig, tmp_path: Path) -> None:
    copied = tmp_path / "elsewhere"
    copied.mkdir()
    for file in Path(config.model.path).iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    elsewhere = replace(
        config,
        model=replace(config.model, path=copied),
        cache=replace(config.cache, kv_plan=copied / "plan.yaml"),
    )
    assert first_difference([facts_on_cpu(config), facts_on_cpu(config), facts_on_cpu(elsewhere)]) is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (with_limits, "setting max_num_seqs, got '32' on rank 0 and '7' on rank 2"),
        (with_blocks, "setting block_size, got '128' on rank 0 and '32' on rank 2"),
        (with_dtype, "setting dtype, got 'float32' on rank 0 and 'bfloat16' on rank 2"),
        (with_table, "setting table, got 'None' on rank 0 and 'a table of 1 buckets, "),
    ],
)
def test_another_setting_is_refused_by_its_name(config: EngineConfig, change: Change, told: str) -> None:
    found = first_difference([facts_on_cpu(config), facts_on_cpu(config), facts_on_cpu(change(config))])
    assert found is not None
    assert found.startswith(f"expected all ranks to have the same {told}")


@pytest.mark.parametrize(
    "name", ["torch", "transformers", "hpu-duo", "Python", "the device and its software"]
)
def test_another_version_is_refused_by_the_name_of_the_package(config: EngineConfig, name: str) -> None:
    own = facts_on_cpu(config)
    found = first_difference([own, {**own, f"version of {name}": "0.1"}])
    assert found is not None
    assert found.startswith(f"expected all ranks to have the same version of {name}, got ")
    assert found.endswith("and '0.1' on rank 1")


def test_other_weights_of_the_same_shapes_are_refused(config: EngineConfig, tmp_path: Path) -> None:
    for file in Path(config.model.path).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    [weights] = tmp_path.glob("*.safetensors")
    save_file({name: torch.zeros_like(each) for name, each in load_file(weights).items()}, weights)
    other = replace(config, model=replace(config.model, path=tmp_path))
    found = first_difference([facts_on_cpu(config), facts_on_cpu(other)])
    assert found is not None
    assert "same model (config.json and weights, by model_fingerprint), got" in found


def test_plans_differ_where_what_a_head_keeps_does() -> None:
    plans = [
        None,
        KVPlan(((Keep("h2o", 9), Keep()),)),
        KVPlan(((Keep("h2o", 8), Keep()),)),
        KVPlan(((Keep(), Keep("h2o", 9)),)),
        KVPlan(((Keep("h2o:recent=0.25", 9), Keep()),)),
    ]
    digests = [plan_digest(each) for each in plans]
    assert len(set(digests)) == len(plans)
    assert digests[1] == plan_digest(KVPlan.from_dict(plans[1].as_dict()))  # type: ignore[union-attr]


def test_patterns_differ_where_heads_or_windows_do() -> None:
    scores = np.zeros((2, 2), np.float32)
    mask = np.array([[True, False], [False, True]])
    patterns = [
        None,
        HeadPattern(scores, sink=2, recent=6, retrieval=mask),
        HeadPattern(scores, sink=2, recent=7, retrieval=mask),
        HeadPattern(scores, sink=2, recent=6, retrieval=~mask),
    ]
    digests = [pattern_digest(each) for each in patterns]
    assert len(set(digests)) == len(patterns)
    assert digests[1] == pattern_digest(HeadPattern(scores, sink=2, recent=6, retrieval=mask.copy()))
