"""Fused elementwise programs as objects: run by several threads, shared if equal, gone with their owners."""

from __future__ import annotations

import gc
import math
from pathlib import Path

import pytest
import torch

from kernels_ref.rowwise import Builder, Code, RowProgram, Rows, is_available
from tests.kernels_ref.row_cases import random, rows_of, run

pytestmark = [
    pytest.mark.skipif(not is_available(), reason="the interpreter cannot be built here"),
    pytest.mark.instruction_set,
]

TASKS = Path("/proc/self/task")


def test_several_threads_share_the_rows() -> None:
    x = random(3000, 128, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        got = run((3000,), [x], Code.SILU, 128, x.dtype)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(got, run((3000,), [x], Code.SILU, 128, x.dtype))


def ticks_of_threads() -> dict[str, int]:
    """Processor time of each thread of this process, in ticks of the system."""
    stats = {path.parent.name: path.read_text().rpartition(")")[2].split() for path in TASKS.glob("*/stat")}
    return {thread: int(fields[11]) for thread, fields in stats.items()}


@pytest.mark.skipif(not TASKS.is_dir(), reason="needs Linux's account of threads")
def test_another_thread_takes_part_of_the_rows() -> None:
    x = random(4000, 1024, dtype=torch.bfloat16)
    threads, before = torch.get_num_threads(), ticks_of_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(200):
            run((4000,), [x], Code.SILU, 1024, x.dtype)
    finally:
        torch.set_num_threads(threads)
    busy = [thread for thread, ticks in ticks_of_threads().items() if ticks > before.get(thread, 0) + 3]
    assert len(busy) >= 2


def test_a_program_is_gone_with_its_owner() -> None:
    x = torch.ones(1, 4)
    builder = Builder((1,))
    builder.store(builder.load(0, rows_of(x)), x.shape, x.stride(), rows_of(x))
    program = builder.build()
    number = program.number
    assert torch.equal(program([x])[0], x)
    del program
    gc.collect()
    with pytest.raises(ValueError, match=f"expected the number of a program, got {number}"):
        torch.ops.hpu_duo_rowwise_v2.run.i1o1(number, x)


def test_equal_programs_are_one_and_others_are_not() -> None:
    def program(number: float) -> RowProgram:
        builder = Builder((1,))
        builder.store(builder.constant(number), (1, 1), (1, 1), Rows(torch.float32, 0, 1, 0, (1,)))
        return builder.build()

    first = program(0.0)
    assert program(0.0) is first
    assert program(-0.0) is not first
    assert math.copysign(1, program(-0.0)([])[0].item()) == -1
    assert math.copysign(1, first([])[0].item()) == 1


def test_constants_that_are_equal_and_not_the_same_stay_apart() -> None:
    builder = Builder((1,))
    for number in (0.0, -0.0, math.nan):
        builder.store(builder.constant(number), (1, 1), (1, 1), Rows(torch.float32, 0, 1, 0, (1,)))
    signs = [math.copysign(1, x.item()) for x in builder.build()([])]
    assert signs[:2] == [1, -1]
