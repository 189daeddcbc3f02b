"""Fused elementwise programs on a CPU: loaded, computed and stored row by row in the cache.

A program is a list of instructions on registers of some rows at a time. It is interpreted, so a new one
costs microseconds and needs no compiler; the interpreter itself is prebuilt or built once per machine.
``is_available`` is False where it cannot be had.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, auto
from functools import cache
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import torch

from kernels_ref.native import BuildError, Sources, Unit
from kernels_ref.x86.library import is_supported


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
        is_half: items are stored as bfloat16, else as float32.
    """

    width: int
    is_rounded: bool = False
    is_half: bool = False


@dataclass(frozen=True)
class Instruction:
    """One step of a program.

    Attributes:
        to: the register of the result; the index of an output for STORE.
        sources: registers, and immediate numbers of some instructions.
        rounds: the result is rounded to bfloat16.
        output: the output that the result is also written to, -1 for none.
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
    """Fuse rounding into an instruction if its result is only rounded afterwards."""
    body = [*instructions]
    num_readers = _num_readers(body)
    maker = {each.to: at for at, each in enumerate(body) if each.code > Code.PLACE}
    merged = []
    for at, each in enumerate(body):
        source = each.sources[0]
        is_rounding = each.code is Code.COPY and each.rounds and isinstance(source, Register)
        if is_rounding and source in maker and num_readers[source] == 1:
            made = body[maker[source]]
            # Others may have been fused before it; it is still the only writer of the register.
            body[maker[source]] = replace(made, to=each.to, rounds=True)
            maker[each.to] = maker.pop(source)
            merged.append(at)
    return [each for at, each in enumerate(body) if at not in {*merged}]


def square_at_once(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Fuse squaring into a mean if nothing else reads the squares."""
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
    """Fuse a store into the instruction that computes the value."""
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


TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.bool: 2}
"""Dtypes that can be loaded and stored; a bool is 0 or 1 in registers."""

INDEX_TYPES = {torch.int32: 0, torch.int64: 1}
"""Dtypes of an index."""

MAX_WIDTH = 16_384
"""Most items of a row, so that rows stay in the cache."""

MAX_DIMS = 8
"""Most dimensions that count rows."""


_EXACT = frozenset({Code.COPY, Code.NEG, Code.ABS, Code.RELU, Code.MAX, Code.MIN, Code.WHERE, Code.AMAX})
"""Instructions whose results are rounded if their operands are."""


@dataclass(frozen=True)
class Index:
    """Numbers that choose rows, in the place of a dimension.

    Attributes:
        tensor: place among the tensors that a program is called with.
        dtype: one of ``INDEX_TYPES``.
        offset, step: of the first number, and the distance of neighbours.
        dim: the dimension of rows that counts the numbers, -1 for a single number.
        stride: items from one chosen row to the next.
    """

    tensor: int
    dtype: torch.dtype
    offset: int
    step: int
    dim: int
    stride: int


@dataclass(frozen=True)
class Rows:
    """A tensor as rows of a program.

    Attributes:
        dtype: one of ``TYPES``.
        offset: items before the first row.
        width, step: items of a row, and the distance of neighbours.
        strides: distance of rows along each dimension that counts them, 0 where all see the same.
        index: chooses rows along a dimension whose stride is 0.
    """

    dtype: torch.dtype
    offset: int
    width: int
    step: int
    strides: tuple[int, ...]
    index: Index | None = None


@dataclass(frozen=True)
class _Output:
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    rows: Rows


