"""Variables that the vendor's packages read once, when they are first imported.

Written from public sources (the open PyTorch bridge, vllm-gaudi's ``platform.py`` and its serving scripts,
docs.habana.ai); no Gaudi has run it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from hpu_duo.writable import check_directory

_ENVIRONMENT = {
    # One process drives one device, and weights are not shared between graphs of several.
    "PT_HPU_WEIGHT_SHARING": "0",
}
_LAZY_ENVIRONMENT = {"PT_HPU_ENABLE_LAZY_COLLECTIVES": "true"}
_EAGER_ENVIRONMENT = {
    # Recipes of single operators are cached, for eager steps and operators around compiled ones.
    "PT_HPU_ENABLE_EAGER_CACHE": "true",
    # int64 results of operators lie as int32 on the device, as in lazy mode: all indices are int32 here.
    "PT_ENABLE_INT64_SUPPORT": "0",
    # Recipes of a compiled graph are built by several threads.
    "FUSER_ENABLE_MULTI_THREADED_INVOCATIONS": "1",
}
_LAZY = "PT_HPU_LAZY_MODE"
_MODULE, _VISIBLE = "HLS_MODULE_ID", "HABANA_VISIBLE_MODULES"
_RECIPES = "PT_HPU_RECIPE_CACHE_CONFIG"
_RECIPES_FORM = "'directory,delete,megabytes' or 'directory,false,0,true' of a shared volume"
_MOST_RECIPE_MB = 16384
"""Size for the recipes of some hundred graphs; public serving scripts use 8 to 40 GB."""


def prepare_environment(lazy: bool | None = None) -> Mapping[str, str]:
    """Set the environment variables that the vendor's packages read once, when they are first imported.

    A variable that the user has set stays as it is. The mode is always set, since its default differs
    between software versions. Where the packages are imported already, as current ones are by
    ``import torch``, it is the mode that they were imported in.

    Args:
        lazy: lazy mode or eager mode; None = the mode that the user has set or that is in use, or else eager
            mode.
    Returns:
        The variables and their values now.

    Raises:
        ValueError: another mode than the one that is set by the user, or already in use; or a recipe cache
            that the bridge could not use.
    """
    found = os.environ.get(_LAZY)
    in_use = is_lazy() if "habana_frameworks.torch" in sys.modules else None
    if lazy is None:
        is_wanted = bool(in_use) if found is None else found != "0"
    else:
        is_wanted = lazy
    wanted = f"{_LAZY}={int(is_wanted)}"
    if found is not None and (found != "0") is not is_wanted:
        raise ValueError(f"expected {wanted} for this capture backend, got {_LAZY}={found}")
    if in_use is not None and in_use is not is_wanted:
        raise ValueError(
            f"expected {wanted}, but this process has imported habana_frameworks in the other mode: set "
            f"{wanted} before Python starts, for importing torch may import it"
        )
    values = {_LAZY: str(int(is_wanted)), **_ENVIRONMENT, _RECIPES: _own_recipes()}
    values |= _LAZY_ENVIRONMENT if is_wanted else _EAGER_ENVIRONMENT
    for name, value in values.items():
        os.environ.setdefault(name, value)
    _check_recipes(os.environ[_RECIPES])
    return {name: os.environ[name] for name in values}


def _own_recipes() -> str:
    """The recipe cache of a user who has not named one: a directory that outlives the process."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return f"{caches / 'hpu-duo' / 'recipes'},false,{_MOST_RECIPE_MB}"


def _check_recipes(config: str) -> None:
    """Check settings that the bridge silently accepts, with which compilations would be lost.

    Raises:
        ValueError: another form, a size that is none, or a directory that cannot be written to.
    """
    parts = [part.strip() for part in config.split(",")]
    expected = f"expected {_RECIPES}={_RECIPES_FORM}, got {config!r}"
    flags = (parts[1:2] + parts[3:]) if 3 <= len(parts) <= 4 else [""]
    if not all(flag.lower() in ("true", "false") for flag in flags):
        raise ValueError(f"{expected}, with true or false for what is no directory and no number")
    if not parts[2].isascii() or not parts[2].isdigit():
        raise ValueError(f"{expected}, with a size that is no number")
    # Without a directory recipes stay in memory, which is a choice.
    if parts[0]:
        check_directory(f"the recipe cache of {_RECIPES}", Path(parts[0]))


def card_environment(local_rank: int, num_processes: int) -> Mapping[str, str]:
    """Variables that assign a card to one of several processes of a machine.

    The card is that of the list ``HABANA_VISIBLE_MODULES``, or of all modules, at the place of the process.
    The vendor's ``hccl`` module chooses the same when it is imported, but gloo alone does not import it. A
    single process uses any free card.

    Raises:
        ValueError: the list is shorter than the processes are many, or the user has named one card for all.

    Source: docs.habana.ai, "Gaudi-to-process Assignment"; gaudi-pytorch-bridge, ``distributed/hccl``.
    """
    values = dict(prepare_environment())
    if num_processes == 1:
        return values
    if _MODULE in os.environ:
        raise ValueError(
            f"expected {_VISIBLE} for the cards of {num_processes} processes, got {_MODULE}="
            f"{os.environ[_MODULE]}, which names one card for all of them: unset it"
        )
    listed = os.environ.get(_VISIBLE)
    if not listed:
        return {**values, _MODULE: str(local_rank)}
    modules = listed.split(",")
    if len(modules) < num_processes:
        raise ValueError(f"expected {_VISIBLE} to list {num_processes} cards, one a process, got {listed!r}")
    return {**values, _MODULE: modules[local_rank].strip()}


def card_type(devices: Path = Path("/sys/class/accel")) -> str:
    """Return the driver's name of the first card, such as "GAUDI3"; "" where it has none.

    The vendor's packages have to acquire a card to say it, which a process that starts ranks must not.

    Args:
        devices: the kernel's directory of accelerators.

    Source: Linux, ``Documentation/ABI/testing/sysfs-driver-habanalabs``, ``device_type``.
    """
    for file in sorted(devices.glob("accel*/device/device_type")):
        return file.read_text(encoding="utf-8").strip()
    return ""


def is_lazy() -> bool:
    """Whether the vendor's packages, which are imported for it, are in lazy mode."""
    from habana_frameworks.torch.utils.internal import is_lazy

    return bool(is_lazy())
