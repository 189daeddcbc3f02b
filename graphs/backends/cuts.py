"""Graphs that are cut at some operators, so that what is compiled does not grow with loops inside of them.

A compiler gets the pieces between these operators; the operators themselves run as Python.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from graphs.backends.inductor import find_compiler

Compiler: TypeAlias = Callable[..., Any]
"""A backend of ``torch.compile``: takes a traced graph and its inputs, returns what runs it."""

_runs: dict[Any, Callable[..., Any]] = {}


def cut_at(target: Any, run: Callable[..., Any]) -> None:
    """Cut graphs at an operator from now on.

    Args:
        target: the operator.
        run: called with its arguments in its place.
    """
    _runs[target] = run


def cutting(compiler: str | Compiler) -> Compiler:
    """Return a compiler that passes pieces of graphs to ``compiler``; a graph without cuts is one piece.

    A piece is compiled when it is first run, with the tensors that it then gets.
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
            # The items of what an operator returns belong to it: pieces pass tensors only.
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
