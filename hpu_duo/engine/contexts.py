"""Contexts: prefixes that stay cached until they are closed, and their copies on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch

from graphs.interrupts import interrupts_deferred
from hpu_duo.engine.intake import Add, Calls, Entry, Intake
from hpu_duo.engine.outputs import FairLock
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.engine.stepper import Runner, Stepper
from hpu_duo.kv.prefix_tree import Adoption, PrefixNode
from hpu_duo.kv.row_state import RowState
from hpu_duo.kv.store import UnitTensor, block_tensors
from hpu_duo.request import PrefixHold
from hpu_duo.sampling import SamplingParams


class Source(Protocol):
    """Blocks and row states of a prefix on the host."""

    def chunks(
        self, tensors: Sequence[UnitTensor], first: int
    ) -> Iterator[tuple[UnitTensor, int, torch.Tensor]]:
        """Yield chunks of the blocks from ``first`` on: their tensor, number of the first block, and data."""
        ...

    def row(self, state: RowState) -> Mapping[str, torch.Tensor]:
        """Return what ``RowState.snapshot`` returned."""
        ...


class PrefixCopies:
    """Copies pinned prefixes from the stores to the host and back, between steps.

    Args:
        runner: the device side.
        scheduler: has the blocks and snapshots of each prefix.
        stepper: runs the steps.
        turns: lock of the engine.

    Attributes:
        chunk_bytes: most bytes that are copied between two steps; may be changed.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, stepper: Stepper, turns: FairLock) -> None:
        self.chunk_bytes = 1 << 25
        self._runner, self._scheduler, self._stepper, self._turns = runner, scheduler, stepper, turns

    def read_blocks(
        self, hold: PrefixHold, tensors: Sequence[UnitTensor], chunk: int
    ) -> Iterator[list[torch.Tensor]]:
        """Yield the blocks of a pinned prefix in all tensors, ``chunk`` at a time; steps run in between.

        Raises:
            ValueError: the stores cannot be read here, see ``check``; or the prefix was released or lost.
        """
        for begin in range(0, hold.num_blocks, chunk):
            with interrupts_deferred(), self._turns:
                path = [node.block for node in self._node(hold).path][::-1]
                data = [each.read(path[begin : begin + chunk]) for each in tensors]
            yield data

    def read_row(self, hold: PrefixHold, state: RowState) -> dict[str, torch.Tensor]:
        """Return a row state at the end of a pinned prefix.

        Raises:
            ValueError: see ``read_blocks``.
        """
        with interrupts_deferred(), self._turns:
            row = self._node(hold).snapshot
            assert row is not None, "expected a snapshot of a pinned prefix"
            return state.snapshot(row, len(hold.tokens))

    def _node(self, hold: PrefixHold) -> PrefixNode:
        """Return the end of a pinned prefix, once the stores have its content."""
        self._settle()
        if hold.node is None:
            raise ValueError("the context was closed or lost while it was read")
        hold.touch()
        return hold.node

    def write(self, hold: PrefixHold, source: Source) -> None:
        """Cache a prefix with keys and values from the host, and pin it; steps wait for the copy.

        Raises:
            ValueError: see ``check``; there is no room for it, or the source cannot be read. Nothing changes
                then.
        """
        with interrupts_deferred(), self._turns:
            self._settle()
            holding, allocations = self._scheduler.holding, self._scheduler.allocations
            holding.sweep()
            if holding.open_cached(hold):
                return
            adopted = allocations.adopt(hold)
            try:
                self._fill(source, adopted)
            except BaseException:
                allocations.withdraw(adopted)
                raise

    def _fill(self, source: Source, adopted: Adoption) -> None:
        store, first, blocks = self._runner.store, adopted.first, adopted.blocks
        if blocks:
            for each, begin, data in source.chunks(tuple(block_tensors(store)), first):
                each.write(blocks[begin - first : begin - first + len(data)], data)
        if adopted.row is not None:
            for state in store.row_states:
                state.restore(adopted.row, source.row(state))

    def check(self) -> None:
        """Raise ValueError where keys and values cannot be copied to the host and back."""
        if self._runner.executor.followers is not None:
            raise ValueError("contexts are saved and loaded with tensor_parallel_size=1, got several ranks")
        if self._scheduler.limits.chunk_grid:
            raise ValueError(
                "contexts are saved and loaded without kv_policy and top_blocks, got heads with either"
            )
        if self._stepper.telemetry.step_recorder is not None:
            raise ValueError(
                "contexts are saved and loaded without record_steps, whose recordings do not contain them"
            )

    def _settle(self) -> None:
        """Execute the copies that are due before the next step, so that the stores match the scheduler."""
        self.check()
        self._stepper.check_between_steps()
        self._scheduler.discard()
        copies = self._scheduler.allocations.take_copies()
        if not copies:
            return
        try:
            self._runner.carry_out(copies)
        except BaseException:
            self._scheduler.forget_cache()
            raise


