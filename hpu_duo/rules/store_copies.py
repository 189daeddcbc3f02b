"""Copies of whole stores in the graph of a compiled region, by the conditions of Gaudi's compiler.

A compiler sees a region as a function: what the region writes in place becomes an ``index_copy`` that makes a
new tensor, and a final ``copy_`` into the region's input. A pass makes one write in place of the two, or else
the whole store is copied twice, to write a few vectors.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import fx

from hpu_duo.rules.operators import OpOverload, describe

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

    A store is an input of one of ``layouts``, or a view of one, that an ``index_copy`` writes. It is
    written in place if the write takes the input itself and no view of it, and the input has exactly two
    users, the write and the final ``copy_``.

    Args:
        graph: without mutations but those of its inputs, as ``aot_autograd`` makes it with
            ``keep_inference_input_mutations``.
        layouts: of stores; None for all inputs. Others that a graph writes, such as positions of slots, are
            small, and may be copied.
        strict: as release 1.19.0 of the bridge does it. Later public sources also allow reads before the
            write, and a second write of what the first one made.

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
            reason = "it makes as much as the store holds"
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
