"""Contexts from elsewhere among random requests, holds, failures and moves of blocks."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from graphs import StepLimits
from hpu_duo.request import PrefixHold
from tests.engine_host.test_prefix_properties import STEMS, PrefixMachine


class LoadMachine(PrefixMachine):
    """The machine of prefixes, which also loads them and fails to."""

    @rule(
        stem=st.sampled_from(STEMS),
        cut=st.integers(4, 12),
        salt=st.sampled_from([None, None, "a"]),
        old=st.none() | st.integers(0, 100),
        fails=st.sampled_from([False, False, True]),
    )
    def load(self, stem: list[int], cut: int, salt: str | None, old: int | None, fails: bool) -> None:
        if old is not None and self.texts:
            stem = self.texts[old % len(self.texts)]
        hold = PrefixHold(np.array(stem[:cut], np.int32), self.limits.block_size, salt)
        allocations = self.scheduler.allocations
        self.device.carry_out(allocations.take_copies())
        if not hold.num_blocks or not self._may_open(hold):
            return
        before = (allocations.blocks.num_free + allocations.blocks.num_idle, allocations.blocks.num_used)
        try:
            adopted = allocations.adopt(hold)
        except ValueError:  # requests hold the blocks
            assert (
                allocations.blocks.num_free + allocations.blocks.num_idle,
                allocations.blocks.num_used,
            ) == before
            return
        if fails:
            allocations.withdraw(adopted)
            assert (
                allocations.blocks.num_free + allocations.blocks.num_idle,
                allocations.blocks.num_used,
            ) == before
            return
        self.device.fill(hold.tokens.tolist(), adopted.first, adopted.blocks, adopted.row)
        self.open.append(hold)


TestLoadMachine = LoadMachine.TestCase
TestLoadMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_load_that_fails_leaves_no_prefix_without_its_evicted_snapshot() -> None:
    machine = LoadMachine()
    machine.create(
        StepLimits(
            max_num_seqs=1,
            max_num_batched_tokens=1,
            max_model_len=64,
            block_size=1,
            num_blocks=10,
            max_chunk_rows=1,
            decode_len=1,
            uses_blocks=False,
            caches_prefixes=True,
            num_snapshots=1,
        )
    )
    machine.load(STEMS[0], cut=5, salt=None, old=None, fails=False)
    machine.close(0, is_later=False)
    machine.load(STEMS[0], cut=4, salt=None, old=None, fails=True)
    machine.blocks_are_held_by_running_requests_idle_in_the_tree_or_free()
