"""Compare every operator of a step on the device with the same operator on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphs.backends.base import DispatchMode, writes
from hpu_duo.lab.selftest.finding import Notes
from hpu_duo.lab.selftest.steps import record_steps, relative_error, run_uncaptured
from hpu_duo.lab.selftest.subject import Subject
from hpu_duo.sampling import sample

_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
_NEEDS_LONG = ("aten.index_copy", "aten.index_add", "aten.scatter", "aten.gather")
_CPU = torch.device("cpu")


@dataclass
class OperatorRecord:
    """Result of the comparison of one operator.

    Attributes:
        num_variants: distinct shapes, dtypes and plain arguments that it was called with.
        error: largest relative error of a result.
        problem: why a result is wrong or missing; None if all were right.
    """

    num_variants: int = 0
    error: float = 0.0
    problem: str | None = None


class OperatorShadow(DispatchMode):
    """Runs every operator on the device, and each distinct call of it a second time on the CPU.

    The CPU's operands are read back from the device before the call, so that errors do not add up.

    Args:
        device: type of the device, such as "hpu".
        notes: records the operator that is tried.
    """

    def __init__(self, device: str, notes: Notes) -> None:
        super().__init__()
        self.records: dict[str, OperatorRecord] = {}
        self._device, self._notes = device, notes
        self._seen: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [value for value in _leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        key = (func, tuple(map(_signature, _leaves((args, kwargs)))))
        is_here = any(tensor.device.type == self._device for tensor in tensors)
        if not is_here or key in self._seen or func.is_view:
            return func(*args, **kwargs)
        self._seen.add(key)
        name = str(func)
        record = self.records.setdefault(name, OperatorRecord())
        record.num_variants += 1
        self._notes.begin(f"{name} on {', '.join(map(_shown, tensors))}")
        host_args, host_kwargs = self._on_host(name, args), self._on_host(name, kwargs)
        result = func(*args, **kwargs)
        try:
            expected = func(*host_args, **host_kwargs)
        except (RuntimeError, NotImplementedError, IndexError) as error:
            record.problem = f"cannot be run on the CPU to compare: {_line(error)}"
            return result
        _compare(record, _leaves(result), _leaves(expected), func)
        if writes(func):
            _compare(record, _leaves((args, kwargs)), _leaves((host_args, host_kwargs)), func)
        return result

    def _on_host(self, name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            host = value.detach().cpu().clone()
            # A limit of torch's CPU kernels: the device takes int32.
            return host.long() if host.dtype == torch.int32 and name.startswith(_NEEDS_LONG) else host
        if isinstance(value, torch.device):
            return _CPU if value.type == self._device else value
        if isinstance(value, dict):
            return {key: self._on_host(name, each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([self._on_host(name, each) for each in value])
        return value


def compare_operators(subject: Subject, notes: Notes) -> None:
    """Run recorded steps and sampling on the device, uncaptured, under an ``OperatorShadow``."""
    steps = record_steps(subject)
    for dtype in ("float32", "bfloat16"):
        model = steps.load(subject, attention="reference", dtype=dtype, graphs="eager")
        shadow = OperatorShadow(model.engine.runner.device.type, notes)
        with shadow:
            for message in steps.messages:
                logits = run_uncaptured(model, message)
                if message.sampling is not None:
                    sample(logits, message.sampling)
        for name, record in sorted(shadow.records.items()):
            what = "1 variant" if record.num_variants == 1 else f"{record.num_variants} variants"
            notes.check(
                f"{name}, {dtype}",
                record.problem is None,
                record.problem or f"{what} within {record.error:.1e} of the CPU",
                relative_error=record.error,
                num_variants=record.num_variants,
            )


def _compare(record: OperatorRecord, got: Iterator[Any], expected: Iterator[Any], func: Any) -> None:
    for one, other in zip(got, expected):
        if not isinstance(one, torch.Tensor) or one.numel() == 0 or func in _UNDEFINED:
            continue
        host = one.detach().cpu()
        if host.shape != other.shape:
            record.problem = f"expected a result {tuple(other.shape)}, got {tuple(host.shape)}"
        elif not host.is_floating_point():
            num_wrong = int((host.long() != other.long()).sum())
            if num_wrong:
                record.problem = f"{num_wrong} of {host.numel()} integers differ, {_shown(host)}"
        else:
            _compare_floats(record, host, other)


def _compare_floats(record: OperatorRecord, got: torch.Tensor, expected: torch.Tensor) -> None:
    finite = torch.isfinite(expected)
    if not torch.allclose(got[~finite].double(), expected[~finite].double(), equal_nan=True):
        record.problem = f"values that are not finite differ, {_shown(got)}"
        return
    error = relative_error(got[finite], expected[finite])
    record.error = max(record.error, error)
    if error > _TOLERANCES.get(got.dtype, _TOLERANCES[torch.float32]):
        record.problem = f"off by {error:.1e}, {_shown(got)}"


_UNDEFINED = (torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default)
"""Operators whose results are uninitialised."""


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for each in value.values():
            yield from _leaves(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _signature(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), tuple(value.stride()), value.dtype, value.device.type
    return type(value), str(value)


def _shown(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
