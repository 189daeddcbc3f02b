from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hpu_duo.kv.pool import BlockPool


def test_blocks_are_handed_out_lowest_free_id_first() -> None:
    pool = BlockPool(5)
    assert pool.allocate(4) == [0, 1, 2, 3]
    pool.release([2, 0])
    assert pool.allocate(3) == [0, 2, 4]


def test_the_trash_block_is_never_handed_out() -> None:
    pool = BlockPool(3)
    assert pool.null_block == 3
    assert pool.null_block not in pool.allocate(3)


def test_a_shared_block_is_free_only_after_its_last_holder_released_it() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 2


def test_asking_for_more_blocks_than_are_free_names_both_and_takes_none() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(ValueError, match="expected 3 free blocks, got 2 of 3"):
        pool.allocate(3)
    assert pool.num_free == 2


@pytest.mark.parametrize("block", [-1, 1, 2])
def test_a_block_nobody_holds_can_be_neither_shared_nor_released(block: int) -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(ValueError, match=f"block {block} is"):
        pool.share([block])
    with pytest.raises(ValueError, match=f"block {block} is"):
        pool.release([block])


def test_a_pool_cannot_have_fewer_than_no_blocks() -> None:
    with pytest.raises(ValueError, match="got -1"):
        BlockPool(-1)


class PoolMachine(RuleBasedStateMachine):
    """The pool against a plain list of who holds what."""

    @initialize(num_blocks=st.integers(0, 12))
    def create(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.holdings: list[list[int]] = []
        self.kept: set[int] = set()

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        held = {block for blocks in self.holdings for block in blocks}
        free = [block for block in range(self.pool.num_blocks) if block not in held | self.kept]
        if count > len(free):
            with pytest.raises(ValueError):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert blocks == free[:count]
        self.holdings.append(blocks)

    @precondition(lambda self: self.holdings)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.holdings))
        shared = blocks[: data.draw(st.integers(0, len(blocks)))]
        self.pool.share(shared)
        self.holdings.append(shared)

    @precondition(lambda self: self.holdings)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holdings) - 1))
        self.pool.release(self.holdings.pop(index))

    @precondition(lambda self: any(self.holdings))
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([block for blocks in self.holdings for block in blocks]))
        if block not in self.kept:
            self.pool.keep(block)
            self.kept.add(block)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.kept)))
        self.pool.drop(block)
        self.kept.remove(block)

    @rule(most=st.integers(0, 4))
    def compact(self, most: int) -> None:
        """The highest held blocks take the lowest places, and what lay there takes theirs."""
        held = {block for blocks in self.holdings for block in blocks}
        above = sorted((block for block in held if block >= len(held)), reverse=True)[:most]
        holes = [block for block in range(len(held)) if block not in held][: len(above)]
        idle = self.kept - held
        moves = self.pool.compact(most)
        assert [(move.src, move.dst, move.is_exchange) for move in moves] == [
            (src, dst, dst in idle) for src, dst in zip(above, holes)
        ]
        now = {src: dst for src, dst, _ in moves} | {dst: src for src, dst, _ in moves}
        self.holdings = [[now.get(block, block) for block in blocks] for blocks in self.holdings]
        self.kept = {now.get(block, block) for block in self.kept}

    @invariant()
    def every_block_has_as_many_holders_as_hold_it(self) -> None:
        if not hasattr(self, "pool"):
            return
        for block in range(self.pool.num_blocks):
            assert self.pool.num_holders(block) == sum(block in blocks for blocks in self.holdings)
        holders = Counter(block for blocks in self.holdings for block in blocks)
        assert self.pool.num_used == len(holders)
        assert self.pool.num_shared == sum(number > 1 for number in holders.values())
        idle = self.kept - {block for blocks in self.holdings for block in blocks}
        assert self.pool.num_idle == len(idle) == sum(map(self.pool.is_idle, range(self.pool.num_blocks)))
        assert self.pool.num_used + self.pool.num_free + len(idle) == self.pool.num_blocks


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_kept_blocks_are_idle_without_holders_until_they_are_dropped() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.keep(first)
    pool.release([first, second])
    assert (pool.num_free, pool.num_idle, pool.num_used) == (2, 1, 0)
    assert pool.is_idle(first)
    assert not pool.is_idle(second)
    pool.share([first])
    assert (pool.num_idle, pool.num_holders(first)) == (0, 1)
    pool.drop(first)
    pool.release([first])
    assert pool.num_free == 3
    with pytest.raises(ValueError, match="not cached"):
        pool.drop(first)
    with pytest.raises(ValueError, match="is free"):
        pool.keep(first)
