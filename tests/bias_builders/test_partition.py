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
    NOWHERE,
    Held,
    Leading,
    Ring,
    StepRows,
    Window,
    causal_mask,
    leading_visible,
    ring_mask,
    ring_slot,
    seen_mask,
    slot_position,
    split_context,
    stays_in_ring,
)

SETTINGS = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepRows, int, list[list[int]]]:
    """Rows with scattered blocks; a row may hold leading blocks of an earlier row (a shared prefix)."""
    block_size = draw(st.sampled_from([1, 3, 4]))
    decode_len = draw(st.integers(1, block_size))
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
        decode_len=decode_len,
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
    causal_row = np.where(rows.is_decode[entry], 99, entry)
    return tuple(torch.from_numpy(x.astype(np.int32)) for x in (entry, causal_row, position))


def causal_pairs(rows: StepRows, window: Window | None) -> Counter:
    entry, causal_row, position = token_arrays(rows)
    mask = causal_mask(causal_row, position, causal_row, position, no_row=99, rule=window)
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
            if not shared.reads[row, column]:
                continue
            assert shared.start[column] == where[row][block]
            for slot in range(min(int(rows.start[row]) - where[row][block], block_size)):
                pairs[row, int(position[q]), where[row][block] + slot] += 1
        for block, owner in enumerate(unique.owner.tolist()):
            for slot in range(block_size if owner == row else 0):
                pairs[row, int(position[q]), where[row][block] + slot] += 1
        if not rows.is_decode[row]:
            assert (unique.tail_block[row] == -1).all()
            continue
        seen = leading_visible(torch.from_numpy(unique.tail_start[row]), position[q] + 1, block_size)
        for block, visible in zip(unique.tail_block[row].tolist(), seen.tolist()):
            for slot in range(visible):
                pairs[row, int(position[q]), where[row][block] + slot] += 1
    assert pairs == expected(rows, None)


@SETTINGS
@given(steps(), st.integers(0, 5), st.integers(1, 8), st.integers(0, 3))
def test_causal_band_and_rings_cover_each_visible_pair_once(
    step: tuple[StepRows, int, list[list[int]]], sink: int, recent: int, slack: int
) -> None:
    rows, window = step[0], Window(sink, recent)
    ring = Ring(window, rows.decode_len - 1 + slack)
    _, causal_row, position = token_arrays(rows)
    pairs = causal_pairs(rows, window)
    stored = torch.from_numpy(rows.context_len)
    held = slot_position(stored, ring)
    number = torch.arange(rows.decode_len, dtype=torch.int32)
    end = torch.where(number < torch.from_numpy(rows.num_new)[:, None], stored[:, None], 0)
    end = torch.where(end > 0, torch.from_numpy(rows.start)[:, None] + number + 1, 0)
    mask = seen_mask(Held(held[:, None], torch.clamp(end - recent, min=0), end, sink), ring.size)
    for row, _, token, slot in mask.nonzero().tolist():
        if rows.is_decode[row]:
            pairs[row, int(rows.start[row]) + token, int(held[row, slot])] += 1
    mask = ring_mask(causal_row, position, torch.arange(rows.num_rows, dtype=torch.int32), held, window)
    for q, row, slot in mask.nonzero().tolist():
        pairs[row, int(position[q]), int(held[row, slot])] += 1
    assert pairs == expected(rows, window)


@SETTINGS
@given(steps(), st.integers(0, 5), st.integers(1, 8))
def test_one_token_sees_the_leading_slots_of_a_ring_without_slack(
    step: tuple[StepRows, int, list[list[int]]], sink: int, recent: int
) -> None:
    window = Window(sink, recent)
    end = torch.from_numpy(step[0].start)[:, None] + 1
    held = Held(slot_position(end[:, 0], Ring(window))[:, None], torch.clamp(end - recent, min=0), end, sink)
    leading = Leading(torch.clamp(end, max=window.size)[:, None])
    assert torch.equal(seen_mask(held, window.size), seen_mask(leading, window.size))


CHUNKS = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 9)), min_size=1, max_size=8)


@SETTINGS
@given(st.integers(0, 6), st.integers(1, 9), st.integers(0, 5), CHUNKS)
def test_a_ring_shows_what_a_text_without_detours_would_show_however_it_is_cut_and_taken_back(
    sink: int, recent: int, slack: int, chunks: list[tuple[int, int]]
) -> None:
    """Chunks are stored and some of the last ``slack`` tokens taken back; each token has its own name."""
    window = Window(sink, recent)
    ring = Ring(window, slack)
    slots, text, name, most = [-1] * ring.size, [], 0, 0
    for size, back in chunks:
        start = len(text)
        position = torch.arange(start, start + size)
        kept = position[stays_in_ring(position, torch.tensor(start + size), ring)]
        places = ring_slot(kept, ring).tolist()
        assert len(set(places)) == len(places), "no two tokens of a chunk meet in a slot"
        text += range(name, name + size)
        name += size
        for place, token in zip(places, kept.tolist()):
            slots[place] = text[token]
        most = max(most, len(text))
        query = max(len(text) - back, most - slack, 0)
        del text[query:]
        held = slot_position(torch.tensor([query]), ring)[0].tolist()
        seen = {(p, slots[i]) for i, p in enumerate(held) if p >= 0 and (p < sink or p > query - recent)}
        assert seen == {(p, text[p]) for p in range(query) if p < sink or p > query - recent}


@SETTINGS
@given(steps())
def test_no_index_of_the_split_is_out_of_range(step: tuple[StepRows, int, list[list[int]]]) -> None:
    rows, block_size, tables = step
    shared, unique = split_context(rows, block_size)
    used = {block for table in tables for block in table}
    assert set(shared.blocks.tolist()) <= used
    assert shared.reads.shape == (rows.num_rows, len(shared.blocks))
    assert shared.start.shape == (len(shared.blocks),)
    assert set(unique.tail_block.flatten().tolist()) <= used | {-1}
    assert ((unique.tail_start == NOWHERE) == (unique.tail_block == -1)).all()
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
