"""A step as it is written down: calls of operators on named tensors, and the Python function made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from graphs.backends.base import Inputs


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of a step; another one with the same layout in each run.

    Attributes:
        name: of the variable, or an expression that finds it.
        shape, stride, offset, dtype: as torch has them, ``offset`` from the begin of the memory.
        base: the value whose memory this one shows a part of, None if it has its own.
        is_variable: an operator has made it in this run; otherwise it is an input or a constant.
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
        """The value that ``tensor`` is of."""
        is_strided = tensor.layout is torch.strided
        stride, offset = (tuple(tensor.stride()), int(tensor.storage_offset())) if is_strided else ((), 0)
        return cls(name, tuple(tensor.shape), stride, offset, tensor.dtype, base, is_variable)

    @property
    def owner(self) -> Value:
        """The value that has the memory."""
        return self if self.base is None else self.base.owner


@dataclass(frozen=True)
class Line:
    """One call.

    Attributes:
        func: what is called.
        args, kwargs: plain values, with a ``Value`` for each tensor.
        results: values that the call makes.
        is_one: it returns its result itself, not a list of results.
        keeps: what must be alive for the call.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    results: tuple[Value, ...] = ()
    is_one: bool = True
    keeps: Any = None

    @property
    def read(self) -> Iterator[Value]:
        """Every value that the call reads, as often as it does."""
        return values_in((self.args, tuple(self.kwargs.values())))

    @property
    def is_view(self) -> bool:
        """Whether the results show the memory of an argument."""
        return bool(self.results) and all(result.base is not None for result in self.results)


def values_in(item: Any) -> Iterator[Value]:
    """The values in a nest of tuples and lists."""
    if isinstance(item, Value):
        yield item
    elif type(item) in (tuple, list):
        for part in item:
            yield from values_in(part)


def as_function(
    lines: Iterable[Line], outputs: Any, constants: Mapping[str, torch.Tensor]
) -> Callable[[Inputs], Any]:
    """A function of a step's inputs that makes all calls and returns ``outputs``.

    Variables are deleted after their last use.

    Args:
        outputs: a value, or a nest of tuples and lists of them.
        constants: by the names of values that are neither inputs nor variables.
    """
    lines, constants = _with_views_of_constants(lines, constants)
    names = _Names(dict(constants))
    needed = {value.name for value in values_in(outputs) if value.is_variable}
    body = [f"return {names.text(outputs)}"]
    for line in reversed([*lines]):
        read = {value.name for value in line.read if value.is_variable and value.name not in constants}
        assigned = [result.name for result in line.results]
        unneeded = sorted((read | {*assigned}) - needed)
        if unneeded:
            body.append(f"del {', '.join(unneeded)}")
        texts = [names.text(argument) for argument in line.args]
        texts += [f"{name}={names.text(argument)}" for name, argument in line.kwargs.items()]
        if line.keeps is not None:
            names.constant(line.keeps)
        call = f"{names.constant(_direct(line.func))}({', '.join(texts)})"
        if line.is_one and assigned:
            call = f"{assigned[0]} = {call}"
        elif assigned:
            call = f"{''.join(f'{name}, ' for name in assigned)}= {call}"
        body.append(call)
        needed |= read
    source = "\n    ".join(["def replay(inputs):", *reversed(body)])
    exec(compile(source, "<written step>", "exec"), names.constants)
    replay: Callable[[Inputs], Any] = names.constants.pop("replay")
    return replay


def _with_views_of_constants(
    lines: Iterable[Line], constants: Mapping[str, torch.Tensor]
) -> tuple[list[Line], dict[str, torch.Tensor]]:
    """Views of constants are constants."""
    left, found = [], dict(constants)
    for line in lines:
        is_view = line.is_view and len(line.results) == 1
        if is_view and all(value.name in found for value in line.read):
            args = [found[x.name] if isinstance(x, Value) else x for x in line.args]
            found[line.results[0].name] = line.func(*args, **line.kwargs)
        else:
            left.append(line)
    return left, found


def _direct(func: Any) -> Callable[..., Any]:
    """Return the function that an operator of torch calls in the end."""
    return getattr(func, "_op", func) if isinstance(func, torch._ops.OpOverload) else func


class _Names:
    """Gives names to what the text of a function cannot hold itself."""

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
