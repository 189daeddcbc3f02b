"""A model of the scheduler, for sequences that are numbers of tokens: no tensors, no texts."""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from dataclasses import dataclass, field

from graphs.limits import BucketLimits
from graphs.shape import BatchShape, Phase


@dataclass(eq=False)
class Sequence:
    """One request, in tokens: known, in the end, cached; with the blocks that hold them."""

    num_known: int
    num_total: int
    num_samples: int = 1
    arrival: int = -1
    is_sample: bool = False
    num_cached: int = 0
    blocks: list[int] = field(default_factory=list)
    family: _Family | None = None
    num_full: int = 0
    top: int = -1

    @property
    def num_uncached(self) -> int:
        """Tokens to compute, of those that are known."""
        return self.num_known - self.num_cached

    @property
    def num_prefix(self) -> int:
        """Leading blocks that other samples of the prompt read too."""
        return 0 if self.family is None else len(self.family.blocks)

    def highest_full(self, block_size: int) -> int:
        """The highest number of its own blocks that one more token leaves full, -1 = none."""
        num_full = (self.num_cached + 1) // block_size
        self.top = max([self.top, *self.blocks[max(self.num_full, self.num_prefix) : num_full]])
        self.num_full = num_full
        return self.top

    def forget(self) -> None:
        """Lose everything that is cached."""
        self.num_cached, self.blocks, self.family = 0, [], None
        self.num_full, self.top = 0, -1


@dataclass(eq=False)
class _Family:
    """Samples of one prompt, which read the same leading blocks."""

    blocks: list[int]
    num_members: int = 0


