"""The capture key of a step: the attention parts that run, the size of each dimension, and what they cost."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

LARGEST_SIZE = 2**31 - 1
"""Largest size of any dimension: device indices are int32."""

_LETTERS = "csu"
_SHAPE_TEXT = re.compile(r"(?P<phase>[^/]*)/q(?P<q>\d+)/s(?P<s>\d+)/u(?P<u>\d+)/l(?P<l>\d+)", re.ASCII)


@dataclass(frozen=True, order=True)
class Phase:
    """The set of attention parts a step runs, written ``csu`` with ``-`` for a part that does not run.

    A part may run without any block: the rings of streaming heads follow the same letters, so a model
    that has only streaming heads runs ``csu`` with zero shared and zero unique blocks.

    Args:
        causal: queries against the keys of this step, for prompt rows.
        shared: queries against gathered context blocks, and the rings of prompt rows.
        unique: queries of decode rows against the leading slice of the block store, and against their rings.
    """

    causal: bool = False
    shared: bool = False
    unique: bool = False

    @classmethod
    def parse(cls, text: str) -> Phase:
        """Read a phase string, or a short form of one.

        A short form omits dashes and nothing else (``u`` and ``-u`` for ``--u``, ``cs`` for ``cs-``). The
        letters determine the phase, so no short form is ambiguous; dashes at other places than in the phase
        string (``u-``) are an error.

        Raises:
            ValueError: unknown, repeated or misordered characters, or an empty string.
        """
        phase = cls(*(letter in text for letter in _LETTERS))
        remaining = iter(str(phase))
        keeps_order = all(character in remaining for character in text)
        keeps_letters = text.replace("-", "") == str(phase).replace("-", "")
        if not (text and keeps_order and keeps_letters):
            raise ValueError(f"expected a phase such as 'csu', 'c--' or '-u', got {text!r}")
        return phase

    @classmethod
    def all(cls) -> Iterator[Phase]:
        """Yield the eight phases in ascending order, from ``---`` to ``csu``."""
        for bits in range(8):
            yield cls(bool(bits & 4), bool(bits & 2), bool(bits & 1))

    def holds(self, other: Phase) -> bool:
        """Whether every part of ``other`` also runs here."""
        return self.causal >= other.causal and self.shared >= other.shared and self.unique >= other.unique

    def __or__(self, other: Phase) -> Phase:
        """The smallest phase that holds both."""
        return Phase(self.causal or other.causal, self.shared or other.shared, self.unique or other.unique)

    def __str__(self) -> str:
        runs = (self.causal, self.shared, self.unique)
        return "".join(letter if run else "-" for letter, run in zip(_LETTERS, runs))


@dataclass(frozen=True, order=True)
class BatchShape:
    """The shape of a captured step, which is its key; printed as ``csu/q2048/s64/u512/l32``.

    Args:
        phase: the attention parts that run.
        query_len: ``Q``, padded query tokens of the step, at least 1.
        num_shared_blocks: ``NS``, context blocks gathered for the shared part.
        num_unique_blocks: ``NU``, length of the slice ``[0, NU)`` of the block store that the unique part
            reads; it follows the highest block id in use, not the number of blocks in use.
        num_logits: ``N``, rows for which logits are computed. The number of logits of each, and of ring rows
            that are read, follows from it.

    Raises:
        ValueError: a negative size, one beyond ``LARGEST_SIZE``, no query tokens, or blocks for a part that
            does not run.
    """

    phase: Phase
    query_len: int
    num_shared_blocks: int
    num_unique_blocks: int
    num_logits: int

    def __post_init__(self) -> None:
        # Sizes may be numpy scalars; plain ints print and hash uniformly.
        for name in ("query_len", "num_shared_blocks", "num_unique_blocks", "num_logits"):
            size = index(getattr(self, name))
            object.__setattr__(self, name, size)
            if not 0 <= size <= LARGEST_SIZE:
                limit = ">= 0" if size < 0 else f"<= {LARGEST_SIZE}"
                raise ValueError(f"expected {name} {limit}, got {size}")
        if self.query_len < 1:
            raise ValueError(f"expected query_len >= 1, got {self.query_len}")
        if self.num_shared_blocks and not self.phase.shared:
            raise ValueError(
                f"phase {self.phase} has no shared part: expected num_shared_blocks=0, "
                f"got {self.num_shared_blocks}"
            )
        if self.num_unique_blocks and not self.phase.unique:
            raise ValueError(
                f"phase {self.phase} has no unique part: expected num_unique_blocks=0, "
                f"got {self.num_unique_blocks}"
            )

    @classmethod
    def parse(cls, text: str) -> BatchShape:
        """Read what ``str`` prints; the phase may be a short form.

        Raises:
            ValueError: the text does not have that form, or names an impossible shape.
        """
        match = _SHAPE_TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"expected a shape such as 'csu/q2048/s64/u512/l32', got {text!r}")
        phase, *sizes = match.group("phase", "q", "s", "u", "l")
        try:
            return cls(Phase.parse(phase), *map(int, sizes))
        except ValueError as error:
            raise ValueError(f"shape {text!r}: {error}") from error

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Seven ints ``(c, s, u, Q, NS, NU, N)``: a shape holds another unless one of them is lower."""
        parts = (int(self.phase.causal), int(self.phase.shared), int(self.phase.unique))
        return (*parts, self.query_len, self.num_shared_blocks, self.num_unique_blocks, self.num_logits)

    def holds(self, other: BatchShape) -> bool:
        """Whether a step of shape ``other`` can run padded to this shape."""
        return all(mine >= theirs for mine, theirs in zip(self.levels, other.levels))

    def __or__(self, other: BatchShape) -> BatchShape:
        """The smallest shape that holds both."""
        return BatchShape(
            self.phase | other.phase,
            max(self.query_len, other.query_len),
            max(self.num_shared_blocks, other.num_shared_blocks),
            max(self.num_unique_blocks, other.num_unique_blocks),
            max(self.num_logits, other.num_logits),
        )

    def __str__(self) -> str:
        return (
            f"{self.phase}/q{self.query_len}/s{self.num_shared_blocks}"
            f"/u{self.num_unique_blocks}/l{self.num_logits}"
        )


