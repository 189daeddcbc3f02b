"""The scheduler admits requests with cached prefixes when they get a share, and moves blocks together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpu_duo.engine.batch import exact_shape
from hpu_duo.engine.scheduler import Scheduler
from tests.engine_host.planning import LIMITS, planned, stepped
from tests.engine_host.simulated_device import VOCAB_SIZE, SimulatedDevice, make_request

TEXT = [1, 2, 3, 4, 5, 6, 7, 8]
WARM = replace(LIMITS, caches_prefixes=True, uses_rows=False, max_chunk_rows=1)


def _scheduler(**limits: int) -> Scheduler:
    """A scheduler whose cache holds the text."""
    scheduler = Scheduler(replace(WARM, **limits))
    scheduler.add(make_request("first", [*TEXT, 9], max_tokens=1))
    while scheduler.has_unfinished:
        stepped(scheduler)
    return scheduler


def test_nobody_gets_a_row_without_a_share_of_the_step() -> None:
    """A step of fewer tokens than rows is none that a table has."""
    scheduler = _scheduler()
    for name in "abc":
        scheduler.add(make_request(name, [*TEXT, 1, 2], max_tokens=3))
    while scheduler.has_unfinished:
        plan = planned(scheduler)
        assert len(plan.rows) == scheduler.num_running
        assert scheduler.limits.reaches(exact_shape(plan, scheduler.limits.block_size))
        scheduler.commit(plan, [5] * len(plan.sampled_rows))


def test_later_arrivals_do_not_take_the_chunk_row_of_an_earlier_one() -> None:
    scheduler = _scheduler()
    scheduler.add(make_request("long", list(range(1, 12)) * 2, max_tokens=1))
    assert stepped(scheduler) == [("long", 8, 8)]
    scheduler.add(make_request("short", [*TEXT, 1, 2], max_tokens=1))
    scheduler.add(make_request("cold", [9] * 3, max_tokens=1))
    assert stepped(scheduler) == [("long", 16, 6)]
    assert [name for name, *_ in stepped(scheduler)] == ["short", "cold"]


def _starts_of_the_first_step(texts: dict[str, list[int]], **limits: int) -> list[tuple[str, int, int]]:
    """Rows of the step after three requests have come whose texts are known up to two tokens."""
    scheduler = _scheduler(**limits)
    for name, text in texts.items():
        scheduler.add(make_request(f"{name} before", [*text, 9], max_tokens=1))
    while scheduler.has_unfinished:
        stepped(scheduler)
    for name, text in texts.items():
        scheduler.add(make_request(name, [*text, 1, 2], max_tokens=1))
    return stepped(scheduler)


def test_rows_that_read_the_same_blocks_take_one_chunk_row() -> None:
    assert _starts_of_the_first_step({"a": TEXT, "b": TEXT, "c": TEXT}, max_chunk_rows=1) == [
        ("a", 8, 2),
        ("b", 8, 2),
        ("c", 8, 2),
    ]


def test_rows_that_read_other_blocks_or_have_rings_take_a_chunk_row_each() -> None:
    others = {"a": TEXT, "b": TEXT[::-1], "c": TEXT[::-1]}
    assert _starts_of_the_first_step(others, max_chunk_rows=1) == [("a", 8, 2)]
    assert _starts_of_the_first_step(others, max_chunk_rows=2) == [("a", 8, 2), ("b", 8, 2), ("c", 8, 2)]
    rings = {"uses_rows": True, "num_snapshots": 8}
    assert _starts_of_the_first_step(others, max_chunk_rows=2, **rings) == [("a", 8, 2), ("b", 8, 2)]


def _longest_slices(fills_cache: bool, max_block_moves: int) -> list[int]:
    """Unique blocks of each step of two texts that take turns, beside a cache that is full or empty."""
    limits = replace(WARM, num_blocks=60, max_block_moves=max_block_moves)
    scheduler = Scheduler(limits)
    device = SimulatedDevice(60, limits.block_size, limits.num_ring_rows, uses_blocks=True, uses_rows=False)
    texts = [[(number * place) % (VOCAB_SIZE - 1) + 1 for place in range(1, 32)] for number in (1, 5, 7)]
    strangers = [[number % 10 + 1, number // 10 + 1] * 12 for number in range(20)] if fills_cache else []
    slices = []
    for index, text in enumerate([texts[0], *strangers, texts[1], texts[0], texts[2], texts[1]]):
        scheduler.add(make_request(f"r{index}", text, max_tokens=20, ignore_eos=True))
        while scheduler.has_unfinished:
            plan = planned(scheduler)
            shape = exact_shape(plan, limits.block_size)
            if text in texts[1:] and not shape.phase.causal:
                slices.append(shape.num_unique_blocks)
            scheduler.commit(plan, device.run(plan))
    return slices


def test_a_step_reads_no_more_of_the_store_beside_a_full_cache() -> None:
    """A text comes to 13 blocks, hits among them, and not one more is read, wherever others lie."""
    empty, full = (_longest_slices(fills_cache, 8) for fills_cache in (False, True))
    assert max(full) == max(empty) == 13
    assert sum(full) <= sum(empty) * 1.01


@pytest.mark.parametrize("max_block_moves", [1, 2])
def test_few_moves_in_a_step_come_to_the_same_in_time(max_block_moves: int) -> None:
    assert _longest_slices(True, max_block_moves)[-1] in (12, 13)
    assert _longest_slices(True, 0)[-1] > 40


@pytest.mark.parametrize("uses_rows", [False, True])
@pytest.mark.parametrize("length", [1, 3])
def test_prompts_shorter_than_a_block_leave_nothing_of_their_salts(length: int, uses_rows: bool) -> None:
    scheduler = Scheduler(replace(WARM, uses_rows=uses_rows, num_snapshots=4 if uses_rows else 0))
    for number in range(20):
        scheduler.add(make_request(str(number), [1] * length, max_tokens=1, cache_salt=f"salt {number}"))
        while scheduler.has_unfinished:
            stepped(scheduler)
    cache = scheduler.allocations.prefixes
    assert cache is not None
    assert cache.tree.num_namespaces == len(cache.tree) == 0


def test_salts_of_evicted_prompts_are_forgotten() -> None:
    scheduler = Scheduler(WARM)
    for number in range(100):
        scheduler.add(make_request(str(number), TEXT, max_tokens=1, cache_salt=f"salt {number}"))
        while scheduler.has_unfinished:
            stepped(scheduler)
    cache = scheduler.allocations.prefixes
    assert cache is not None
    assert cache.counters.num_evicted_blocks > 100
    assert 1 < cache.tree.num_namespaces <= cache.num_blocks


def _steps(texts: list[list[int]], **limits: int) -> tuple[int, int]:
    """Steps until requests that come together have ended, and tokens that they took up."""
    few = {"num_snapshots": 4, "max_num_batched_tokens": 64, "num_blocks": 200, "max_model_len": 60}
    scheduler = Scheduler(replace(WARM, uses_rows=True, max_num_seqs=16, **{**few, **limits}))
    for index, text in enumerate(texts):
        scheduler.add(make_request(f"r{index}", text, max_tokens=1))
    number = 0
    while scheduler.has_unfinished:
        stepped(scheduler)
        number += 1
    assert scheduler.allocations.prefixes is not None
    return number, scheduler.allocations.prefixes.counters.num_hit_tokens


def test_a_prefix_is_computed_again_where_that_is_sooner_than_to_wait_for_a_chunk_row() -> None:
    """With one chunk row each request that takes the prefix up has a step for itself."""
    texts = [[*TEXT, index, index] for index in range(1, 7)]
    assert _steps(texts, step_tokens=0) == (7, 5 * 8)
    assert _steps(texts, step_tokens=8) == (1, 0)
    assert _steps(texts, step_tokens=15, max_chunk_rows=2) == (4, 5 * 8)


def test_a_short_hit_takes_a_chunk_row_that_is_free_and_else_none() -> None:
    scheduler = _scheduler(uses_rows=True, num_snapshots=4, step_tokens=8, max_num_batched_tokens=64)
    scheduler.add(make_request("whole", TEXT, max_tokens=1))  # ends at a border, hence with a snapshot
    stepped(scheduler)
    for name in "ab":
        scheduler.add(make_request(name, [*TEXT, 1, 2], max_tokens=1))
    assert stepped(scheduler) == [("a", 8, 2), ("b", 0, 10)]
    assert not scheduler.has_unfinished


RINGS = replace(WARM, uses_rows=True, num_snapshots=4, max_num_batched_tokens=64)


def test_a_prompt_is_cut_at_its_last_border_where_an_almost_empty_step_is_little_beside_it() -> None:
    for step_tokens, steps in ((0, [(0, 16), (16, 3)]), (1, [(0, 16), (16, 3)]), (2, [(0, 19)])):
        scheduler = Scheduler(replace(RINGS, step_tokens=step_tokens))
        scheduler.add(make_request("a", [*TEXT, *TEXT, 1, 2, 3], max_tokens=1))
        assert [stepped(scheduler)[0][1:] for _ in steps] == steps
        assert not scheduler.has_unfinished


def test_no_prompt_waits_because_another_one_is_cut_at_its_last_border() -> None:
    """The first is cut, and the chunk row of the next step is taken: the second has a step for all of it."""
    scheduler = Scheduler(RINGS)
    for number, name in enumerate("abc"):
        scheduler.add(make_request(name, [number + 1, *TEXT, 1], max_tokens=1))
    assert stepped(scheduler) == [("a", 0, 8), ("b", 0, 10), ("c", 0, 10)]


def test_a_decode_that_passes_borders_keeps_the_last_one_that_it_passed() -> None:
    scheduler = Scheduler(replace(RINGS, step_tokens=99))
    request = make_request("a", TEXT[:3], max_tokens=20, ignore_eos=True)
    scheduler.add(request)
    cache = scheduler.allocations.prefixes
    assert cache is not None
    # Its end, in the middle of a block, takes the place of the last border.
    for num_tokens, depths in ((21, [5]), (22, [6])):
        while request.num_computed_tokens < num_tokens:
            stepped(scheduler)
        assert [node.depth for node in cache.tree if node.snapshot is not None] == depths
    assert not scheduler.has_unfinished


def test_a_text_begins_in_the_middle_of_the_block_that_another_one_ended_in() -> None:
    scheduler = Scheduler(replace(RINGS, max_num_batched_tokens=64))
    first = make_request("a", [*TEXT, 9], max_tokens=3, ignore_eos=True)
    scheduler.add(first)
    while scheduler.has_unfinished:
        stepped(scheduler)
    text = first.tokens[: first.num_tokens].tolist()
    assert len(text) == 12
    # The last token was sampled and not computed.
    for name, own, start in (("goes on", text, 11), ("differs", [*text[:10], text[10] + 1, 1], 8)):
        scheduler.add(make_request(name, [*own, 1, 2], max_tokens=1))
        assert stepped(scheduler)[0][:2] == (name, start)
        while scheduler.has_unfinished:
            stepped(scheduler)
    cache = scheduler.allocations.prefixes
    assert cache is not None
    assert cache.counters.num_hit_tokens == 11 + 8


def test_a_preempted_request_resumes_from_the_last_border_that_it_passed() -> None:
    """Its partial block is needed at once, so the snapshot behind it would be lost."""
    scheduler = Scheduler(replace(RINGS, num_blocks=11))
    for name, prompt in (("first", [1, 2, 3]), ("preempted", [4, 5, 6, 7])):
        scheduler.add(make_request(name, prompt, max_tokens=22, ignore_eos=True))
    starts = [start for _ in range(26) for name, start, _ in stepped(scheduler) if name == "preempted"]
    assert starts == [0, *range(4, 21), 20, *range(22, 25)]
    assert not scheduler.has_unfinished


def test_a_snapshot_that_another_text_begins_with_outlives_the_next_border() -> None:
    scheduler = Scheduler(replace(RINGS, step_tokens=99))
    request = make_request("a", TEXT[:3], max_tokens=20, ignore_eos=True)
    scheduler.add(request)
    for _ in range(6):
        stepped(scheduler)
    scheduler.add(make_request("b", [*request.tokens[:8].tolist(), 1, 1], max_tokens=1))
    while scheduler.has_unfinished:
        stepped(scheduler)
    cache = scheduler.allocations.prefixes
    assert cache is not None
    assert cache.counters.num_hit_tokens == 8
    assert sorted(node.depth for node in cache.tree if node.snapshot is not None) == [2, 3, 6]


def test_nobody_waits_for_a_snapshot_that_has_no_place() -> None:
    texts = [[*TEXT, index, index] for index in range(1, 7)]
    assert _steps(texts, num_snapshots=0) == (1, 0)


def test_a_chunk_ends_at_no_more_places_than_snapshots_are_kept_for() -> None:
    text = [index % 9 + 1 for index in range(40)]
    parting = [text, *([*text[: 4 * index], 10, 10] for index in range(1, 10))]
    for num_snapshots, most in ((2, 1), (4, 2), (40, 9)):
        scheduler = Scheduler(
            replace(
                WARM,
                uses_rows=True,
                max_num_seqs=16,
                num_snapshots=num_snapshots,
                max_num_batched_tokens=64,
                num_blocks=200,
                max_model_len=60,
            )
        )
        first = make_request("first", parting[0], max_tokens=1)
        scheduler.add(first)
        for index, other in enumerate(parting[1:]):
            scheduler.add(make_request(f"r{index}", other, max_tokens=1))
        ends = []
        while not first.num_output_tokens:
            ends += [start for name, start, _ in stepped(scheduler) if name == "first"]
        assert len(ends) - 1 == most


@pytest.mark.parametrize("num_between", [1, 4])
def test_one_off_prompts_do_not_throw_a_shared_beginning_out(num_between: int) -> None:
    """From the third request on all of it is taken up, whatever comes in between."""
    limits = replace(WARM, uses_rows=True, num_snapshots=4, max_model_len=60, num_blocks=200)
    scheduler = Scheduler(replace(limits, max_num_batched_tokens=64))
    taken = []
    for number in range(8):
        shared = make_request(f"r{number}", [*TEXT, number + 1, 10, 10], max_tokens=1)
        others = [
            make_request(f"o{number} {other}", [number + 1, other + 1] * 20, max_tokens=1)
            for other in range(num_between)
        ]
        for request in (shared, *others):
            scheduler.add(request)
            while scheduler.has_unfinished:
                stepped(scheduler)
        taken.append(shared.num_cached_tokens)
    assert taken[2:] == [len(TEXT)] * 6


def test_the_second_request_takes_up_what_ends_with_a_chunk_while_rows_are_free() -> None:
    text = [number % 9 + 1 for number in range(40)]
    limits = replace(WARM, uses_rows=True, max_model_len=60, num_blocks=200, max_num_batched_tokens=16)
    for num_snapshots, expected in ((8, 16), (1, 0)):
        scheduler = Scheduler(replace(limits, num_snapshots=num_snapshots))
        second = make_request("b", [*text[:30], 10, 10], max_tokens=1)
        for request in (make_request("a", text, max_tokens=1), second):
            scheduler.add(request)
            while scheduler.has_unfinished:
                stepped(scheduler)
        assert second.num_cached_tokens == expected


def test_tokens_whose_blocks_were_evicted_are_counted() -> None:
    scheduler = _scheduler()
    cache = scheduler.allocations.prefixes
    assert cache is not None
    cache.evict(1)
    scheduler.add(make_request("again", [*TEXT, 9, 9, 9, 9, 9], max_tokens=1))
    while scheduler.has_unfinished:
        stepped(scheduler)
    assert (cache.counters.num_hit_tokens, cache.counters.num_lost_to_blocks) == (4, 4)
    scheduler.add(make_request("third", [*TEXT, 9, 9, 9, 9, 9], max_tokens=1))
    while scheduler.has_unfinished:
        stepped(scheduler)
    assert (cache.counters.num_hit_tokens, cache.counters.num_lost_to_blocks) == (16, 4)
