from __future__ import annotations

from hpu_duo.kv.allocations import KVAllocations
from hpu_duo.kv.pool import BlockCopy, RowCopy
from hpu_duo.request import NO_ROW, Request, TokenLimits
from hpu_duo.sampling.params import SamplingParams


def _request(name: str, num_prompt_tokens: int = 9) -> Request:
    limits = TokenLimits(max_model_len=64)
    return Request(name, [1] * num_prompt_tokens, SamplingParams(max_tokens=8), limits)


def _opened(allocations: KVAllocations, name: str, num_tokens: int) -> Request:
    request = _request(name)
    allocations.open(request)
    assert allocations.grow(request, num_tokens)
    return request


def _table(request: Request) -> list[int]:
    return request.block_table[: request.num_blocks].tolist()


def test_a_request_grows_by_the_blocks_it_lacks() -> None:
    allocations = KVAllocations(8, 4, 2)
    request = _opened(allocations, "a", 5)
    assert _table(request) == [0, 1]
    assert allocations.grow(request, 8)
    assert _table(request) == [0, 1]
    assert allocations.grow(request, 9)
    assert _table(request) == [0, 1, 2]


def test_growing_beyond_the_free_blocks_changes_nothing() -> None:
    allocations = KVAllocations(3, 4, 2)
    request = _opened(allocations, "a", 8)
    assert not allocations.grow(request, 16)
    assert _table(request) == [0, 1]
    assert allocations.blocks.num_free == 1


def test_closing_gives_everything_back_but_leaves_the_table_readable_for_a_step_under_way() -> None:
    allocations = KVAllocations(3, 4, 2)
    request = _opened(allocations, "a", 8)
    allocations.close(request)
    assert (request.row, request.num_blocks) == (NO_ROW, 0)
    assert (allocations.blocks.num_used, allocations.rows.num_used) == (0, 0)
    assert request.block_table[:2].tolist() == [0, 1]


def test_a_fork_shares_full_blocks_and_copies_the_block_it_writes_to_next() -> None:
    allocations = KVAllocations(8, 4, 2)
    parent, child = _opened(allocations, "p", 11), _request("c")
    assert allocations.fork(parent, child, 10)
    assert _table(parent) == [0, 1, 2]
    assert _table(child) == [0, 1, 3]
    assert [allocations.blocks.num_holders(block) for block in range(4)] == [2, 2, 1, 1]
    assert allocations.take_copies() == (BlockCopy(2, 3), RowCopy(0, 1))


def test_a_fork_at_a_block_boundary_copies_no_block() -> None:
    allocations = KVAllocations(8, 4, 2)
    parent, child = _opened(allocations, "p", 9), _request("c")
    assert allocations.fork(parent, child, 8)
    assert _table(child) == [0, 1, 3]
    assert allocations.take_copies() == (RowCopy(0, 1),)


def test_a_fork_without_a_free_row_or_block_changes_nothing() -> None:
    for allocations in (KVAllocations(8, 4, 1), KVAllocations(3, 4, 2)):
        parent, child = _opened(allocations, "p", 11), _request("c")
        assert not allocations.fork(parent, child, 10)
        assert (child.row, child.num_blocks) == (NO_ROW, 0)
        assert allocations.blocks.num_used == 3
        assert allocations.take_copies() == ()


def test_copies_of_forks_come_before_the_moves_that_close_the_gap_their_parent_left() -> None:
    allocations = KVAllocations(8, 4, 3)
    parent, first, second = _opened(allocations, "p", 9), _request("c"), _request("d")
    assert allocations.fork(parent, first, 8)
    assert allocations.fork(parent, second, 8)
    allocations.close(parent)
    assert allocations.take_copies() == (RowCopy(0, 1), RowCopy(0, 2), RowCopy(2, 0))
    assert (first.row, second.row) == (1, 0)


def test_copies_are_handed_over_once() -> None:
    allocations = KVAllocations(8, 4, 2)
    parent = _opened(allocations, "p", 9)
    assert allocations.fork(parent, _request("c"), 8)
    assert allocations.take_copies()
    assert allocations.take_copies() == ()


def test_without_retrieval_heads_a_request_needs_a_row_only() -> None:
    allocations = KVAllocations(0, 4, 2, uses_blocks=False)
    parent, child = _opened(allocations, "p", 11), _request("c")
    assert allocations.fork(parent, child, 10)
    assert (_table(parent), _table(child)) == ([], [])
    assert allocations.take_copies() == (RowCopy(0, 1),)
    assert allocations.num_blocks_due(parent) == 0
