"""Trace a step operator by operator, on tensors without data."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from hpu_duo.lab.audit.fake_tensors import DispatchMode, memory_key, tree_leaves, tree_map_only
from hpu_duo.lab.audit.findings import Finding, FindingKey
from hpu_duo.lab.audit.trace_checks import TraceChecks
from hpu_duo.lab.audit.work import OperatorWork, operator_work
from hpu_duo.lab.rules import Engine, Operator, OpOverload, base_name, describe

_NO_WORK = OperatorWork()


@dataclass
class Tally:
    """Counts: work by engine, calls by operator (without overload), and findings."""

    work: dict[Engine, OperatorWork] = field(default_factory=dict)
    operators: Counter[str] = field(default_factory=Counter)
    findings: dict[FindingKey, Finding] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Add the counts of another tally."""
        for engine, work in other.work.items():
            self.work[engine] = self.work.get(engine, _NO_WORK) + work
        self.operators.update(other.operators)
        self.findings.update(other.findings)


class StepTracer(DispatchMode):
    """Counts the operators inside the context, and the bytes of the tensors that live at the same time.

    A tensor's memory counts from the operator that makes it until its last reference is gone, as an
    allocator sees it that runs one operator after the other. Views share it. A compiler that fuses
    operators, or orders them anew, may need less.

    Args:
        held: tensors that outlive the step, such as weights, stores and staged inputs: not counted.
        weights: those of them that products are to meet in their own float type.
        model_dtype: float type of the model, None where float16 is as good as any.
        stores: those of the held tensors that a layer may write only once, and read only afterwards.

    Attributes:
        tally: counts so far.
        live_bytes, peak_bytes: current and peak size of the step's own tensors.
    """

    def __init__(
        self,
        held: Iterable[torch.Tensor],
        weights: Iterable[torch.Tensor] = (),
        model_dtype: torch.dtype | None = None,
        stores: Iterable[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        self.tally = Tally()
        self.live_bytes = self.peak_bytes = 0
        self._held = tuple(held)
        self._known = {*map(memory_key, self._held)}
        self._checks = TraceChecks(self._found, weights, model_dtype, stores)
        self._described: dict[OpOverload, Operator] = {}
        self._is_counting = True

    @contextmanager
    def part(self) -> Iterator[Part]:
        """Count operators inside the context, a layer's, separately too."""
        self._checks.store_use.begin_graph()
        tally, peak = self.tally, self.peak_bytes
        part = Part()
        self.tally, self.peak_bytes = part.tally, self.live_bytes
        before = self.live_bytes
        try:
            yield part
        finally:
            part.peak_bytes = self.peak_bytes - before
            self.tally, self.peak_bytes = tally, max(peak, self.peak_bytes)
            tally.add(part.tally)

    def repeat(self, part: Part, template: Any) -> Any:
        """Count a part once more, without running it.

        Args:
            template: result of the part, from ``without_memory``.
        Returns:
            The same with new tensors.
        """
        self.tally.add(part.tally)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + part.peak_bytes)
        self._is_counting = False
        try:
            return Like.make_all(template)
        finally:
            self._is_counting = True

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the memory of new tensors until they are gone."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, size = memory_key(tensor), storage.nbytes()
            if key not in self._known:
                self._known.add(key)
                self.live_bytes += size
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._checks.forget(key)
        self.live_bytes -= size

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # torch asks for the device of a fake tensor by an operator.
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if not self._is_counting:
            made = func(*args, **kwargs)
            self.track(leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor))
            return made
        operator = self._described.get(func)
        if operator is None:
            operator = self._described[func] = describe(func)
        if operator.is_composite:
            with self:
                return func.decompose(*args, **kwargs)
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self._checks.before(operator, operands, args, kwargs)
        result = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.track(results)
        self._checks.after(operator, operands, results)
        self._count(func, operator, operands, results)
        return result

    def _found(self, finding: Finding) -> None:
        self.tally.findings.setdefault(finding.key, finding)

    def _count(
        self, func: OpOverload, operator: Operator, operands: list[torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        name = base_name(func)
        engine = operator.engine or Engine.VECTOR
        if operator.is_view:
            engine = Engine.VIEW
        elif name == "_to_copy" and operands[0].dtype == results[0].dtype:
            engine = Engine.MEMORY
        tally = self.tally
        tally.operators[name] += 1
        if engine is not Engine.VIEW:
            work = operator_work(name, engine, operands, results)
            tally.work[engine] = tally.work.get(engine, _NO_WORK) + work


@dataclass
class Part:
    """A part of a step, counted separately.

    Attributes:
        tally: its counts.
        peak_bytes: peak size of its own tensors.
    """

    tally: Tally = field(default_factory=Tally)
    peak_bytes: int = 0


@dataclass(frozen=True)
class Like:
    """A tensor without memory."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def make_all(template: Any) -> Any:
        """Make new tensors of all that ``without_memory`` has described."""
        return tree_map_only(Like, Like._make, template)

    def _make(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def without_memory(result: Any) -> Any:
    """A result with descriptions in place of its tensors, which keeps none of them alive."""
    return tree_map_only(torch.Tensor, lambda tensor: Like(tensor.shape, tensor.dtype, tensor.device), result)