@dataclass(frozen=True)
class Launches:
    """Operators that a layer launches, by what a step runs.

    The defaults are those of the portable kernels for an eight-billion-parameter Llama, as ``hpu-duo audit``
    counts them. A part without work launches its operators too.

    Attributes:
        layer: in any step. causal, causal_slice: for the causal part, and for each ``query_slice`` query
            tokens of it.
        shared, shared_chunk: for the shared part, and for each chunk of gathered blocks: as many blocks as
            have ``shared_pairs`` pairs with query tokens, at most ``shared_blocks``, and at least one.
        unique, unique_chunk: for the unique part, and for each ``unique_blocks`` blocks of it.
        query_slice, shared_pairs, shared_blocks, unique_blocks: see there.
    """

    layer: float = 33.0
    causal: float = 8.0
    causal_slice: float = 26.0
    shared: float = 16.0
    shared_chunk: float = 45.0
    unique: float = 47.0
    unique_chunk: float = 31.0
    query_slice: int = 512
    shared_pairs: int = 4096
    shared_blocks: int = 64
    unique_blocks: int = 64

    def at(self, phase: Phase, query_len: Any, num_shared_blocks: Any, num_unique_blocks: Any) -> Any:
        """Operators of a layer, or of each of many steps when sizes are arrays that broadcast together.

        Chunks after the first count fractionally, so that the count is continuous; it is monotonic in all
        sizes.
        """
        count: Any = self.layer
        if phase.causal:
            count = count + self.causal + self.causal_slice * np.maximum(query_len / self.query_slice, 1.0)
        if phase.shared:
            blocks = np.minimum(np.maximum(self.shared_pairs / query_len, 1.0), self.shared_blocks)
            count = count + self.shared + self.shared_chunk * _chunks(num_shared_blocks, blocks)
        if phase.unique:
            chunks = _chunks(num_unique_blocks, self.unique_blocks)
            count = count + self.unique + self.unique_chunk * chunks
        return count


def _chunks(num_blocks: Any, size: Any) -> Any:
    return np.where(num_blocks > 0, np.maximum(num_blocks / size, 1.0), 0.0)


CostFunction: TypeAlias = Callable[[BatchShape], float]
"""The cost of one step at a shape: positive, in any unit, never lower for a shape that holds another."""


@runtime_checkable
class BroadcastCost(Protocol):
    """A cost function that also prices many shapes of one phase at once."""

    def __call__(self, shape: BatchShape) -> float:
        """Cost of one step at ``shape``."""

    def at(
        self, phase: Phase, query_len: Any, num_shared_blocks: Any, num_unique_blocks: Any, num_logits: Any
    ) -> Any:
        """Cost of a step, or of every combination when the sizes are arrays that broadcast together.

        The result broadcasts to the shape of all sizes; an axis that only sizes without influence have may
        be missing from it.
        """


