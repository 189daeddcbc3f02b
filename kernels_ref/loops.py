"""Loops over slices and chunks that a compiled layer does not hold.

A compiler of layers unrolls a loop, and so its graphs grow with the context. Such a loop is one operator in
the layer's graph, which is cut there. The loop runs between the pieces, and its body is a region of its own,
compiled once and called with the number of one slice or chunk after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import torch

from bias_builders import Rule, decode_rule, encode_rule
from kernels_ref.hpu.operators import FusedOperators
from kernels_ref.partial import Partial, empty
from kernels_ref.scoring import Scoring, Softmax
from kernels_ref.units import UnitLayout

Body: TypeAlias = Callable[..., Any]
RegionOf: TypeAlias = Callable[[Hashable, Body], Body]
"""Returns what runs a body in place of it, by a key that tells bodies apart that compute differently."""

_regions: ContextVar[RegionOf | None] = ContextVar("_regions", default=None)


class How(NamedTuple):
    """Parameters of a loop besides tensors.

    Attributes:
        scoring: soft cap and precision; sizes in it are not used.
        operators: fused operators to call.
        size: queries of a slice, or blocks of a chunk.
        num_rows: rows of the step (N).
        rule: which earlier tokens a token sees; of rings, their window.
        layout: of the units that are read.
    """

    scoring: Scoring
    operators: FusedOperators
    size: int
    num_rows: int = 0
    rule: Rule | None = None
    layout: UnitLayout | None = None


Loop: TypeAlias = Callable[[torch.Tensor, Sequence[torch.Tensor], How], Partial]
"""Takes queries, other tensors and parameters; returns the partial of all queries."""

_loops: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    """Register a function under its name, for ``run_loop``."""
    _loops[function.__name__] = function
    return function


@contextmanager
def in_regions(region_of: RegionOf) -> Iterator[None]:
    """Run the bodies of loops as regions of a capture backend, within the context."""
    token = _regions.set(region_of)
    try:
        yield
    finally:
        _regions.reset(token)


def run_body(body: Body, how: How, *tensors: torch.Tensor) -> Any:
    """Call the body of a loop, as a region where there are regions.

    Args:
        body: a plain function of ``how`` and the tensors.
    """
    region_of = _regions.get()
    if region_of is None:
        return body(how, *tensors)
    sizes = tuple((tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in tensors)
    return region_of(("loop", body.__name__, how, sizes), body)(how, *tensors)


def as_operator(name: str, q: torch.Tensor, tensors: Sequence[torch.Tensor], how: How) -> Partial:
    """Call a loop as one operator, for graphs.

    Args:
        name: of a function that is a ``loop``.
        q: queries, ``[*, K, G, D]``.
    """
    scoring, operators = how.scoring, how.operators
    flags = (
        *(int(scoring.softmax is Softmax.FAST), int(operators.attention), int(operators.softmax)),
        *(int(operators.block_softmax), operators.line_bytes, how.size, how.num_rows),
    )
    rule = encode_rule(how.rule)
    ints = [*flags, len(rule), *rule, *(how.layout or ())]
    return Partial(*operator(name, q, list(tensors), ints, [scoring.softcap or 0.0, operators.inverse_scale]))


def run_loop(
    name: str, q: torch.Tensor, tensors: Sequence[torch.Tensor], ints: Sequence[int], floats: Sequence[float]
) -> tuple[torch.Tensor, ...]:
    """Run a loop; the function of the operator."""
    fast, attention, softmax, blocks, line_bytes, size, num_rows, length, *rest = ints
    layout = rest[length:]
    how = How(
        Scoring(floats[0] or None, Softmax.FAST if fast else Softmax.EXACT),
        FusedOperators(bool(attention), bool(softmax), bool(blocks), line_bytes, floats[1]),
        size,
        num_rows,
        decode_rule(rest[:length]),
        UnitLayout(*layout) if layout else None,
    )
    return tuple(_loops[name](q, tensors, how))


def _shapes(_: str, q: torch.Tensor, *rest: object) -> tuple[torch.Tensor, ...]:
    return tuple(empty(q))


_library = torch.library.Library("hpu_duo_loops", "FRAGMENT")
_library.define(
    "run(str name, Tensor q, Tensor[] tensors, int[] ints, float[] floats) -> (Tensor, Tensor, Tensor)"
)
_library.impl("run", run_loop, "CompositeExplicitAutograd")
torch.library.register_fake("hpu_duo_loops::run", _shapes, lib=_library)
operator = torch.ops.hpu_duo_loops.run.default
"""The operator that stands for a loop in a graph."""
