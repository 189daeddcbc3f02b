"""Attention on the host as operators, at which graphs of layers are cut.

Shapes: Q query tokens, N rows, M most tokens of a decode row, K key/value heads, G query heads of each.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from graphs.backends.compile import cut_at
from kernels_ref import Step
from kernels_ref.impl import Kernels
from kernels_ref.partial import unpacked
from kernels_ref.step import PartInputs
from kernels_ref.unified import ElsewherePartials


class MeetsHost(Protocol):
    """The host's side of the cuts of a step, for the layer that runs."""

    def begin_rows(self, q: torch.Tensor, place: int, decode_len: int) -> None:
        """Begin to attend on the host for decode rows, whose queries are ``[N * M, K, G, D]``."""
        ...

    def of_rows(self, q: torch.Tensor, place: int) -> torch.Tensor:
        """Wait for their triples, and return them on the device, float32 ``[N * M, K, G, D + 2]``."""
        ...

    def of_tokens(
        self, q: torch.Tensor, row: torch.Tensor, row_start: torch.Tensor, place: int
    ) -> torch.Tensor:
        """Attend on the device, for prompts, to blocks that move there: ``[Q, K, G, D + 2]``.

        Args:
            row: row of each token, ``[Q]``.
            row_start: tokens that each row has stored, ``[N]``.
        """
        ...


_met: weakref.WeakValueDictionary[int, MeetsHost] = weakref.WeakValueDictionary()
_library = torch.library.Library("hpu_duo_host", "DEF")


def _begin(q: torch.Tensor, host: int, place: int, value_dim: int, decode_len: int) -> torch.Tensor:
    _met[host].begin_rows(q, place, decode_len)
    return q.new_empty(0)


def _of_rows(begun: torch.Tensor, q: torch.Tensor, host: int, place: int, *_: int) -> torch.Tensor:
    return _met[host].of_rows(q, place)


def _of_tokens(
    q: torch.Tensor, row: torch.Tensor, row_start: torch.Tensor, host: int, place: int, *_: int
) -> torch.Tensor:
    return _met[host].of_tokens(q, row, row_start, place)


def _triples(q: torch.Tensor, value_dim: int) -> torch.Tensor:
    return q.new_empty((*q.shape[:-1], value_dim + 2), dtype=torch.float32)


def _operator(
    name: str, tensors: str, run: Callable[..., torch.Tensor], shape: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    _library.define(f"{name}({tensors}, int host, int place, int value_dim, int decode_len) -> Tensor")
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hpu_duo_host::{name}", shape, lib=_library)
    operator = getattr(torch.ops.hpu_duo_host, name).default
    cut_at(operator, run)
    found: Callable[..., torch.Tensor] = operator
    return found


_begin_operator = _operator("begin", "Tensor q", _begin, lambda q, *_: q.new_empty(0))
_rows_operator = _operator(
    "of_rows", "Tensor begun, Tensor q", _of_rows, lambda _, q, *sizes: _triples(q, sizes[2])
)
_tokens_operator = _operator(
    "of_tokens",
    "Tensor q, Tensor row, Tensor row_start",
    _of_tokens,
    lambda q, *others: _triples(q, others[4]),
)


def register(host: MeetsHost) -> int:
    """Return the number by which operators find the host's side, as long as it lives."""
    number = id(host)
    _met[number] = host
    return number


@dataclass(frozen=True)
class CutAttention:
    """The attention of a layer, with the same operators in every step; see ``Elsewhere``.

    Layers of one kind have equal ones, so that one graph serves all of them.

    Attributes:
        host: number of the host's side.
        places: groups of heads that store blocks.
    """

    host: int
    places: tuple[int, ...]

    def begin(
        self, place: int, run: Kernels, inputs: PartInputs, step: Step
    ) -> Callable[[], ElsewherePartials] | None:
        """Begin the attention of a group of heads."""
        parts = step.parts
        if place not in self.places or not (parts.causal or parts.unique):
            return None
        q, value_dim = inputs.q, inputs.units.encoding.value_dim
        sizes = self.host, place, value_dim, step.decode_len
        q_rows = begun = None
        if parts.unique:
            q_rows = q.index_select(0, step.row_token)
            begun = _begin_operator(q_rows, *sizes)

        def join() -> ElsewherePartials:
            of_tokens = of_rows = None
            if begun is not None:
                of_rows = unpacked(_rows_operator(begun, q_rows, *sizes))
            if parts.causal:
                plan = step.tensors.row, step.tensors.row_start
                of_tokens = unpacked(_tokens_operator(q, *plan, *sizes))
            return ElsewherePartials(of_tokens, of_rows)

        return join


def places_of(device_keys: Sequence[tuple[int, int]], layer: int) -> tuple[int, ...]:
    """Return the groups of a layer among keys of layers and groups."""
    return tuple(place for number, place in device_keys if number == layer)