class RowProgram:
    """A finished program.

    Attributes:
        run: called with ``number`` and the tensors, returns the outputs in the order of stores, a single one
            itself. Valid as long as the program is alive.
        num_outputs: number of outputs.

    Args:
        num_tensors: number of tensors, at least 1.
    """

    def __init__(
        self, code: Sequence[int], constants: Sequence[float], num_tensors: int, num_outputs: int
    ) -> None:
        numbers, values = torch.tensor(code), torch.tensor(constants, dtype=torch.float64)
        self.number: int = torch.ops.hpu_duo_rowwise_v2.build.default(numbers, values)
        self.run = _operator(num_tensors, num_outputs)
        self.num_outputs = num_outputs
        weakref.finalize(self, torch.ops.hpu_duo_rowwise_v2.release.default, self.number).atexit = False

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs for some tensors."""
        results = self.run(self.number, *tensors)
        return [results] if self.num_outputs == 1 else [*results]


@cache
def _operator(num_tensors: int, num_outputs: int) -> Callable[..., Any]:
    """Return the operator that runs programs of these sizes."""
    torch.ops.hpu_duo_rowwise_v2.offer.default(num_tensors, num_outputs)
    found: Callable[..., Any] = getattr(torch.ops.hpu_duo_rowwise_v2.run, f"i{num_tensors}o{num_outputs}")
    return found


class Builder:
    """Collects the instructions of a program.

    Args:
        sizes: of the dimensions that count rows, outermost first; at most ``MAX_DIMS``.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self._inputs: list[tuple[int, Rows]] = []
        self._outputs: list[_Output] = []
        # By their digits: 0.0 and -0.0 are equal and not the same.
        self._constants: dict[str, Register] = {}
        self._prologue: list[Instruction] = []
        self._body: list[Instruction] = []

    def load(self, tensor: int, rows: Rows) -> Register:
        """Rows of a tensor, by its place among those that the program is called with."""
        is_half = rows.dtype == torch.bfloat16 and rows.width > 1
        register = Register(rows.width, rows.dtype != torch.float32, is_half)
        # What all rows share is loaded once.
        is_same = rows.index is None and not any(
            stride for stride, size in zip(rows.strides, self.sizes) if size > 1
        )
        target = self._prologue if is_same else self._body
        target.append(Instruction(Code.LOAD, register, (len(self._inputs),)))
        self._inputs.append((tensor, rows))
        return register

    def constant(self, number: float) -> Register:
        """A number, the same in every row."""
        digits = number.hex()
        if digits not in self._constants:
            register = self._constants[digits] = Register(1)
            self._prologue.append(Instruction(Code.CONSTANT, register, (0, 0, len(self._constants) - 1)))
        return self._constants[digits]

    def compute(
        self, code: Code, sources: Sequence[Register], width: int, dtype: torch.dtype = torch.float32
    ) -> Register:
        """The result of an instruction, as wide as its widest source unless it sums up rows."""
        is_exact = code in _EXACT and all(source.is_rounded for source in sources)
        rounds = dtype == torch.bfloat16
        is_rounded = is_exact or rounds
        register = Register(width, is_rounded, is_rounded and width > 1)
        self._body.append(Instruction(code, register, tuple(sources), rounds and not is_exact))
        return register

    def join(self, parts: Sequence[Register]) -> Register:
        """Concatenation of the rows of all parts."""
        width, is_rounded = sum(part.width for part in parts), all(part.is_rounded for part in parts)
        register = Register(width, is_rounded, is_rounded and width > 1)
        column = 0
        for part in parts:
            self._body.append(Instruction(Code.PLACE, register, (part, part, column)))
            column += part.width
        return register

    def store(self, register: Register, shape: Sequence[int], strides: Sequence[int], rows: Rows) -> None:
        """Store a register as the next output, a new tensor of a shape and strides."""
        self._body.append(Instruction(Code.STORE, len(self._outputs), (register,)))
        self._outputs.append(_Output(tuple(shape), tuple(strides), rows))

    def build(self) -> RowProgram:
        """The program; equal instructions, as of all layers of a kind, share one."""
        number: dict[Register, int] = {}
        instructions = []
        for each in (*self._prologue, *self._body):
            places = [
                number.setdefault(x, len(number)) if isinstance(x, Register) else x
                for x in (each.to, *each.sources)
            ]
            instructions.append((each.code, each.rounds, *places))
        registers = tuple([(each.width, each.is_rounded, each.is_half) for each in number])
        rows = *self._inputs, *self._outputs
        key = self.sizes, rows, tuple(self._constants), registers, len(self._prologue), tuple(instructions)
        program = _by_instructions.get(key)
        if program is None:
            program = _by_instructions[key] = self._built()
        return program

    def _built(self) -> RowProgram:
        self._body = store_at_once(square_at_once(round_at_once(self._body)))
        layouts = [rows for _, rows in self._inputs] + [output.rows for output in self._outputs]
        indexed = {rows.index.dim for rows in layouts if rows.index is not None}
        kept, strides, places = _merged(self.sizes, [rows.strides for rows in layouts], indexed)
        slots, forms = self._slots()
        code = [len(kept), *kept, len(forms), *(number for form in forms for number in form)]
        code.append(len(self._inputs))
        for (tensor, rows), steps in zip(self._inputs, strides):
            code += _layout(tensor, rows, steps, places)
        code.append(len(self._outputs))
        for output, steps in zip(self._outputs, strides[len(self._inputs) :]):
            code += [len(output.shape), *output.shape, len(output.strides), *output.strides]
            code += _layout(0, output.rows, steps, places)
        for part in (self._prologue, self._body):
            code.append(len(part))
            for each in part:
                numbers = [slots[x] if isinstance(x, Register) else x for x in (each.to, *each.sources)]
                numbers += [numbers[0] if each.code > Code.STORE else 0] * (4 - len(numbers))
                code += [int(each.code), *numbers, int(each.rounds), each.output]
        used = [tensor for tensor, _ in self._inputs]
        used += [rows.index.tensor for rows in layouts if rows.index is not None]
        return _program_of(tuple(code), tuple(self._constants), max(used, default=-1) + 1, len(self._outputs))

    def _slots(self) -> tuple[dict[Register, int], list[tuple[int, int]]]:
        """Assign each register a place, free again after its last reader; also returns their contents."""
        last = {x: at for at, each in enumerate(self._body) for x in each.registers}
        slots: dict[Register, int] = {}
        free: dict[tuple[int, int], list[int]] = {}
        for each in self._prologue:
            for register in each.registers:
                slots.setdefault(register, len(slots))
        forms = [_form(register) for register in slots]
        lasting = set(slots)
        for at, each in enumerate(self._body):
            for register in each.registers:
                if register not in slots:
                    reusable = free.get(_form(register))
                    slots[register] = reusable.pop() if reusable else len(forms)
                    if slots[register] == len(forms):
                        forms.append(_form(register))
            for register in dict.fromkeys(each.registers):
                if last[register] == at and register not in lasting:
                    free.setdefault(_form(register), []).append(slots[register])
        return slots, forms


