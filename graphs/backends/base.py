"""The interface of a capture backend, the eager backend, and backends that record whole steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

from graphs.shape import BatchShape

__all__ = ["DispatchMode", "decides_sizes", "direct_function", "is_random", "share_memory", "writes"]


def direct_function(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function behind an operator of torch; ``func`` itself if it is no operator."""
    return getattr(func, "_op", func) if isinstance(func, torch._ops.OpOverload) else func


_COMPLETES = frozenset({"_c10d_functional::wait_tensor"})
"""Operators that return their written argument although their schemas do not declare it."""


def writes(func: Callable[..., Any]) -> bool | None:
    """Whether an operator writes to its arguments; None of code that is no operator, and may."""
    return _operator_writes(func) if isinstance(func, torch._ops.OpOverload) else None


@cache
def _operator_writes(func: torch._ops.OpOverload) -> bool:
    schema = func._schema
    return bool(schema.is_mutable) or schema.name in _COMPLETES


@cache
def is_random(func: Callable[..., Any]) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


@cache
def decides_sizes(func: Callable[..., Any]) -> bool:
    """Whether shapes of an operator's results depend on the contents of its arguments."""
    return torch.Tag.dynamic_output_shape in getattr(func, "tags", ())


def share_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are views of the same memory."""
    memory, other = (x.untyped_storage()._cdata for x in (left, right))
    return bool(memory == other)


Inputs: TypeAlias = Mapping[str, torch.Tensor]
"""Device inputs of a step by field name, at addresses that are fixed for a bucket."""

Outputs = TypeVar("Outputs")
Region = TypeVar("Region", bound=Callable[..., Any])


class CaptureBackend(Protocol):
    """Turns steps, or the repeated parts of steps, into executables for one shape.

    A backend captures at either of two grains. Whole-step backends (device graphs) do their work in
    ``capture`` and return regions unchanged. Regional backends (compilers, for which a model of equal layers
    is one layer repeated) return the step unchanged and do their work in ``region``. The runner calls both.
    """

    @property
    def name(self) -> str:
        """The name that ``make_backend`` knows this backend by."""
        ...

    @property
    def num_first_runs(self) -> int:
        """Number of runs of a bucket until capture is complete; warm-up runs them all."""
        ...

    def problem(self, device: torch.device) -> str | None:
        """Return why steps on ``device`` cannot be captured here, as what was expected and got; or None.

        Called once, before anything is captured: there is no fallback to another backend later.
        """
        ...

    def capture(self, fn: Callable[[Inputs], Outputs], shape: BatchShape) -> Callable[[Inputs], Outputs]:
        """Return an executable for a whole step at one shape.

        The graph may be recorded here or at the executable's first call, and never again. Nothing that ``fn``
        reads varies from step to step, except the tensors of its inputs. Tensors that the executable returns
        may be overwritten by its next call.

        Args:
            fn: the step, written for padded inputs of ``shape``.
            shape: the bucket.
        """
        ...

    def region(self, shape: BatchShape, key: Hashable, fn: Region) -> Region:
        """Return a replacement of ``fn`` at one shape.

        A backend may return the callable that it built for an earlier ``fn`` of equal ``shape`` and ``key``,
        so two functions that compute differently need different keys.

        Args:
            shape: the bucket that the region is private to.
            key: which region, for example ``("layer", num_retrieval_heads, num_streaming_heads)``.
            fn: the region, for example one decoder layer.
        """
        ...


_log = logging.getLogger(__name__)

MOST_OPERATORS = 50_000
"""Most operators of a graph that is captured whole: 80 layers of 600, and those around them."""


@dataclass(frozen=True)
class Recording(Generic[Outputs]):
    """A recorded step.

    Attributes:
        first: result of the step's only run for the recording.
        static: the tensors that a replay writes its results to.
        replay: launches the recorded work again, on the current content of the input tensors.
    """

    first: Outputs
    static: Outputs
    replay: Callable[[], None]


class Recorder(Protocol):
    """Records and replays steps on a device."""

    def problem(self, device: torch.device) -> str | None:
        """See ``CaptureBackend.problem``."""
        ...

    def record(self, run: Callable[[], Outputs]) -> Recording[Outputs]:
        """Run a step once, so that its effects happen once, and record it.

        Errors of ``run`` are propagated, and end the recording.
        """
        ...


class WholeStepBackend:
    """Records a whole step at the first run of its executable and replays it from then on.

    The replay reads the tensors that it was recorded with, hence inputs at other addresses are an error. It
    returns the same tensors each time, overwritten.

    Args:
        name: the name of the backend for ``make_backend``.
        recorder: records and replays on the device.
        max_operators: operators of a step above which a warning names its bucket, once for each: such a graph
            may need much time to build and much device memory.
    """

    num_first_runs = 1

    def __init__(self, name: str, recorder: Recorder, max_operators: int = MOST_OPERATORS) -> None:
        if max_operators < 1:
            raise ValueError(f"expected max_operators >= 1, got {max_operators}")
        self.name = name
        self._recorder = recorder
        self._max_operators = max_operators
        self._warned: set[str] = set()

    def problem(self, device: torch.device) -> str | None:
        """Return the recorder's problem with the device, or None."""
        return self._recorder.problem(device)

    def capture(self, fn: Callable[[Inputs], Outputs], shape: BatchShape) -> Callable[[Inputs], Outputs]:
        """Return an executable that runs and records ``fn`` at its first call.

        The executable raises ValueError for inputs at other addresses than those of its first call.
        """
        return _Executable(self._recorder, fn, str(shape), self._note_size)

    def _note_size(self, label: str, num_operators: int) -> None:
        if num_operators <= self._max_operators or label in self._warned:
            return
        self._warned.add(label)
        _log.warning(
            "the graph of %s has %d operators, and %s expects %d at most: it grows with the context. Give "
            "chunks of context more memory (score_bytes), leave long prefills uncaptured "
            "(max_captured_tokens), lower max_model_len, or capture layers instead of steps",
            *(label, num_operators, self.name, self._max_operators),
        )

    def region(self, shape: BatchShape, key: Hashable, fn: Region) -> Region:
        """Return ``fn``: steps are recorded whole."""
        return fn


