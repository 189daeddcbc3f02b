"""The parts partition the dense mask: every visible (query, key) pair is in exactly one of them.

Each part's plan is expanded into the set of (query token, row, key position) triples that it
covers, and the sets are compared with the token rule as a multiset.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bias_builders import (
    StepRows,
    Window,
    causal_mask,
    leading_slots,
    ring_mask,
    ring_slot,
    slot_position,
    split_context,
    stays_in_ring,
)

SETTINGS = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepRows, int, list[list[int]]]:
    """Rows with scattered blocks; a row may hold leading blocks of an earlier row (a shared prefix)."""
    block_size = draw(st.sampled_from([1, 3, 4]))
    sizes = draw(
        st.lists(st.tuples(st.integers(0, 17), st.integers(1, 7)), min_size=1, max_size=6).filter(bool)
    )
    need = [-(-(start + new) // block_size) for start, new in sizes]
    ids = iter(draw(st.permutations(range(sum(need) + 4))))
    tables: list[list[int]] = []
    for i, ((start, _), count) in enumerate(zip(sizes, need)):
        shared: list[int] = []
        if i and draw(st.booleans()):
            other = draw(st.integers(0, i - 1))
            # Only blocks that both have filled before the step can be the same.
            whole = min(start, sizes[other][0]) // block_size
            shared = tables[other][: draw(st.integers(0, whole))]
        tables.append(shared + [next(ids) for _ in range(count - len(shared))])
    rows = StepRows(
        row_id=np.array(draw(st.permutations(range(len(sizes) + 2))), np.int32)[: len(sizes)],
        start=np.array([start for start, _ in sizes], np.int32),
        num_new=np.array([new for _, new in sizes], np.int32),
        block_ids=np.concatenate([np.array(table, np.int32) for table in tables]),
        num_blocks=np.array([len(table) for table in tables], np.int32),
    )
    return rows, block_size, tables


def expected(rows: StepRows, window: Window | None) -> Counter:
    """All visible pairs, by the rule, one (row entry, query position, key position) each."""
    pairs: Counter = Counter()
    for entry, (start, new) in enumerate(zip(rows.start.tolist(), rows.num_new.tolist())):
        for q in range(start, start + new):
            for k in range(q + 1):
                if window is None or k < window.sink or q - k < window.recent:
                    pairs[entry, q, k] += 1
    return pairs


def token_arrays(rows: StepRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row entry, row for the causal part (or nobody), and position of each flat token."""
    entry = np.repeat(np.arange(rows.num_rows), rows.num_new)
    position = np.concatenate([np.arange(s, s + n) for s, n in zip(rows.start, rows.num_new)])
    causal_row = np.where(rows.is_single[entry], 99, entry)
    return tuple(torch.from_numpy(x.astype(np.int32)) for x in (entry, causal_row, position))


def causal_pairs(rows: StepRows, window: Window | None) -> Counter:
    entry, causal_row, position = token_arrays(rows)
    mask = causal_mask(causal_row, position, causal_row, position, no_row=99, window=window)
    return Counter((int(entry[q]), int(position[q]), int(position[k])) for q, k in mask.nonzero().tolist())


@SETTINGS
@given(steps())
def test_causal_shared_and_unique_cover_each_visible_pair_once(
    step: tuple[StepRows, int, list[list[int]]],
) -> None:
    rows, block_size, tables = step
    entry, _, position = token_arrays(rows)
    shared, unique = split_context(rows, block_size)
    where = [{block: i * block_size for i, block in enumerate(table)} for table in tables]
    pairs = causal_pairs(rows, None)
    for q in range(len(entry)):
        row = int(entry[q])
        for column, block in enumerate(shared.blocks.tolist()):
            for slot in range(int(shared.visible[row, column])):
                pairs[row, int(position[q]), where[row][block] + slot] += 1
    for block, owner in enumerate(unique.owner.tolist()):
        for slot in range(block_size if owner >= 0 else 0):
            pairs[owner, int(rows.start[owner]), where[owner][block] + slot] += 1
    for row, block in enumerate(unique.tail_block.tolist()):
        for slot in range(int(unique.tail_visible[row])):
            pairs[row, int(rows.start[row]), where[row][block] + slot] += 1
    assert pairs == expected(rows, None)


@SETTINGS
@given(steps(), st.integers(0, 5), st.integers(1, 8))
def test_causal_band_and_rings_cover_each_visible_pair_once(
    step: tuple[StepRows, int, list[list[int]]], sink: int, recent: int
) -> None:
    rows, window = step[0], Window(sink, recent)
    _, causal_row, position = token_arrays(rows)
    pairs = causal_pairs(rows, window)
    stored = torch.from_numpy(rows.context_len)
    held = slot_position(stored, window)
    for row in range(rows.num_rows):
        if rows.is_single[row]:
            seen = leading_slots(torch.clamp(stored, max=window.size), window.size)[row]
            for slot in seen.nonzero().flatten().tolist():
                pairs[row, int(rows.start[row]), int(held[row, slot])] += 1
    mask = ring_mask(causal_row, position, torch.arange(rows.num_rows, dtype=torch.int32), held, window)
    for q, row, slot in mask.nonzero().tolist():
        pairs[row, int(position[q]), int(held[row, slot])] += 1
    assert pairs == expected(rows, window)


@SETTINGS
@given(st.integers(0, 6), st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_rings_hold_the_same_tokens_however_a_text_is_cut_into_chunks(
    sink: int, recent: int, chunks: list[int]
) -> None:
    window = Window(sink, recent)
    ring = torch.full((window.size,), -1)
    stored = 0
    for size in chunks:
        position = torch.arange(stored, stored + size)
        kept = position[stays_in_ring(position, torch.tensor(stored + size), window)]
        slots = ring_slot(kept, window)
        assert len(set(slots.tolist())) == len(slots), "no two tokens of a chunk meet in a slot"
        ring[slots] = kept
        stored += size
        assert slot_position(torch.tensor([stored]), window)[0].tolist() == ring.tolist()
        wanted = {k for k in range(stored) if k < sink or k >= stored - recent}
        assert set(ring.tolist()) - {-1} == wanted


@SETTINGS
@given(steps())
def test_no_index_of_the_split_is_out_of_range(step: tuple[StepRows, int, list[list[int]]]) -> None:
    rows, block_size, tables = step
    shared, unique = split_context(rows, block_size)
    used = {block for table in tables for block in table}
    assert set(shared.blocks.tolist()) <= used
    assert shared.visible.shape == (rows.num_rows, len(shared.blocks))
    assert ((shared.visible >= 0) & (shared.visible <= block_size)).all()
    assert ((unique.tail_visible >= 0) & (unique.tail_visible < block_size)).all()
    assert len(unique.owner) <= max(used) + 1
    assert {b for b, owner in enumerate(unique.owner.tolist()) if owner >= 0}.isdisjoint(
        shared.blocks.tolist()
    )


def test_window_clips_to_the_longest_request_without_changing_what_is_seen() -> None:
    window = Window(128, 256)
    for length in (1, 5, 128, 129, 300, 384, 1000):
        clipped = window.clipped(length)
        assert clipped.size <= max(length, 1 + clipped.sink)
        for q in range(length):
            for k in range(q + 1):
                rule = [k < w.sink or q - k < w.recent for w in (window, clipped)]
                assert rule[0] == rule[1]
