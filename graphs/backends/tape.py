"""Steps on a CPU without the Python around their operators: written down once, then run as a plain list."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from graphs.backends.base import Inputs, Outputs

_tape: ContextVar[_Tape | None] = ContextVar("_tape", default=None)


def call_compiled(code: Callable[[list[Any]], Any], args: tuple[Any, ...]) -> Any:
    """Call compiled code, which takes a list and may empty it; to a tape it is one operator."""
    tape = _tape.get()
    return code(list(args)) if tape is None else tape.run_compiled(code, args)


class TapedStep(Generic[Outputs]):
    """A step whose operators are written down in its second run, and run as they stand from then on.

    Much of a short step on a CPU is Python: modules that call modules and sort out arguments, in each
    run alike. The first run is left alone because it compiles. A step whose inputs are not on a CPU, that
    reads numbers from tensors, or returns other things than tensors in tuples and lists, is never written.

    Args:
        fn: the step. It may read inputs, and tensors that live as long as it: weights and stores.
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
            return self._replay(inputs)
        is_time = self._num_runs == 1 and all(tensor.device.type == "cpu" for tensor in inputs.values())
        outputs = self._record(inputs) if is_time else self._fn(inputs)
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
        self._replay = tape.function(outputs)
        return outputs


@dataclass(frozen=True)
class _Line:
    """One call: what it assigns, the call itself, and the variables that it reads."""

    assigned: tuple[str, ...]
    call: str
    read: frozenset[str]

    def __str__(self) -> str:
        return " ".join([*(f"{name}," for name in self.assigned), "=" if self.assigned else "", self.call])


class _Tape(TorchDispatchMode):
    """Lets operators run and writes them down as lines of a Python function."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self._lines: list[_Line] = []
        self._globals: dict[str, Any] = {}
        self._name_of = WeakTensorKeyDictionary()
        for name, tensor in inputs.items():
            self._name_of[tensor] = f"inputs[{name!r}]"
        self._num_variables = 0
        self._is_complete = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.lift_fresh.default:
            # A tensor that Python has made of numbers, which the step may write to: each run gets its own.
            func, args = torch.ops.aten.clone.default, (args[0].clone(),)
        # Lists and numpy arrays are copied behind this operator, unseen.
        self._is_complete &= func is not torch.ops.aten.resolve_neg.default
        result = func(*args, **kwargs)
        self._write(func, args, kwargs, result)
        return result

    def run_compiled(self, code: Callable[[list[Any]], Any], args: tuple[Any, ...]) -> Any:
        """Call ``code`` as one operator, whatever operators it runs."""
        self.__exit__(None, None, None)
        try:
            results = code(list(args))
        finally:
            self.__enter__()
        self._write(code, (list(args),), {}, results)
        return results

    def function(self, outputs: Any) -> Callable[[Inputs], Any] | None:
        """What was written, as a function that returns what ``outputs`` holds; None if it lacks something."""
        needed: set[str] = set()
        body = [f"return {self._text(outputs, needed)}"]
        if not self._is_complete or not _is_of_tensors(outputs):
            return None
        for line in reversed(self._lines):
            unneeded = (line.read | {*line.assigned}) - needed
            if unneeded:
                body.append(f"del {', '.join(sorted(unneeded))}")
            body.append(str(line))
            needed |= line.read
        source = "\n    ".join(["def replay(inputs):", *reversed(body)])
        exec(compile(source, "<written step>", "exec"), self._globals)
        return cast("Callable[[Inputs], Any]", self._globals["replay"])

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
        if not isinstance(value, torch.Tensor):
            return self._constant(value)
        name = cast("str | None", self._name_of.get(value))
        if name is None:
            return self._constant(value)
        if name.isidentifier():
            read.add(name)
        return name

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._globals)}"
        self._globals[name] = value
        return name


def _is_of_tensors(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_of_tensors, value))
    return isinstance(value, torch.Tensor)