class _Executable(Generic[Outputs]):
    def __init__(
        self,
        recorder: Recorder,
        fn: Callable[[Inputs], Outputs],
        label: str,
        note_size: Callable[[str, int], None],
    ) -> None:
        self._recorder, self._fn, self._label, self._note_size = recorder, fn, label, note_size
        self._recording: Recording[Outputs] | None = None
        self._inputs: Inputs = {}
        self._addresses: Mapping[str, int] = {}

    def __call__(self, inputs: Inputs) -> Outputs:
        if self._recording is None:
            counter = _Counter()
            recording = self._recorder.record(lambda: counter.count(self._fn, inputs))
            self._note_size(self._label, counter.num_operators)
            self._recording, self._inputs, self._addresses = recording, inputs, _addresses(inputs)
            return recording.first
        if inputs is not self._inputs:
            self._check(inputs)
        self._recording.replay()
        return self._recording.static

    def _check(self, inputs: Inputs) -> None:
        found = _addresses(inputs)
        if found != self._addresses:
            moved = sorted(
                name for name in found | dict(self._addresses) if found.get(name) != self._addresses.get(name)
            )
            raise ValueError(
                f"{self._label}: expected inputs where they were when the step was recorded, "
                f"got others for {', '.join(moved)}"
            )
        self._inputs = inputs


class _Counter(DispatchMode):
    """Counts the operators of a step, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.num_operators = 0

    def count(self, fn: Callable[[Inputs], Outputs], inputs: Inputs) -> Outputs:
        """Run a step, which a recorder may do more than once, and count its operators."""
        self.num_operators = 0
        with self:
            return fn(inputs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operators += 1
        return func(*args, **(kwargs or {}))


def _addresses(inputs: Inputs) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in inputs.items()}


def tensors_of(outputs: Any) -> list[torch.Tensor]:
    """Yield the tensors of a step's result: one tensor, or any nesting of tuples and lists of them."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    if isinstance(outputs, tuple | list):
        return [tensor for item in outputs for tensor in tensors_of(item)]
    return []


class EagerBackend:
    """The eager backend: returns every step and region unchanged.

    Caches no region either, so each call of ``region`` returns its own ``fn``, whatever the key.
    """

    name = "eager"
    num_first_runs = 1

    def problem(self, device: torch.device) -> str | None:
        """Return None: steps run as written everywhere."""
        return None

    def capture(self, fn: Callable[[Inputs], Outputs], shape: BatchShape) -> Callable[[Inputs], Outputs]:
        """Return ``fn``."""
        return fn

    def region(self, shape: BatchShape, key: Hashable, fn: Region) -> Region:
        """Return ``fn``."""
        return fn
