"""Copies of held prefixes between the stores and the host, between steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from graphs.interrupts import interrupts_deferred
from hpu_duo.engine.runner import Runner
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.engine.stepper import Stepper
from hpu_duo.engine.turns import Turns
from hpu_duo.kv.transfer import UnitTensor, tensors_of
from hpu_duo.prefix_hold import PrefixHold


class Source(Protocol):
    """Units of a prefix on the host."""

    def chunks(self, each: UnitTensor, first: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield units of a tensor from ``first`` on, with the number of the first one of each chunk."""
        ...


class PrefixCopies:
    """Reads what is held from the stores, and writes what was read before, while no step runs.

    Args:
        runner: the device side.
        scheduler: knows what is held where.
        stepper: runs the steps.
        turns: of the threads of the engine.

    Attributes:
        chunk_bytes: most bytes that are copied between two steps; may be changed.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, stepper: Stepper, turns: Turns) -> None:
        self.chunk_bytes = 1 << 25
        self._runner, self._scheduler, self._stepper, self._turns = runner, scheduler, stepper, turns

    def read(self, hold: PrefixHold, each: UnitTensor, chunk: int) -> Iterator[torch.Tensor]:
        """Yield the units of a held prefix, ``chunk`` of them at a time; steps run in between.

        Raises:
            ValueError: the stores cannot be read here; see ``check``; or the prefix was let go or lost.
        """
        for begin in range(0, hold.num_blocks if each.is_of_blocks else 1, chunk):
            with interrupts_deferred(), self._turns:
                self._settle()
                if hold.node is None:
                    raise ValueError("the context was closed or lost while it was read")
                if each.is_of_blocks:
                    path = [node.block for node in hold.node.path][::-1]
                    data = each.read(path[begin : begin + chunk])
                else:
                    assert hold.node.snapshot is not None, "what is held has a snapshot"
                    data = each.read([hold.node.snapshot])
                    seen = each.kind.seen_slots(len(hold.tokens), data.shape[2])
                    data = torch.where(seen[:, None], data, torch.zeros((), dtype=data.dtype))
            yield data

    def write(self, hold: PrefixHold, source: Source) -> None:
        """Enter a prefix with keys and values from the host, and hold it; steps wait until it is there.

        Raises:
            ValueError: see ``check``; there is no room for it, or the source cannot be read. Nothing is
                entered then.
        """
        with interrupts_deferred(), self._turns:
            self._settle()
            holding, leases = self._scheduler.holding, self._scheduler.leases
            holding.sweep()
            if holding.open_cached(hold):
                return
            adopted = leases.adopt(hold)
            try:
                for each in tensors_of(self._runner.store):
                    self._fill(each, source, adopted.first, adopted.blocks, adopted.row)
            except BaseException:
                leases.withdraw(adopted)
                raise

    def _fill(self, each: UnitTensor, source: Source, first: int, blocks: list[int], row: int | None) -> None:
        if not each.is_of_blocks:
            if row is not None:
                for _, data in source.chunks(each, 0):
                    each.write([row], data)
            return
        for begin, data in source.chunks(each, first) if blocks else ():
            each.write(blocks[begin - first : begin - first + len(data)], data)

    def check(self) -> None:
        """Raise ValueError where keys and values cannot be copied to the host and back."""
        if self._runner.executor.followers is not None:
            raise ValueError("contexts are saved and loaded with tensor_parallel_size=1, got several ranks")
        if self._scheduler.limits.chunk_grid:
            raise ValueError(
                "contexts are saved and loaded without kv_policy and top_blocks, got heads with either"
            )
        if self._stepper.telemetry.step_recorder is not None:
            raise ValueError("contexts are saved and loaded without record_steps, which would not hold them")

    def _settle(self) -> None:
        """Bring the stores to what the scheduler knows: carry out copies that wait for the next step."""
        self.check()
        self._stepper.check_between_steps()
        self._scheduler.discard()
        copies = self._scheduler.leases.take_copies()
        if not copies:
            return
        try:
            self._runner.carry_out(copies)
        except BaseException:
            self._scheduler.forget_cache()
            raise