@dataclass(frozen=True)
class StepCost:
    """Work of a step, in units of one query-key pair of one layer, which is ``4 * hidden_size`` operations.

    Matrix work counts as arithmetic. Memory traffic (reading the weights once per step, and cached slots once
    per decoded token) and launches count as arithmetic of the same duration. The defaults are those of an
    eight-billion-parameter dense model in bf16 on Gaudi 2 (432 TFLOP/s, 2.45 TB/s, and 1 µs to launch an
    operator). The result ranks buckets and predicts no time.

    Args:
        block_size: tokens of one block.
        ring_width: entries of one ring (sink + recent); 0 = no rings.
        hidden_size, num_layers, vocab_size: of the model.
        kv_ratio: KV heads over query heads.
        operations_per_byte: arithmetic that fits into the time of reading one byte; near 0 for a device
            that arithmetic always bounds.
        operations_per_launch: arithmetic that fits into the time of launching one operator.
        launches: operators of a layer.
    """

    block_size: int = 128
    ring_width: int = 0
    hidden_size: int = 4096
    num_layers: int = 32
    vocab_size: int = 131_072
    kv_ratio: float = 0.25
    operations_per_byte: float = 176.0
    operations_per_launch: float = 432e6
    launches: Launches = field(default_factory=Launches)

    @property
    def token(self) -> float:
        """Projections and MLP of one query token: about ``12 * hidden_size**2`` weights per layer."""
        return 6.0 * self.hidden_size

    @property
    def step(self) -> float:
        """Reading the weights, two bytes each, once per step."""
        return self.operations_per_byte * self.token

    @property
    def logit(self) -> float:
        """One row of logits."""
        return self.vocab_size / (2 * self.num_layers)

    @property
    def slot(self) -> float:
        """One cached slot of the unique part: its pair, and reading a key and a value of two bytes each."""
        return 1.0 + self.operations_per_byte * self.kv_ratio

    @property
    def launch(self) -> float:
        """Launching one operator in each layer."""
        return self.operations_per_launch / (4 * self.hidden_size)

    def at(
        self, phase: Phase, query_len: Any, num_shared_blocks: Any, num_unique_blocks: Any, num_logits: Any
    ) -> Any:
        """Cost of a step, or of each of many when sizes are arrays that broadcast together."""
        launches = self.launches.at(phase, query_len, num_shared_blocks, num_unique_blocks)
        cost = self.step + self.launch * launches + self.token * query_len + self.logit * num_logits
        ring_slots = num_logits * self.ring_width
        if phase.causal:
            cost = cost + query_len**2 / 2
        if phase.shared:
            cost = cost + query_len * (num_shared_blocks * self.block_size + ring_slots)
        if phase.unique:
            cost = cost + self.slot * (num_unique_blocks * self.block_size + ring_slots)
        return cost

    def __call__(self, shape: BatchShape) -> float:
        """Cost of one step at ``shape``."""
        return self.at(shape.phase, *shape.levels[3:])


@dataclass(frozen=True)
class SkippingCost:
    """Work of a step whose attention skips padded blocks, in units of one query token.

    That is the CPU path: its attention reads the plan, so a bucket adds padded query tokens in the
    projections and padded rows of logits. Padded blocks cost only the copy of a longer plan, which is counted
    so that equal buckets rank by size.

    Args:
        logit: one row of logits, over one query token.
        step: reading the weights once, over one query token.
    """

    logit: float = 0.3
    step: float = 32.0

    def at(
        self, phase: Phase, query_len: Any, num_shared_blocks: Any, num_unique_blocks: Any, num_logits: Any
    ) -> Any:
        """Cost of a step, or of each of many when sizes are arrays that broadcast together."""
        plan_items = num_unique_blocks + num_shared_blocks * (num_logits + 2)
        parts = phase.causal + phase.shared + phase.unique
        work = self.step + query_len + self.logit * num_logits
        return work + 1e-2 * parts + 1e-6 * plan_items

    def __call__(self, shape: BatchShape) -> float:
        """Cost of one step at ``shape``."""
        return self.at(shape.phase, *shape.levels[3:])


def row_len(shape: BatchShape, decode_len: int, draft_lens: Sequence[int] = ()) -> int:
    """Return the tokens of a decode row (M) in a step of this shape.

    Args:
        decode_len: of all steps, without ``draft_lens``.
        draft_lens: sizes that steps without prompts may have, ascending. Steps with prompts have the first,
            others the largest that their query tokens have room for in each row.
    """
    if not draft_lens:
        return decode_len
    if shape.phase.causal:
        return draft_lens[0]
    room = shape.query_len // max(1, shape.num_logits)
    return max((each for each in draft_lens if each <= room), default=draft_lens[0])
