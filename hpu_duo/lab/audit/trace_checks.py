"""Rules that an operator breaks, as far as tensors without data show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from hpu_duo.lab.audit.fake_tensors import memory_key, tree_leaves
from hpu_duo.lab.audit.findings import Finding, Severity, TraceEnded
from hpu_duo.lab.rules import Engine, Operator, Rule, StoreOperand, StoreUse, Transfer, calling_line

_HERE = str(Path(__file__).parent)
_WIDE = (torch.int64, torch.float64, torch.complex128)
_MASKS = (torch.bool, torch.uint8)
_INDEX_SOURCES = ("indices", "moe-routing")


class TraceChecks:
    """Checks operators, and reports findings.

    Args:
        found: takes them.
        weights, model_dtype, stores: see ``StepTracer``.
    """

    def __init__(
        self,
        found: Callable[[Finding], None],
        weights: Iterable[torch.Tensor],
        model_dtype: torch.dtype | None,
        stores: Iterable[torch.Tensor],
    ) -> None:
        self._found, self._model_dtype = found, model_dtype
        self._own_indices: set[int] = set()
        self._stores = frozenset(map(memory_key, stores))
        self.store_use = StoreUse()
        self._weight_dtype = {memory_key(weight): weight.dtype for weight in weights}

    def forget(self, key: int) -> None:
        """Forget about memory that is gone."""
        self._own_indices.discard(key)
        self._weight_dtype.pop(key, None)

    def before(
        self,
        operator: Operator,
        operands: list[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Check the operands of a call.

        Raises:
            TraceEnded: nothing is known of the results.
        """
        devices = {tensor.device.type for tensor in operands if tensor.dim()}
        is_transfer = operator.transfer is not Transfer.NONE
        target = kwargs.get("device")
        if operator.transfer is Transfer.READ:
            self._end(Rule.HOST_IN_GRAPH, operator, "the host waits for a value")
        if is_transfer and (len(devices) > 1 or (target is not None and {target.type} != devices)):
            self._end(Rule.HOST_IN_GRAPH, operator, "host and device meet inside a step")
        if len(devices) > 1:
            self._end(Rule.MIXED_DEVICES, operator, f"operands are on {' and '.join(sorted(devices))}")
        if operator.is_dynamic and kwargs.get("output_size") is None:
            self._end(Rule.DYNAMIC_SHAPE, operator, "the size of the result depends on values")
        if operator.takes_index_list and any(i is not None and i.dtype in _MASKS for i in args[1]):
            self._end(Rule.BOOLEAN_INDEX, operator, "an index is a mask")
        if operator.is_scatter:
            self._add(Rule.SCATTER, operator, "use index_copy_, index_add or where")
        if operator.is_strided:
            self._add(Rule.AS_STRIDED, operator, "slice, transpose or unflatten instead")
        if operator.is_random:
            self._add(Rule.RANDOM_IN_GRAPH, operator, "every replay would draw the same numbers")
        copied = self.store_use.problem(operator, map(self._as_store, operands))
        if copied is not None:
            self._add(Rule.STORE_COPY, operator, copied)
        for tensor in operands:
            if _is_wide(tensor) and not operator.may_take_wide:
                self._check_wide(operator, tensor)
            weight_dtype = self._weight_dtype.get(memory_key(tensor), tensor.dtype)
            if operator.engine is Engine.MATRIX and weight_dtype != tensor.dtype:
                self._add(
                    Rule.FLOAT_TYPE, operator, f"multiplies a weight of {weight_dtype} as {tensor.dtype}"
                )
        for written in (*(args[i] for i in operator.written), *map(kwargs.get, operator.written_names)):
            for tensor in tree_leaves(written):
                if isinstance(tensor, torch.Tensor) and _is_partial(tensor):
                    self._add(Rule.VIEW_WRITE, operator, f"writes {tuple(tensor.shape)} of a larger tensor")

    def after(self, operator: Operator, operands: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        """Check the results of a call, and remember what they hold."""
        self._remember(operator, operands, results)
        for tensor in results:
            if _is_wide(tensor) and not (operator.may_make_wide or self._is_own_index(tensor)):
                self._add(Rule.WIDE_DTYPE, operator, f"makes {tensor.dtype} {tuple(tensor.shape)}")
            if tensor.dtype == torch.float16 and self._model_dtype not in (None, torch.float16):
                self._add(Rule.FLOAT_TYPE, operator, f"makes float16 in a model of {self._model_dtype}")

    def _remember(
        self, operator: Operator, operands: list[torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        """Remember indices that the device has computed itself, and copies of weights; views share memory."""
        keeps = operator.keeps_numbers and bool(operands)
        if operator.makes_indices or (keeps and any(map(self._is_own_index, operands))):
            for tensor in results:
                if tensor.dtype == torch.int64:
                    self._own_indices.add(memory_key(tensor))
        weight_dtype = self._weight_dtype.get(memory_key(operands[0])) if keeps else None
        if weight_dtype is not None:
            for tensor in results:
                self._weight_dtype[memory_key(tensor)] = weight_dtype

    def _check_wide(self, operator: Operator, tensor: torch.Tensor) -> None:
        if operator.reads_indices and self._is_own_index(tensor):
            detail = f"reads the int64 indices {tuple(tensor.shape)} that another operator has just found"
            self._add(Rule.WIDE_DTYPE, operator, detail, Severity.NOTE, _INDEX_SOURCES)
        else:
            self._add(Rule.WIDE_DTYPE, operator, f"takes {tensor.dtype} {tuple(tensor.shape)}")

    def _as_store(self, tensor: torch.Tensor) -> StoreOperand | None:
        memory = memory_key(tensor)
        return StoreOperand(memory, tensor._is_view()) if memory in self._stores else None

    def _is_own_index(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype == torch.int64 and memory_key(tensor) in self._own_indices

    def _add(
        self,
        rule: Rule,
        operator: Operator,
        detail: str,
        severity: Severity = Severity.FORBIDDEN,
        shown_by: tuple[str, ...] = (),
    ) -> None:
        self._found(Finding(rule, operator.name, calling_line(_HERE), detail, severity, shown_by))

    def _end(self, rule: Rule, operator: Operator, detail: str) -> None:
        self._add(rule, operator, detail)
        raise TraceEnded(detail)


def _is_wide(tensor: torch.Tensor) -> bool:
    """Whether a tensor is 64-bit; a single integer is let through, a single float only on the host."""
    if tensor.dim():
        return tensor.dtype in _WIDE
    return tensor.dtype == torch.float64 and tensor.device.type == "hpu"


def _is_partial(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
