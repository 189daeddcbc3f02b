"""Replay of steps on a CPU: operators are traced once, then called without the Python around them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from types import NoneType
from typing import Any, Generic, NamedTuple, TypeAlias, cast

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from graphs.backends.base import (
    DispatchMode,
    Inputs,
    Outputs,
    Region,
    decides_sizes,
    share_memory,
    tensors_of,
    writes,
)
from graphs.backends.recipes import Arguments, Recipe
from graphs.backends.trace import Call, Value, function_of, replaced, simplify, values_in
from graphs.interrupts import interrupts_deferred
from graphs.shape import BatchShape, Phase

_ATEN = torch.ops.aten
_GONE = object()
_CONSTANT = (
    *(torch.Tensor, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(NoneType, bool, int, float, complex, str),
)
_PLAIN = frozenset((torch.dtype, torch.device, torch.layout, torch.memory_format, NoneType, bool, int, float))
Arrange: TypeAlias = Callable[[Sequence[Call], Any], list[Call]]
"""A pass over a trace: from its calls and the nest of returned values to new calls."""

_current: ContextVar[_Tracer | None] = ContextVar("_current", default=None)
_is_unused: ContextVar[bool] = ContextVar("_is_unused", default=False)


def call_compiled(code: Callable[[list[Any]], Any], args: tuple[Any, ...]) -> Any:
    """Call compiled code, which has a list as argument and may empty it; one operator in a trace."""
    tracer = _current.get()
    return code(list(args)) if tracer is None else tracer.run_compiled(code, args)


@contextmanager
def untraced() -> Iterator[None]:
    """Run the operators inside untraced; the step around them is then not replayed."""
    tracer = _current.get()
    with nullcontext() if tracer is None else tracer.given_up():
        yield


@contextmanager
def results_unused() -> Iterator[None]:
    """Run steps of padding inside: a trace needs the operators of repeated regions, and not their results."""
    token = _is_unused.set(True)
    try:
        yield
    finally:
        _is_unused.reset(token)


class TracedStep(Generic[Outputs]):
    """A step whose operators are traced in one of its first runs; from the next run on the trace is replayed.

    Much of a short step on a CPU is Python overhead of modules, the same in each run. A step is never
    replayed if its inputs are not on a CPU, if it reads numbers from tensors or has sizes that depend on
    them, if it returns anything else than tensors in tuples and lists, or if it calls operators with tensors
    that are neither inputs, nor results of operators, nor alive after it. Reads outside of torch's dispatcher
    are not detected: ``str(x)``.

    Args:
        fn: the step. A replay reads the weights and stores of the traced run: their contents may change, but
            none may be replaced by another tensor.
        arrange: rearranges the calls of the trace into others that compute the same.
        num_untraced: runs before the traced one, in which the step compiles.
    """

    def __init__(
        self, fn: Callable[[Inputs], Outputs], arrange: Arrange | None = None, num_untraced: int = 0
    ) -> None:
        self._fn, self._arrange, self._num_untraced = fn, arrange, num_untraced
        self._num_runs = 0
        self._replay: Callable[[Inputs], Outputs] | None = None

    @property
    def is_replayed(self) -> bool:
        """Whether the step has been traced, and is replayed from now on."""
        return self._replay is not None

    def __call__(self, inputs: Inputs) -> Outputs:
        if self._replay is not None:
            with interrupts_deferred(only_first=True):
                return self._replay(inputs)
        if self._num_runs == self._num_untraced and all(
            tensor.device.type == "cpu" for tensor in inputs.values()
        ):
            # An incomplete trace would slow down every later step.
            with interrupts_deferred():
                return self._trace(inputs)
        outputs = self._fn(inputs)
        self._num_runs += 1
        return outputs

    def _trace(self, inputs: Inputs) -> Outputs:
        tracer = _Tracer(inputs)
        token = _current.set(tracer)
        try:
            with tracer:
                outputs = self._fn(inputs)
        finally:
            _current.reset(token)
        self._num_runs += 1
        self._replay = tracer.function(outputs, self._arrange)
        return outputs


class _Tracer(DispatchMode):
    """Runs operators and records a trace of them."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self._calls: list[Call] = []
        self._value_of = WeakTensorKeyDictionary()
        for name, tensor in inputs.items():
            self._value_of[tensor] = Value.of(f"inputs[{name!r}]", tensor)
        self._num_variables = 0
        # References to other tensors are weak, so that temporary ones are freed at the end.
        self._constants: dict[str, Callable[[], Any]] = {}
        self._made_of_numbers: dict[Hashable, torch.Tensor] = {}
        self._is_complete = len(self._value_of) == len(inputs)
        # Recipes of regions by their keys, and tensors that regions share.
        self._recipes: dict[Hashable, Recipe | None] = {}
        self._alive: dict[Value, Callable[[], Any]] = {
            self._value_of[tensor]: weakref.ref(tensor) for tensor in inputs.values()
        }
        self._is_in_region = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._is_complete &= not _reads_numbers(func, args)
        if func is _ATEN.lift_fresh.default:
            # A tensor created from Python numbers, which the step may write to: each run creates its own.
            func, args = _ATEN.clone.default, (self._made_of(args[0]),)
        result = func(*args, **kwargs)
        self._append(func, args, kwargs, result)
        return result

    def _made_of(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor made of numbers, the same one for equal numbers."""
        key = numbers.dtype, numbers.shape, repr(numbers.tolist())  # 0.0 and -0.0 are equal and not the same
        return self._made_of_numbers.setdefault(key, numbers.clone())

    def run_compiled(self, code: Callable[[list[Any]], Any], args: tuple[Any, ...]) -> Any:
        """Call ``code`` as one operator, whatever operators it runs."""
        with self._away():
            results = code(list(args))
        self._append(code, (list(args),), {}, results)
        return results

    def run_region(
        self, key: Hashable, fn: Callable[..., Any], trials: _Trials, args: Any, kwargs: Any
    ) -> Any:
        """Call ``fn``, or the operators that it ran for another region of this key."""
        arguments = None if self._is_in_region or key in trials.failed else Arguments.of(args, kwargs)
        if arguments is None:
            return fn(*args, **kwargs)
        recipe = self._recipes.get(key)
        found = None if recipe is None else recipe.start(arguments)
        if recipe is not None and found is not None and key in trials.passed:
            repeat = self._write_down if _is_unused.get() and recipe.is_local else self._repeat
            return repeat(recipe, found)
        begin, num_constants = len(self._calls), len(self._constants)
        values = {value: self._named(tensor) for value, tensor in (found or {}).items()}
        places = {self._value_of.get(tensor): place for place, tensor in enumerate(arguments.tensors)}
        self._is_in_region = True
        try:
            outputs = fn(*args, **kwargs)
        finally:
            self._is_in_region = False
        calls = self._calls[begin:]
        if not self._is_complete or not _is_of_tensors(outputs):
            return outputs
        named = self._named(outputs)
        if recipe is None:
            constants = {id(tensor): place for place, tensor in enumerate(arguments.tensors)}

            def place_of(value: Value) -> int | None:
                constant = self._constants.get(value.name)
                return places.get(value) if constant is None else constants.get(id(constant()))

            find = partial(self._shared, num_constants)
            self._recipes[key] = Recipe.of(arguments, calls, named, place_of, find)
        elif found is not None:
            (trials.passed if recipe.is_of(calls, named, values) else trials.failed).add(key)
        return outputs

    def _shared(self, num_constants: int, value: Value) -> Callable[[], Any] | None:
        """Find the tensor of a value that is older than the ``num_constants``-th constant, or of numbers."""
        constant = self._constants.get(value.name)
        if constant is None:
            return self._alive.get(value)
        is_older = int(value.name[1:]) < num_constants
        return constant if is_older or any(constant() is x for x in self._made_of_numbers.values()) else None

    def _repeat(self, recipe: Recipe, tensors: dict[Value, torch.Tensor]) -> Any:
        values = {value: self._named(tensor) for value, tensor in tensors.items()}
        with self._away():
            for call, ended in zip(recipe.calls, recipe.ends):
                kwargs = {name: replaced(item, tensors) for name, item in call.kwargs.items()}
                result = call.func(*replaced(call.args, tensors), **kwargs)
                results = (result,) if call.is_one and call.results else result or ()
                for old, tensor in zip(call.results, results):
                    base = None if old.base is None else values[old.base]
                    values[old] = Value.of(f"x{self._num_variables}", tensor, base, is_variable=True)
                    self._num_variables += 1
                    tensors[old] = tensor
                self._calls.append(call.with_values(values))
                for value in ended:
                    del tensors[value]
        return self._outputs(recipe, tensors, values)

    def _write_down(self, recipe: Recipe, tensors: dict[Value, torch.Tensor]) -> Any:
        """Append the calls of a recipe without running them; returns other tensors of the same layouts."""
        values = {value: self._named(tensor) for value, tensor in tensors.items()}
        for call in recipe.calls:
            for old in call.results:
                base = None if old.base is None else values[old.base]
                values[old] = old.renamed(f"x{self._num_variables}", base)
                self._num_variables += 1
            self._calls.append(call.with_values(values))
        with self._away():
            tensors |= {
                value: _stand_in(value, tensors)
                for value in values_in(recipe.outputs)
                if value not in tensors
            }
        return self._outputs(recipe, tensors, values)

    def _outputs(
        self, recipe: Recipe, tensors: Mapping[Value, torch.Tensor], values: Mapping[Value, Value]
    ) -> Any:
        outputs = replaced(recipe.outputs, tensors)
        for tensor, value in zip(tensors_of(outputs), values_in(replaced([recipe.outputs], values))):
            self._value_of[tensor] = value
        return outputs

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """Run operators untraced inside; the trace is then incomplete and not used."""
        self._is_complete = False
        with self._away():
            yield

    @contextmanager
    def _away(self) -> Iterator[None]:
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def function(self, outputs: Any, arrange: Arrange | None) -> Callable[[Inputs], Any] | None:
        """Return the trace as a function that returns ``outputs``; None if the trace is incomplete.

        To be called after the step, when its temporary tensors are freed.
        """
        constants = {name: get() for name, get in self._constants.items()}
        is_complete = self._is_complete and all(value is not _GONE for value in constants.values())
        if not is_complete or not _is_of_tensors(outputs):
            return None
        if not all(tensor in self._value_of for tensor in tensors_of(outputs)):
            return None
        returned = self._named(outputs)
        calls, returned = simplify(self._calls, returned)
        if arrange is not None:
            calls = arrange(calls, returned)
        return function_of(calls, returned, constants)

    def _append(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        is_one = isinstance(result, torch.Tensor)
        results = [result] if is_one else [] if result is None else result
        if not isinstance(results, tuple | list) or not all(isinstance(x, torch.Tensor) for x in results):
            self._is_complete = False  # a number, on which Python control flow may depend
            return
        named = tuple(map(self._named, args))
        named_kwargs = {name: self._named(value) for name, value in kwargs.items()}
        values = tuple(self._variable(x, named[0] if _is_view(func, args, x) else None) for x in results)
        self._calls.append(Call(func, named, named_kwargs, values, is_one or not results))

    def _variable(self, tensor: torch.Tensor, base: Value | None) -> Value:
        value = Value.of(f"x{self._num_variables}", tensor, base, is_variable=True)
        self._num_variables += 1
        self._value_of[tensor] = value
        if not self._is_in_region:
            self._alive[value] = weakref.ref(tensor)
        return value

    def _named(self, item: Any) -> Any:
        """Return ``item`` with a value in place of each tensor."""
        kind = type(item)
        if kind in _PLAIN:
            return item
        if kind in (tuple, list):
            # Mostly shapes and strides.
            return kind(item if all(type(part) is int for part in item) else map(self._named, item))
        if not isinstance(item, torch.Tensor):
            self._is_complete &= isinstance(item, _CONSTANT)
            return item
        value = cast("Value | None", self._value_of.get(item))
        if value is None:
            value = Value.of(f"c{len(self._constants)}", item)
            self._constants[value.name] = _weakly(item)
            self._value_of[item] = value
        return value


def _stand_in(value: Value, tensors: Mapping[Value, torch.Tensor]) -> torch.Tensor:
    """Return a tensor with the layout of a value: one of ``tensors`` under another identity, or zeros."""
    layout = value.shape, value.stride, value.offset, value.dtype
    for other, tensor in tensors.items():
        if (other.shape, other.stride, other.offset, other.dtype) == layout:
            return tensor.detach()
    last = value.offset + sum((size - 1) * step for size, step in zip(value.shape, value.stride))
    return torch.zeros(last + 1, dtype=value.dtype).as_strided(value.shape, value.stride, value.offset)


def _is_view(func: Any, args: tuple[Any, ...], result: torch.Tensor) -> bool:
    """Whether a result is a view of the first argument."""
    if writes(func) is not False or not args or not isinstance(args[0], torch.Tensor):
        return False
    both = args[0], result
    return all(x.layout is torch.strided for x in both) and share_memory(*both)


def _weakly(tensor: torch.Tensor) -> Callable[[], Any]:
    reference = weakref.ref(tensor)

    def get() -> Any:
        found = reference()
        return _GONE if found is None else found

    return get


def _reads_numbers(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether this operator exposes contents of tensors to Python: copies on the host, or sizes."""
    if func is _ATEN.resolve_neg.default:  # the only visible operator of ``tolist`` and ``numpy``
        return True
    if func is _ATEN.index.Tensor:  # a mask or, mostly, numbers
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return decides_sizes(func)


def _is_of_tensors(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_of_tensors, value))
    return isinstance(value, torch.Tensor)


