"""Graphs that are cut compute what they computed, and their compilers see the pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from graphs.backends import compile
from graphs.backends.compile import cut_at, cutting

_library = torch.library.Library("hpu_duo_test_cuts", "FRAGMENT")
_library.define("twice(Tensor x, Tensor store) -> (Tensor, Tensor)")
_library.impl("twice", lambda x, store: (x * 2, store.sum()[None]), "CompositeExplicitAutograd")
torch.library.register_fake("hpu_duo_test_cuts::twice", lambda x, s: (x * 2, s[:1, 0] * 1), lib=_library)
TWICE = torch.ops.hpu_duo_test_cuts.twice.default


class Compiler:
    """Keeps the operators of what it gets."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        assert all(isinstance(each, Tensor) for each in inputs)
        self.graphs.append([node.name for node in module.graph.nodes if node.op.startswith("call")])
        forward: Callable[..., Any] = module.forward
        return forward


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(compile, "_runs", {})
    seen: list[int] = []

    def run(x: Tensor, store: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(len(x))
        return x * 2, store.sum()[None]

    cut_at(TWICE, run)
    torch._dynamo.reset()
    return seen


def layer(x: Tensor, store: Tensor, index: Tensor) -> Tensor:
    store.index_copy_(0, index, x)
    y, total = TWICE(x + 1, store)
    z, again = TWICE(y * total, store)
    return z - again


def plain(x: Tensor) -> Tensor:
    return x.sin() + 1


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 2), torch.arange(3)


def test_the_operators_run_as_python_between_compiled_pieces(calls: list[int]) -> None:
    compiler, wanted = Compiler(), layer(*inputs())
    run = torch.compile(layer, backend=cutting(compiler), fullgraph=True, dynamic=False)
    for times in (1, 2):
        x, store, index = inputs()
        torch.testing.assert_close(run(x, store, index), wanted)
        torch.testing.assert_close(store[:3], x)
        assert calls == [3, 3] * times
    assert len(compiler.graphs) == 3
    assert not any("twice" in name for names in compiler.graphs for name in names)


def test_a_graph_without_these_operators_is_one_piece(calls: list[int]) -> None:
    compiler, x = Compiler(), torch.ones(3)
    run = torch.compile(plain, backend=cutting(compiler), fullgraph=True, dynamic=False)
    torch.testing.assert_close(run(x), plain(x))
    assert (len(compiler.graphs), calls) == (1, [])


def test_a_compiler_is_found_by_its_name(calls: list[int]) -> None:
    run = torch.compile(layer, backend=cutting("eager"), fullgraph=True, dynamic=False)
    torch.testing.assert_close(run(*inputs()), layer(*inputs()))
    assert calls == [3, 3]
