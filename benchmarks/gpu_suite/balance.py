"""Balance of the two kernels of the unique part, counted from their plans; nothing is run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.gpu_suite.cases import Heads, RowSize, lay_out
from benchmarks.gpu_suite.results import Key, Point, Results
from benchmarks.gpu_suite.shapes import Sizes
from kernels_ref import Blocks
from kernels_ref.triton.launch import DeviceLimits, blocks_per_program
from kernels_ref.triton.stream_k_choice import choose, num_workers

H200 = DeviceLimits(num_processors=132, shared_bytes=227 << 10)
"""The device that plans are counted for."""

SPLIT = "split"
STREAM_K = "Stream-K"


@dataclass(frozen=True)
class Cut:
    """Division of the work of a step among the programs of a kernel.

    Attributes:
        busiest: most blocks that one program reads.
        num_programs: programs that read ranges, those that get nothing included.
        slots: programs that run side by side.
        total: blocks read by all programs: owned blocks and tails, in every head.
        num_triples: triples that are written besides the result, to be merged.
    """

    busiest: int
    num_programs: int
    slots: int
    total: int
    num_triples: int

    @property
    def evenness(self) -> float:
        """Share of the slots' time that is work, if programs are equally fast and all slots are filled."""
        waves = -(-self.num_programs // self.slots)
        return self.total / (self.slots * waves * self.busiest)


@dataclass(frozen=True)
class Work:
    """The host plan of a unique part.

    Attributes:
        owner: row of each block of the slice, ``num_rows`` = nobody, ``[NU]``.
        has_tail: rows with a partly filled block, ``[N]``.
    """

    owner: np.ndarray
    has_tail: np.ndarray

    @property
    def num_rows(self) -> int:
        """Rows of the bucket (N)."""
        return len(self.has_tail)


def cut_split(work: Work, num_heads: int, limits: DeviceLimits) -> Cut:
    """Cut the slice into equal ranges, whatever their owners; each tail has a program of its own."""
    per_range = blocks_per_program(len(work.owner), num_heads, limits)
    ranges = [work.owner[begin : begin + per_range] for begin in range(0, len(work.owner), per_range)]
    owned = [int((part < work.num_rows).sum()) for part in ranges]
    runs = sum(_num_runs(part, work.num_rows) for part in ranges)
    tails = int(work.has_tail.sum())
    return Cut(
        busiest=max([*owned, min(tails, 1)]),
        num_programs=num_heads * len(ranges),
        slots=2 * limits.num_processors,
        total=num_heads * (sum(owned) + tails),
        num_triples=num_heads * (runs + work.num_rows),
    )


def _num_runs(owner: np.ndarray, num_rows: int) -> int:
    """Neighbouring blocks of one owner count once; blocks of nobody do not."""
    starts = np.ones(len(owner), bool)
    starts[1:] = owner[1:] != owner[:-1]
    return int((starts & (owner < num_rows)).sum())


def cut_stream_k(work: Work, num_heads: int, limits: DeviceLimits) -> Cut:
    """Equal ranges of what is owned; a triple for every piece of a tile that is cut."""
    workers = num_workers(limits)
    counts = np.bincount(work.owner[work.owner < work.num_rows], minlength=work.num_rows) + work.has_tail
    total = num_heads * int(counts.sum())
    cuts = np.arange(workers + 1) * total // workers
    ends = np.cumsum(np.tile(counts, num_heads))
    pieces = 0
    for begin, end in zip(ends - np.tile(counts, num_heads), ends):
        # Cuts strictly inside a tile; equal ones bound workers that have nothing.
        inside = len(np.unique(cuts[(cuts > begin) & (cuts < end)]))
        pieces += inside + 1 if inside else 0
    return Cut(int(np.diff(cuts).max()), workers, workers, total, pieces)


def works(sizes: Sizes) -> Iterator[tuple[str, Work]]:
    """Plans to compare: batches as they grow side by side, alone, in a larger bucket, and half shared."""
    for name, contexts in (("one row", (sizes.unique_context,)), *sizes.ragged):
        rows = [RowSize(context - 1, 1) for context in contexts]
        layout = lay_out(rows, sizes.block_size, torch.device("cpu"), heads=Heads(1, 1, 16))
        tails = layout.plans[Blocks()].tails.visible.flatten()
        work = Work(layout.tensors.owner.numpy(), (tails > 0).numpy())
        yield name, work
        nobody = np.full(len(work.owner), work.num_rows, np.int32)
        yield f"{name}, bucket twice as large", Work(np.concatenate([work.owner, nobody]), work.has_tail)
        begins_shared = np.concatenate([nobody, work.owner])
        yield f"{name}, behind as many shared blocks", Work(begins_shared, work.has_tail)


def count_balance(sizes: Sizes, results: Results) -> None:
    """Both cuts of every plan, for the last model's heads, on the multiprocessors of an H200."""
    num_heads = sizes.models[-1].num_kv_heads
    for name, work in works(sizes):
        is_even = choose(work.num_rows, len(work.owner), num_heads, H200)
        for system, cut in ((SPLIT, cut_split), (STREAM_K, cut_stream_k)):
            found = cut(work, num_heads, H200)
            values = {
                "busiest": found.busiest,
                "programs": found.num_programs,
                "evenness": found.evenness,
                "triples": found.num_triples,
                "chosen": float(is_even == (system == STREAM_K)),
            }
            results.add(Point(Key("balance", name, system), values))
