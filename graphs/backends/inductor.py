"""All uses of private names of torch's compiler, for the backend ``compile``.

The compiler is imported at its first use, since that needs a second.
"""

from __future__ import annotations

import gc
import operator
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from types import CodeType, FunctionType, ModuleType
from typing import Any, Protocol, cast

import torch

from graphs.backends.replay import call_compiled
from graphs.interrupts import interrupts_deferred

_MOST_SEARCHED = 10_000


class Handle(Protocol):
    """A hook that can be removed."""

    def remove(self) -> None:
        """Remove the hook."""
        ...


def is_loaded() -> bool:
    """Whether this process has imported the compiler."""
    return "torch._dynamo" in sys.modules


def traced_seconds() -> float:
    """Seconds in which this process has traced Python into graphs, by the compiler's own clocks.

    What follows the trace, functionalising included, is not in it.
    """
    if not is_loaded():
        return 0.0
    from torch._dynamo.utils import compilation_time_metrics

    return sum(compilation_time_metrics.get("bytecode_tracing", ()))


def cache_directory() -> Path | None:
    """The directory of inductor's cache; None if it is turned off."""
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) if config.fx_graph_cache and not config.force_disable_caches else None


def find_compiler(name: str) -> Callable[..., Any]:
    """Return the backend of ``torch.compile`` of a name."""
    from torch._dynamo.backends.registry import lookup_backend

    return cast(Callable[..., Any], lookup_backend(name))


def on_bytecode(note: Callable[[CodeType, CodeType], None]) -> Handle:
    """Call ``note`` with each code object that the compiler replaces from now on, and its replacement."""
    from torch._dynamo.convert_frame import register_bytecode_hook

    return cast(Handle, register_bytecode_hook(note))  # type: ignore[arg-type]


def compile_graph(
    graph: torch.fx.GraphModule, inputs: list[Any], options: dict[str, bool]
) -> Callable[..., Any]:
    """Code of a graph by inductor; ``options`` are those of ``torch._inductor.config``."""
    return cast(Callable[..., Any], torch._inductor.compile(graph, inputs, options))


class DirectCode:
    """Code of inductor, called without the wrappers for views, aliases and gradients of its arguments.

    Layers do not need these. The first call checks that: the wrappers must pass on the very tensors that they
    were called with, and return the very results. A trace has it as one operator. Interrupts are deferred to
    its end, since C++ replaces exceptions of operators in Python.

    Args:
        wrapped: what ``compile_graph`` returned.
    """

    def __init__(self, wrapped: Callable[..., Any]) -> None:
        self._wrapped = wrapped
        self._code: Callable[[list[Any]], Any] | None = None
        self._entering = Lock()

    def __call__(self, *args: Any) -> Any:
        with interrupts_deferred(only_first=True):
            if self._code is None:
                with self._entering:
                    self._code, results = self._enter_first(args)
                return results
            return call_compiled(self._code, args)

    def _enter_first(self, args: tuple[Any, ...]) -> tuple[Callable[[list[Any]], Any], Any]:
        """Return the code to call from now on, and the results of the first call."""
        found = _inside(self._wrapped)
        code = None if found is None else found.current_callable
        if code is None:
            return self._enter_wrapped, self._wrapped(*args)
        calls: list[tuple[list[Any], Any]] = []

        def note(inputs: list[Any]) -> Any:
            given = list(inputs)  # before it is emptied
            results = code(inputs)
            calls.append((given, results))
            return results

        found.current_callable = note
        try:
            results = self._wrapped(*args)
        finally:
            found.current_callable = code
        if len(calls) == 1:
            given, returned = calls[0]
            if _are_same(given, args) and _are_same(returned, results):
                return code, results
        return self._enter_wrapped, results

    def _enter_wrapped(self, inputs: list[Any]) -> Any:
        return self._wrapped(*inputs)


def _inside(wrapped: Callable[..., Any]) -> Any:
    """Return the one compiled graph behind a function and its wrappers; None if there is none, or several."""
    from torch._inductor.output_code import CompiledFxGraph

    passed_by = (ModuleType, type, CodeType, torch.Tensor, str, int)
    found: list[Any] = []
    seen, searched = {id(wrapped)}, [wrapped]
    for holder in searched:
        if len(searched) > _MOST_SEARCHED:
            return None
        if isinstance(holder, CompiledFxGraph):
            found.append(holder)
            continue
        # Globals of a function lead to all objects of a module.
        if isinstance(holder, FunctionType):
            seen.add(id(holder.__globals__))
        for held in gc.get_referents(holder):
            if id(held) not in seen and not isinstance(held, passed_by):
                seen.add(id(held))
                searched.append(held)
    return found[0] if len(found) == 1 else None


def _are_same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))
