"""Gaudi: the calls that the engine needs of its software.

Written from public sources (the open PyTorch bridge 1.19, vllm-gaudi, docs.habana.ai); no Gaudi has run it.
Tested with a fake ``habana_frameworks``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from torch import nn

from hpu_duo.device.habana_environment import is_lazy, prepare_environment
from hpu_duo.device.runtime import DeviceMetrics

_PACKAGE = "habana-torch-plugin"


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of device memory: the limit, the bytes in use, and their peak."""

    limit: int
    in_use: int
    peak: int


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
        self.is_lazy = is_lazy()

    def version(self) -> str:
        """The vendor's plug-in for torch."""
        try:
            return f"{_PACKAGE} {version(_PACKAGE)}"
        except PackageNotFoundError:
            return f"no {_PACKAGE}"

    def own_backend(self) -> None:
        """Return None: ``hpu-compile`` and ``hpu-graph`` capture on a Gaudi."""

    def collectives(self) -> str:
        """Import the vendor's module, which registers HCCL with ``torch.distributed``; returns its name.

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

    def results(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: reads wait for what has been launched."""
        return nullcontext()

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
        """Move the module.

        The vendor's switch to inference, ``hpu_inference_set_env``, is not called: public code calls it
        before a quantised model is converted, and nowhere else.
        """
        module.to("hpu")
