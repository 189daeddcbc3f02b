"""The simulated device: runs operators on CPU, checks the rules, counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hpu_duo.rules import (
    HpuRuleViolation,
    Operator,
    OpOverload,
    Rule,
    Transfer,
    base_name,
    calling_line,
    describe,
)
from hpu_duo.sim.garbage import spoil, with_any_index
from hpu_duo.sim.journal import Journal, Watch
from hpu_duo.sim.tensor import HPU, SimTensor

_HERE = str(Path(__file__).parent)
_CPU = torch.device("cpu")
_WIDE = (torch.int64, torch.float64, torch.complex128)
_MASKS = (torch.bool, torch.uint8)


class _Call:
    """One operator call: its host arguments and its operands.

    Attributes:
        sims: operands on the device.
        strays: operands in host memory that are more than scalars.
        signature: key of the call's recipe.
    """

    def __init__(self) -> None:
        self.sims: list[SimTensor] = []
        self.strays: list[torch.Tensor] = []
        self.signature: list[Any] = []

    def unwrap(self, value: Any) -> Any:
        """Return a value with host data in place of device tensors, and the CPU in place of the device."""
        if type(value) is SimTensor:
            self.sims.append(value)
            self.signature.append(value.signature)
            return value.host
        if isinstance(value, torch.Tensor):
            if value.dim():
                self.strays.append(value)
                self.signature.append((tuple(value.shape), value.dtype))
            else:
                self.signature.append((value.item(), value.dtype))
            return value
        if isinstance(value, list | tuple):
            return type(value)(map(self.unwrap, value))
        if isinstance(value, torch.device):
            return _CPU
        if isinstance(value, torch.ScriptObject):
            # A process group, say, is another object in each call, and may not live as long as the counts.
            self.signature.append(type(value))
            return value
        # 1, 1.0 and True are equal, and different recipes.
        self.signature.append((type(value), value))
        return value


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
    def step(self) -> Iterator[None]:
        """Count what happens inside as one step of an engine."""
        for watch in self.journal.watches:
            watch.begin_step()
        yield
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
            if made.dtype in _WIDE:
                self.break_rule(Rule.WIDE_DTYPE, str(func), f"makes {made.dtype}")
            if launches:
                self._launch((func, str(args), made.signature))
            return made

        return kernel

    def copy_from(
        self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        """The device's kernel of ``aten._copy_from``, which torch calls where it bypasses subclasses."""
        return self._copy("aten._copy_from", target, source)

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator with at least one tensor of this device among its arguments.

        Raises:
            HpuRuleViolation: it breaks a rule.
        """
        operator = self._known.get(func)
        if operator is None:
            operator = self._known[func] = describe(func)
        if operator.is_composite:
            return func.decompose(*args, **kwargs)
        match operator.transfer:
            case Transfer.COPY:
                return self._copy(operator.name, args[0], args[1])
            case Transfer.TO_COPY if _leaves(kwargs):
                return self._download(operator.name, func, args, kwargs)
            case Transfer.READ:
                return self._read(operator.name, func, args)
        return self._compute(func, operator, args, kwargs)

    def _compute(
        self, func: OpOverload, operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        call = _Call()
        host_args = [call.unwrap(arg) for arg in args]
        host_kwargs = {name: call.unwrap(value) for name, value in kwargs.items()}
        host_kwargs.pop("pin_memory", None)
        self._check(operator, call, args, kwargs)
        if operator.needs_long and operator.index is not None:
            # A limit of torch's CPU kernels, not of the device.
            host_args[operator.index[0]] = host_args[operator.index[0]].long()
        if not operator.is_view:
            self._launch((func, *call.signature))
        if self._is_launching or operator.is_view:
            result = func(*host_args, **host_kwargs)
        elif operator.written or operator.written_names:
            return [*(args[at] for at in operator.written), *(kwargs[n] for n in operator.written_names)][0]
        else:
            result = func(*with_any_index(operator, host_args), **host_kwargs)
            spoil(result, {sim.host.untyped_storage().data_ptr() for sim in call.sims})
        if _leaves(kwargs):
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
                    operator.keeps_indices and any(sim.is_own_index for sim in sims)
                )
            if result.dtype in _WIDE and not (operator.may_make_wide or made.is_own_index):
                self.break_rule(Rule.WIDE_DTYPE, operator.name, f"makes {result.dtype}")
            return made
        if isinstance(result, list | tuple):
            return type(result)([self._wrap(operator, sims, each) for each in result])
        return result

    def _launch(self, signature: tuple[Any, ...]) -> None:
        number = self._numbers.setdefault(signature, len(self._numbers))
        if self._graph is None:
            self.journal.launch_alone(number)
        else:
            self._graph.append(number)
            self.journal.launch_inside()

    # Crossing the bus

    def _copy(self, name: str, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        host_target = target.host if isinstance(target, SimTensor) else target
        host_source = source.host if isinstance(source, SimTensor) else source
        if isinstance(target, SimTensor) and isinstance(source, SimTensor):
            self._check_written(name, target)
            self._launch((name, target.signature, source.signature))
        elif isinstance(target, SimTensor):
            if not host_target.is_contiguous():
                self.break_rule(Rule.VIEW_WRITE, name, "a transfer into memory that is not contiguous")
            self._cross(host_source, "h2d", name)
        else:
            self._cross(host_source, "d2h", name)
        if self._is_launching or not isinstance(target, SimTensor):
            host_target.copy_(host_source)
        return target

    def _download(
        self, name: str, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.Tensor:
        host = args[0].host
        self._cross(host, "d2h", name)
        return func(host, *args[1:], **kwargs)

    def _read(self, name: str, func: OpOverload, args: tuple[Any, ...]) -> Any:
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
        if host.dtype in _WIDE:
            self.break_rule(Rule.WIDE_DTYPE, name, f"uploads {host.dtype}")
        if num_bytes:
            self.journal.count(h2d_copies=1, h2d_bytes=num_bytes)

    # Rules

    def _check(
        self, operator: Operator, call: _Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        name = operator.name
        if operator.is_dynamic and kwargs.get("output_size") is None:
            self.break_rule(Rule.DYNAMIC_SHAPE, name, "the size of the result depends on values")
        if call.strays:
            shapes = ", ".join(str(tuple(stray.shape)) for stray in call.strays)
            self.break_rule(Rule.MIXED_DEVICES, name, f"operands {shapes} are in host memory")
        if not operator.may_take_wide:
            for sim in call.sims:
                if sim.signature[-1] in _WIDE and not (sim.is_own_index and operator.reads_indices):
                    self.break_rule(Rule.WIDE_DTYPE, name, f"takes {sim.dtype} {tuple(sim.shape)}")
        if operator.is_scatter:
            self.break_rule(Rule.SCATTER, name, "use index_copy_, index_add or where")
        if operator.index is not None:
            position, along = operator.index
            source = args[0]
            size = source.shape[0] if along is None else source.shape[args[along]]
            self._check_index(name, args[position], size)
        if operator.takes_index_list:
            for dim, index in enumerate(args[1]):
                if index is not None:
                    self._check_index(name, index, args[0].shape[dim])
        for position in operator.written:
            self._check_written(name, args[position])
        for keyword in operator.written_names:
            self._check_written(name, kwargs[keyword])

    def _check_index(self, name: str, index: torch.Tensor, size: int) -> None:
        if index.dtype in _MASKS:
            self.break_rule(Rule.BOOLEAN_INDEX, name, f"a mask of shape {tuple(index.shape)}")
            return
        host = index.host if isinstance(index, SimTensor) else index
        if host.numel() and self._is_launching:
            low, high = torch.aminmax(host)
            if low < 0 or high >= size:
                self.break_rule(
                    Rule.BAD_INDEX,
                    name,
                    f"expected indices in [0, {size}), got {low.item()} to {high.item()}",
                )

    def _check_written(self, name: str, target: Any) -> None:
        for tensor in target if isinstance(target, list | tuple) else (target,):
            if isinstance(tensor, SimTensor) and tensor.is_partial_view:
                self.break_rule(Rule.VIEW_WRITE, name, f"writes {tuple(tensor.shape)} of a larger tensor")


def _leaves(kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator is to leave the device, by its keyword arguments."""
    device = kwargs.get("device")
    return device is not None and torch.device(device).type != HPU.type
