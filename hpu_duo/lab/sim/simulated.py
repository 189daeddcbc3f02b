"""The simulated device: runs operators on CPU, checks the rules, counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from graphs.backends.compile import run_of_cut
from hpu_duo.lab.rules import (
    HpuRuleViolation,
    Operator,
    OpOverload,
    Rule,
    Transfer,
    base_name,
    calling_line,
    describe,
)
from hpu_duo.lab.sim.call import Call, leaves_device
from hpu_duo.lab.sim.checks import WIDE, BreakRule, Checks, has_nan
from hpu_duo.lab.sim.garbage import spoil, with_any_index
from hpu_duo.lab.sim.journal import Journal, Watch
from hpu_duo.lab.sim.streams import SimCopyStream
from hpu_duo.lab.sim.tensor import SimTensor

_HERE = str(Path(__file__).parent)
_CPU = torch.device("cpu")


class SimulatedHpu:
    """The one device ``hpu:0`` of this process.

    Args:
        journal: takes the counts.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._allowed: frozenset[Rule] = frozenset()
        self._known: dict[OpOverload, Operator] = {}
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._graph: list[int] | None = None
        self._is_launching = True
        self._aside: SimCopyStream | None = None
        self._checks = Checks(self.break_rule)

    # What others ask of the device

    @contextmanager
    def watch(self) -> Iterator[Watch]:
        """Count what happens inside the context."""
        with self.journal.attached() as watch:
            yield watch

    @contextmanager
    def allow(self, *rules: Rule) -> Iterator[None]:
        """Let rules be broken inside the context; watches count how often."""
        before = self._allowed
        self._allowed = before | set(rules)
        try:
            yield
        finally:
            self._allowed = before

    @contextmanager
    def step(self, model_dtype: torch.dtype | None = None, *, goes_on: bool = False) -> Iterator[None]:
        """Count what happens inside as one step of an engine.

        Args:
            model_dtype: float type of its model, which float types inside are compared with.
            goes_on: it is the last step, whose results are read.
        """
        for watch in self.journal.watches:
            watch.begin_step(goes_on=goes_on)
        before, self._checks.model_dtype = self._checks.model_dtype, model_dtype
        try:
            yield
        finally:
            self._checks.model_dtype = before
        for watch in self.journal.watches:
            watch.end_step()

    @contextmanager
    def graph(self) -> Iterator[list[int]]:
        """Capture the operators inside; yields their numbers, in order.

        Transfers and waits are forbidden inside.
        """
        assert self._graph is None, "a graph cannot hold another one"
        self._graph = []
        try:
            yield self._graph
        finally:
            self._graph = None

    def region(self) -> AbstractContextManager[None]:
        """Hold what runs inside to the rules of one graph that is compiled by itself, such as a layer."""
        return self._checks.region()

    @contextmanager
    def compile_only(self) -> Iterator[None]:
        """Count and check operators inside as ever, and launch none of them.

        As in the bridge's compile-only mode, by public sources: existing tensors stay as they are, and new
        tensors hold garbage, here NaN, or 0 for dtypes without NaN.
        """
        before, self._is_launching = self._is_launching, False
        try:
            yield
        finally:
            self._is_launching = before

    @contextmanager
    def copies_aside(self, stream: SimCopyStream) -> Iterator[BreakRule]:
        """Queue copies inside on a stream, which runs them later; yields what it reports broken rules to.

        Nothing else runs inside.
        """
        assert self._aside is None, "one stream is current"
        self._aside = stream
        try:
            yield self.break_rule
        finally:
            self._aside = None

    def upload(self, host: torch.Tensor) -> SimTensor:
        """A copy of a host tensor on the device."""
        self._cross(host, "h2d", "upload")
        return SimTensor(host.clone())

    def break_rule(self, rule: Rule, operator: str, detail: str) -> None:
        """Raise an error, or count if the rule is allowed to be broken.

        Raises:
            HpuRuleViolation: the rule is not allowed to be broken.
        """
        if rule not in self._allowed:
            raise HpuRuleViolation(rule, operator, calling_line(_HERE), detail)
        for watch in self.journal.watches:
            watch.excuse(rule)

    # Operators

    def make(self, func: OpOverload) -> Callable[..., SimTensor]:
        """The device's kernel of a factory function such as ``aten.arange``."""
        launches = not base_name(func).startswith("empty")

        def kernel(*args: Any, device: Any = None, pin_memory: Any = None, **kwargs: Any) -> SimTensor:
            made = SimTensor(func(*args, device=_CPU, **kwargs))
            if not self._is_launching:
                spoil(made.host, set())
            if made.dtype in WIDE:
                self.break_rule(Rule.WIDE_DTYPE, str(func), f"makes {made.dtype}")
            self._checks.made(str(func), made.host)
            if launches:
                self._launch((func, str(args), made.signature))
            return made

        return kernel

    def copy_from(
        self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        """The device's kernel of ``aten._copy_from``, which torch calls where it bypasses subclasses."""
        return self._copy("aten._copy_from", target, source, is_async=non_blocking)

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator with at least one tensor of this device among its arguments.

        Raises:
            HpuRuleViolation: it breaks a rule.
        """
        if (run := run_of_cut(func)) is not None:
            with self._cut((func, *map(_sizes_of, args))):
                return run(*args)
        operator = self._known.get(func)
        if operator is None:
            operator = self._known[func] = describe(func)
        if operator.is_composite:
            return func.decompose(*args, **kwargs)
        match operator.transfer:
            case Transfer.COPY:
                is_async = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
                return self._copy(operator.name, args[0], args[1], is_async=is_async)
            case Transfer.TO_COPY if leaves_device(kwargs):
                return self._download(operator.name, func, args, kwargs)
            case Transfer.READ:
                return self._read(operator.name, func, args)
        return self._compute(func, operator, args, kwargs)

    def _compute(
        self, func: OpOverload, operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        call = Call(operator, args, kwargs)
        self._checks.before(call, in_graph=self._graph is not None, reads_values=self._is_launching)
        if operator.needs_long and operator.index is not None:
            # A limit of torch's CPU kernels, not of the device.
            call.host_args[operator.index[0]] = call.host_args[operator.index[0]].long()
        if not operator.is_view:
            self._launch((func, *call.signature))
        if self._is_launching or operator.is_view:
            had_nan = any(map(has_nan, call.written))
            result = func(*call.host_args, **call.host_kwargs)
            self._checks.after(call, result, had_nan)
        elif call.written:
            return call.written[0]
        else:
            result = func(*with_any_index(operator, call.host_args), **call.host_kwargs)
            spoil(result, {sim.host.untyped_storage().data_ptr() for sim in call.sims})
        if call.leaves_device:
            return result
        return self._wrap(operator, call.sims, result)

    def _wrap(self, operator: Operator, sims: list[SimTensor], result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            for sim in sims:
                if sim.host is result:
                    return sim
            made = SimTensor(result)
            if result.dtype == torch.int64:
                made.is_own_index = operator.makes_indices or (
                    operator.keeps_numbers and any(sim.is_own_index for sim in sims)
                )
            if operator.keeps_numbers and sims:
                made.weight_dtype = sims[0].weight_dtype
                made.null = sims[0].null if operator.is_view else None
                made.is_state = operator.is_view and sims[0].is_state
            if result.dtype in WIDE and not (operator.may_make_wide or made.is_own_index):
                self.break_rule(Rule.WIDE_DTYPE, operator.name, f"makes {result.dtype}")
            return made
        if isinstance(result, list | tuple):
            return type(result)([self._wrap(operator, sims, each) for each in result])
        return result

    def _launch(self, signature: tuple[Any, ...]) -> None:
        assert self._aside is None, "expected copies alone on a stream of copies"
        number = self._numbers.setdefault(signature, len(self._numbers))
        if self._graph is None:
            self.journal.launch_alone(number)
        else:
            self._graph.append(number)
            self.journal.launch_inside()

    @contextmanager
    def _cut(self, signature: tuple[Any, ...]) -> Iterator[None]:
        """End a graph at an operator, and begin the next one behind what the host does in its place."""
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.append(self._numbers.setdefault(signature, len(self._numbers)))
        try:
            with self._checks.outside():
                yield
        finally:
            self._graph = graph

    # Crossing the bus

    def _copy(self, name: str, target: torch.Tensor, source: torch.Tensor, *, is_async: bool) -> torch.Tensor:
        host_target = target.host if isinstance(target, SimTensor) else target
        host_source = source.host if isinstance(source, SimTensor) else source
        if isinstance(target, SimTensor) and isinstance(source, SimTensor):
            self._checks.written(name, target)
            self._launch((name, target.signature, source.signature))
        elif self._aside is not None:
            self._queue(self._aside, name, host_target, host_source, is_async=is_async)
            return target
        elif isinstance(target, SimTensor):
            if not host_target.is_contiguous():
                self.break_rule(Rule.VIEW_WRITE, name, "a transfer into memory that is not contiguous")
            self._cross(host_source, "h2d", name)
        else:
            self._cross(host_source, "d2h", name)
        if self._is_launching or not isinstance(target, SimTensor):
            host_target.copy_(host_source)
        return target

    def _queue(
        self, stream: SimCopyStream, name: str, target: torch.Tensor, source: torch.Tensor, *, is_async: bool
    ) -> None:
        if self._graph is not None:
            self.break_rule(Rule.HOST_IN_GRAPH, name, "host and device meet inside a captured graph")
        if not is_async:
            self.break_rule(Rule.HOST_WAIT, name, "a copy on a stream of its own has to be non_blocking")
        if not (target.is_contiguous() and source.is_contiguous()):
            self.break_rule(Rule.VIEW_WRITE, name, "a transfer of memory that is not contiguous")
        self.journal.count(aside_copies=1, aside_bytes=source.nbytes)
        if self._is_launching:
            stream.queue(name, target, source)

    def _download(
        self, name: str, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.Tensor:
        host = args[0].host
        self._cross(host, "d2h", name)
        return func(host, *args[1:], **kwargs)

    def _read(self, name: str, func: OpOverload, args: tuple[Any, ...]) -> Any:
        if self._graph is None:
            self.break_rule(Rule.HOST_WAIT, name, "read results of a step together, as tensors")
        # A number of one tensor, or whether two are equal.
        self._cross(args[0].host if len(args) == 1 else None, "d2h", name)
        return func(*(arg.host if isinstance(arg, SimTensor) else arg for arg in args))

    def _cross(self, host: torch.Tensor | None, way: str, name: str) -> None:
        if self._graph is not None:
            self.break_rule(Rule.HOST_IN_GRAPH, name, "host and device meet inside a captured graph")
        num_bytes = 1 if host is None else host.nbytes
        if way == "d2h":
            self.journal.count(d2h_reads=1, d2h_bytes=num_bytes)
            return
        assert host is not None, "an upload has data"
        if host.dtype in WIDE:
            self.break_rule(Rule.WIDE_DTYPE, name, f"uploads {host.dtype}")
        self._checks.made(name, host)
        if num_bytes:
            self.journal.count(h2d_copies=1, h2d_bytes=num_bytes)


def _sizes_of(value: Any) -> Any:
    return value.signature if isinstance(value, SimTensor) else value
