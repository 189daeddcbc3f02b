"""The rank that ended all ranks is named, of what rank 0 knows of each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.device.heartbeats import Report, Signs, blamed

TIMEOUT_S = 4.0


def follows(rank: int) -> Report:
    return Report(rank, "RuntimeError: Connection closed by peer", "", may_follow=True)


def own(rank: int) -> Report:
    return Report(rank, "ValueError: no such file", "Traceback", may_follow=False)


def test_an_error_of_a_ranks_own_is_named_whoever_else_has_told_of_one_before() -> None:
    signs = Signs(4, (follows(0), follows(3), own(2)), frozenset({1}), {1: 9.0})
    found = blamed(signs, TIMEOUT_S, is_all=False)
    assert found is not None
    assert (found.rank, found.report) == (2, "failed: ValueError: no such file\nTraceback")


def test_a_process_that_ends_without_a_word_is_named_before_those_that_saw_it_end() -> None:
    # Ranks that have told of an error are gone soon after.
    signs = Signs(4, (follows(3), follows(1)), frozenset({1, 2, 3}), {2: 0.1})
    assert blamed(signs, TIMEOUT_S, is_all=False) == (2, None)


def test_a_silent_rank_is_named_before_those_that_waited_for_it() -> None:
    signs = Signs(4, (follows(3),), frozenset(), {1: 4.5, 2: 0.2, 3: 5.0})
    assert blamed(signs, TIMEOUT_S, is_all=False) == (1, "sent no heartbeat for 4 s")
    assert not Signs(4, (), frozenset(), {1: 3.9}).are_bad(TIMEOUT_S)


def test_a_rank_that_lives_and_takes_part_in_nothing_is_named_once_all_others_have_told() -> None:
    signs = Signs(4, (follows(0), follows(3), follows(1)), frozenset(), {1: 0.1, 2: 0.1, 3: 0.1})
    assert blamed(signs, TIMEOUT_S, is_all=False) is None
    found = blamed(signs, TIMEOUT_S, is_all=True)
    assert found is not None
    assert found.rank == 2
    assert found.report is not None
    assert found.report.startswith("hangs: rank 0 waited for it in vain")


def test_of_ranks_that_wait_for_orders_and_one_that_carries_one_out_the_latter_hangs() -> None:
    signs = Signs(4, (follows(0),), num_done={1: 7, 2: 6, 3: 7})
    found = blamed(signs, TIMEOUT_S, is_all=True)
    assert found is not None
    assert found.rank == 2
    # Rank 0 gives orders, and fails like others where it waits for one of them.
    assert blamed(Signs(4, (follows(1),), num_done={1: 7, 2: 6, 3: 7}), TIMEOUT_S, is_all=True) == (
        0,
        "hangs: rank 1 waited for it in vain (RuntimeError: Connection closed by peer)",
    )


def test_an_error_that_no_exchange_raises_is_its_ranks_own_even_where_rank_0_lives() -> None:
    mismatch = Report(1, "RuntimeError: shape mismatch: [2] and [3]", "Traceback", may_follow=True)
    expected = (1, "failed: RuntimeError: shape mismatch: [2] and [3]\nTraceback")
    signs = Signs(2, (mismatch,), frozenset({1}), {}, {1: 7})
    assert blamed(signs, TIMEOUT_S, is_all=True) == expected
    # Others that see it end come later, or first.
    for reports in ((mismatch, follows(0)), (follows(0), mismatch)):
        assert blamed(Signs(2, reports, frozenset({1})), TIMEOUT_S, is_all=True) == expected
    assert blamed(Signs(2, (mismatch,)), TIMEOUT_S, is_all=False) is None, "a rank may have died before"
    assert blamed(Signs(3, (mismatch,), frozenset({2})), TIMEOUT_S, is_all=False) == (2, None)


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer",
        "RuntimeError: Timed out waiting 3000ms for recv operation to complete",
        "torch.distributed.DistBackendError: NCCL error in ProcessGroupNCCL.cpp:2251",
    ],
)
def test_a_rank_that_was_left_alone_is_not_blamed_though_it_ends(message: str) -> None:
    report = Report(1, message, "Traceback of rank 1", may_follow=True)
    found = blamed(
        Signs(3, (report,), frozenset({1}), {}, {1: 7, 2: 6}, {}, frozenset({0})), 4.0, is_all=True
    )
    assert found == (2, f"hangs: rank 1 waited for it in vain ({message})\nTraceback of rank 1")


def test_the_rank_at_a_step_that_waits_for_nobody_hangs() -> None:
    late = {1: 4.5, 2: 4.5, 3: 4.4}
    signs = Signs(4, num_done={1: 6, 2: 6, 3: 6}, late_s=late, waiting=frozenset({1, 3}))
    assert signs.are_bad(TIMEOUT_S)
    assert blamed(signs, TIMEOUT_S, is_all=False) == (2, "hangs: it has been at an order for 4 s")
    assert not Signs(4, late_s={1: 3.9}).are_bad(TIMEOUT_S)


def test_a_late_rank_that_gives_no_sign_of_life_is_silent() -> None:
    signs = Signs(2, silent_s={1: 3.8}, late_s={1: 4.2})
    assert blamed(signs, TIMEOUT_S, is_all=True) is None
    found = blamed(replace(signs, silent_s={1: 4.1}, late_s={1: 4.5}), TIMEOUT_S, is_all=True)
    assert found == (1, "sent no heartbeat for 4 s")


def test_late_ranks_of_which_the_first_is_not_known_have_some_seconds_to_tell_more() -> None:
    signs = Signs(4, num_done={1: 7, 2: 6, 3: 6}, late_s={1: 4.5, 2: 4.5, 3: 4.5})
    assert blamed(signs, TIMEOUT_S, is_all=True) is None
    later = replace(signs, late_s={1: 5.1, 2: 5.1, 3: 5.1})
    assert blamed(later, TIMEOUT_S, is_all=True) == (
        2,
        "hangs: it has been at an order for 5 s, as has rank 3, 1",
    )


def test_where_all_have_told_of_the_same_the_first_is_named() -> None:
    found = blamed(Signs(2, (follows(1), follows(0))), TIMEOUT_S, is_all=True)
    assert found is not None
    assert (found.rank, found.report) == (1, "failed: RuntimeError: Connection closed by peer")


@given(
    st.integers(2, 8).flatmap(
        lambda size: st.tuples(
            st.just(size),
            st.lists(st.tuples(st.integers(0, size - 1), st.booleans()), max_size=size),
            st.frozensets(st.integers(1, size - 1)),
            st.dictionaries(st.integers(1, size - 1), st.floats(0, 10)),
        )
    )
)
def test_in_the_end_a_rank_is_named_if_and_only_if_something_is_wrong(
    drawn: tuple[int, list[tuple[int, bool]], frozenset[int], dict[int, float]],
) -> None:
    size, told, gone, silent_s = drawn
    reports = tuple(follows(rank) if may_follow else own(rank) for rank, may_follow in told)
    signs = Signs(size, reports, gone, silent_s)
    found = blamed(signs, TIMEOUT_S, is_all=True)
    assert (found is not None) == signs.are_bad(TIMEOUT_S)
    if found is not None:
        assert 0 <= found.rank < size
        early = blamed(signs, TIMEOUT_S, is_all=False)
        assert early in (None, found), "what is said early is what is said later"
