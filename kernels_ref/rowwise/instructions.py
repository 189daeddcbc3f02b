"""Instructions of row programs, and ways to let one of them do the work of two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, auto


class Code(IntEnum):
    """Instructions; the numbers are those of ``rowwise.cpp``."""

    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[int]) -> int:
        return count

    LOAD = auto()
    CONSTANT = auto()
    STORE = auto()
    PLACE = auto()
    COPY = auto()
    NEG = auto()
    ABS = auto()
    EXP = auto()
    LOG = auto()
    SQRT = auto()
    RSQRT = auto()
    RECIPROCAL = auto()
    SIGMOID = auto()
    TANH = auto()
    SILU = auto()
    RELU = auto()
    GELU = auto()
    GELU_TANH = auto()
    COS = auto()
    SIN = auto()
    ADD = auto()
    SUB = auto()
    MUL = auto()
    DIV = auto()
    MAX = auto()
    MIN = auto()
    LESS = auto()
    LESS_EQUAL = auto()
    GREATER = auto()
    GREATER_EQUAL = auto()
    EQUAL = auto()
    NOT_EQUAL = auto()
    WHERE = auto()
    SUM = auto()
    MEAN = auto()
    MEAN_OF_SQUARES = auto()
    AMAX = auto()


@dataclass(frozen=True, eq=False)
class Register:
    """A value of a program.

    Attributes:
        width: items in each row, 1 where one counts for the whole row.
        is_rounded: every item is one that bfloat16 has.
        is_half: items are kept as bfloat16, and as float32 otherwise.
    """

    width: int
    is_rounded: bool = False
    is_half: bool = False


@dataclass(frozen=True)
class Instruction:
    """One step of a program.

    Attributes:
        to: the register that holds the result; the number of an output for STORE.
        sources: registers, and numbers that some instructions take.
        rounds: the result is rounded to bfloat16.
        output: the one that the result is written to at once, -1 for none.
    """

    code: Code
    to: Register | int
    sources: tuple[Register | int, ...]
    rounds: bool = False
    output: int = -1

    @property
    def registers(self) -> tuple[Register, ...]:
        """Registers that are written and read."""
        return tuple(x for x in (self.to, *self.sources) if isinstance(x, Register))


def round_at_once(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Let an instruction round its result itself if the result is only rounded afterwards."""
    body = [*instructions]
    num_readers = _num_readers(body)
    maker = {each.to: at for at, each in enumerate(body) if each.code > Code.PLACE}
    merged = []
    for at, each in enumerate(body):
        source = each.sources[0]
        is_rounding = each.code is Code.COPY and each.rounds and isinstance(source, Register)
        if is_rounding and source in maker and num_readers[source] == 1:
            made = body[maker[source]]
            # Others may have been merged before it; it is still the only one who writes there.
            body[maker[source]] = replace(made, to=each.to, rounds=True)
            maker[each.to] = maker.pop(source)
            merged.append(at)
    return [each for at, each in enumerate(body) if at not in {*merged}]


def square_at_once(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Let a mean square what it sums up if nobody else reads the squares."""
    body = [*instructions]
    num_readers = _num_readers(body)
    squares = {
        each.to: at
        for at, each in enumerate(body)
        if each.code is Code.MUL and each.sources[0] is each.sources[1] and not each.rounds
    }
    merged = []
    for at, each in enumerate(body):
        made = squares.get(each.sources[0]) if each.code is Code.MEAN else None
        if made is not None and num_readers[each.sources[0]] == 1:
            sources = body[made].sources[:1]
            body[at] = replace(each, code=Code.MEAN_OF_SQUARES, sources=sources)
            merged.append(made)
    return [each for at, each in enumerate(body) if at not in {*merged}]


def store_at_once(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Let an instruction write its result where it is stored."""
    body = [*instructions]
    made = {each.to for each in body if each.code not in (Code.LOAD, Code.STORE)}
    output_of: dict[Register | int, int] = {}
    for each in body:
        if each.code is Code.STORE and each.sources[0] in made:
            output_of.setdefault(each.sources[0], int(each.to))  # type: ignore[arg-type]
    for at, each in enumerate(body):
        is_store = each.code is Code.STORE
        output = output_of.get(each.sources[0] if is_store else each.to, -1)
        if each.code is not Code.LOAD and (not is_store or output == each.to):
            body[at] = replace(each, output=output)
    return body


def _num_readers(body: Sequence[Instruction]) -> Counter[Register | int]:
    return Counter(x for each in body for x in each.sources if isinstance(x, Register))
