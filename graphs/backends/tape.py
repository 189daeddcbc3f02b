"""Steps on a CPU without the Python around their operators: written down once, then run as a plain list."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from types import NoneType
from typing import Any, Generic, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from graphs.backends.base import Inputs, Outputs
from graphs.backends.whole_step import tensors_of
from graphs.interrupts import interrupts_deferred

_ATEN = torch.ops.aten
_GONE = object()
_CONSTANT = (
    *(torch.Tensor, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(NoneType, bool, int, float, complex, str),
)
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
    """

    def __init__(self, fn: Callable[[Inputs], Outputs]) -> None:
        self._fn = fn
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
        self._replay = tape.function(outputs)
        return outputs


@dataclass(frozen=True)
class _Line:
    """One call: what it assigns, the call itself, and the variables that it reads."""

    assigned: tuple[str, ...]
    call: str
    read: frozenset[str]

    def __str__(self) -> str:
        targets = "".join(f"{name}, " for name in self.assigned)
        return f"{targets}= {self.call}" if targets else self.call


class _Tape(TorchDispatchMode):
    """Lets operators run and writes them down as lines of a Python function."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self._lines: list[_Line] = []
        self._name_of = WeakTensorKeyDictionary()
        for name, tensor in inputs.items():
            self._name_of[tensor] = f"inputs[{name!r}]"
        self._num_variables = 0
        # Tensors from elsewhere are not held: what was a temporary one is gone in the end.
        self._constants: dict[str, Callable[[], Any]] = {}
        self._made_of_numbers: list[torch.Tensor] = []
        self._is_complete = len(self._name_of) == len(inputs)

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

    def function(self, outputs: Any) -> Callable[[Inputs], Any] | None:
        """What was written, as a function that returns what ``outputs`` holds; None if it lacks something.

        Only once the step is over, and its temporary tensors with it.
        """
        constants = {name: get() for name, get in self._constants.items()}
        is_complete = self._is_complete and all(value is not _GONE for value in constants.values())
        if not is_complete or not _is_of_tensors(outputs):
            return None
        if not all(tensor in self._name_of for tensor in tensors_of(outputs)):
            return None
        needed: set[str] = set()
        body = [f"return {self._text(outputs, needed)}"]
        for line in reversed(self._lines):
            unneeded = (line.read | {*line.assigned}) - needed
            if unneeded:
                body.append(f"del {', '.join(sorted(unneeded))}")
            body.append(str(line))
            needed |= line.read
        source = "\n    ".join(["def replay(inputs):", *reversed(body)])
        exec(compile(source, "<written step>", "exec"), constants)
        return cast("Callable[[Inputs], Any]", constants.pop("replay"))

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        read: set[str] = set()
        texts = [self._text(value, read) for value in args]
        texts += [f"{name}={self._text(value, read)}" for name, value in kwargs.items()]
        call = f"{self._constant(func)}({', '.join(texts)})"
        is_one = isinstance(result, torch.Tensor)
        results = [result] if is_one else [] if result is None else result
        if not isinstance(results, tuple | list) or not all(isinstance(x, torch.Tensor) for x in results):
            self._is_complete = False  # a number, which Python may go by
            return
        assigned = tuple(map(self._variable, results))
        self._lines.append(_Line(assigned, f"[{call}]" if is_one else call, frozenset(read)))

    def _variable(self, tensor: torch.Tensor) -> str:
        name = f"x{self._num_variables}"
        self._num_variables += 1
        self._name_of[tensor] = name
        return name

    def _text(self, value: Any, read: set[str]) -> str:
        """``value`` as it is written in a call; adds the variables of it to ``read``."""
        if type(value) in (tuple, list):
            items = "".join(f"{self._text(item, read)}, " for item in value)
            return f"({items})" if type(value) is tuple else f"[{items}]"
        name = cast("str | None", self._name_of.get(value)) if isinstance(value, torch.Tensor) else None
        if name is None:
            self._is_complete &= isinstance(value, _CONSTANT)
            return self._constant(value)
        if name.isidentifier():
            read.add(name)
        return name

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = _weakly(value) if isinstance(value, torch.Tensor) else lambda: value
        return name


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
