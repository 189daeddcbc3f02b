"""Prompts that are read whole in chunks: each keeps a region until all of it is there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import StepLimits
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.request import NO_REGION
from tests.engine_host.simulated_device import SimulatedDevice, Slot, make_request, outputs_alone

LONGEST = 40


class DeviceWithRegions(SimulatedDevice):
    """A chunk reads all tokens before it in the region of its row."""

    def __init__(self, limits: StepLimits) -> None:
        super().__init__(
            limits.num_blocks, limits.block_size, limits.max_num_seqs, uses_blocks=limits.uses_blocks
        )
        self.regions: list[dict[int, Slot]] = [{} for _ in range(limits.num_regions)]

    def run(self, plan: StepPlan) -> list[int]:
        chunks = [row for row in plan.rows if row.num_new_tokens > 1]
        assert len({row.region for row in chunks}) == len(chunks)
        for row in chunks:
            region = self.regions[row.region]
            assert row.region != NO_REGION
            expected = {position: self._slot(row.request, position) for position in range(row.start)}
            assert {position: region.get(position) for position in expected} == expected
            region |= {position: self._slot(row.request, position) for position in range(row.start, row.end)}
        return super().run(plan)


class Draw(NamedTuple):
    """Events before a step: requests that come, and one that is aborted, if it is there."""

    prompts: list[tuple[int, int]]
    aborted: int | None


DRAWS = st.lists(
    st.builds(
        Draw,
        st.lists(st.tuples(st.integers(1, LONGEST - 8), st.sampled_from([0, 0, 1, 5])), max_size=3),
        st.none() | st.integers(0, 12),
    ),
    max_size=12,
)


@st.composite
def limits_with_regions(draw: st.DrawFn) -> StepLimits:
    chunk_rows, last = draw(st.integers(1, 3)), draw(st.integers(2, 6))
    grid = draw(st.integers(last + 1, last + 9))
    max_num_seqs = draw(st.integers(chunk_rows, 6))
    uses_blocks, block_size = draw(st.booleans()), draw(st.integers(1, 4))
    return StepLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=chunk_rows * grid + max_num_seqs - chunk_rows + draw(st.integers(0, 9)),
        max_model_len=LONGEST,
        block_size=block_size,
        num_blocks=-(-LONGEST // block_size) + draw(st.integers(0, 20)) if uses_blocks else 0,
        max_chunk_rows=chunk_rows,
        decode_len=1,
        uses_blocks=uses_blocks,
        chunk_grid=grid,
        last_chunk=last,
        num_regions=chunk_rows,
    )


def check_chunks(starts: Sequence[tuple[int, int]], num_prefilled: int, limits: StepLimits) -> None:
    """Chunks follow each other, end on the grid but for the last two, and the last one is long enough."""
    assert all(end == start for (_, end), (start, _) in pairwise(starts))
    *others, last = [end - start for start, end in starts]
    assert not others or last >= limits.last_chunk
    assert starts[-1][1] == num_prefilled
    assert all(end % limits.chunk_grid == 0 for _, end in starts[:-2])
    assert all(2 <= size <= limits.chunk_grid for size in others)


@settings(max_examples=200)
@given(limits=limits_with_regions(), draws=DRAWS)
def test_a_prompt_keeps_its_region_while_it_is_under_way(limits: StepLimits, draws: list[Draw]) -> None:
    scheduler, device = Scheduler(limits), DeviceWithRegions(limits)
    requests: list[Any] = []
    aborted: set[str] = set()
    chunks: dict[str, list[tuple[int, int]]] = {}
    steps = iter(draws)
    while (drawn := next(steps, None)) is not None or scheduler.has_unfinished:
        for size, num_decoded in drawn.prompts if drawn is not None else ():
            name = str(len(requests))
            prompt = [1 + (len(requests) + place) % 12 for place in range(size)]
            request = make_request(
                name, prompt, max_model_len=LONGEST, seed=size, decoded_prompt_tokens=num_decoded
            )
            scheduler.add(request)
            requests.append(request)
        if drawn is not None and drawn.aborted is not None and scheduler.abort(str(drawn.aborted)):
            aborted.add(str(drawn.aborted))
        plan = scheduler.plan()
        if plan is None:
            continue
        for row in plan.rows:
            if row.start == 0:
                chunks[row.request.request_id] = []
            if row.start < row.request.num_prefilled_tokens:
                chunks[row.request.request_id].append((row.start, row.end))
        for request in plan.preempted:
            assert request.region == NO_REGION
        scheduler.commit(plan, device.run(plan))
    regions = scheduler.allocations.regions
    assert regions is not None
    assert regions.num_used == 0
    for request in requests:
        if request.request_id not in aborted:
            assert request.output_token_ids.tolist() == outputs_alone(request)
            if request.num_prefilled_tokens:
                check_chunks(chunks[request.request_id], request.num_prefilled_tokens, limits)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_regions": 1}, "a region for each of max_chunk_rows=2, got 1"),
        ({"last_chunk": 8}, "chunks of 9 tokens or more"),
        ({"last_chunk": -1}, "expected last_chunk >= 0, got -1"),
    ],
)
def test_limits_that_do_not_go_together_are_refused(fields: dict[str, int], message: str) -> None:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 20, "max_model_len": 40, "block_size": 4}
    rows = {"num_blocks": 9, "max_chunk_rows": 2, "decode_len": 1, "chunk_grid": 8}
    with pytest.raises(ValueError, match=message):
        StepLimits(**{**sizes, **rows, **fields})