class Contexts:
    """Opens and closes contexts; thread-safe.

    Args:
        intake: checks tokens.
        entry: queues the request that computes a prefix.
        calls: serves it.
        scheduler: decides whether there is room.
        turns: lock of the engine.
        copies: reads and writes pinned prefixes.
    """

    def __init__(
        self,
        intake: Intake,
        entry: Entry,
        calls: Calls,
        scheduler: Scheduler,
        turns: FairLock,
        copies: PrefixCopies,
    ) -> None:
        self.copies = copies
        self._intake, self._entry, self._calls = intake, entry, calls
        self._scheduler, self._turns = scheduler, turns

    @property
    def block_size(self) -> int:
        """Tokens of a block: a prefix has a whole number of them."""
        return self._scheduler.allocations.block_size

    def open(
        self, token_ids: Sequence[int], salt: str | None = None, base: PrefixHold | None = None
    ) -> PrefixHold:
        """Compute the uncached full blocks of a text, and pin the prefix that they form.

        With a KV policy whose choice depends on chunks, the prefix ends at the last full chunk.

        It is computed as the prompt of a request, in chunks, batched with others.

        Args:
            token_ids: at least one.
            salt: see ``SamplingParams.cache_salt``.
            base: the hold of a shorter prefix of the text.

        Returns:
            A hold with one reference, to be released by ``close`` or ``close_later``; empty if the text fills
            no block.

        Raises:
            ValueError: there is no prefix cache, the text cannot be served, or too few blocks or snapshots
                are left by other contexts and by what unfinished requests may need.
        """
        params, hold = self._checked(token_ids, salt)
        holding = self._scheduler.holding
        if not hold.num_blocks:
            return hold
        with interrupts_deferred(), self._turns:
            holding.sweep()
            if holding.open_cached(hold):
                return hold
        add: Add = partial(
            self._entry.add, hold.tokens, [params], name="the context", context=base, opens=hold
        )
        try:
            self._calls.serve(deque([add]), None)
        except BaseException:
            if hold.is_there:
                self.close(hold)
            raise
        if hold.refusal is not None:
            raise ValueError(hold.refusal)
        return hold

    def load(self, token_ids: Sequence[int], salt: str | None, source: Source) -> PrefixHold:
        """Pin a text whose keys and values are read from the host; see ``open``.

        Raises:
            ValueError: see ``open`` and ``PrefixCopies.write``.
        """
        _, hold = self._checked(token_ids, salt)
        if hold.num_blocks:
            self.copies.write(hold, source)
        return hold

    def _checked(self, token_ids: Sequence[int], salt: str | None) -> tuple[SamplingParams, PrefixHold]:
        params = SamplingParams(temperature=0.0, max_tokens=1, cache_salt=salt)
        [request] = self._intake.requests("", 0, token_ids, [params], "the context")
        self._scheduler.holding.check_possible()
        tokens, grid = request.prompt_token_ids, self._scheduler.limits.prefix_grid
        if grid:
            tokens = tokens[: len(tokens) // grid * grid]
        return params, PrefixHold(tokens, self.block_size, request.namespace)

    def close(self, hold: PrefixHold) -> None:
        """Release one reference of a hold; requests that begin with it have references of their own."""
        with interrupts_deferred(), self._turns:
            self._scheduler.holding.let_go(hold)

    def close_later(self, hold: PrefixHold) -> None:
        """Release one reference of a hold before the next step; thread-safe, also in finalisers."""
        self._scheduler.holding.let_go_later(hold)
