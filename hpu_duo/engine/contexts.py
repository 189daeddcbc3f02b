"""Prefixes that an engine computes once and keeps until they are let go."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

from graphs.interrupts import interrupts_deferred
from hpu_duo.engine.calls import Add, Calls
from hpu_duo.engine.entry import Entry
from hpu_duo.engine.intake import Intake
from hpu_duo.engine.prefix_copies import PrefixCopies, Source
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.engine.turns import Turns
from hpu_duo.prefix_hold import PrefixHold
from hpu_duo.sampling import SamplingParams


class Contexts:
    """Opens prefixes for requests to begin with, and lets them go; any thread may call it.

    Args:
        intake: checks tokens.
        entry: queues the request that computes a prefix.
        calls: serves it.
        scheduler: decides whether there is room.
        turns: of the threads of the engine.
        copies: reads and writes what is held.
    """

    def __init__(
        self,
        intake: Intake,
        entry: Entry,
        calls: Calls,
        scheduler: Scheduler,
        turns: Turns,
        copies: PrefixCopies,
    ) -> None:
        self.copies = copies
        self._intake, self._entry, self._calls = intake, entry, calls
        self._scheduler, self._turns = scheduler, turns

    @property
    def block_size(self) -> int:
        """Tokens of a block: a prefix has a whole number of them."""
        return self._scheduler.leases.block_size

    def open(
        self, token_ids: Sequence[int], salt: str | None = None, base: PrefixHold | None = None
    ) -> PrefixHold:
        """Compute a text up to its last full block, but for what is cached of it, and hold that.

        Up to its last full chunk, where chunks decide what heads keep.

        It is computed like the prompt of any request, in chunks, beside others.

        Args:
            token_ids: at least one.
            salt: see ``SamplingParams.cache_salt``.
            base: a hold of its beginning.

        Returns:
            A hold with one holder, who gives it back by ``close`` or ``close_later``; of no blocks if the
            text fills none.

        Raises:
            ValueError: there is no prefix cache, the text cannot be served, or blocks or snapshots are too
                few beside those that are held and what unfinished requests may need.
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
        """Hold a text whose keys and values come from elsewhere; see ``open``.

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
        """Take one holder from a hold; requests that begin with it keep it until they end."""
        with interrupts_deferred(), self._turns:
            self._scheduler.holding.let_go(hold)

    def close_later(self, hold: PrefixHold) -> None:
        """Take one holder from a hold before the next step, from any thread and at any moment."""
        self._scheduler.holding.let_go_later(hold)
