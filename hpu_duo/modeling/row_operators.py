"""Operators of torch that work row by row, and the instructions of a row program for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from graphs.backends.trace import Call, Value
from kernels_ref.rowwise import INDEX_TYPES, MAX_DIMS, MAX_WIDTH, TYPES, Builder, Code, Register

_ATEN = torch.ops.aten
_NUMBER = (bool, int, float)
_NARROW = 8
"""Last dimensions up to this size count rows, like the dimensions before them."""


@dataclass(frozen=True)
class Gathered:
    """Entries of the first dimension of a value, by an index for each."""

    source: Value
    index: Value


Operand: TypeAlias = "Value | Gathered | bool | int | float"


@dataclass(frozen=True)
class RowOperator:
    """A call as a computation on rows.

    Attributes:
        operands: values that broadcast against the result, gathered values, and numbers.
        emit: adds the instructions to a program, given a register for each operand.
    """

    operands: tuple[Operand, ...]
    emit: Callable[[Builder, list[Register]], Register]


def row_operator(call: Call) -> RowOperator | None:
    """Return a call as a computation on rows; None if it is none."""
    if not call.is_one or len(call.results) != 1 or call.is_view:
        return None
    result = call.results[0]
    make = _MAKERS.get(call.func)
    if make is None or not _fits(result):
        return None
    if make is _gather:
        return _gather(call, result)
    return make(call, result) if all(map(_fits, call.read)) else None


def _fits(value: Value) -> bool:
    is_small = width_of(value) <= MAX_WIDTH and len(value.shape) < MAX_DIMS
    return value.dtype in TYPES and is_small and len(value.stride) == len(value.shape)


def is_narrow(value: Value) -> bool:
    """Whether each item of a value is a row of its own."""
    return bool(value.shape) and 1 < value.shape[-1] <= _NARROW


def width_of(value: Value) -> int:
    """Items of a row."""
    return 1 if not value.shape or is_narrow(value) else value.shape[-1]


_Maker = Callable[[Call, Value], "RowOperator | None"]


def _plain(code: Code, num_operands: int) -> _Maker:
    def make(call: Call, result: Value) -> RowOperator | None:
        if call.kwargs or len(call.args) != num_operands:
            return None
        return _of_operands(call.args, result, code)

    return make


def _of_operands(operands: tuple[Any, ...], result: Value, code: Code) -> RowOperator | None:
    if not all(isinstance(x, (Value, *_NUMBER)) for x in operands):
        return None

    def emit(builder: Builder, sources: list[Register]) -> Register:
        return builder.compute(code, sources, width_of(result), result.dtype)

    return RowOperator(operands, emit)


_COPY_ARGUMENTS = {"dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format"}


def _copy(call: Call, result: Value) -> RowOperator | None:
    """Return a copy in another layout or dtype; None if the call asks for anything else."""
    if not {*call.kwargs} <= _COPY_ARGUMENTS:
        return None
    source = call.args[0]
    if len(call.args) > 1 and call.func is not _ATEN.to.dtype:
        return None
    if str(call.kwargs.get("device") or "cpu") != "cpu" or not isinstance(source, Value):
        return None
    if result.dtype == torch.bool != source.dtype:
        return None  # any other number than 0 becomes 1

    def emit(builder: Builder, sources: list[Register]) -> Register:
        if result.dtype == source.dtype or result.dtype == torch.float32:
            return sources[0]
        return builder.compute(Code.COPY, sources, width_of(result), result.dtype)

    return RowOperator((source,), emit)


def _number(call: Call, result: Value) -> RowOperator | None:
    number = call.args[0]
    return RowOperator((number,), lambda _, sources: sources[0]) if isinstance(number, _NUMBER) else None


_POWERS = {0.5: Code.SQRT, -0.5: Code.RSQRT, -1: Code.RECIPROCAL}


def _power(call: Call, result: Value) -> RowOperator | None:
    base, exponent = call.args
    if exponent == 2:
        return _of_operands((base, base), result, Code.MUL)
    code = _POWERS.get(exponent)
    return None if code is None else _of_operands((base,), result, code)


def _gelu(call: Call, result: Value) -> RowOperator | None:
    code = {"none": Code.GELU, "tanh": Code.GELU_TANH}.get(call.kwargs.get("approximate", "none"))
    return None if code is None or len(call.args) != 1 else _of_operands(call.args, result, code)


def _clamp(call: Call, result: Value) -> RowOperator | None:
    values = dict(zip(("x", "min", "max"), call.args), **call.kwargs)
    bounds = [(Code.MAX, values.get("min")), (Code.MIN, values.get("max"))]
    given = [(code, bound) for code, bound in bounds if bound is not None]
    if not given or not all(isinstance(bound, _NUMBER) for _, bound in given):
        return None

    def emit(builder: Builder, sources: list[Register]) -> Register:
        register = sources[0]
        for (code, _), bound in zip(given, sources[1:]):
            register = builder.compute(code, [register, bound], width_of(result), result.dtype)
        return register

    operands: tuple[Any, ...] = (values["x"], *(bound for _, bound in given))
    return RowOperator(operands, emit)


def _reduction(code: Code) -> _Maker:
    def make(call: Call, result: Value) -> RowOperator | None:
        arguments = dict(zip(("x", "dim", "keepdim"), call.args), **call.kwargs)
        x, dims = arguments["x"], arguments.get("dim")
        if not isinstance(x, Value) or not isinstance(dims, tuple | list):
            return None
        is_last = [dim % max(1, len(x.shape)) for dim in dims] == [len(x.shape) - 1]
        if not is_last or not arguments.get("keepdim") or arguments.get("dtype") not in (None, result.dtype):
            return None
        if x.dtype == torch.bool or is_narrow(x) or not width_of(x):
            return None
        return RowOperator((x,), lambda builder, sources: builder.compute(code, sources, 1, result.dtype))

    return make


def _join(call: Call, result: Value) -> RowOperator | None:
    parts, dim = call.args[0], call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
    if is_narrow(result) or dim % len(result.shape) != len(result.shape) - 1:
        return None
    if not all(part.dtype == result.dtype and len(part.shape) == len(result.shape) for part in parts):
        return None
    return RowOperator(tuple(parts), lambda builder, sources: builder.join(sources))


def _gather(call: Call, result: Value) -> RowOperator | None:
    source, dim, index = call.args
    if dim != 0 or not _fits(source) or index.dtype not in INDEX_TYPES or len(index.stride) != 1:
        return None
    return RowOperator((Gathered(source, index),), lambda _, sources: sources[0])


_UNARY = {
    _ATEN.neg.default: Code.NEG,
    _ATEN.abs.default: Code.ABS,
    _ATEN.exp.default: Code.EXP,
    _ATEN.log.default: Code.LOG,
    _ATEN.sqrt.default: Code.SQRT,
    _ATEN.rsqrt.default: Code.RSQRT,
    _ATEN.reciprocal.default: Code.RECIPROCAL,
    _ATEN.sigmoid.default: Code.SIGMOID,
    _ATEN.tanh.default: Code.TANH,
    _ATEN.silu.default: Code.SILU,
    _ATEN.relu.default: Code.RELU,
    _ATEN.cos.default: Code.COS,
    _ATEN.sin.default: Code.SIN,
}
_BINARY = {
    _ATEN.add.Tensor: Code.ADD,
    _ATEN.sub.Tensor: Code.SUB,
    _ATEN.mul.Tensor: Code.MUL,
    _ATEN.div.Tensor: Code.DIV,
    _ATEN.maximum.default: Code.MAX,
    _ATEN.minimum.default: Code.MIN,
    _ATEN.lt.Scalar: Code.LESS,
    _ATEN.lt.Tensor: Code.LESS,
    _ATEN.le.Scalar: Code.LESS_EQUAL,
    _ATEN.le.Tensor: Code.LESS_EQUAL,
    _ATEN.gt.Scalar: Code.GREATER,
    _ATEN.gt.Tensor: Code.GREATER,
    _ATEN.ge.Scalar: Code.GREATER_EQUAL,
    _ATEN.ge.Tensor: Code.GREATER_EQUAL,
    _ATEN.eq.Scalar: Code.EQUAL,
    _ATEN.eq.Tensor: Code.EQUAL,
    _ATEN.ne.Scalar: Code.NOT_EQUAL,
    _ATEN.ne.Tensor: Code.NOT_EQUAL,
}
_MAKERS: dict[Any, _Maker] = {
    **{func: _plain(code, 1) for func, code in _UNARY.items()},
    **{func: _plain(code, 2) for func, code in _BINARY.items()},
    _ATEN.where.self: _plain(Code.WHERE, 3),
    _ATEN.where.ScalarOther: _plain(Code.WHERE, 3),
    _ATEN.where.ScalarSelf: _plain(Code.WHERE, 3),
    _ATEN.index_select.default: _gather,
    _ATEN.to.dtype: _copy,
    _ATEN.pow.Tensor_Scalar: _power,
    _ATEN.gelu.default: _gelu,
    _ATEN.clamp.default: _clamp,
    _ATEN.clone.default: _copy,
    _ATEN._to_copy.default: _copy,
    _ATEN.scalar_tensor.default: _number,
    _ATEN.sum.dim_IntList: _reduction(Code.SUM),
    _ATEN.mean.dim: _reduction(Code.MEAN),
    _ATEN.amax.default: _reduction(Code.AMAX),
    _ATEN.cat.default: _join,
}
