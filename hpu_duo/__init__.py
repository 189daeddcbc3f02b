"""HPU-Duo: a static-shape LLM inference runtime for Intel Gaudi (HPU) and long contexts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpu_duo.version import __version__

if TYPE_CHECKING:
    from hpu_duo.config.engine import EngineConfig
    from hpu_duo.heads import HeadPattern
    from hpu_duo.llm import HPUDuoModel
    from hpu_duo.sampling import SamplingParams

__all__ = ["EngineConfig", "HPUDuoModel", "HeadPattern", "SamplingParams", "__version__"]

_HOMES = {
    "EngineConfig": "hpu_duo.config.engine",
    "HPUDuoModel": "hpu_duo.llm",
    "HeadPattern": "hpu_duo.heads",
    "SamplingParams": "hpu_duo.sampling",
}


def __getattr__(name: str) -> Any:
    # Lazy, so that the command line answers --help without importing torch.
    if name in _HOMES:
        from importlib import import_module

        from hpu_duo.garbage import collector_paused

        with collector_paused():
            return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