_by_instructions: WeakValueDictionary[tuple[Hashable, ...], RowProgram] = WeakValueDictionary()
_programs: WeakValueDictionary[tuple[tuple[int, ...], tuple[str, ...]], RowProgram] = WeakValueDictionary()


def _program_of(
    code: tuple[int, ...], constants: tuple[str, ...], num_tensors: int, num_outputs: int
) -> RowProgram:
    """A cached program: equal code, as of all layers of a kind, shares one."""
    program = _programs.get((code, constants))
    if program is None:
        values = [*map(float.fromhex, constants)]
        program = _programs[code, constants] = RowProgram(code, values, num_tensors, num_outputs)
    return program


def _form(register: Register) -> tuple[int, int]:
    return register.width, int(register.is_half)


def _layout(tensor: int, rows: Rows, strides: Sequence[int], places: Mapping[int, int]) -> list[int]:
    code = [tensor, TYPES[rows.dtype], rows.offset, rows.width, rows.step, *strides]
    index = rows.index
    if index is None:
        return [*code, -1, 0, 0, 0, 0, 0]
    place = places.get(index.dim, -1)
    return [
        *code,
        *(index.tensor, INDEX_TYPES[index.dtype], index.offset, index.step, place, index.stride),
    ]


def _merged(
    sizes: Sequence[int], strides: Sequence[Sequence[int]], apart: Collection[int]
) -> tuple[list[int], list[list[int]], dict[int, int]]:
    """Merge neighbouring dimensions that all tensors step through as one.

    Args:
        apart: dimensions that are not merged.
    Returns:
        Sizes, strides, and the new numbers of the dimensions in ``apart``.
    """
    dims: list[list[int]] = []
    for d, size in enumerate(sizes):
        is_next = bool(dims) and not {d, dims[-1][-1]} & {*apart}
        if size == 1 and d not in apart:
            continue
        if is_next and all(each[dims[-1][-1]] == each[d] * size for each in strides):
            dims[-1].append(d)
        else:
            dims.append([d])
    kept = [prod(sizes[d] for d in each) for each in dims]
    steps = [[each[dim[-1]] for dim in dims] for each in strides]
    return kept, steps, {dim[0]: place for place, dim in enumerate(dims) if dim[0] in apart}


_lock = Lock()
_AVX512 = (
    "-mavx512f",
    "-mavx512dq",
    "-mavx512vl",
    "-mavx512bw",
    "-mfma",
    "-mprefer-vector-width=512",
    "-DCPU_CAPABILITY_AVX512",
)
_VECTORS = {
    "plain": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY_AVX2"),
    "avx512": _AVX512,
    "pairs": (*_AVX512, "-mavx512bf16"),
}
"""Options by instructions, in the order of their numbers in ``operators.cpp``."""


def is_available() -> bool:
    """Whether the operators are available. False, with one warning, where they cannot be built."""
    with _lock:
        return _load()


@cache
def _load() -> bool:
    try:
        torch.ops.load_library(sources().provide()[0])
    except (BuildError, OSError) as error:
        warnings.warn(f"small operators of a step run one by one: {error}", stacklevel=2)
        return False
    torch.ops.hpu_duo_rowwise_v2.use.default([*_VECTORS].index(_instructions()))
    return True


def _instructions() -> str:
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512" and is_supported():
        return "pairs"
    return {"AVX512": "avx512", "AVX2": "avx2"}.get(capability, "plain")


def sources() -> Sources:
    """The sources of this CPU's interpreter, and those of a prebuilt library if this CPU runs it."""
    found = _instructions()
    portable = () if found == "plain" else portable_units()
    return Sources("rowwise", _units(found), portable, ("-O3", "-fopenmp"), needs_torch=True)


def portable_units() -> tuple[Unit, ...]:
    """The sources of a library for all CPUs with AVX2."""
    return _units("avx2", "avx512", "pairs")


def _units(*names: str) -> tuple[Unit, ...]:
    folder = Path(__file__).parent
    variants = (
        Unit(folder / "rowwise.cpp", (f"-DHPU_DUO_VARIANT={name}", *_VECTORS[name])) for name in names
    )
    return (Unit(folder / "operators.cpp"), *variants)