class Server:
    """The scheduler's rules, for sequences that are numbers of tokens."""

    def __init__(self, limits: BucketLimits) -> None:
        self.num_rows = limits.max_decode_rows
        self._limits = limits
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._free = list(range(limits.max_unique_blocks))
        self._shares: dict[Sequence, int] = {}
        self._num_arrived = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        return not (self._waiting or self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a request, with all of its samples."""
        sequence.arrival = self._num_arrived
        self._num_arrived += sequence.num_samples
        self._waiting.append(sequence)
        if sequence.num_known == 1:
            self._part(sequence)

    def step(self) -> tuple[BatchShape | None, int]:
        """Plan and serve one step: its shape, None without anything to do, and how many requests it ended."""
        self._shares = {}
        for sequence in [s for s in self._running if s.num_uncached == 1]:
            self._serve(sequence)
        for sequence in [s for s in self._running if s.num_uncached > 1]:
            self._serve(sequence)
        self._admit()
        if not self._shares:
            return None, 0
        shape = self._shape()
        return shape, self._commit()

    @property
    def _num_free_tokens(self) -> int:
        return self._limits.max_num_batched_tokens - sum(self._shares.values())

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._limits.block_size) if self._limits.uses_blocks else 0

    def _share_of(self, sequence: Sequence) -> int:
        num_new = min(sequence.num_uncached, self._num_free_tokens)
        if num_new < 2 or not sequence.num_cached:
            return num_new
        num_chunks = sum(new > 1 and s.num_cached > 0 for s, new in self._shares.items())
        return num_new if num_chunks < self._limits.max_chunk_rows else 0

    def _serve(self, sequence: Sequence) -> None:
        """Give a running sequence its share; later ones give way for its blocks, or it does itself."""
        while sequence in self._running:
            num_new = self._share_of(sequence)
            if not num_new:
                return
            missing = max(0, self._blocks_for(sequence.num_cached + num_new) - len(sequence.blocks))
            if missing <= len(self._free):
                sequence.blocks += [heapq.heappop(self._free) for _ in range(missing)]
                self._shares[sequence] = num_new
                return
            latest = self._running.pop()
            self._shares.pop(latest, None)
            self._release(latest)
            latest.forget()
            self._wait(latest)
            self._part(latest)

    def _admit(self) -> None:
        due = sum(map(self._num_due, self._running)) if self._waiting else 0
        while self._waiting and len(self._running) < self.num_rows and self._num_free_tokens:
            due += self._num_due(self._waiting[0])
            if due > len(self._free):
                return
            sequence = self._waiting.pop(0)
            self._run(sequence)
            self._serve(sequence)
            due -= len(sequence.blocks)

    def _num_due(self, sequence: Sequence) -> int:
        num_tokens = min(sequence.num_known + 1, sequence.num_total - 1)
        return max(0, self._blocks_for(num_tokens) - len(sequence.blocks))

    def _wait(self, sequence: Sequence) -> None:
        bisect.insort(self._waiting, sequence, key=_arrival)

    def _run(self, sequence: Sequence) -> None:
        bisect.insort(self._running, sequence, key=_arrival)

    def _shape(self) -> BatchShape:
        chunks = [s for s, num_new in self._shares.items() if num_new > 1]
        decodes = [s for s, num_new in self._shares.items() if num_new == 1]
        readers = Counter(s.family for s in decodes if s.family is not None)
        num_shared = sum(self._blocks_for(s.num_cached) for s in chunks)
        num_shared += sum(len(family.blocks) for family, count in readers.items() if count > 1)
        num_unique = 0
        if self._limits.uses_blocks:
            tops = [s.highest_full(self._limits.block_size) for s in decodes]
            tops += [max(family.blocks) for family, count in readers.items() if count == 1]
            num_unique = max(tops, default=-1) + 1
        query_len = sum(self._shares.values())
        # The rows of running requests lie close together, and all of them run, but for prompts that wait.
        num_logits = min(len(self._running), query_len) if chunks else len(self._running)
        has_shared = num_shared > 0 or any(s.num_cached for s in chunks)
        phase = Phase(bool(chunks), has_shared, bool(decodes))
        return BatchShape(phase, query_len, num_shared, num_unique, num_logits)

    def _commit(self) -> int:
        """Take in the results: requests that ended leave, then samples start, then their parents leave."""
        done = []
        for sequence in sorted(self._shares, key=self._row_order):
            num_new = self._shares[sequence]
            sequence.num_cached += num_new
            if not sequence.num_uncached:
                sequence.num_known += 1
                done.append(sequence)
        ended = [s for s in done if s.num_known >= s.num_total]
        parents = [s for s in done if s.num_samples > 1]
        for sequence in ended:
            if sequence not in parents:
                self._end(sequence)
        for parent in parents:
            self._fork(parent)
        for parent in parents:
            if parent in ended:
                self._end(parent)
        return sum(not s.is_sample for s in ended)

    def _row_order(self, sequence: Sequence) -> tuple[int, int]:
        """Rows with one token, with several and context, with several and none; by arrival."""
        kind = 0 if self._shares[sequence] == 1 else 1 if sequence.num_cached else 2
        return kind, sequence.arrival

    def _end(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._release(sequence)

    def _part(self, parent: Sequence) -> list[Sequence]:
        """Make the samples that waited for a prompt requests of their own."""
        samples = [
            Sequence(parent.num_known, parent.num_total, arrival=parent.arrival + index, is_sample=True)
            for index in range(1, parent.num_samples)
        ]
        parent.num_samples = 1
        for sample in samples:
            self._wait(sample)
        return samples

    def _fork(self, parent: Sequence) -> None:
        """Samples start with the cache of a prompt, and compute its last token again."""
        num_cached = parent.num_cached - 1
        parent.num_known -= 1
        samples = self._part(parent)
        parent.num_known += 1
        uses_blocks = self._limits.uses_blocks
        family = _Family(parent.blocks[: num_cached // self._limits.block_size] if uses_blocks else [])
        for sample in samples:
            if len(self._running) >= self.num_rows or (uses_blocks and not self._free):
                continue
            self._waiting.remove(sample)
            sample.num_cached = num_cached
            sample.blocks = family.blocks + ([heapq.heappop(self._free)] if uses_blocks else [])
            if family.blocks:
                sample.family, parent.family = family, family
                family.num_members += 1
            self._run(sample)
        if parent.family is family:
            family.num_members += 1
            parent.num_full, parent.top = 0, -1

    def _release(self, sequence: Sequence) -> None:
        freed, family = sequence.blocks[sequence.num_prefix :], sequence.family
        if family is not None:
            family.num_members -= 1
            freed = freed if family.num_members else [*freed, *family.blocks]
        for number in freed:
            heapq.heappush(self._free, number)


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
