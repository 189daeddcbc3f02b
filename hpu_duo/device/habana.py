"""Gaudi: the environment that its software reads at import, and the calls that the engine needs.

Written from public sources (the open PyTorch bridge 1.19, vllm-gaudi, docs.habana.ai); no Gaudi has run
it. A stand-in of ``habana_frameworks`` exercises it in the tests.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from torch import nn

from hpu_duo.device.runtime import DeviceMetrics

_ENVIRONMENT = {
    # One process drives one device, and weights are not shared between graphs of several.
    "PT_HPU_WEIGHT_SHARING": "0",
}
_LAZY_ENVIRONMENT = {"PT_HPU_ENABLE_LAZY_COLLECTIVES": "true"}
_LAZY = "PT_HPU_LAZY_MODE"
_PACKAGE = "habana-torch-plugin"
_MODULE, _VISIBLE = "HLS_MODULE_ID", "HABANA_VISIBLE_MODULES"
_INFERENCE_SWITCHES = ("hpu_inference_set_env", "hpu_set_inference_env", "hpu_set_env")
"""Names of the switch to inference, the newest first."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of device memory: the limit, the bytes in use, and their peak."""

    limit: int
    in_use: int
    peak: int


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
        ValueError: the user has set another mode, or it is in use already.
    """
    found = os.environ.get(_LAZY)
    in_use = _is_lazy() if "habana_frameworks.torch" in sys.modules else None
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
    values = {_LAZY: str(int(is_wanted)), **_ENVIRONMENT}
    if is_wanted:
        values |= _LAZY_ENVIRONMENT
    for name, value in values.items():
        os.environ.setdefault(name, value)
    return {name: os.environ[name] for name in values}


def is_available(lazy: bool | None = None) -> bool:
    """Whether the vendor's packages, which must be installed, find a device.

    Args:
        lazy: see ``prepare_environment``, which raises the same errors.
    """
    prepare_environment(lazy)
    import habana_frameworks.torch.hpu as hpu

    return bool(hpu.is_available())


def num_devices() -> int:
    """Cards that the vendor's packages, which must be installed, find."""
    prepare_environment()
    import habana_frameworks.torch.hpu as hpu

    return int(hpu.device_count())


def card_environment(local_rank: int, num_processes: int) -> Mapping[str, str]:
    """Variables that give one of several processes of a machine a card of its own.

    The card is that of the list ``HABANA_VISIBLE_MODULES``, or of all modules, at the place of the process.
    The vendor's ``hccl`` module chooses the same when it is imported, but gloo alone does not import it. One
    process takes any card that is free.

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


def _is_lazy() -> bool:
    from habana_frameworks.torch.utils.internal import is_lazy

    return bool(is_lazy())


class HabanaRuntime:
    """See ``DeviceRuntime``.

    Args:
        lazy: see ``prepare_environment``.

    Raises:
        ValueError: see ``prepare_environment``.
    """

    name = "hpu"
    counted_by = "the device"
    compiles_operators = True

    def __init__(self, lazy: bool | None = None) -> None:
        prepare_environment(lazy)
        import habana_frameworks.torch.core as core
        import habana_frameworks.torch.hpu as hpu

        self._core, self._hpu = core, hpu
        self.is_lazy = _is_lazy()

    def version(self) -> str:
        """The vendor's plug-in for torch."""
        try:
            return f"{_PACKAGE} {version(_PACKAGE)}"
        except PackageNotFoundError:
            return f"no {_PACKAGE}"

    def own_backend(self) -> None:
        """Return None: ``hpu-compile`` and ``hpu-graph`` capture on a Gaudi."""

    def collectives(self) -> str:
        """Import the vendor's module, which makes HCCL known to ``torch.distributed``; returns its name.

        The import also reads ``LOCAL_RANK`` and ``PT_HPU_LAZY_MODE``, which must be set before.
        """
        import habana_frameworks.torch.distributed.hccl  # noqa: F401

        return "hccl"

    @contextmanager
    def step(self) -> Iterator[None]:
        """In lazy mode, launch what the step has collected; in eager mode it has been launched."""
        yield
        if self.is_lazy:
            self._core.mark_step()

    def synchronize(self) -> None:
        """Wait for all streams."""
        self._hpu.synchronize()

    def free_bytes(self) -> int:
        """The limit minus the bytes in use."""
        return int(self._hpu.mem_get_info()[0])

    def total_bytes(self) -> int:
        """The limit."""
        return int(self._hpu.mem_get_info()[1])

    def used_bytes(self) -> int:
        """Bytes in use."""
        return self.memory().in_use

    def compile_only(self) -> AbstractContextManager[None]:
        """The bridge's compile-only mode: recipes are compiled and launches are left out."""
        from habana_frameworks.torch.internal.bridge_config import env_setting

        return env_setting("PT_COMPILE_ONLY_MODE", True)

    def memory(self) -> DeviceMemory:
        """Read the counts of the device's allocator."""
        stats = self._hpu.memory_stats()
        return DeviceMemory(stats["Limit"], stats["InUse"], stats["MaxInUse"])

    def metrics(self) -> DeviceMetrics:
        """Read the vendor's counts: compilations, of graphs without names, and CPU fallbacks."""
        from habana_frameworks.torch.hpu.metrics import metric_global

        compilations = dict(metric_global("graph_compilation").stats())
        fallbacks = dict(metric_global("cpu_fallback").stats())
        return DeviceMetrics({"graphs": int(compilations["TotalNumber"])}, dict(fallbacks["FallbackOps"]))

    def place(self, module: nn.Module) -> None:
        """Switch to inference, then move the module.

        Raises:
            ValueError: this version of the vendor's packages has no known switch.
        """
        found = next((name for name in _INFERENCE_SWITCHES if hasattr(self._core, name)), None)
        if found is None:
            raise ValueError(
                f"expected habana_frameworks.torch.core to have one of {', '.join(_INFERENCE_SWITCHES)}"
            )
        getattr(self._core, found)()
        module.to("hpu")
