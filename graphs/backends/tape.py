"""Steps on a CPU without the Python around their operators: written down once, then run as a plain list."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from types import NoneType
from typing import Any, Generic, TypeAlias, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from graphs.backends.base import Inputs, Outputs
from graphs.backends.fewer_lines import fewer_lines
from graphs.backends.whole_step import tensors_of
from graphs.backends.written import Line, Value, as_function
from graphs.interrupts import interrupts_deferred

_ATEN = torch.ops.aten
_GONE = object()
_CONSTANT = (
    *(torch.Tensor, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(NoneType, bool, int, float, complex, str),
)
Arrange: TypeAlias = Callable[[Sequence[Line], Any], list[Line]]
"""Of the lines of a step, and of the nest of values that it returns."""

_tape: ContextVar[_Tape | None] = ContextVar("_tape", default=None)


def call_compiled(code: Callable[[list[Any]], Any], args: tuple[Any, ...]) -> Any:
    """Call compiled code, which takes a list and may empty it; to a tape it is one operator."""
    tape = _tape.get()
    return code(list(args)) if tape is None else tape.run_compiled(code, args)


@contextmanager
def unwritten() -> Iterator[None]:
    """What runs inside is not written down, and so neither is the step."""
    tape = _tape.get()
    with nullcontext() if tape is None else tape.given_up():
        yield


class TapedStep(Generic[Outputs]):
    """A step whose operators are written down in its second run, and run as they stand from then on.

    Much of a short step on a CPU is Python: modules that call modules and sort out arguments, in each
    run alike. The first run is left alone because it compiles. A step is never written down if its inputs
    are not on a CPU, if it reads numbers from tensors or lets sizes depend on them, if it returns other
    things than tensors in tuples and lists, or if it calls operators with tensors that are neither inputs,
    nor results of operators, nor alive after it. Reads that torch does not see go unnoticed: ``str(x)``.

    Args:
        fn: the step. Weights and stores that it reads are those of the second run for ever: what they hold
            may change, but none may be replaced.
        arrange: makes other lines of those that were written, which do the same.
    """

    def __init__(self, fn: Callable[[Inputs], Outputs], arrange: Arrange | None = None) -> None:
        self._fn, self._arrange = fn, arrange
        self._num_runs = 0
        self._replay: Callable[[Inputs], Outputs] | None = None

    @property
    def is_replayed(self) -> bool:
        """Whether the step has been written down."""
        return self._replay is not None

    def __call__(self, inputs: Inputs) -> Outputs:
        if self._replay is not None:
            with interrupts_deferred(only_first=True):
                return self._replay(inputs)
        if self._num_runs == 1 and all(tensor.device.type == "cpu" for tensor in inputs.values()):
            # A torn tape would stay in the way of every later step.
            with interrupts_deferred():
                return self._record(inputs)
        outputs = self._fn(inputs)
        self._num_runs += 1
        return outputs

    def _record(self, inputs: Inputs) -> Outputs:
        tape = _Tape(inputs)
        token = _tape.set(tape)
        try:
            with tape:
                outputs = self._fn(inputs)
        finally:
            _tape.reset(token)
        self._num_runs += 1
        self._replay = tape.function(outputs, self._arrange)
        return outputs


class _Tape(TorchDispatchMode):
    """Lets operators run and writes them down as lines of a Python function."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self._lines: list[Line] = []
        self._value_of = WeakTensorKeyDictionary()
        for name, tensor in inputs.items():
            self._value_of[tensor] = Value.of(f"inputs[{name!r}]", tensor)
        self._num_variables = 0
        # Tensors from elsewhere are not held: what was a temporary one is gone in the end.
        self._constants: dict[str, Callable[[], Any]] = {}
        self._made_of_numbers: list[torch.Tensor] = []
        self._is_complete = len(self._value_of) == len(inputs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._is_complete &= not _shows_numbers(func, args)
        if func is _ATEN.lift_fresh.default:
            # Python has made a tensor of numbers, and the step may write to it: each run gets its own.
            func, args = _ATEN.clone.default, (args[0].clone(),)
            self._made_of_numbers += args
        result = func(*args, **kwargs)
        self._write(func, args, kwargs, result)
        return result

    def run_compiled(self, code: Callable[[list[Any]], Any], args: tuple[Any, ...]) -> Any:
        """Call ``code`` as one operator, whatever operators it runs."""
        with self._away():
            results = code(list(args))
        self._write(code, (list(args),), {}, results)
        return results

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """Let operators run unseen inside; nothing will come of this tape."""
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
        """What was written, as a function that returns what ``outputs`` holds; None if it lacks something.

        Only once the step is over, and its temporary tensors with it.
        """
        constants = {name: get() for name, get in self._constants.items()}
        is_complete = self._is_complete and all(value is not _GONE for value in constants.values())
        if not is_complete or not _is_of_tensors(outputs):
            return None
        if not all(tensor in self._value_of for tensor in tensors_of(outputs)):
            return None
        returned = self._written(outputs)
        lines, returned = fewer_lines(self._lines, returned)
        if arrange is not None:
            lines = arrange(lines, returned)
        return as_function(lines, returned, constants)

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        is_one = isinstance(result, torch.Tensor)
        results = [result] if is_one else [] if result is None else result
        if not isinstance(results, tuple | list) or not all(isinstance(x, torch.Tensor) for x in results):
            self._is_complete = False  # a number, which Python may go by
            return
        written = tuple(map(self._written, args))
        named = {name: self._written(value) for name, value in kwargs.items()}
        values = tuple(self._variable(x, written[0] if _shows(func, args, x) else None) for x in results)
        self._lines.append(Line(func, written, named, values, is_one or not results))

    def _variable(self, tensor: torch.Tensor, base: Value | None) -> Value:
        value = Value.of(f"x{self._num_variables}", tensor, base, is_variable=True)
        self._num_variables += 1
        self._value_of[tensor] = value
        return value

    def _written(self, item: Any) -> Any:
        """``item`` with a value in place of each tensor."""
        if type(item) in (tuple, list):
            return type(item)(map(self._written, item))
        if not isinstance(item, torch.Tensor):
            self._is_complete &= isinstance(item, _CONSTANT)
            return item
        value = cast("Value | None", self._value_of.get(item))
        if value is None:
            value = Value.of(f"c{len(self._constants)}", item)
            self._constants[value.name] = _weakly(item)
            self._value_of[item] = value
        return value


def _shows(func: Any, args: tuple[Any, ...], result: torch.Tensor) -> bool:
    """Whether a result shows memory of the first argument."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable or not args or not isinstance(args[0], torch.Tensor):
        return False
    both = args[0], result
    if not all(x.layout is torch.strided for x in both):
        return False
    memory, shown = (x.untyped_storage()._cdata for x in both)
    return bool(memory == shown)


def _weakly(tensor: torch.Tensor) -> Callable[[], Any]:
    reference = weakref.ref(tensor)

    def get() -> Any:
        found = reference()
        return _GONE if found is None else found

    return get


def _shows_numbers(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether Python sees contents of tensors by this operator: copies of them on the host, or sizes."""
    if func is _ATEN.resolve_neg.default:  # before lists and numpy arrays are made, unseen
        return True
    if func is _ATEN.index.Tensor:  # a mask or, by far most often, numbers
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.dynamic_output_shape in func.tags


def _is_of_tensors(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_of_tensors, value))
    return isinstance(value, torch.Tensor)
