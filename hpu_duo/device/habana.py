"""Gaudi: the calls that the engine needs of its software.

Written from public sources (the open PyTorch bridge 1.19, vllm-gaudi, docs.habana.ai); no Gaudi has run it.
Tested with a fake ``habana_frameworks``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from hpu_duo.device.habana_environment import is_lazy, prepare_environment
from hpu_duo.device.runtime import DeviceMetrics
from hpu_duo.device.streams import Mark

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


class HpuMark:
    """An event of the vendor's package."""

    def __init__(self, event: Any) -> None:
        self._event = event

    @property
    def is_passed(self) -> bool:
        """Whether the event has been recorded."""
        return bool(self._event.query())

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds between two events."""
        assert isinstance(earlier, HpuMark), "marks of one device"
        return float(earlier._event.elapsed_time(self._event)) / 1e3

    def hold_computation(self) -> None:
        """Let the current stream wait for the event."""
        self._event.wait()

    def wait(self) -> None:
        """Wait for the event."""
        self._event.synchronize()


class HpuCopyStream:
    """A stream of the vendor's package; see ``CopyQueue``.

    Args:
        launch: launches what lazy mode has collected.
    """

    def __init__(self, hpu: Any, launch: Callable[[], object]) -> None:
        self._hpu, self._launch, self._stream = hpu, launch, hpu.Stream()

    @contextmanager
    def after_launched(self) -> Iterator[None]:
        """Make the stream current, once it waits for the one that is current now."""
        self._launch()
        self._stream.wait_stream(self._hpu.current_stream())
        with self._hpu.stream(self._stream):
            yield
            self._launch()

    def mark(self) -> HpuMark:
        """Record an event."""
        self._launch()
        event = self._hpu.Event(enable_timing=True)
        event.record(self._stream)
        return HpuMark(event)


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
        self._launch()

    def results(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: reads wait for what has been launched."""
        return nullcontext()

    def copy_stream(self) -> HpuCopyStream:
        """Return a new stream."""
        return HpuCopyStream(self._hpu, self._launch)

    def _launch(self) -> None:
        """Launch what lazy mode has collected."""
        if self.is_lazy:
            self._core.mark_step()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return zeros that the bridge has pinned."""
        return torch.zeros(num_bytes, dtype=torch.uint8).pin_memory("hpu")

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

    def mark(self) -> Callable[[], None]:
        """Record an event behind the work launched so far; returns its wait on the host, for any thread."""
        self._launch()
        event = self._hpu.Event()
        event.record(self._hpu.current_stream())
        return HpuMark(event).wait

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
