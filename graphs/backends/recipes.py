"""Recipes: the operators of a region at its first call in a traced step, run again for others like it.

A model is one layer repeated, and tracing runs all the Python of a layer. So a region is traced once for a
bucket, and its operators are then called with the tensors of the next one. That takes what compiled regions
take too: regions with one key differ in the tensors of their arguments and modules only, and what is read
after them is returned. The second region of a key is traced as well, once for each phase, and has to be what
the recipe says; if it is not, regions of the key are always traced.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn

from graphs.backends.trace import Call, Value, replaced, values_in

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
_TENSOR = object()


class Arguments(NamedTuple):
    """Arguments of a call of a region.

    Attributes:
        structure: nests, numbers, names of a module's parameters and buffers, and which tensors are the same.
        tensors: in the order of the structure.
    """

    structure: Hashable
    tensors: list[torch.Tensor]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments | None:
        """Return the arguments.

        None if one is neither tensor, module, number nor a tuple or list of them, or a module with hooks.
        """
        tensors: list[torch.Tensor] = []
        parts = [_structure(part, tensors) for part in (*args, *kwargs.values())]
        if None in parts:
            return None
        first: dict[int, int] = {}
        same = tuple([first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)])
        return cls((len(args), *kwargs, *parts, same), tensors)


def _structure(item: Any, tensors: list[torch.Tensor]) -> Hashable | None:
    if isinstance(item, torch.Tensor):
        tensors.append(item)
        return _TENSOR
    if isinstance(item, nn.Module):
        if any(map(_is_changed, islice(item.modules(), 1, None))):
            return None
        named = [*item.named_parameters(remove_duplicate=False), *item.named_buffers(remove_duplicate=False)]
        tensors += (tensor for _, tensor in named)
        return type(item), *(name for name, _ in named)
    if type(item) in (tuple, list):
        parts = tuple(_structure(part, tensors) for part in item)
        return None if None in parts else (type(item), parts)
    return (type(item), item) if isinstance(item, _PLAIN) else None


def _is_changed(module: nn.Module) -> bool:
    """Whether a module runs what no key says, and its class neither: hooks, or a ``forward`` of its own."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in vars(module)


@dataclass(frozen=True)
class Recipe:
    """The operators that a region ran.

    Attributes:
        calls: in their order.
        ends: for each call, the values that no later one reads and that are not returned.
        inputs: places among the tensors of the arguments that are read or returned, with value and layout.
        around: values that are neither arguments nor made in the region: the same for all.
        outputs: a value, or a nest of tuples and lists of them.
        is_local: whether no call exchanges data with other ranks.
    """

    structure: Hashable
    calls: list[Call]
    ends: list[list[Value]]
    inputs: list[tuple[int, Value, Hashable]]
    around: list[tuple[Value, Callable[[], torch.Tensor | None]]]
    outputs: Any
    is_local: bool

    @classmethod
    def of(
        cls,
        arguments: Arguments,
        calls: list[Call],
        outputs: Any,
        place_of: Callable[[Value], int | None],
        tensor_of: Callable[[Value], Callable[[], torch.Tensor | None] | None],
    ) -> Recipe | None:
        """Return the recipe of a region that has run; None if it read tensors of unknown origin.

        Args:
            place_of: the place of a value among the tensors of the arguments; None for others.
            tensor_of: finds the tensor of a value that is the same for all regions; None for others.
        """
        made = {result for call in calls for result in call.results}
        read = {value for call in calls for value in call.read} | {*values_in(outputs)}
        inputs, around = [], []
        for value in sorted(read - made, key=lambda each: each.name):
            place, find = place_of(value), tensor_of(value)
            if place is not None:
                inputs.append((place, value, layout_of(arguments.tensors[place])))
            elif find is not None:
                around.append((value, find))
            else:
                return None
        is_local = not any("c10d" in str(call.func) for call in calls)
        return cls(arguments.structure, calls, [*_ends(calls, outputs)], inputs, around, outputs, is_local)

    def start(self, arguments: Arguments) -> dict[Value, torch.Tensor] | None:
        """Return the tensors that a region with other arguments reads, by values of the recipe.

        None if the arguments have another structure or layout.
        """
        if arguments.structure != self.structure:
            return None
        found: dict[Value, torch.Tensor] = {}
        for place, value, layout in self.inputs:
            tensor = arguments.tensors[place]
            if layout_of(tensor) != layout:
                return None
            found[value] = tensor
        for value, find in self.around:
            tensor_or_none = find()
            if tensor_or_none is None:
                return None
            found[value] = tensor_or_none
        return found

    def is_of(self, calls: Sequence[Call], outputs: Any, values: dict[Value, Value]) -> bool:
        """Whether a traced region is what the recipe says.

        Args:
            values: of the region, by those of the recipe that are not made in it; receives the others.
        """
        if len(calls) != len(self.calls):
            return False
        for mine, other in zip(self.calls, calls):
            expected = replaced(mine.args, values), replaced([*mine.kwargs.items()], values)
            got = other.args, [*other.kwargs.items()]
            if mine.func is not other.func or len(mine.results) != len(other.results):
                return False
            if not _is_same(expected, got):
                return False
            values.update(zip(mine.results, other.results))
        return _is_same(replaced(self.outputs, values), outputs)


def _ends(calls: Sequence[Call], outputs: Any) -> Iterator[list[Value]]:
    last: dict[Value, int] = {}
    for number, call in enumerate(calls):
        last.update(dict.fromkeys((*call.read, *call.results), number))
    made = {result for call in calls for result in call.results} - {*values_in(outputs)}
    for number, call in enumerate(calls):
        some = dict.fromkeys((*call.read, *call.results))
        yield [value for value in some if value in made and last[value] == number]


def layout_of(tensor: torch.Tensor) -> Hashable:
    """Return what operators may depend on besides contents."""
    if tensor.layout is not torch.strided:
        return tensor.shape, tensor.dtype, tensor.layout
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _is_same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if type(left) in (tuple, list):
        return len(left) == len(right) and all(map(_is_same, left, right))
    return left is right or (not isinstance(left, Value | torch.Tensor) and bool(left == right))
