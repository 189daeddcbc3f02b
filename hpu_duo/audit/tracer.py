"""Trace a step operator by operator, on tensors without data."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from hpu_duo.audit.fake_tensors import DispatchMode, memory_key, tree_leaves, tree_map_only
from hpu_duo.audit.native import Engine, native_operators
from hpu_duo.audit.work import Work, operator_work
from hpu_duo.rules import Operator, OpOverload, Rule, Transfer, base_name, calling_line, describe

_HERE = str(Path(__file__).parent)
_WIDE = (torch.int64, torch.float64, torch.complex128)
_MASKS = (torch.bool, torch.uint8)
_NO_WORK = Work()
_INDEX_SOURCES = ("indices", "moe-routing")


class Severity(str, Enum):
    """Severity of a finding.

    ``FORBIDDEN``: an HPU does it badly, wrongly or not at all. ``NOTE``: it breaks a rule of this project,
    but public sources show that an HPU does it.
    """

    FORBIDDEN = "forbidden"
    NOTE = "note"


FindingKey = tuple[Severity, Rule, str, str]


@dataclass(frozen=True)
class Finding:
    """A broken rule, or a note about an operator of a step.

    Attributes:
        rule: the rule of an HPU that it breaks.
        operator: the torch operator.
        source: file, line and function that called it.
        detail: description.
        severity: of the finding.
        shown_by: for a note, keys of ``native_sources()`` that show it on an HPU.
    """

    rule: Rule
    operator: str
    source: str
    detail: str
    severity: Severity = Severity.FORBIDDEN
    shown_by: tuple[str, ...] = ()

    @property
    def key(self) -> FindingKey:
        """Return a key that tells it apart from findings of the same line in other steps."""
        return self.severity, self.rule, self.operator, self.source

    def __str__(self) -> str:
        return f"{self.rule.value}: {self.operator} at {self.source}: {self.detail}"


class TraceEnded(RuntimeError):
    """A step ran an operator after which its shapes are unknown; the last finding names it."""


@dataclass
class Tally:
    """Counts: work by engine, calls by operator (without overload), and findings."""

    work: dict[Engine, Work] = field(default_factory=dict)
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

    Attributes:
        tally: counts so far.
        live_bytes, peak_bytes: current and peak size of the step's own tensors.
    """

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.tally = Tally()
        self.live_bytes = self.peak_bytes = 0
        self._held = tuple(held)
        self._known = {*map(memory_key, self._held)}
        self._own_indices: set[int] = set()
        self._described: dict[OpOverload, Operator] = {}
        self._is_counting = True

    @contextmanager
    def part(self) -> Iterator[Part]:
        """Count operators inside the context separately too."""
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
            return tree_map_only(_Like, _Like.make, template)
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
        self._own_indices.discard(key)
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
        self._check_operands(func, operator, operands, args, kwargs)
        result = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.track(results)
        self._mark_own_indices(operator, operands, results)
        self._check_results(operator, results)
        self._count(func, operator, operands, results)
        return result

    def _count(
        self, func: OpOverload, operator: Operator, operands: list[torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        name = base_name(func)
        native = native_operators().get(name)
        engine = native.engine if native is not None else Engine.VECTOR
        if operator.is_view:
            engine = Engine.VIEW
        elif name == "_to_copy" and operands[0].dtype == results[0].dtype:
            engine = Engine.MEMORY
        tally = self.tally
        tally.operators[name] += 1
        if engine is not Engine.VIEW:
            work = operator_work(name, engine, operands, results)
            tally.work[engine] = tally.work.get(engine, _NO_WORK) + work

    # Rules

    def _check_operands(
        self,
        func: OpOverload,
        operator: Operator,
        operands: list[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        devices = {tensor.device.type for tensor in operands if tensor.dim()}
        is_transfer = operator.transfer is not Transfer.NONE
        target = kwargs.get("device")
        if operator.transfer is Transfer.READ:
            self._end(Rule.HOST_IN_GRAPH, operator, "the host waits for a value")
        if is_transfer and (len(devices) > 1 or (target is not None and {target.type} != devices)):
            self._end(Rule.HOST_IN_GRAPH, operator, "host and device meet inside a step")
        if len(devices) > 1:
            self._end(Rule.MIXED_DEVICES, operator, f"operands are on {' and '.join(sorted(devices))}")
        if operator.is_dynamic and kwargs.get("output_size") is None:
            self._end(Rule.DYNAMIC_SHAPE, operator, "the size of the result depends on values")
        if operator.takes_index_list and any(i is not None and i.dtype in _MASKS for i in args[1]):
            self._end(Rule.BOOLEAN_INDEX, operator, "an index is a mask")
        if operator.is_scatter:
            self._add(Rule.SCATTER, operator, "use index_copy_, index_add or where")
        if not operator.may_take_wide:
            for tensor in operands:
                if tensor.dim() and tensor.dtype in _WIDE:
                    self._check_wide(operator, tensor)
        for written in (*(args[i] for i in operator.written), *map(kwargs.get, operator.written_names)):
            for tensor in tree_leaves(written):
                if isinstance(tensor, torch.Tensor) and _is_partial(tensor):
                    self._add(Rule.VIEW_WRITE, operator, f"writes {tuple(tensor.shape)} of a larger tensor")

    def _check_wide(self, operator: Operator, tensor: torch.Tensor) -> None:
        if operator.reads_indices and self._is_own_index(tensor):
            detail = f"reads the int64 indices {tuple(tensor.shape)} that another operator has just found"
            self._add(Rule.WIDE_DTYPE, operator, detail, Severity.NOTE, _INDEX_SOURCES)
        else:
            self._add(Rule.WIDE_DTYPE, operator, f"takes {tensor.dtype} {tuple(tensor.shape)}")

    def _check_results(self, operator: Operator, results: list[torch.Tensor]) -> None:
        for tensor in results:
            is_wide = tensor.dim() and tensor.dtype in _WIDE
            if is_wide and not (operator.may_make_wide or self._is_own_index(tensor)):
                self._add(Rule.WIDE_DTYPE, operator, f"makes {tensor.dtype} {tuple(tensor.shape)}")

    def _mark_own_indices(
        self, operator: Operator, operands: list[torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        """Remember indices that the device has computed itself; views of them share their memory."""
        if operator.makes_indices or (operator.keeps_indices and any(map(self._is_own_index, operands))):
            for tensor in results:
                if tensor.dtype == torch.int64:
                    self._own_indices.add(memory_key(tensor))

    def _is_own_index(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype == torch.int64 and memory_key(tensor) in self._own_indices

    def _add(
        self,
        rule: Rule,
        operator: Operator,
        detail: str,
        severity: Severity = Severity.FORBIDDEN,
        shown_by: tuple[str, ...] = (),
    ) -> None:
        source = calling_line(_HERE)
        finding = Finding(rule, operator.name, source, detail, severity, shown_by)
        self.tally.findings.setdefault(finding.key, finding)

    def _end(self, rule: Rule, operator: Operator, detail: str) -> None:
        self._add(rule, operator, detail)
        raise TraceEnded(detail)


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
class _Like:
    """A tensor without memory."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def make(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def without_memory(result: Any) -> Any:
    """A result with descriptions in place of its tensors, which keeps none of them alive."""
    return tree_map_only(
        torch.Tensor, lambda tensor: _Like(tensor.shape, tensor.dtype, tensor.device), result
    )


def _is_partial(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
