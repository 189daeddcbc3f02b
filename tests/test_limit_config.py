"""Limits are stated once: as wishes with one default each, and as one resolved value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from inspect import signature

import pytest

from graphs import StepLimits
from hpu_duo import HPUDuoModel
from hpu_duo.cli.arguments.options import EngineOptions, LimitOptions
from hpu_duo.config.engine import (
    CacheConfig,
    EngineConfig,
    GraphConfig,
    HeadConfig,
    ModelConfig,
    SchedulerConfig,
)
from hpu_duo.planning import Serving

WISHES = {one.name: one.default for config in (CacheConfig, SchedulerConfig) for one in fields(config)}
LEFT_OPEN = {"max_num_seqs", "kv_cache_bytes"}
"""Options of the command line that follow from the requests, or are texts."""


def test_the_public_class_has_the_defaults_of_the_configs() -> None:
    given = {name: one.default for name, one in signature(HPUDuoModel.from_pretrained).parameters.items()}
    assert WISHES.keys() <= given.keys()
    assert {name: given[name] for name in WISHES} == WISHES


@pytest.mark.parametrize("options", [LimitOptions(), EngineOptions()])
def test_the_command_line_has_the_defaults_of_the_configs(options: object) -> None:
    shared = (WISHES.keys() - LEFT_OPEN) & vars(options).keys()
    assert {"max_chunk_rows", "max_num_batched_tokens", "block_size", "max_model_len"} <= shared
    assert {name: getattr(options, name) for name in shared} == {name: WISHES[name] for name in shared}


def test_no_number_is_a_wish_of_two_configs_and_the_cost_model_takes_the_same_block() -> None:
    names = [one.name for config in (CacheConfig, SchedulerConfig) for one in fields(config)]
    assert len(names) == len(set(names))
    assert next(one.default for one in fields(Serving) if one.name == "block_size") == CacheConfig.block_size


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (ModelConfig, "path"),
        (HeadConfig, None),
        (CacheConfig, 16),
        (SchedulerConfig, 4),
        (GraphConfig, "eager"),
        (EngineConfig, ModelConfig(path="path")),
        (StepLimits, 4),
    ],
)
def test_values_are_given_by_name(kind: Callable[[object], object], value: object) -> None:
    with pytest.raises(TypeError, match="positional argument"):
        kind(value)


def test_what_was_resolved_has_no_default_for_what_may_be_asked_for() -> None:
    defaults = {one.name for one in fields(StepLimits) if one.default is not one.default_factory}
    assert not defaults & WISHES.keys()
