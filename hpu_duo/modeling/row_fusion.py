"""Fuse the small operators of a traced step, so that each group of them is one call.

A group is one row program (``kernels_ref.rowwise``). The results of its operators have the same rows, that
is all dimensions but the last one, and no call between them reads their results or writes to memory. A
result that only the group reads is never stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graphs.backends.trace import Call, Value, values_in
from hpu_duo.modeling.row_operators import Gathered, RowOperator, is_narrow, row_operator
from kernels_ref.rowwise import Builder, Index, Register, Rows

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
        """Whether a call of the group makes ``value``, or the same rows of another shape."""
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
    """Builds the row program of a group."""

    def __init__(self, group: _Group, needed: set[Value]) -> None:
        self._group, self._needed = group, needed
        self._builder = Builder(group.key)
        self._registers: dict[Value, Register] = {}
        self._loaded: dict[tuple[Value, Rows], Register] = {}
        self._tensors: dict[Value, int] = {}

    def calls(self) -> list[Call]:
        """Return the call that runs the program; none if nobody reads its results."""
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
        args = program.number, [*self._tensors]
        return [Call(program.run, args, {}, tuple(outputs), is_one=False, keeps=program)]

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
    """Shape and strides with a last dimension that holds one row."""
    return ((*value.shape, 1), (*value.stride, 0)) if is_narrow(value) else (value.shape, value.stride)


def _key_of(value: Value) -> _Key:
    return tuple(size for size in _in_rows(value)[0][:-1] if size != 1)


def _layout_of(value: Value) -> tuple[Any, ...]:
    """Return a key that is equal for values whose items lie at the same places, row by row."""
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
