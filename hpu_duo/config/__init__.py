"""All settings, validated and frozen; in several modules, some of which import no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpu_duo.config.engine import (
        EngineConfig,
        GraphConfig,
        HeadConfig,
        ModelConfig,
        ParallelConfig,
        RunConfig,
    )
    from hpu_duo.config.limits import CacheConfig, SchedulerConfig

__all__ = [
    "CacheConfig",
    "EngineConfig",
    "GraphConfig",
    "HeadConfig",
    "ModelConfig",
    "ParallelConfig",
    "RunConfig",
    "SchedulerConfig",
]

_LIMITS = ("CacheConfig", "SchedulerConfig")


def __getattr__(name: str) -> Any:
    if name in __all__:
        from importlib import import_module

        return getattr(import_module(f"hpu_duo.config.{'limits' if name in _LIMITS else 'engine'}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
