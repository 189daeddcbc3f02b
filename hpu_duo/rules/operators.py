"""Descriptions of torch operators, from which rules and the simulation on a host follow."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch._ops import OpOverload

from hpu_duo.rules.native import Engine, native_operators

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
"""Operators whose results hold the same numbers, possibly in a narrower dtype."""

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
        is_composite: made of other operators, which are checked instead.
        is_view: returns views and launches nothing.
        written: positions of positional arguments that it changes.
        written_names: keyword arguments that it changes.
        transfer: how it may cross the bus.
        is_dynamic: the size of its result depends on values.
        is_scatter: writes to scattered places.
        may_make_wide, may_take_wide: 64-bit results or operands are its only form, or about to end.
        makes_indices: its results hold indices that the device computed, below the size of a dimension.
        keeps_numbers: its results hold the numbers of an operand: a view, or a copy, of another type perhaps.
        reads_indices: it looks up entries by index.
        index: position of an index argument, and of the dimension; None for an operator without.
        takes_index_list: ``aten.index`` and its relatives, with a list of indices.
        needs_long: torch's CPU kernel insists on int64 for this index.
        overwrites: it writes entries by index, of which the last one stays where an index repeats.
        is_strided: it makes a view by strides.
        is_random: its result depends on the state of a random number generator.
        engine: that it keeps busy; None for an operator that public sources do not show on HPU.
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
    """``aten.index_copy_.default`` is ``index_copy_``; other namespaces keep theirs."""
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
