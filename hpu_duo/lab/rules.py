"""Rules for steps on an HPU, and descriptions of the torch operators that they concern."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
from torch import fx
from torch._ops import OpOverload

from graphs.backends.base import MOST_OPERATORS
from hpu_duo import device

REGION_NODES = 600
"""Nodes of a graph that is compiled by itself, such as a layer: some seconds to trace and to compile."""

STEP_OPERATORS = MOST_OPERATORS
"""Operators of a step that is captured whole."""

_TABLE = Path(__file__).with_name("operators.json")


class Engine(str, Enum):
    """Engine of the device that an operator runs on.

    ``MATRIX``: the matrix engine. ``VECTOR``: whatever computes elements, on the programmable cores.
    ``MEMORY``: moves data and computes nothing, whichever unit does it. ``VIEW``: nothing at all.
    """

    MATRIX = "matrix"
    VECTOR = "vector"
    MEMORY = "memory"
    VIEW = "view"


@dataclass(frozen=True)
class NativeOperator:
    """An operator that public sources show on HPU.

    Attributes:
        name: without overload, such as ``index_copy_``.
        engine: assigned by this project, from the operator's computation.
        sources: keys of ``native_sources()``.
    """

    name: str
    engine: Engine
    sources: tuple[str, ...]


@cache
def native_operators() -> Mapping[str, NativeOperator]:
    """The operators of the table by name; the vendor's own are those that begin with ``hpu.``."""
    entries = json.loads(_TABLE.read_text(encoding="utf-8"))["operators"]
    return MappingProxyType(
        {
            name: NativeOperator(name, Engine(entry["engine"]), tuple(entry["sources"]))
            for name, entry in entries.items()
        }
    )


@cache
def native_sources() -> Mapping[str, str]:
    """Sources that show the operators of the table, by key."""
    sources: dict[str, str] = json.loads(_TABLE.read_text(encoding="utf-8"))["sources"]
    return MappingProxyType(sources)


_UNTOLD = (str(Path(torch.__file__).parent), str(Path(device.__file__).parent), __file__, "<")
"""Beginnings of the paths of code that no finding names."""


class Rule(str, Enum):
    """The rules; the value of each is its name in reports.

    ``DYNAMIC_SHAPE``: the size of a result depends on values, so the host must wait for it and every size is
    compiled anew. ``BOOLEAN_INDEX``: the same, hidden in an index. ``MIXED_DEVICES``: operands in host memory
    and on the device. ``WIDE_DTYPE``: an int64 or float64 tensor, which the device narrows silently.
    ``BAD_INDEX``: an index below zero or past the end, undefined on the device. ``VIEW_WRITE``: a write
    through a view of a part of a tensor, which graphs do not support. ``SCATTER``: ``index_put`` and
    ``scatter``, slow or not native. ``HOST_IN_GRAPH``: a transfer or a wait inside a captured graph.
    ``HOST_WAIT``: the host waits for a value outside of one. ``GRAPH_CHANGED``: a replay that computes
    something else than was captured. ``GRAPH_SIZE``: more operators than compile in reasonable time.
    ``STORE_COPY``: a graph that copies a whole store to write a few vectors. ``REPEATED_INDEX``: a write to
    the same place twice, of which either may win, outside of null units. ``AS_STRIDED``: a view by strides,
    of an unknown part of its base. ``UNKNOWN_OPERATOR``: one that public sources do not show on HPU.
    ``FLOAT_TYPE``: a product with a weight in another float type than its own, or float16 in a model of
    another type. ``RANDOM_IN_GRAPH``: random numbers inside a captured graph, the same in each replay.
    ``NAN``: NaN computed from numbers that are none. ``COPY_RACE``: memory of a copy on a stream of its own
    that changes before the copy has ended.
    """

    DYNAMIC_SHAPE = "data-dependent output shape"
    BOOLEAN_INDEX = "index that is a boolean mask"
    MIXED_DEVICES = "operands on two devices"
    WIDE_DTYPE = "64-bit tensor"
    BAD_INDEX = "index out of range"
    VIEW_WRITE = "write through a partial view"
    SCATTER = "scattered write"
    HOST_IN_GRAPH = "host transfer inside a graph"
    HOST_WAIT = "host waits for a value"
    GRAPH_CHANGED = "replay differs from capture"
    GRAPH_SIZE = "graph above the limit"
    STORE_COPY = "copy of a whole store"
    REPEATED_INDEX = "write to a place twice"
    AS_STRIDED = "view by strides"
    UNKNOWN_OPERATOR = "operator that sources do not show"
    FLOAT_TYPE = "float type other than the model's"
    RANDOM_IN_GRAPH = "random numbers inside a graph"
    NAN = "NaN computed from numbers"
    COPY_RACE = "memory changed under a copy"


