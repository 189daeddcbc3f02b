"""Compile the repeated regions of a step, one private function per bucket and region."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import FunctionType
from typing import cast

import torch

from graphs.backends.base import Inputs, Outputs, Region
from graphs.shape import BatchShape


_SKIP_GUARDS = getattr(torch.compiler, "skip_all_guards_unsafe", None)
"""From torch 2.8 on; before that guards are always checked."""


class CompileBackend:
    """``torch.compile(fullgraph=True, dynamic=False)`` of regions; the step around them stays as it is.

    A model is one layer repeated, so compiling a layer instead of the whole step makes a bucket
    cost seconds instead of minutes. Parameters and stores of the layer are inputs of the compiled
    function, which is why one serves all layers of a kind.

    Every (bucket, region) gets a function with a code object of its own. The compiler keeps its
    variants per code object and tries their guards one after the other; with one variant each, the
    number of buckets costs nothing at run time and no limit on variants is ever reached.

    Args:
        guards: check before each call that a region's inputs are what it was compiled for, which
            costs more than the small operators of a layer. Off, the bucket and the region's key
            vouch for that; on, a violation is a recompilation, which tests can see.
    """

    name = "compile"

    def __init__(self, guards: bool = False) -> None:
        self._options = {} if guards or _SKIP_GUARDS is None else {"guard_filter_fn": _SKIP_GUARDS}
        self._regions: dict[tuple[BatchShape, Hashable], Callable[..., object]] = {}

    @property
    def num_regions(self) -> int:
        """Functions handed out so far; each is compiled at its first call."""
        return len(self._regions)

    def capture(self, fn: Callable[[Inputs], Outputs], shape: BatchShape) -> Callable[[Inputs], Outputs]:
        """Return ``fn``: its regions are what is captured."""
        return fn

    def region(self, shape: BatchShape, key: Hashable, fn: Region) -> Region:
        """Return the compiled function of a region at one shape.

        Raises:
            TypeError: ``fn`` is not a plain Python function.
        """
        place = (shape, key)
        if place not in self._regions:
            self._regions[place] = torch.compile(
                _private_copy(fn, f"{shape}"), fullgraph=True, dynamic=False, options=self._options
            )
        return cast(Region, self._regions[place])


def _private_copy(fn: Callable[..., object], label: str) -> Callable[..., object]:
    """The same function with its own code object, named after its bucket for profiles and logs."""
    if not isinstance(fn, FunctionType):
        raise TypeError(f"expected a plain function to compile, got {type(fn).__name__}")
    code = fn.__code__.replace(co_name=f"{fn.__name__}@{label}")
    copy = FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy
