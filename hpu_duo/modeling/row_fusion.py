"""Fuse the small operators of a traced step, so that each group of them is one call.

A group is one fused elementwise program (``kernels_ref.rowwise``). The results of its operators share rows,
that is all dimensions but the last one, and no call between them reads their results or writes to memory. A
result that only the group reads is never stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from graphs.backends.trace import Call, Value, values_in
from hpu_duo.modeling.packed_linear import join_linears
from kernels_ref import rowwise
from kernels_ref.rowwise import INDEX_TYPES, MAX_DIMS, MAX_WIDTH, TYPES, Builder, Code, Index, Register, Rows

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
    """Return a copy in another layout or dtype; None for any other call."""
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

_Key = tuple[int, ...]


def fuse_rows(calls: Sequence[Call], outputs: Any) -> list[Call]:
    """Return the same step in fewer calls.

    Args:
        calls: the trace.
        outputs: the nest of values that it returns.
    """
    grouping = _Grouping()
    for call in calls:
        grouping.add(call)
    grouping.end()
    needed: set[Value] = set(values_in(outputs))
    result: list[Call] = []
    for item in reversed(grouping.items):
        emitted = [item] if isinstance(item, Call) else item.calls(needed)
        for call in reversed(emitted):
            if call.is_view and not needed.intersection(call.results):
                continue
            result.append(call)
            needed.update(call.read)
    return result[::-1]


@dataclass
class _Group:
    """Calls that become one, and views of their results."""

    key: _Key
    members: list[tuple[Call, RowOperator]] = field(default_factory=list)
    views: list[Call] = field(default_factory=list)
    made: set[Value] = field(default_factory=set)
    results: set[Value] = field(default_factory=set)
    same: dict[Value, Value] = field(default_factory=dict)

    def has(self, value: Value) -> bool:
        """Whether ``value``, or a reshaped view of it, is a result of the group."""
        return self.same.get(value, value) in self.results

    def calls(self, needed: set[Value]) -> list[Call]:
        """Return the calls that replace the group if ``needed`` is read after it."""
        if len(self.members) == 1:
            return [self.members[0][0], *self.views]
        read = set(needed)
        views = []
        for view in reversed(self.views):
            if read.intersection(view.results):
                views.append(view)
                read.update(view.read)
        return [*_Writer(self, read).calls(), *reversed(views)]


class _Grouping:
    """Sorts calls into groups, in their order."""

    def __init__(self) -> None:
        self.items: list[Call | _Group] = []
        self._open: dict[_Key, _Group] = {}
        self._group_of: dict[Value, _Group] = {}

    def add(self, call: Call) -> None:
        """Add the next call of the trace."""
        operator = row_operator(call)
        if operator is not None:
            self._join(call, operator)
        elif call.is_view and (group := self._group_of.get(_source(call))) is not None:
            self._view(call, group)
        else:
            # An operator that writes may write to memory that a group has yet to read.
            may_write = call.writes is not False
            self._close([*self._open.values()] if may_write else self._groups_read(call))
            self.items.append(call)

    def end(self) -> None:
        """Close all groups: the trace is over."""
        self._close([*self._open.values()])

    def _join(self, call: Call, operator: RowOperator) -> None:
        result = call.results[0]
        key = _key_of(result)
        here = {x for x in operator.operands if isinstance(x, Value) and _key_of(x) == key}
        self._close(
            group
            for value in call.read
            if (group := self._group_of.get(value)) is not None
            and not (value in here and group.key == key and group.has(value))
        )
        group = self._open.get(key)
        if group is None:
            group = self._open[key] = _Group(key)
        group.members.append((call, operator))
        group.results.add(result)
        self._made(result, group)

    def _view(self, call: Call, group: _Group) -> None:
        group.views.append(call)
        source = group.same.get(_source(call), _source(call))
        for result in call.results:
            self._made(result, group)
            if _layout_of(result) == _layout_of(source):
                group.same[result] = source

    def _made(self, value: Value, group: _Group) -> None:
        group.made.add(value)
        self._group_of[value] = group

    def _groups_read(self, call: Call) -> list[_Group]:
        return [group for value in call.read if (group := self._group_of.get(value)) is not None]

    def _close(self, groups: Iterable[_Group]) -> None:
        for group in [*groups]:
            if self._open.get(group.key) is not group:
                continue
            del self._open[group.key]
            for value in group.made:
                del self._group_of[value]
            self.items.append(group)


class _Writer:
    """Builds the fused elementwise program of a group."""

    def __init__(self, group: _Group, needed: set[Value]) -> None:
        self._group, self._needed = group, needed
        self._builder = Builder(group.key)
        self._registers: dict[Value, Register] = {}
        self._loaded: dict[tuple[Value, Rows], Register] = {}
        self._tensors: dict[Value, int] = {}

    def calls(self) -> list[Call]:
        """Return the call that runs the program; none if its results are unused."""
        outputs = []
        for call, operator in self._live_members():
            result = call.results[0]
            sources = [self._operand(operand, result) for operand in operator.operands]
            self._registers[result] = operator.emit(self._builder, sources)
            if result in self._needed:
                rows = _rows(result, result, 0)
                self._builder.store(self._registers[result], result.shape, result.stride, rows)
                outputs.append(result)
        if not outputs:
            return []
        program = self._builder.build()
        args = program.number, *self._tensors
        is_one = len(outputs) == 1
        return [Call(program.run, args, {}, tuple(outputs), is_one=is_one, keeps=program)]

    def _live_members(self) -> list[tuple[Call, RowOperator]]:
        needed = set(self._needed)
        live = []
        for call, operator in reversed(self._group.members):
            if call.results[0] in needed:
                live.append((call, operator))
                needed.update(self._group.same.get(x, x) for x in call.read)
        return live[::-1]

    def _operand(self, operand: Any, result: Value) -> Register:
        if isinstance(operand, Gathered):
            return self._load(operand.source, result, operand.index)
        if not isinstance(operand, Value):
            return self._builder.constant(float(operand))
        made = self._registers.get(self._group.same.get(operand, operand))
        return self._load(operand, result) if made is None else made

    def _load(self, value: Value, result: Value, index: Value | None = None) -> Register:
        owner = value.owner
        rows = _rows(value, result, value.offset - owner.offset)
        if index is not None:
            rows = replace(rows, index=self._index(value, result, index), strides=_after_first(rows, result))
        if (owner, rows) not in self._loaded:
            self._loaded[owner, rows] = self._builder.load(self._tensor(owner), rows)
        return self._loaded[owner, rows]

    def _index(self, value: Value, result: Value, index: Value) -> Index:
        # The first dimension does not count rows if it has one entry only.
        dim = 0 if result.shape[0] != 1 else -1
        first = index.offset - index.owner.offset
        step = index.stride[0] if result.shape[0] != 1 else 0
        return Index(self._tensor(index.owner), index.dtype, first, step, dim, value.stride[0])

    def _tensor(self, owner: Value) -> int:
        return self._tensors.setdefault(owner, len(self._tensors))


def _source(call: Call) -> Value:
    source = call.args[0]
    assert isinstance(source, Value)
    return source


def _in_rows(value: Value) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides with a last dimension of one row."""
    return ((*value.shape, 1), (*value.stride, 0)) if is_narrow(value) else (value.shape, value.stride)


def _key_of(value: Value) -> _Key:
    return tuple(size for size in _in_rows(value)[0][:-1] if size != 1)


def _layout_of(value: Value) -> tuple[Any, ...]:
    """Return a key that is equal for values with items at the same places, row by row."""
    shape, stride = _in_rows(value)
    steps = [(size, step) for size, step in zip(shape[:-1], stride) if size != 1]
    last = (shape[-1], stride[-1] if shape[-1] != 1 else 0) if shape else (1, 0)
    return value.offset, value.dtype, tuple(steps), last


def _rows(value: Value, result: Value, offset: int) -> Rows:
    """The rows of a value that is broadcast to ``result``, a stride for each dimension that counts rows."""
    missing = len(result.shape) - len(value.shape)
    sizes, steps = (1,) * missing + value.shape, (0,) * missing + value.stride
    if is_narrow(result):
        sizes, steps = (*sizes, 1), (*steps, 0)
    counting = _in_rows(result)[0][:-1]
    strides = tuple(0 if sizes[d] == 1 else steps[d] for d, size in enumerate(counting) if size != 1)
    width = sizes[-1] if sizes else 1
    return Rows(value.dtype, offset, width, 0 if width == 1 else steps[-1], strides)


def _after_first(rows: Rows, result: Value) -> tuple[int, ...]:
    """Strides in which an index replaces that of the first dimension of a result."""
    return (0, *rows.strides[1:]) if result.shape[0] != 1 else rows.strides


def arrange(calls: Sequence[Call], outputs: Any) -> list[Call]:
    """Return the same step with products joined and, where fused programs can be run, small operators fused.

    Their interpreter is needed here, when a step is traced; it may be built in the background until then.

    Args:
        calls: the trace.
        outputs: the nest of values that it returns.
    """
    joined = join_linears(calls)
    return fuse_rows(joined, outputs) if rowwise.is_available() else joined