class HpuRuleViolation(RuntimeError):
    """A step did what an HPU does badly, wrongly or not at all.

    Attributes:
        rule: the broken rule.
        operator: the torch operator, for example ``aten.nonzero.default``.
        source: file, line and function that called it, see ``calling_line``.
    """

    def __init__(self, rule: Rule, operator: str, source: str, detail: str) -> None:
        self.rule, self.operator, self.source = rule, operator, source
        super().__init__(f"{rule.value}: {operator} at {self.source}: {detail}")


def calling_line(*skipped: str) -> str:
    """Return the innermost line of Python outside torch and the checks, as ``path:line in function``.

    Args:
        skipped: directories of the checks, as beginnings of paths.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*_UNTOLD, *skipped)):
        frame = frame.f_back
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"


_DYNAMIC = frozenset(
    {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "histc"}
)
_SCATTERS = frozenset(
    {"index_put", "index_put_", "_index_put_impl_", "scatter", "scatter_", "scatter_add", "scatter_add_"}
    | {"scatter_reduce", "scatter_reduce_", "put", "put_", "masked_scatter", "masked_scatter_"}
)
_WIDE_RESULTS = frozenset({"argmax", "argmin", "argsort", "max", "min", "sort", "topk", "kthvalue", "mode"})
"""Operators that return indices, and have no form that returns them as int32."""

_COPIES = frozenset({"_to_copy", "copy_", "clone", "detach", "lift_fresh", "alias", "_unsafe_view"})
"""Operators with the same numbers as results, possibly in a narrower dtype."""

_INDEX_LISTS = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
_INDEX_ARGUMENT = {
    "index_select": (2, 1),
    "index_copy": (2, 1),
    "index_copy_": (2, 1),
    "index_add": (2, 1),
    "index_add_": (2, 1),
    "index_fill": (2, 1),
    "index_fill_": (2, 1),
    "gather": (2, 1),
    "embedding": (1, None),
    "take": (1, None),
}
"""Positions of the index argument and of its dimension; None: the first dimension."""

_STRIDED = frozenset({"as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"})
_OVERWRITING = frozenset({"index_copy", "index_copy_"})
_LONG_ON_CPU = frozenset({"index_copy", "index_copy_", "index_fill", "index_fill_", "gather", "take"})
_RESIZING = frozenset({"resize_", "set_", "t_", "transpose_", "squeeze_", "unsqueeze_", "swapaxes_"})


class Transfer(Enum):
    """Transfer between host and device that an operator may do."""

    NONE = "none"
    TO_COPY = "to_copy"
    COPY = "copy"
    READ = "read"


@dataclass(frozen=True)
class Operator:
    """One operator overload.

    Attributes:
        name: as torch prints it.
        is_composite: composed of other operators, which are checked instead.
        is_view: returns views and launches nothing.
        written: positions of positional arguments that it changes.
        written_names: keyword arguments that it changes.
        transfer: how it may cross the bus.
        is_dynamic: the size of its result depends on values.
        is_scatter: writes to scattered places.
        may_make_wide, may_take_wide: 64-bit results or operands are its only form, or about to end.
        makes_indices: its results are indices computed by the device, below the size of a dimension.
        keeps_numbers: its results are the numbers of an operand: a view, or a copy, possibly of another
            dtype.
        reads_indices: it looks up entries by index.
        index: position of an index argument, and of the dimension; None for an operator without.
        takes_index_list: ``aten.index`` and its relatives, with a list of indices.
        needs_long: torch's CPU kernel insists on int64 for this index.
        overwrites: it writes entries by index, of which the last one stays where an index repeats.
        is_strided: its result is a view by strides.
        is_random: its result depends on the state of a random number generator.
        engine: that it runs on; None for an operator that public sources do not show on HPU.
    """

    name: str
    is_composite: bool
    is_view: bool
    written: tuple[int, ...]
    written_names: tuple[str, ...]
    transfer: Transfer
    is_dynamic: bool
    is_scatter: bool
    may_make_wide: bool
    may_take_wide: bool
    makes_indices: bool
    keeps_numbers: bool
    reads_indices: bool
    index: tuple[int, int | None] | None
    takes_index_list: bool
    needs_long: bool
    overwrites: bool
    is_strided: bool
    is_random: bool
    engine: Engine | None


def base_name(func: OpOverload) -> str:
    """``aten.index_copy_.default`` is ``index_copy_``; other namespaces are not removed."""
    namespace, _, name = func._schema.name.partition("::")
    return name if namespace == "aten" else f"{namespace}.{name}"


def describe(func: OpOverload) -> Operator:
    """Read an operator's schema and look it up in the tables of this file.

    Raises:
        NotImplementedError: it changes the shape of a tensor in place.
    """
    name = func._schema.name.partition("::")[2]
    if name in _RESIZING:
        raise NotImplementedError(f"the simulated HPU has no {func}, which reshapes a tensor in place")
    arguments = func._schema.arguments
    written = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    names = [a.name for a in arguments]
    is_view = not written and any(
        r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
    )
    native = native_operators().get(base_name(func))
    return Operator(
        name=str(func),
        is_composite=_is_composite(func),
        is_view=is_view,
        written=tuple(names.index(a.name) for a in written if not a.kwarg_only),
        written_names=tuple(a.name for a in written if a.kwarg_only),
        transfer=_transfer(name),
        is_dynamic=name in _DYNAMIC or func is torch.ops.aten.repeat_interleave.Tensor,
        is_scatter=name in _SCATTERS,
        may_make_wide=is_view or name in _WIDE_RESULTS,
        may_take_wide=is_view or name in _COPIES,
        makes_indices=name in _WIDE_RESULTS,
        keeps_numbers=is_view or name in _COPIES,
        reads_indices=name in _INDEX_ARGUMENT or name in _INDEX_LISTS,
        index=_INDEX_ARGUMENT.get(name),
        takes_index_list=name in _INDEX_LISTS,
        needs_long=name in _LONG_ON_CPU,
        overwrites=name in _OVERWRITING,
        is_strided=name in _STRIDED,
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        engine=native.engine if native is not None else None,
    )


def _is_composite(func: OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _transfer(name: str) -> Transfer:
    match name:
        case "_to_copy":
            return Transfer.TO_COPY
        case "copy_":
            return Transfer.COPY
        case "_local_scalar_dense" | "equal":
            return Transfer.READ
        case _:
            return Transfer.NONE


_WRITE = torch.ops.aten.index_copy.default
_RETURN = torch.ops.aten.copy_.default

Layout: TypeAlias = tuple[torch.Size, torch.dtype]
"""Shape and dtype of a tensor."""


@dataclass(frozen=True)
class StoreCopy:
    """A store that a graph copies.

    Attributes:
        store: the input of the graph.
        operator: what copies it.
        num_bytes: of one copy.
        reason: why it is copied.
    """

    store: str
    operator: str
    num_bytes: int
    reason: str


def store_copies(
    graph: fx.Graph, *, layouts: Collection[Layout] | None = None, strict: bool = True
) -> tuple[StoreCopy, ...]:
    """Find the copies of stores in a graph.

    A store is an input of one of ``layouts``, or a view of one, that an ``index_copy`` writes. It is written
    in place if the write has the input itself as argument, not a view of it, and the input has exactly two
    users, the write and the final ``copy_``.

    Args:
        graph: without mutations except those of its inputs, as ``aot_autograd`` returns it with
            ``keep_inference_input_mutations``.
        layouts: of stores; None for all inputs. Others that a graph writes, such as positions of slots, are
            small, and may be copied.
        strict: as release 1.19.0 of the bridge does it. Later public sources also allow reads before the
            write, and a second write of the first one's result.

    Source: gaudi-pytorch-bridge 1.19.0, ``pass_reinplace_index_copy_ops``, and for the later ones
    ``pass_reinplace_inplaceable_ops_v2``.
    """
    written = (_store_of(node.args[0]) for node in graph.nodes if node.target is _WRITE)
    stores = {store for store in written if store and (layouts is None or _layout(store) in layouts)}
    in_place: set[fx.Node] = set()
    found = []
    for node in graph.nodes:
        if node.op != "call_function" or not node.args:
            continue
        source = node.args[0]
        store = _store_of(source)
        if store is None or store not in stores:
            continue
        reason = None
        if node.target is _WRITE:
            reason = _why_copied(source, store, in_place, strict)
            if reason is None:
                in_place.add(node)
        elif node.target is not _RETURN and not _is_view(node) and _num_bytes(node) >= _num_bytes(store):
            reason = "its result is as large as the store"
        if reason is not None:
            found.append(StoreCopy(store.name, str(node.target), _num_bytes(store), reason))
    return tuple(found)


def _why_copied(source: fx.Node, store: fx.Node, in_place: set[fx.Node], strict: bool) -> str | None:
    """Why a write of ``source`` is not done in place, or None."""
    if source is not store:
        if not strict and source in in_place:
            return None
        what = "the result of another write" if source.target is _WRITE else "a view"
        return f"it writes {what}, where the store itself is expected"
    users = [user.target for user in store.users]
    if strict and sorted(map(str, users)) != sorted(map(str, (_WRITE, _RETURN))):
        names = ", ".join(sorted(str(user) for user in users))
        return f"the store has {len(users)} users, where a write and the final copy_ are expected: {names}"
    return None if _RETURN in users else "nothing is written back"


def _store_of(node: object) -> fx.Node | None:
    """The input that a node is, shows a view of, or is a newer state of."""
    while isinstance(node, fx.Node):
        if node.op == "placeholder":
            return node
        if node.op != "call_function" or not (node.target is _WRITE or _is_view(node)) or not node.args:
            return None
        node = node.args[0]
    return None


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and describe(node.target).is_view


def _layout(node: fx.Node) -> Layout | None:
    value = node.meta.get("val")
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None


def _num_bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


class _Use(Enum):
    READ = auto()
    WRITTEN = auto()


class StoreOperand(NamedTuple):
    """A store among the operands of an operator.

    Attributes:
        memory: of the store, as a number.
        is_view: whether the operand is a view of it.
    """

    memory: int
    is_view: bool


class StoreUse:
    """Follows the stores through one graph after the other."""

    def __init__(self) -> None:
        self._uses: dict[int, _Use] = {}

    def begin_graph(self) -> None:
        """Begin a graph of its own, such as a layer."""
        self._uses.clear()

    def problem(self, operator: Operator, operands: Iterable[StoreOperand | None]) -> str | None:
        """Note an operator.

        Args:
            operator: about to run.
            operands: its tensors, in order; None for those that are no store.

        Returns:
            Why a store would be copied, or None.
        """
        if operator.is_view:
            return None
        found = None
        for place, operand in enumerate(operands):
            if operand is None:
                continue
            memory, is_view = operand
            if place not in operator.written:
                self._uses.setdefault(memory, _Use.READ)
                continue
            before = self._uses.get(memory)
            if is_view:
                found = "writes a view of a store, where the store itself is expected"
            elif before is not None:
                what = "written" if before is _Use.WRITTEN else "read"
                found = f"writes a store that the same graph has {what} before"
            self._uses[memory] = _Use.WRITTEN
        return found


__all__ = [
    "REGION_NODES",
    "STEP_OPERATORS",
    "Engine",
    "HpuRuleViolation",
    "NativeOperator",
    "OpOverload",
    "Operator",
    "Rule",
    "StoreCopy",
    "StoreOperand",
    "StoreUse",
    "Transfer",
    "base_name",
    "calling_line",
    "describe",
    "native_operators",
    "native_sources",
    "store_copies",
]
