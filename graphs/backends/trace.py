"""A trace: a step's calls of operators on named tensors, its simplification, and code generation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from graphs.backends.base import Inputs, direct_function, is_random, writes

_NESTS = (tuple, list)


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of a trace: another one with the same layout in each run.

    Attributes:
        name: of the variable, or an expression that finds it.
        shape, stride, offset, dtype: as torch has them, ``offset`` from the beginning of the memory.
        base: the value that this one is a view of; None if it has memory of its own.
        is_variable: whether it is a result of an operator; otherwise it is an input or a constant.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    base: Value | None = None
    is_variable: bool = False

    @classmethod
    def of(
        cls, name: str, tensor: torch.Tensor, base: Value | None = None, is_variable: bool = False
    ) -> Value:
        """Return a value that describes ``tensor``."""
        is_strided = tensor.layout is torch.strided
        stride, offset = (tuple(tensor.stride()), int(tensor.storage_offset())) if is_strided else ((), 0)
        return cls(name, tuple(tensor.shape), stride, offset, tensor.dtype, base, is_variable)

    def renamed(self, name: str, base: Value | None) -> Value:
        """Return the variable of this layout that another call makes."""
        return Value(name, self.shape, self.stride, self.offset, self.dtype, base, is_variable=True)

    @property
    def owner(self) -> Value:
        """The value that owns the memory: itself, or the one that it is a view of, directly or not."""
        value = self
        while value.base is not None:
            value = value.base
        return value


@dataclass(frozen=True)
class Call:
    """One call of an operator, or of compiled code.

    Attributes:
        func: the function that is called.
        args, kwargs: plain values, with a ``Value`` for each tensor.
        results: values that the call returns.
        is_one: the call returns its result itself, not a list of results.
        keeps: an object that must stay alive for the call.
        read: every value that the call reads, as often as it is read.
        is_view: the results are views of an argument.
        writes: whether it writes to an argument; None for compiled code, which may.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    results: tuple[Value, ...] = ()
    is_one: bool = True
    keeps: Any = None
    read: tuple[Value, ...] = field(init=False, repr=False, compare=False)
    is_view: bool = field(init=False, repr=False, compare=False)
    writes: bool | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        is_view = bool(self.results) and all(result.base is not None for result in self.results)
        object.__setattr__(self, "read", values_in((self.args, *self.kwargs.values())))
        object.__setattr__(self, "is_view", is_view)
        object.__setattr__(self, "writes", writes(self.func))

    def with_values(self, values: Mapping[Value, Value]) -> Call:
        """Return the same call of other values, one for each that this one has."""
        call = object.__new__(Call)
        call.__dict__.update(
            vars(self),
            args=replaced(self.args, values),
            kwargs={name: replaced(item, values) for name, item in self.kwargs.items()},
            results=tuple([values[result] for result in self.results]),
            read=tuple([values[value] for value in self.read]),
        )
        return call


def values_in(item: Any) -> tuple[Value, ...]:
    """The values in a nest of tuples and lists."""
    if isinstance(item, Value):
        return (item,)
    found: list[Value] = []
    if type(item) in _NESTS:
        _collect(item, found)
    return tuple(found)


def _collect(nest: Iterable[Any], found: list[Value]) -> None:
    # Most items are numbers of shapes: without a call for them.
    for part in nest:
        kind = type(part)
        if kind is Value:
            found.append(part)
        elif kind in _NESTS:
            _collect(part, found)


def function_of(
    calls: Iterable[Call], outputs: Any, constants: Mapping[str, torch.Tensor]
) -> Callable[[Inputs], Any]:
    """Return a function of a step's inputs that runs all calls and returns ``outputs``.

    Variables are deleted after their last use.

    Args:
        outputs: a value, or a nest of tuples and lists of them.
        constants: by the names of values that are neither inputs nor variables.
    """
    calls, constants = _with_views_of_constants(calls, constants)
    names = _Names(dict(constants))
    needed = {value.name for value in values_in(outputs) if value.is_variable}
    body = [f"return {names.text(outputs)}"]
    for call in reversed([*calls]):
        read = {value.name for value in call.read if value.is_variable and value.name not in constants}
        assigned = [result.name for result in call.results]
        unneeded = sorted((read | {*assigned}) - needed)
        if unneeded:
            body.append(f"del {', '.join(unneeded)}")
        texts = [names.text(argument) for argument in call.args]
        texts += [f"{name}={names.text(argument)}" for name, argument in call.kwargs.items()]
        if call.keeps is not None:
            names.constant(call.keeps)
        text = f"{names.constant(direct_function(call.func))}({', '.join(texts)})"
        if call.is_one and assigned:
            text = f"{assigned[0]} = {text}"
        elif assigned:
            text = f"{''.join(f'{name}, ' for name in assigned)}= {text}"
        body.append(text)
        needed |= read
    source = "\n    ".join(["def replay(inputs):", *reversed(body)])
    exec(compile(source, "<traced step>", "exec"), names.constants)
    replay: Callable[[Inputs], Any] = names.constants.pop("replay")
    return replay


def _with_views_of_constants(
    calls: Iterable[Call], constants: Mapping[str, torch.Tensor]
) -> tuple[list[Call], dict[str, torch.Tensor]]:
    """Evaluate views of constants once, not in each run."""
    left, found = [], dict(constants)
    for call in calls:
        is_view = call.is_view and len(call.results) == 1
        if is_view and all(value.name in found for value in call.read):
            args = [found[x.name] if isinstance(x, Value) else x for x in call.args]
            found[call.results[0].name] = call.func(*args, **call.kwargs)
        else:
            left.append(call)
    return left, found