class ReplayBackend:
    """Traces the first run of a bucket, and replays the trace from then on, see ``TracedStep``.

    There is no compilation, neither at start nor in a request.

    Attributes:
        arrange: rewrites the calls of a trace into fewer or faster ones; None = unchanged.
    """

    name = "replay"
    num_first_runs = 1

    def __init__(self, arrange: Arrange | None = None) -> None:
        self.arrange = arrange
        self._trials: dict[Phase, _Trials] = {}

    def problem(self, device: torch.device) -> str | None:
        """Return why steps on ``device`` are not replayed; None if they are."""
        return None if device.type == "cpu" else f"steps are replayed on device 'cpu', got {str(device)!r}"

    def capture(self, fn: Callable[[Inputs], Outputs], shape: BatchShape) -> Callable[[Inputs], Outputs]:
        """Return the step, which is traced in its first run."""
        return TracedStep(fn, self.arrange)

    def region(self, shape: BatchShape, key: Hashable, fn: Region) -> Region:
        """Return ``fn``, which is traced once for all its calls in a step that are alike."""
        return cast(Region, _Region(key, fn, self._trials.setdefault(shape.phase, _Trials(set(), set()))))


class _Trials(NamedTuple):
    """Keys of regions whose second call was what their recipes say, and of those where it was not."""

    passed: set[Hashable]
    failed: set[Hashable]


class _Region:
    """A region of steps that are replayed."""

    def __init__(self, key: Hashable, fn: Callable[..., Any], trials: _Trials) -> None:
        self._key, self._fn, self._trials = key, fn, trials

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tracer = _current.get()
        if tracer is None:
            return self._fn(*args, **kwargs)
        return tracer.run_region(self._key, self._fn, self._trials, args, kwargs)
