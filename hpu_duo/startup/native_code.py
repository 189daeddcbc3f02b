"""The C++ code that an engine runs on a CPU: built in threads while weights are read, all of it at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from hpu_duo.config import ModelConfig
from hpu_duo.startup.place import Place
from kernels_ref import Implementation, rowwise
from kernels_ref.x86 import library as x86


@contextmanager
def native_code_built(model: ModelConfig, place: Place, dtype: torch.dtype) -> Iterator[None]:
    """Begin to build what an engine will need, and wait for it after what is done inside.

    What cannot be built is done without, with the warning of each library.

    Args:
        model: as configured.
        dtype: of its weights.
    """
    libraries = _needed(model, place, dtype)
    if not libraries:
        yield
        return
    threads = ThreadPoolExecutor(len(libraries), thread_name_prefix="hpu-duo-build")
    building = [threads.submit(is_available) for is_available in libraries]
    threads.shutdown(wait=False)
    yield
    for each in building:
        each.result()


def _needed(model: ModelConfig, place: Place, dtype: torch.dtype) -> list[Callable[[], bool]]:
    """Functions that load libraries and build them where need be, the longest source first."""
    if place.device.type != "cpu":
        return []
    attends = model.attention in ("auto", Implementation.SDPA.value)
    runs_x86 = dtype == torch.bfloat16 and (attends or model.pack_weights is not False)
    found: list[Callable[[], bool]] = []
    if place.fuses_rows:
        found.append(rowwise.is_available)
    if runs_x86:
        found.append(x86.is_available)
    return found