class _Names:
    """Names of the objects that have no literal in the text of a function."""

    def __init__(self, constants: dict[str, Any]) -> None:
        self.constants = constants
        self._of_functions: dict[Any, str] = {}

    def text(self, item: Any) -> str:
        if isinstance(item, Value):
            return item.name
        if type(item) in (tuple, list):
            items = "".join(f"{self.text(part)}, " for part in item)
            return f"({items})" if type(item) is tuple else f"[{items}]"
        if item is None or type(item) in (bool, int):
            return repr(item)
        return self.constant(item)

    def constant(self, item: Any) -> str:
        is_function = callable(item)
        if is_function and item in self._of_functions:
            return self._of_functions[item]
        name = f"k{len(self.constants)}"
        self.constants[name] = item
        if is_function:
            self._of_functions[item] = name
        return name


_AS_STRIDED = torch.ops.aten.as_strided.default


def simplify(calls: Sequence[Call], outputs: Any) -> tuple[list[Call], Any]:
    """Return fewer calls that do the same, and the nest of values that the step now returns.

    Args:
        calls: the trace.
        outputs: the nest of values that the step returns.
    """
    written = _written_memory(calls)
    renamed: dict[Value, Value] = {}
    known: dict[Hashable, tuple[Value, ...]] = {}
    kept: list[Call] = []
    for original in calls:
        call = _with_values(original, renamed)
        renamed.update((old, new) for old, new in zip(original.results, call.results) if old is not new)
        if call.is_view and len(call.results) == 1 and _is_whole(call.results[0]):
            renamed[original.results[0]] = _base(call.results[0])
            continue
        key = _key(call, written)
        if key is not None and key in known:
            renamed.update(zip(original.results, known[key]))
            continue
        if key is not None:
            known[key] = call.results
        kept.append(call)
    returned = _renamed(outputs, renamed)
    return _without_chains(kept, returned), returned


def _with_values(call: Call, renamed: Mapping[Value, Value]) -> Call:
    if renamed.keys().isdisjoint(call.read):
        return call
    kwargs = {name: _renamed(item, renamed) for name, item in call.kwargs.items()}
    args = _renamed(call.args, renamed)
    # The base of a view may have been renamed as well.
    results = tuple(
        x if x.base is None else replace(x, base=renamed.get(x.base, x.base)) for x in call.results
    )
    return replace(call, args=args, kwargs=kwargs, results=results)


def replaced(item: Any, values: Mapping[Value, Any]) -> Any:
    """Return a nest of tuples and lists with something else in place of each value."""
    kind = type(item)
    if kind is Value:
        return values[item]
    return kind([replaced(part, values) for part in item]) if kind in _NESTS else item


def _renamed(item: Any, renamed: Mapping[Value, Value]) -> Any:
    if isinstance(item, Value):
        return renamed.get(item, item)
    if type(item) in (tuple, list):
        return type(item)(_renamed(part, renamed) for part in item)
    return item


def _base(value: Value) -> Value:
    """Replace identity views by their base, transitively."""
    while value.base is not None and _is_whole(value):
        value = value.base
    return value


def _is_whole(value: Value) -> bool:
    base = value.base
    if base is None or len(value.stride) != len(value.shape):
        return False
    mine = value.shape, value.stride, value.offset, value.dtype
    return mine == (base.shape, base.stride, base.offset, base.dtype)


def _written_memory(calls: Sequence[Call]) -> set[Value] | None:
    """The owners of memory that the step writes to; None if that is not known."""
    written: set[Value] = set()
    for call in calls:
        if call.writes is None:
            return None
        if call.writes:
            written.update(value.owner for value in (*call.read, *call.results))
    return written


def _key(call: Call, written: set[Value] | None) -> Hashable | None:
    """Return a key that is equal for calls with equal results; None if the call has none."""
    if written is None or call.writes is not False or not call.results:
        return None
    if is_random(call.func):
        return None
    if written and any(value.owner in written for value in (*call.read, *call.results)):
        return None
    key = (call.func, _frozen(call.args), tuple((name, _frozen(x)) for name, x in call.kwargs.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _frozen(item: Any) -> Hashable:
    if type(item) in (tuple, list):
        return tuple(map(_frozen, item))
    # 1, 1.0 and True are equal and not the same.
    return item if isinstance(item, Value) else (type(item), item)


def _without_chains(calls: Sequence[Call], outputs: Any) -> list[Call]:
    """Derive views of views from their base, and remove unused views."""
    needed = set(values_in(outputs))
    kept = []
    for call in reversed(calls):
        if call.is_view:
            if not needed.intersection(call.results):
                continue
            call = _from_memory(call)
        needed.update(call.read)
        kept.append(call)
    return kept[::-1]


def _from_memory(call: Call) -> Call:
    result = call.results[0]
    owner = result.owner
    is_chain = len(call.results) == 1 and result.base is not None and result.base.base is not None
    # Only memory that the step allocates has the same offset in each run.
    if not is_chain or not owner.is_variable or len(result.stride) != len(result.shape) or not owner.stride:
        return call
    if result.dtype != owner.dtype:
        return call
    return Call(_AS_STRIDED, (owner, [*result.shape], [*result.stride], result.offset), {}, (result,))
