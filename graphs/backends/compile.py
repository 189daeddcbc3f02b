"""Compile the repeated regions of a step, one private function per bucket and region."""

from __future__ import annotations

import operator
import shutil
import sys
import sysconfig
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, TypeAlias, cast

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from graphs.backends.base import Inputs, Outputs, Region
from graphs.backends.inductor import DirectCode, cache_directory, compile_graph, find_compiler, on_bytecode
from graphs.backends.replay import TracedStep, untraced
from graphs.interrupts import interrupts_deferred
from graphs.shape import BatchShape

Compiler: TypeAlias = Callable[..., Any]
"""A backend of ``torch.compile``: from a traced graph and its inputs to a function that runs it."""

_runs: dict[Any, Callable[..., Any]] = {}


def cut_at(target: Any, run: Callable[..., Any]) -> None:
    """Cut graphs at an operator from now on.

    Args:
        target: the operator.
        run: called with its arguments instead.
    """
    _runs[target] = run


def run_of_cut(target: Any) -> Callable[..., Any] | None:
    """Return what runs in place of an operator at which graphs are cut; None for any other one."""
    return _runs.get(target)


def cutting(compiler: str | Compiler) -> Compiler:
    """Return a backend that passes pieces of graphs to ``compiler``; a graph without cuts is one piece.

    A piece is compiled at its first run, for the tensors of that run.
    """

    def compile_pieces(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compile_one = find_compiler(compiler) if isinstance(compiler, str) else compiler
        if not any(node.target in _runs for node in module.graph.nodes if node.op == "call_function"):
            compiled: Callable[..., Any] = compile_one(module, inputs)
            return compiled
        return _cut(module, compile_one)

    return compile_pieces


def _cut(module: fx.GraphModule, compiler: Compiler) -> Callable[..., Any]:
    place, cuts, number = dict[fx.Node, int](), set[int](), 0
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node.target in _runs:
            number += 1
            place[node] = number
            cuts.add(number)
            number += 1
        else:
            # ``getitem`` of an operator's results stays in its piece: pieces pass tensors only.
            is_item = node.op == "call_function" and node.target is operator.getitem
            source = place.get(node.args[0], number) if is_item else number
            place[node] = source if source in cuts else number
    split = split_module(module, module, place.__getitem__, keep_original_order=True)
    for name, piece in list(split.named_children()):
        if not isinstance(piece, fx.GraphModule) or not name.startswith("submod_"):
            continue
        is_cut = int(name.removeprefix("submod_")) in cuts
        delattr(split, name)
        setattr(split, name, _as_python(piece) if is_cut else _Piece(piece, compiler))
    run: Callable[..., Any] = split.forward
    return run


def _as_python(piece: fx.GraphModule) -> fx.GraphModule:
    for node in piece.graph.nodes:
        if node.op == "call_function" and node.target in _runs:
            node.target = _runs[node.target]
    piece.recompile()
    return piece


class _Piece:
    """Part of a graph, compiled when it is first called."""

    def __init__(self, module: fx.GraphModule, compiler: Compiler) -> None:
        self._module, self._compiler = module, compiler
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        # Compilers expect a tuple of results.
        self._has_one_result = not isinstance(output.args[0], tuple)
        if self._has_one_result:
            output.args = ((output.args[0],),)
            module.recompile()
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: torch.Tensor) -> Any:
        if self._compiled is None:
            self._compiled = self._compiler(self._module, list(args))
        results = self._compiled(*args)
        return results[0] if self._has_one_result else results


_COMPILERS = ("g++", "clang++", "c++")


def cpu_compile_problem() -> str | None:
    """Return why ``torch.compile`` cannot build CPU code on this machine; None if it can."""
    if not any(map(shutil.which, _COMPILERS)):
        return f"no C++ compiler is on the path ({', '.join(_COMPILERS)})"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        return f"the headers of Python {sys.version_info.major}.{sys.version_info.minor} are not installed"
    return None


