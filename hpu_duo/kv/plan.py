"""Memory plan: the sizes of the KV stores in bytes, computed before allocation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TypeAlias

from bias_builders import Window
from hpu_duo.config.limits import SchedulerConfig
from kernels_ref import (
    PLAIN,
    Blocks,
    Budget,
    ChosenBlocks,
    GroupKind,
    HeadGroup,
    KVFormat,
    LatentBlocks,
    LatentRings,
    LatentSize,
    Owner,
    QuestBlocks,
    Rings,
    RowKind,
    StoreTurn,
    WholePrompts,
)
from kernels_ref.formats import LATENT

_GIB = 1 << 30
_FLOAT32 = 4

SparseKind: TypeAlias = Blocks | ChosenBlocks | QuestBlocks
"""Kinds of heads that may skip stored tokens."""


def head_groups(
    num_retrieval: int, num_streaming: int, window: Window | None, slack: int = 0, num_windowed: int = 0
) -> tuple[HeadGroup, ...]:
    """The groups of a layer of retrieval heads, which store blocks, and streaming heads, which store rings.

    Args:
        num_retrieval, num_streaming: KV heads of each, 0 or more.
        window: of the streaming heads; only needed if there are any.
        slack: slots of a ring beyond its window.
        num_windowed: retrieval heads of which drafts read a window, behind the others.

    Raises:
        ValueError: there are no heads, or streaming heads without a window.
    """
    if min(num_retrieval, num_streaming) < 0 or num_retrieval + num_streaming < 1:
        raise ValueError(
            f"expected 1 KV head or more, got {num_retrieval} retrieval and {num_streaming} streaming heads"
        )
    counts = ((num_retrieval - num_windowed, Blocks()), (num_windowed, Blocks(drafts_in_window=True)))
    groups = [HeadGroup(count, kind) for count, kind in counts if count]
    if num_streaming:
        if window is None:
            raise ValueError(f"expected a window for {num_streaming} streaming heads, got none")
        groups.append(HeadGroup(num_streaming, Rings(window, slack)))
    return tuple(groups)


def budget_groups(num_retrieval: int, num_budget: int, budget: Budget) -> tuple[HeadGroup, ...]:
    """The groups of a layer: heads that store blocks, and heads with a budget, each if there are any."""
    counts = ((num_retrieval, Blocks()), (num_budget, budget))
    return tuple(HeadGroup(count, kind) for count, kind in counts if count)


def sparse_groups(kinds: Sequence[GroupKind]) -> tuple[list[int], tuple[HeadGroup, ...]]:
    """The groups of a layer whose heads store blocks, each of its kind; dense ones come first.

    Returns:
        the number of each head's group, and the groups.
    """
    distinct = sorted(dict.fromkeys(kinds), key=lambda kind: kind != Blocks())
    numbers = [distinct.index(kind) for kind in kinds]
    groups = (HeadGroup(numbers.count(number), kind) for number, kind in enumerate(distinct))
    return numbers, tuple(groups)


def with_latents(groups: tuple[HeadGroup, ...], latent: tuple[int, int] | None) -> tuple[HeadGroup, ...]:
    """Return the groups of a layer with latents stored in place of the keys and values of each head.

    A layer with groups that are neither of blocks nor of rings keeps its groups, and one with more than one
    group of either, each of which would store all latents.

    Args:
        latent: elements of a latent of the layer, and of its rotary part; None = it has none.
    """
    kinds = [type(group.kind) for group in groups]
    if latent is None or not {*kinds} <= {Blocks, Rings} or len(set(kinds)) < len(kinds):
        return groups
    size, found = LatentSize(*latent), list[GroupKind]()
    for kind in (group.kind for group in groups):
        if isinstance(kind, Rings):
            found.append(LatentRings(kind.window, kind.slack, size))
        else:
            assert isinstance(kind, Blocks)
            found.append(LatentBlocks(kind.rule, size))
    return tuple(replace(group, kind=kind) for group, kind in zip(groups, found))


def in_format(
    groups: Iterable[HeadGroup], of_blocks: KVFormat, of_rows: KVFormat = PLAIN
) -> tuple[HeadGroup, ...]:
    """Return the groups of a layer with a format of keys and values.

    Args:
        of_blocks: of units of blocks.
        of_rows: of units of rows: rings, and heads with a budget.

    Raises:
        ValueError: heads of a group cannot store their keys in the format.
    """
    return tuple(
        replace(group, format=of_blocks if group.kind.owner is Owner.BLOCK else of_rows) for group in groups
    )


def ring_slack(decode_len: int) -> int:
    """Return the slots of a ring beyond its window.

    The first token that a row decodes in a step still attends to the slot that the last one overwrites.
    """
    return decode_len - 1


def widest_row(groups: Iterable[HeadGroup]) -> int:
    """Most tokens of its ring that a token attends to; 0 without rings."""
    return max((group.kind.reach or 0 for group in groups if group.kind.owner is Owner.ROW), default=0)


def chunk_grid(groups: Iterable[HeadGroup]) -> int:
    """Return the grid of chunk ends that kinds of heads need, in tokens; 0 if none needs one."""
    return max((group.kind.chunk_grid for group in groups), default=0)


def last_chunk(groups: Iterable[HeadGroup]) -> int:
    """Return the minimum length of a prompt's last chunk; 0 if no kind of heads needs one.

    A chunk has at least two tokens: one is a decode, which chooses pages. Heads that choose once, after the
    last chunk, observe its queries.
    """
    lengths = [
        2 if isinstance(kind, QuestBlocks) else max(2, kind.policy.num_observed or 0)
        for kind in (group.kind for group in groups)
        if isinstance(kind, QuestBlocks | WholePrompts)
    ]
    return max(lengths, default=0)


@dataclass(frozen=True)
class LayerKV:
    """Keys and values that one layer stores per token, and further states that it stores per request.

    Attributes:
        groups: its KV heads; none in a layer with states only, which has head size 0.
        head_dim: elements of a key.
        value_head_dim: elements of a value; None means ``head_dim``.
        rows: kinds of state that each row has besides the keys and values of its heads.
        source: number of an earlier layer with the same keys and values, whose stores this one reads; None if
            its stores are its own.
    """

    groups: tuple[HeadGroup, ...]
    head_dim: int
    value_head_dim: int | None = None
    rows: tuple[RowKind, ...] = ()
    source: int | None = None

    def __post_init__(self) -> None:
        if not self.groups:
            if not self.rows:
                raise ValueError("a layer must have at least one KV head, got no group of them")
            return
        if self.head_dim < 1 or (self.value_head_dim is not None and self.value_head_dim < 1):
            raise ValueError(
                f"head_dim and value_head_dim must be 1 or more, "
                f"got {self.head_dim} and {self.value_head_dim}"
            )
        if self.value_head_dim == self.head_dim:
            object.__setattr__(self, "value_head_dim", None)

    @property
    def own_groups(self) -> tuple[HeadGroup, ...]:
        """Groups that have stores in this layer: all, or none if it reads those of another layer."""
        return self.groups if self.source is None else ()

    @property
    def stores_latents(self) -> bool:
        """Whether groups store latents, which heads on all ranks read."""
        return any(group.format == LATENT for group in self.groups)

    @property
    def num_heads(self) -> int:
        """KV heads of all groups."""
        return sum(group.num_heads for group in self.groups)

    @property
    def value_dim(self) -> int:
        """Elements of a value."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    @property
    def elements_per_head(self) -> int:
        """Elements of one token's key and value in one head."""
        return self.head_dim + self.value_dim

    def token_bytes(self, group: HeadGroup, dtype_bytes: int) -> int:
        """Bytes of one token's key and value in one head of a group, as they are stored."""
        return group.format.token_bytes(*group.kind.stored_dims(self.head_dim, self.value_dim), dtype_bytes)

    @property
    def has_row_states(self) -> bool:
        """Whether a row has any state in the layer."""
        return bool(self.rows) or any(group.kind.owner is Owner.ROW for group in self.own_groups)

    def unit_bytes(
        self, group: HeadGroup, dtype_bytes: int, block_size: int, *, with_state: bool = True
    ) -> int:
        """Bytes of one unit of a group, by default with the state of its slots."""
        token_bytes = self.token_bytes(group, dtype_bytes) + (group.kind.state_bytes if with_state else 0)
        return group.kind.unit_bytes(group.num_heads, token_bytes, block_size)

    def row_state_bytes(self, dtype_bytes: int, block_size: int) -> tuple[int, ...]:
        """Bytes of one row of each state: of groups with units of rows, then of further kinds."""
        of_groups = (
            self.unit_bytes(group, dtype_bytes, block_size)
            for group in self.own_groups
            if group.kind.owner is Owner.ROW
        )
        return (*of_groups, *(kind.row_bytes for kind in self.rows))

    @property
    def without_slack(self) -> LayerKV:
        """The same without slots that no token attends to."""
        groups = tuple(replace(group, kind=group.kind.without_slack) for group in self.groups)
        return replace(self, groups=groups)


def shared_source(
    source: int | None, groups: tuple[HeadGroup, ...], of_layers: Sequence[tuple[HeadGroup, ...]]
) -> int | None:
    """Return the layer whose stores a layer reads; None if it has stores of its own.

    Layers share stores of equal groups, with units that can be shared.

    Args:
        source: number of the layer with the same keys and values, None if there is none.
        groups: of the layer.
        of_layers: groups of all earlier layers at least.

    Raises:
        ValueError: the groups cannot be shared, and would be scored otherwise with stores of their own.
    """
    if source is None or groups != of_layers[source]:
        return None
    if not all(group.kind.shares_units for group in groups):
        return None
    for group in groups:
        if (problem := group.kind.problem_of_sharing) is not None:
            raise ValueError(problem)
    return source


def store_turns(layers: Sequence[LayerKV]) -> list[StoreTurn]:
    """Return the place of each layer among those that read one store."""
    last = {kv.source: number for number, kv in enumerate(layers) if kv.source is not None}
    found = []
    for number, kv in enumerate(layers):
        chooses_last = any(group.kind.chooses_last for group in kv.groups)
        if kv.source is None:
            found.append(StoreTurn.FIRST if chooses_last and number in last else StoreTurn.ONLY)
        else:
            is_last = chooses_last and last[kv.source] == number
            found.append(StoreTurn.LAST if is_last else StoreTurn.NEXT)
    return found


@dataclass(frozen=True)
class MemoryPlan:
    """The number and shape of all KV tensors, and their sizes.

    Each group of each layer has a store of ``[num_units, K, num_slots]`` keys and values in its format, with
    ``num_blocks + 1`` units for units of blocks, and ``max_num_seqs + num_snapshots + 1`` for units of rows;
    the additional one is the null unit of padding. Kinds with a scratch have one of ``max_chunk_rows`` units
    as well, those that read whole prompts as many regions, and those with a state its bytes for each slot of
    a unit. Where several layers read one store, kinds that observe queries have sums of ``max_num_seqs + 1``
    units of slots and ``max_chunk_rows`` of candidates. Further states of a row have as many rows as units of
    rows. All sizes are exact, in bytes.

    Attributes:
        layers: one entry per decoder layer that attends, then one per layer with states only.
        dtype_bytes: bytes of one element of the model's dtype, in which plain keys and values are.
        block_size: tokens per block.
        max_num_seqs: rows that can be allocated.
        num_blocks: blocks that can be allocated; not used if no group stores blocks.
        graph_bytes: device memory reserved for captured graphs, in addition to the stores.
        max_chunk_rows: rows that are copied to a scratch in one step (C), for kinds of heads with one.
        num_snapshots: further rows, for rings of cached prefixes.
        others: layers of the other ranks of the model, whose stores are not counted.
        full_dtype_bytes: bytes of one element of the cache that full attention would have, which is in the
            dtype of ``kv_cache_dtype="auto"``; None = ``dtype_bytes``.
    """

    layers: tuple[LayerKV, ...]
    dtype_bytes: int
    block_size: int
    max_num_seqs: int
    num_blocks: int
    graph_bytes: int = 0
    max_chunk_rows: int = SchedulerConfig.max_chunk_rows
    num_snapshots: int = 0
    others: tuple[tuple[LayerKV, ...], ...] = ()
    full_dtype_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers must name at least one layer, got none")
        for name in ("dtype_bytes", "block_size", "max_num_seqs", "max_chunk_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        for number, layer in enumerate(self.layers):
            self._check_source(number, layer)
        if self.graph_bytes < 0:
            raise ValueError(f"graph_bytes must be 0 or more, got {self.graph_bytes}")
        if self.num_blocks < (1 if self.uses_blocks else 0):
            raise ValueError(
                f"num_blocks is too small for layers with retrieval heads: got {self.num_blocks}"
            )

    def _check_source(self, number: int, layer: LayerKV) -> None:
        source = layer.source
        if source is None:
            return
        if not 0 <= source < number or self.layers[source].source is not None:
            raise ValueError(
                f"expected the source of layer {number} to be an earlier layer with stores of its own, got "
                f"{source}"
            )
        found = self.layers[source]
        sizes = (layer.groups, layer.head_dim, layer.elements_per_head)
        if sizes != (found.groups, found.head_dim, found.elements_per_head):
            raise ValueError(
                f"expected layers {source} and {number}, which share stores, to have the same heads, got "
                f"{found.groups} and {layer.groups}"
            )

    @classmethod
    def from_budget(
        cls,
        layers: tuple[LayerKV, ...],
        *,
        dtype_bytes: int,
        block_size: int,
        max_num_seqs: int,
        kv_cache_bytes: int,
        graph_bytes: int = 0,
        max_chunk_rows: int = SchedulerConfig.max_chunk_rows,
        num_snapshots: int = 0,
    ) -> MemoryPlan:
        """The plan with the most blocks whose ``total_bytes`` is at most ``kv_cache_bytes``.

        Rows are allocated first, blocks use the rest. Without groups that store blocks there are none.

        Raises:
            ValueError: the budget is too small for all rows and one block per row (and the null unit of
                both).
        """
        sizes = (dtype_bytes, block_size, max_num_seqs, max_num_seqs, graph_bytes)
        plan = cls(layers, *sizes, max_chunk_rows, num_snapshots)
        if kv_cache_bytes < plan.total_bytes:
            raise ValueError(
                f"the KV cache needs at least {_show(plan.total_bytes)} for {max_num_seqs} requests with one "
                f"block of {block_size} tokens each, got {_show(kv_cache_bytes)}"
            )
        if not plan.uses_blocks:
            return replace(plan, num_blocks=0)
        spare = (kv_cache_bytes - plan.total_bytes) // plan.block_bytes
        return replace(plan, num_blocks=max_num_seqs + spare)

    @cached_property
    def uses_blocks(self) -> bool:
        """Whether any group of heads stores blocks, here or on another rank."""
        return any(group.kind.owner is Owner.BLOCK for group in self.groups_of_ranks)

    @cached_property
    def uses_rows(self) -> bool:
        """Whether rows have any state, here or on another rank: rings of heads, for instance."""
        return any(layer.has_row_states for layer in self.layers_of_ranks)

    @cached_property
    def can_rewind(self) -> bool:
        """Whether the further states of rows can be rolled back; see ``RowKind.can_rewind``."""
        return all(kind.can_rewind for layer in self.layers_of_ranks for kind in layer.rows)

    def takes_back(self, num_tokens: int) -> bool:
        """Whether the further states of rows can be rolled back by so many tokens of a decode."""
        kinds = (kind for layer in self.layers_of_ranks for kind in layer.rows)
        return all(kind.can_rewind or kind.decode_slack >= num_tokens for kind in kinds)

    @property
    def layers_of_ranks(self) -> Iterator[LayerKV]:
        """All layers, here and on other ranks."""
        return chain(self.layers, *self.others)

    @property
    def groups_of_ranks(self) -> Iterator[HeadGroup]:
        """Groups of heads of all layers, here and on other ranks."""
        return (group for layer in self.layers_of_ranks for group in layer.groups)

    @cached_property
    def budgets(self) -> frozenset[int]:
        """Tokens that heads with a KV budget store, here or on another rank; empty without such heads."""
        kinds = (group.kind for group in self.groups_of_ranks)
        return frozenset(kind.budget for kind in kinds if isinstance(kind, Budget))

    @cached_property
    def uses_block_positions(self) -> bool:
        """Whether any group of heads needs the positions of whole blocks."""
        return any(group.kind.needs_block_positions for layer in self.layers for group in layer.groups)

    @cached_property
    def sparse_heads(self) -> dict[SparseKind, int]:
        """KV heads of all layers that may skip stored tokens, by kind, in the order of the heads."""
        found: dict[SparseKind, int] = {}
        for layer in self.layers:
            for group in layer.groups:
                kind = group.kind
                if isinstance(kind, ChosenBlocks | QuestBlocks) or (
                    isinstance(kind, Blocks) and kind.rule is not None
                ):
                    found[kind] = found.get(kind, 0) + group.num_heads
        return found

    @cached_property
    def uses_token_classes(self) -> bool:
        """Whether any group of heads, here or on another rank, needs the classes of tokens."""
        return any(group.kind.needs_token_classes for group in self.groups_of_ranks)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return sum(
            layer.unit_bytes(group, self.dtype_bytes, self.block_size)
            for layer in self.layers
            for group in layer.own_groups
            if group.kind.owner is Owner.BLOCK
        )

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row in all layers."""
        return sum(sum(layer.row_state_bytes(self.dtype_bytes, self.block_size)) for layer in self.layers)

    def num_units(self, kind: GroupKind) -> int:
        """Units of a store of this kind, the null unit included."""
        return self.null_unit(kind) + 1

    def null_unit(self, kind: GroupKind) -> int:
        """Id of the null unit of padding, after those that are allocated."""
        return self.num_blocks if kind.owner is Owner.BLOCK else self.null_row

    @property
    def null_row(self) -> int:
        """Id of the null row of padding, after those of requests and of snapshots."""
        return self.max_num_seqs + self.num_snapshots

    def token_bytes(self, layer: LayerKV, group: HeadGroup) -> int:
        """Bytes of one token's key and value in one head of a group of a layer, as they are stored."""
        return layer.token_bytes(group, self.dtype_bytes)

    @cached_property
    def scratch_bytes(self) -> int:
        """Bytes of buffers within a step, of all layers.

        Scratches of rows, regions of whole prompts, and sums over layers that read one store.
        """
        scratches = sum(
            layer.unit_bytes(group, self.dtype_bytes, self.block_size, with_state=False)
            for layer in self.layers
            for group in layer.own_groups
            if group.kind.owner is Owner.ROW and group.kind.keeps_scratch
        )
        sums = sum(
            _FLOAT32 * sum(map(math.prod, self.sum_shapes(group)))
            for number in self.read_layers
            for group in self.layers[number].own_groups
            if group.kind.num_summed
        )
        return self.max_chunk_rows * (scratches + self._region_bytes) + sums

    @cached_property
    def read_layers(self) -> frozenset[int]:
        """Numbers of layers whose stores other layers read."""
        return frozenset(layer.source for layer in self.layers if layer.source is not None)

    def sum_shapes(self, group: HeadGroup) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of the tensors of ``ReaderSums`` for a group of heads that observes queries."""
        slots = group.num_heads * group.kind.num_slots(self.block_size)
        of_chunk = self.max_chunk_rows, group.num_heads * group.kind.num_summed
        return (self.max_num_seqs + 1, slots), of_chunk

    @property
    def num_regions(self) -> int:
        """Regions for whole prompts of a layer, here or on another rank; 0 without such heads."""
        return self.max_chunk_rows if any(group.kind.region_len for group in self.groups_of_ranks) else 0

    @cached_property
    def _region_bytes(self) -> int:
        return sum(
            group.kind.region_bytes(group.num_heads, layer.elements_per_head * self.dtype_bytes)
            for layer in self.layers
            for group in layer.own_groups
        )

    @property
    def without_slack(self) -> MemoryPlan:
        """The same without slots that no token attends to."""
        return replace(self, layers=tuple(layer.without_slack for layer in self.layers))

    @property
    def total_bytes(self) -> int:
        """Bytes of all KV tensors, the null block, the null row and the scratch included."""
        of_rows = (self.null_row + 1) * self.row_bytes
        return (self.num_blocks + 1) * self.block_bytes + of_rows + self.scratch_bytes

    @property
    def max_tokens(self) -> int | None:
        """Tokens that fit into all blocks; None if no head needs blocks, so that tokens are unbounded."""
        return self.num_blocks * self.block_size if self.uses_blocks else None

    def bytes_per_request(self, num_tokens: int) -> int:
        """Bytes that a request with ``num_tokens`` cached tokens is allocated: whole blocks and its row."""
        return -(-num_tokens // self.block_size) * self.block_bytes + self.row_bytes

    def full_attention_bytes(self, num_tokens: int) -> int:
        """Bytes of ``num_tokens`` tokens if every head of every layer stored all, unquantised.

        Not rounded to blocks: the smallest possible full cache, so ratios to it are conservative.
        """
        return num_tokens * (self.full_dtype_bytes or self.dtype_bytes) * self._elements_per_token

    @cached_property
    def _elements_per_token(self) -> int:
        return sum(layer.num_heads * layer.elements_per_head for layer in self.layers if layer.source is None)


def _show(num_bytes: int) -> str:
    return f"{num_bytes} bytes ({num_bytes / _GIB:.3f} GiB)"
