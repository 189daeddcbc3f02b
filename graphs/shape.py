"""The capture key of a step: the attention parts that run, and the size of each dimension."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import index

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
    def parse(cls, text: str) -> "Phase":
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
    def all(cls) -> Iterator["Phase"]:
        """Yield the eight phases in ascending order, from ``---`` to ``csu``."""
        for bits in range(8):
            yield cls(bool(bits & 4), bool(bits & 2), bool(bits & 1))

    def holds(self, other: "Phase") -> bool:
        """Whether every part of ``other`` also runs here."""
        return self.causal >= other.causal and self.shared >= other.shared and self.unique >= other.unique

    def __or__(self, other: "Phase") -> "Phase":
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
    def parse(cls, text: str) -> "BatchShape":
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

    def holds(self, other: "BatchShape") -> bool:
        """Whether a step of shape ``other`` can run padded to this shape."""
        return all(mine >= theirs for mine, theirs in zip(self.levels, other.levels))

    def __or__(self, other: "BatchShape") -> "BatchShape":
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
