"""Capture on Gaudi: its compiler in eager mode, and HPU graphs in lazy mode.

Written from public sources (docs.habana.ai, vllm-gaudi, the open PyTorch bridge); not tested on a Gaudi. The
tests use a fake ``habana_frameworks``.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Generic

import torch

from graphs.backends.base import MOST_OPERATORS, Inputs, Outputs, Recording, WholeStepBackend
from graphs.backends.compile import CompileBackend
from graphs.cache import RecompileError
from graphs.shape import BatchShape

_MODES = {False: "eager mode (PT_HPU_LAZY_MODE=0)", True: "lazy mode (PT_HPU_LAZY_MODE=1)"}
_RECIPES = "PT_HPU_RECIPE_CACHE_CONFIG"
_UNSAFE_STANCE = "skip_guard_eval_unsafe"


def recipe_directory() -> Path | None:
    """The bridge's recipe cache (``PT_HPU_RECIPE_CACHE_CONFIG``); None if it does not outlive a process.

    The bridge clears the directory at its start if the second value is true, unless the fourth one is true:
    a cache that is shared over a network file system is never cleared.
    """
    parts = [part.strip().lower() for part in os.environ.get(_RECIPES, "").split(",")]
    is_shared, is_cleared = parts[3:] == ["true"], parts[1:2] == ["true"]
    place = os.environ.get(_RECIPES, "").partition(",")[0].strip()
    return Path(place) if place and (is_shared or not is_cleared) else None


def _problem(what: str, device: torch.device, needs_lazy: bool) -> str | None:
    if device.type != "hpu":
        return f"{what} are for device 'hpu', got {str(device)!r}"
    if importlib.util.find_spec("habana_frameworks") is None:
        return f"{what} need the package habana_frameworks, which is not installed"
    from habana_frameworks.torch.utils.internal import is_lazy

    if bool(is_lazy()) is not needs_lazy:
        return f"{what} need {_MODES[needs_lazy]}, got {_MODES[not needs_lazy]}"
    return None


class HpuCompileBackend(CompileBackend):
    """Regions compiled by ``torch.compile(backend="hpu_backend", fullgraph=True, dynamic=False)``.

    The default on a Gaudi, in eager mode. From the second run of a bucket on, its regions run in torch's
    stance that skips most guards; a region that would be recompiled raises instead, and is compiled if the
    step is retried. The stance applies during the step only, so that other code of the process, and the first
    run of another bucket, is compiled as usual.

    Args:
        guards: check guards in every call, and recompile if one fails.
    """

    name = "hpu-compile"

    def __init__(self, guards: bool = False) -> None:
        super().__init__("hpu_backend", guards=True)
        self._trusts_guards = not guards

    def cache_directory(self) -> Path | None:
        """The vendor's recipe cache on disk, if there is one."""
        return recipe_directory()

    def problem(self, device: torch.device) -> str | None:
        """Return why the vendor's compiler cannot be used on ``device``; None if it can."""
        return _problem("compiled regions", device, needs_lazy=False)

    def capture(self, fn: Callable[[Inputs], Outputs], shape: BatchShape) -> Callable[[Inputs], Outputs]:
        """Return ``fn`` such that, from its second call on, nothing in it may be compiled.

        A later call that would compile raises ``RecompileError``.
        """
        return _CompiledStep(fn, str(shape)) if self._trusts_guards else fn


class _CompiledStep(Generic[Outputs]):
    def __init__(self, fn: Callable[[Inputs], Outputs], label: str) -> None:
        self._fn, self._label = fn, label
        self._has_run = False

    def __call__(self, inputs: Inputs) -> Outputs:
        may_compile = not self._has_run
        # A retry after the error compiles what is missing.
        self._has_run = False
        with nullcontext() if may_compile else no_recompilation(self._label):
            outputs = self._fn(inputs)
        self._has_run = True
        return outputs


@contextmanager
def no_recompilation(what: str) -> Iterator[None]:
    """Context manager that disables as many guards as possible.

    Args:
        what: description of the code inside, for the error.

    Raises:
        RecompileError: something would have to be compiled inside.
    """
    with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
        try:
            yield
        except RuntimeError as error:
            if _UNSAFE_STANCE not in str(error):
                raise
            raise RecompileError([f"{what}: {error}"]) from error


class HpuGraphRecorder:
    """Records with HPU graphs, one per step, through ``HPUGraph`` itself.

    The vendor's ``wrap_in_hpu_graph`` looks the graph up by a hash of all arguments, which ignores dtypes and
    in which 1, 1.0 and True are equal. Here the bucket is the key, and inputs are at the addresses that the
    graph reads, so nothing is hashed or copied. Recording launches the step as well.
    """

    def problem(self, device: torch.device) -> str | None:
        """Return why the device has no HPU graphs; None if it has."""
        return _problem("HPU graphs", device, needs_lazy=True)

    def record(self, run: Callable[[], Outputs]) -> Recording[Outputs]:
        """See ``Recorder``."""
        import habana_frameworks.torch.core as core
        import habana_frameworks.torch.hpu as hpu

        # Operators that lazy mode has collected so far belong to no graph.
        core.mark_step()
        graph = hpu.HPUGraph()
        with hpu.stream(hpu.default_stream()):
            graph.capture_begin()
            try:
                outputs = run()
            finally:
                graph.capture_end()
        return Recording(outputs, outputs, graph.replay)


class HpuGraphBackend(WholeStepBackend):
    """See ``WholeStepBackend`` and ``HpuGraphRecorder``; for lazy mode, which is legacy.

    Args:
        max_operators: see ``WholeStepBackend``.
    """

    def __init__(self, max_operators: int = MOST_OPERATORS) -> None:
        super().__init__("hpu-graph", HpuGraphRecorder(), max_operators)

    def cache_directory(self) -> Path | None:
        """The vendor's recipe cache on disk, if there is one."""
        return recipe_directory()
