"""Limits are stated once: as wishes with one default each, and as one resolved value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import pytest

from graphs import StepLimits
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