class CompileBackend:
    """``torch.compile(fullgraph=True, dynamic=False)`` of regions; on a CPU the rest is replayed.

    A model is one layer repeated, so compiling a layer instead of the whole step makes a bucket
    cost seconds instead of minutes. Parameters and stores of the layer are inputs of the compiled
    function, which is why one serves all layers of a kind.

    Every (bucket, region) gets a function with a code object of its own. The compiler stores variants per
    code object and checks their guards one after the other; with one variant each, the number of buckets
    costs nothing at run time and no limit on variants is reached.

    Args:
        compiler: backend of ``torch.compile``, or its name; "eager" only traces.
        guards: check guards before each call; a violation is then a recompilation, which tests can detect.
            Off, inputs are determined by the bucket and the region's key, sizes included, and compiled code
            is called without checks, which cost more than all the small operators of a layer.
    """

    name = "compile"

    def __init__(self, compiler: str | Compiler = "inductor", guards: bool = False) -> None:
        self._compiler = compiler
        self._guards = guards
        self._is_replayed = compiler == "inductor" and not guards
        # A run that compiles cannot be traced.
        self.num_first_runs = 2 if self._is_replayed else 1
        self._regions: dict[tuple[BatchShape, Hashable], Callable[..., object]] = {}

    @property
    def keys(self) -> tuple[tuple[BatchShape, Hashable], ...]:
        """Buckets and keys of the regions so far."""
        return tuple(self._regions)

    def cache_directory(self) -> Path | None:
        """Inductor's cache on disk; None of other compilers, and if it is turned off."""
        return cache_directory() if self._compiler == "inductor" else None

    def problem(self, device: torch.device) -> str | None:
        """Why the compiler cannot build code for ``device``, or None."""
        if self._compiler != "inductor":
            return None
        if device.type == "hpu":
            return "inductor builds no code for 'hpu', where 'hpu-compile' is expected"
        reason = cpu_compile_problem() if device.type == "cpu" else None
        return None if reason is None else f"inductor cannot build code for the CPU here: {reason}"

    def capture(self, fn: Callable[[Inputs], Outputs], shape: BatchShape) -> Callable[[Inputs], Outputs]:
        """Return ``fn``, with compiled regions; on a CPU the rest is replayed, see ``TracedStep``.

        With guards, or with another compiler than inductor, it stays as it is.
        """
        return TracedStep(fn, num_untraced=1) if self._is_replayed else fn

    def region(self, shape: BatchShape, key: Hashable, fn: Region) -> Region:
        """Return the compiled function of a region at one shape.

        Raises:
            TypeError: ``fn`` is not a plain Python function.
        """
        place = (shape, key)
        if place not in self._regions:
            private = _private_copy(fn, f"{shape}")
            if self._compiler == "inductor":
                backend: Compiler = partial(_inductor, checks_inputs=self._guards)
            else:
                backend = cutting(self._compiler)
            compiled = torch.compile(private, backend=backend, fullgraph=True, dynamic=False)
            self._regions[place] = compiled if self._guards else _Direct(private, compiled)
        return cast(Region, self._regions[place])

    def forget(self, shape: BatchShape) -> None:
        """Free the compiled regions of a bucket that has left the table."""
        for place in [place for place in self._regions if place[0] == shape]:
            del self._regions[place]


class _Direct:
    """A compiled function that is called without guards from its second call on.

    The first call uses ``torch.compile`` and stores its bytecode, which later calls run. If a version of the
    compiler does not report bytecode, every call checks guards.
    """

    def __init__(self, private: FunctionType, compiled: Callable[..., object]) -> None:
        self._private, self._compiled = private, compiled
        self._direct: Callable[..., object] | None = None

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self._direct is not None:
            return self._direct(*args, **kwargs)
        handle = on_bytecode(self._note)
        try:
            with untraced():
                return self._compiled(*args, **kwargs)
        finally:
            handle.remove()

    def _note(self, code: CodeType, new_code: CodeType) -> None:
        if code is self._private.__code__:
            self._direct = _with_code(self._private, new_code)


def _inductor(graph: torch.fx.GraphModule, inputs: list[Any], *, checks_inputs: bool) -> Callable[..., Any]:
    # On a CPU the calls of kernels are C++ as well: from Python they cost more than small kernels do. The C++
    # of torch 2.7 cannot call operators that return nothing.
    is_cpu = all(x.device.type == "cpu" for x in inputs if isinstance(x, torch.Tensor))
    options = {"cpp_wrapper": is_cpu and torch.__version__ >= "2.8", "size_asserts": checks_inputs}
    compiled = compile_graph(graph, inputs, options)
    if not is_cpu:
        return compiled
    return partial(_without_interrupts, compiled) if checks_inputs else DirectCode(compiled)


def _without_interrupts(code: Callable[..., Any], *args: Any) -> Any:
    with interrupts_deferred(only_first=True):
        return code(*args)


def _private_copy(fn: Callable[..., object], label: str) -> FunctionType:
    """The same function with its own code object, named after its bucket for profiles and logs."""
    if not isinstance(fn, FunctionType):
        raise TypeError(f"expected a plain function to compile, got {type(fn).__name__}")
    return _with_code(fn, fn.__code__.replace(co_name=f"{fn.__name__}@{label}"))


def _with_code(fn: FunctionType, code: CodeType) -> FunctionType:
    """Return a copy of ``fn``, its default arguments included, that runs other code."""
    copy = FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy
