"""Groups of heads, and the protocol of their kinds.

A layer's key/value heads are a tuple of groups. A group has a *kind*, which defines the store of its keys,
the visibility of tokens, and the way in which the parts of a step run. Everything that differs between kinds
is a method here, so that layers, stores, memory plans and estimates know groups and no kind by name.

Shapes: Q query tokens, K key/value heads of the group, G query heads of each, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from kernels_ref.chunks import DEFAULT_BOUNDS, DEFAULT_SLICES, QUERY_SLICE, ChunkBounds
from kernels_ref.formats import PLAIN, KVFormat
from kernels_ref.step import DecodeRows, PartInputs, Step, StepParts, StepTensors
from kernels_ref.units import UnitLayout

if TYPE_CHECKING:
    from kernels_ref.impl import Kernels


class Owner(Enum):
    """Owner of a unit of a store, which decides the number of units.

    ``BLOCK``: a run of tokens, by the ids in block tables. ``ROW``: a running request, by its row. Each has
    one null unit after all others. A copy of a block, or of a row, applies to all its stores.
    """

    BLOCK = "block"
    ROW = "row"


class GroupKind(ABC):
    """Storage and attention of the heads of a group; a frozen dataclass of plain numbers.

    Equal kinds share the tensors that a step derives for them; layers of different kinds are compiled
    separately.

    Attributes:
        name: of the kind, in plural, as reports and fingerprints show it.
        owner: owner of its units.
        plain_format: of keys and values in the model's dtype.
    """

    name: ClassVar[str]
    owner: ClassVar[Owner]
    plain_format: ClassVar[KVFormat] = PLAIN

    @property
    @abstractmethod
    def key(self) -> tuple[Hashable, ...]:
        """Name and numbers: plain values by which compiled code finds the step's tensors for the kind."""

    @property
    @abstractmethod
    def reach(self) -> int | None:
        """Most tokens of its request that a token sees, itself included; None = all of them."""

    @abstractmethod
    def describe(self) -> str:
        """Describe the visibility; empty for all tokens, and distinct for kinds of distinct visibility."""

    @abstractmethod
    def num_slots(self, block_size: int) -> int:
        """Number of slots of a unit."""

    @property
    def keeps_scratch(self) -> bool:
        """Whether prompts read units as they were before the step, from copies: ``KVUnits.scratch``.

        A compiled layer writes a store in place if it writes it once and reads it only afterwards. So what a
        prompt overwrites has to be copied outside of the layer. Only for kinds whose units belong to rows.
        """
        return False

    @property
    def chunk_grid(self) -> int:
        """Positions between the ends of chunks of a prompt, for kinds that depend on them; else 0."""
        return 0

    @property
    def shares_blocks(self) -> bool:
        """Whether what a prompt stores of a whole block depends only on the text up to its end."""
        return True

    @property
    def takes_any_format(self) -> bool:
        """Whether its units may have formats other than plain floats."""
        return True

    @property
    def shares_units(self) -> bool:
        """Whether a layer with the same keys and values may read the units of another one."""
        return False

    @property
    def attends_for_some(self) -> bool:
        """Whether a layer that stores nothing may attend for the newest tokens of each row: ``Step.keys``."""
        return False

    @property
    def chooses_last(self) -> bool:
        """Whether the last layer that reads a store scores its tokens and stores those of prompts.

        Other kinds store all new tokens in the first layer.
        """
        return False

    @property
    def num_summed(self) -> int:
        """Most candidates of a prompt row whose weights are summed over layers that share a store; 0 = none.

        If not 0, such layers sum the weights of slots of decode rows too; see ``ReaderSums``.
        """
        return 0

    @property
    def problem_of_sharing(self) -> str | None:
        """Why layers with the same keys and values cannot be served with these heads; None if they can."""
        return None

    @property
    def needs_block_positions(self) -> bool:
        """Whether the unique part needs the positions of whole blocks: ``StepTensors.owner_start``."""
        return False

    @property
    def needs_token_classes(self) -> bool:
        """Whether it needs the classes of new tokens: ``StepTensors.token_class``."""
        return False

    @property
    def state_bytes(self) -> int:
        """Bytes of ``KVUnits.state`` for one slot of one head; 0 for kinds without it."""
        return 0

    @property
    def state_versions(self) -> int:
        """Versions of ``KVUnits.state``; that of a row with ``n`` tokens is number ``(n - 1) % versions``."""
        return 1

    @property
    def region_len(self) -> int:
        """Tokens of a prompt that is stored whole until it is computed, in ``KVUnits.regions``; 0 = none."""
        return 0

    def seen_slots(self, num_tokens: int, num_slots: int) -> torch.Tensor:
        """Return which slots of a unit are visible after ``num_tokens`` tokens of its request: bool ``[S]``.

        Others have undefined content, such as tokens of other requests.
        """
        return torch.ones(num_slots, dtype=torch.bool)

    @property
    def without_slack(self) -> GroupKind:
        """Return the kind without slack."""
        return self

    def num_kept(self, num_heads: int) -> int:
        """Heads that a unit stores, for a group of ``num_heads``: more if it stores those of other ranks."""
        return num_heads

    def stored_dims(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        """Return the elements of a stored key and value, for heads of these sizes."""
        return head_dim, value_dim

    def layout(self, num_units: int, num_heads: int, block_size: int) -> UnitLayout:
        """Return the layout of its units in the store of a layer.

        Args:
            num_units: with the null unit, which is the last one.
        """
        return UnitLayout.dense(num_units, self.num_kept(num_heads), self.num_slots(block_size))

    def region_bytes(self, num_heads: int, token_bytes: int) -> int:
        """Bytes of one region of a group with this number of heads; see ``region_len``."""
        return 0

    def unit_bytes(self, num_heads: int, token_bytes: int, block_size: int) -> int:
        """Bytes of one unit of a group with this number of heads.

        Args:
            token_bytes: of the key and the value of one token in one head.
        """
        return self.num_kept(num_heads) * self.num_slots(block_size) * token_bytes

    @abstractmethod
    def prepare(
        self, parts: StepParts, tensors: StepTensors, rows: DecodeRows, layouts: Collection[UnitLayout]
    ) -> Mapping[UnitLayout, Any]:
        """Derive on the device, once per step, the tensors that ``attend`` needs, by the layout of the store.

        Args:
            layouts: of all stores of this kind, distinct; one or more.
        """

    def masked(self, plans: Mapping[UnitLayout, Any], dtype: torch.dtype) -> Mapping[UnitLayout, Any]:
        """Return the tensors of ``prepare`` with masks of the slots that decode rows see.

        Masks are the same for all layouts. The default is a kind without them.

        Args:
            dtype: of queries.
        """
        return plans

    @abstractmethod
    def attend(self, run: Kernels, inputs: PartInputs, step: Step) -> torch.Tensor:
        """Store the new keys and values, run the parts of the step and merge them.

        Args:
            run: the kernels of the parts.
            inputs: without a rule; ``units`` are written in place, once, and read only after that.
            step: the tensors of ``prepare`` are at ``step.plans[self.key, inputs.units.layout]``.

        Returns:
            ``[Q, K, G, D]`` in the dtype of the queries; zero for padding. See ``Step.keeps_rows``.
        """

    @abstractmethod
    def transient_bytes(self, heads: HeadSizes, sizes: PartSizes) -> int:
        """Peak of the intermediates of ``attend`` with the portable kernels.

        Queries, keys, values and partial sums, which all kinds have, are not counted.
        """


@dataclass(frozen=True)
class HeadGroup:
    """Neighbouring key/value heads of a layer, with their query heads.

    Attributes:
        num_heads: key/value heads; 0 only if its units store heads of other ranks.
        kind: their storage and attention.
        format: of their keys and values; plain ones are the ``plain_format`` of the kind.
    """

    num_heads: int
    kind: GroupKind
    format: KVFormat = PLAIN

    def __post_init__(self) -> None:
        if self.format.is_plain:
            object.__setattr__(self, "format", self.kind.plain_format)
        if self.num_heads < 0 or self.kind.num_kept(self.num_heads) < 1:
            raise ValueError(f"expected a group of 1 head or more, got {self.num_heads}")
        if not (self.format.is_plain or self.kind.takes_any_format):
            raise ValueError(
                f"expected keys and values of {self.kind.describe() or self.kind.name} in the model's dtype, "
                f"ring_dtype {PLAIN.name!r}, got {self.format.name!r}"
            )


FLOAT32 = 4
SCORE_COPIES = 4
"""Simultaneous copies of scores: scores, masked scores, weights, and the product's own copy."""
FUSED_MASK_BYTES = 8
"""Of a pair of a query and a key in fused attention: its mask, and what that is derived from."""


class HeadSizes(NamedTuple):
    """Heads of a group.

    Attributes:
        num_heads: key/value heads.
        group_size: query heads of each.
        head_dim: of keys and values, the larger of both.
        dtype_bytes: of an element.
    """

    num_heads: int
    group_size: int
    head_dim: int
    dtype_bytes: int

    @property
    def num_query_heads(self) -> int:
        """Query heads of all of them."""
        return self.num_heads * self.group_size

    def unit_bytes(self, num_slots: int) -> int:
        """Bytes of the keys, or the values, of a unit with this number of slots."""
        return self.num_heads * num_slots * self.head_dim * self.dtype_bytes


class PartSizes(NamedTuple):
    """Sizes of the parts of a step.

    Attributes:
        parts: the parts that run.
        query_len: query tokens.
        num_shared_blocks, num_unique_blocks: blocks of the shared and of the unique part.
        num_rows: rows of the unique part.
        decode_len: most tokens of a decode row.
        block_size: tokens of a block.
        chunks: bounds of chunks of context.
        is_fused: whether dense attention is one operator, which has a mask and makes no scores.
    """

    parts: StepParts
    query_len: int
    num_shared_blocks: int
    num_unique_blocks: int
    num_rows: int
    decode_len: int
    block_size: int
    chunks: ChunkBounds = DEFAULT_BOUNDS
    is_fused: bool = False

    @property
    def query_slice(self) -> int:
        """Most queries that dense attention takes at a time."""
        return min(DEFAULT_SLICES.masked_queries if self.is_fused else QUERY_SLICE, self.query_len)


def dense_bytes(heads: HeadSizes, sizes: PartSizes, num_pairs: int) -> int:
    """Scores of pairs of a query and a key, or their mask where attention is one operator."""
    if sizes.is_fused:
        return FUSED_MASK_BYTES * num_pairs
    return SCORE_COPIES * num_pairs * heads.num_query_heads * FLOAT32


def causal_bytes(heads: HeadSizes, sizes: PartSizes) -> int:
    """Scores or mask of one slice of the causal part; 0 if it does not run."""
    if not sizes.parts.causal:
        return 0
    size = sizes.query_slice
    if sizes.is_fused:
        size = min(sizes.query_len, sizes.chunks.causal_slice(sizes.query_len, size, heads.dtype_bytes))
    return dense_bytes(heads, sizes, size * sizes.query_len)
