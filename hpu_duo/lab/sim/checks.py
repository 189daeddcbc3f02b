"""Rules that an operator call breaks, by its operands or by its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hpu_duo.lab.rules import Engine, Operator, Rule, StoreUse
from hpu_duo.lab.sim.call import Call
from hpu_duo.lab.sim.tensor import SimTensor

WIDE = (torch.int64, torch.float64, torch.complex128)
_FUSED = "hpu."
_MASKS = (torch.bool, torch.uint8)

BreakRule = Callable[[Rule, str, str], None]


class Checks:
    """Checks calls, and reports what is broken.

    Args:
        break_rule: takes the rule, the operator's name and a sentence about it.

    Attributes:
        model_dtype: of the model whose step is under way, None outside of steps.
    """

    def __init__(self, break_rule: BreakRule) -> None:
        self._break = break_rule
        self.model_dtype: torch.dtype | None = None
        self._store_use = StoreUse()
        self._is_in_region = False

    @contextmanager
    def region(self) -> Iterator[None]:
        """Hold what runs inside to the rules of one graph; elsewhere each operator is a graph of its own."""
        assert not self._is_in_region, "a region cannot hold another one"
        self._store_use.begin_graph()
        self._is_in_region = True
        try:
            yield
        finally:
            self._is_in_region = False

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Hold what runs inside to no graph; behind it the next graph of a region begins."""
        before, self._is_in_region = self._is_in_region, False
        try:
            yield
        finally:
            self._store_use.begin_graph()
            self._is_in_region = before

    def before(self, call: Call, *, in_graph: bool, reads_values: bool) -> None:
        """Check a call that is about to run.

        Args:
            in_graph: whether it is captured.
            reads_values: whether tensors hold more than garbage.
        """
        operator = call.operator
        if operator.is_dynamic and call.kwargs.get("output_size") is None:
            self._break(Rule.DYNAMIC_SHAPE, operator.name, "the size of the result depends on values")
        if operator.is_scatter:
            self._break(Rule.SCATTER, operator.name, "use index_copy_, index_add or where")
        if operator.is_strided:
            self._break(Rule.AS_STRIDED, operator.name, "slice, transpose or unflatten instead")
        if operator.is_random and in_graph:
            self._break(Rule.RANDOM_IN_GRAPH, operator.name, "every replay would draw the same numbers")
        if call.strays:
            shapes = ", ".join(str(tuple(stray.shape)) for stray in call.strays)
            self._break(Rule.MIXED_DEVICES, operator.name, f"operands {shapes} are in host memory")
        self._check_types(call)
        self._check_indices(call, reads_values)
        self._check_stores(call)
        for target in call.written:
            self.written(operator.name, target)
        # Collectives are the business of the device's own library.
        is_known = operator.is_view or operator.is_dynamic or _is_collective(operator.name)
        if operator.engine is None and not is_known:
            self._break(Rule.UNKNOWN_OPERATOR, operator.name, "see hpu_duo/lab/operators.json")

    def after(self, call: Call, result: Any, had_nan: bool) -> None:
        """Check what a call has made.

        Args:
            result: on the host.
            had_nan: whether an operand that it has written held NaN.
        """
        results = result if isinstance(result, list | tuple) else [result]
        for each in results:
            self.made(call.operator.name, each)
        if _is_collective(call.operator.name):
            return  # its result is on its way until somebody waits for it
        # Uninitialised memory holds anything, and fused operators leave lanes of their statistics undefined.
        if call.operator.is_view or "empty" in call.operator.name or had_nan:
            return
        values = results[:1] if call.operator.name.startswith(_FUSED) else results
        if not any(map(_has_nan, values)):
            return
        if not any(_has_nan(sim.host) for sim in call.sims):
            self._break(Rule.NAN, call.operator.name, "none of its operands has any")

    def made(self, name: str, result: Any) -> None:
        """Check the type of a result, 64-bit ones apart."""
        is_half = isinstance(result, torch.Tensor) and result.dtype == torch.float16
        if is_half and self.model_dtype not in (None, torch.float16):
            self._break(Rule.FLOAT_TYPE, name, f"makes float16 in a model of {self.model_dtype}")

    def written(self, name: str, target: Any) -> None:
        """Check the target of a write."""
        for tensor in target if isinstance(target, list | tuple) else (target,):
            if isinstance(tensor, SimTensor) and tensor.is_partial_view:
                self._break(Rule.VIEW_WRITE, name, f"writes {tuple(tensor.shape)} of a larger tensor")

    def _check_stores(self, call: Call) -> None:
        if not self._is_in_region:
            self._store_use.begin_graph()
        copied = self._store_use.problem(call.operator, (sim.store for sim in call.sims))
        if copied is not None:
            self._break(Rule.STORE_COPY, call.operator.name, copied)

    def _check_types(self, call: Call) -> None:
        operator = call.operator
        for sim in call.sims:
            is_let_through = operator.may_take_wide or (sim.is_own_index and operator.reads_indices)
            if sim.signature[-1] in WIDE and not is_let_through:
                self._break(Rule.WIDE_DTYPE, operator.name, f"takes {sim.dtype} {tuple(sim.shape)}")
            if operator.engine is Engine.MATRIX and sim.weight_dtype not in (None, sim.dtype):
                detail = f"multiplies a weight of {sim.weight_dtype} as {sim.dtype}"
                self._break(Rule.FLOAT_TYPE, operator.name, detail)

    def _check_indices(self, call: Call, reads_values: bool) -> None:
        operator, args = call.operator, call.args
        if operator.index is not None:
            position, along = operator.index
            dim = 0 if along is None else args[along]
            self._check_index(operator, args[position], args[0].shape[dim], reads_values)
            if operator.overwrites and reads_values:
                self._check_repeats(operator.name, args[0], dim, args[position])
        if operator.takes_index_list:
            for dim, index in enumerate(args[1]):
                if index is not None:
                    self._check_index(operator, index, args[0].shape[dim], reads_values)

    def _check_index(self, operator: Operator, index: torch.Tensor, size: int, reads_values: bool) -> None:
        if index.dtype in _MASKS:
            self._break(Rule.BOOLEAN_INDEX, operator.name, f"a mask of shape {tuple(index.shape)}")
            return
        host = index.host if isinstance(index, SimTensor) else index
        if host.numel() and reads_values:
            low, high = torch.aminmax(host)
            if low < 0 or high >= size:
                detail = f"expected indices in [0, {size}), got {low.item()} to {high.item()}"
                self._break(Rule.BAD_INDEX, operator.name, detail)

    def _check_repeats(self, name: str, target: torch.Tensor, dim: int, index: torch.Tensor) -> None:
        host = index.host if isinstance(index, SimTensor) else index
        places, counts = torch.unique(host, return_counts=True)
        for place, count in zip(places.tolist(), counts.tolist()):
            if count > 1 and not _is_null(target, dim, place):
                self._break(Rule.REPEATED_INDEX, name, f"index {place} comes {count} times")


def has_nan(target: Any) -> bool:
    """Whether any of the tensors that an operator is about to write holds NaN."""
    tensors = target if isinstance(target, list | tuple) else (target,)
    return any(isinstance(each, SimTensor) and _has_nan(each.host) for each in tensors)


def _has_nan(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and bool(torch.isnan(value).any())


def _is_null(target: torch.Tensor, dim: int, place: int) -> bool:
    """Whether all that lies at a place of a dimension lies in null units."""
    if not isinstance(target, SimTensor) or target.null is None:
        return False
    entry = target.host.select(dim, place)
    first = entry.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(entry.shape, entry.stride()))
    return target.null[0] <= first and last < target.null[1]


def _is_collective(name: str) -> bool:
    return name.startswith(("c10d.", "_c10d_functional."))
