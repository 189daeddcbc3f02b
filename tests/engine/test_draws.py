"""A draw is a function of the request's seed and the number of the draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.sampling import SamplingBatch, SamplingParams, SamplingRow, derive_seed, uniform
from tests.engine.tiny import Tiny, serve
from tests.modeling.families import prompts_of

pytestmark = pytest.mark.instruction_set

SEEDS = (7, 7, 8, None)
PROMPTS = prompts_of([30, 9, 1, 22])
NUM_TOKENS = 10


class Watched:
    """Samples on the host, and writes its draws down."""

    def __init__(self, draws: dict[int, float]) -> None:
        self.draws, self.chooses = draws, True

    def choose(self, output_ids: Sequence[int], logits: Any, uniform: float) -> int:
        before = self.draws.setdefault(len(output_ids), uniform)
        assert before == uniform
        return int(np.searchsorted(np.cumsum(logits.float().softmax(-1).numpy()), uniform)) % len(logits)

    def ends(self, output_ids: Sequence[int]) -> bool:
        return False


def draws_of(
    tiny: Tiny, numbers: Sequence[int], *, is_preempted: bool = False
) -> dict[tuple[int, int], dict[int, float]]:
    """The draws of each sample of some prompts, served together."""
    options = {"num_blocks": 6, "max_model_len": 48, "max_num_batched_tokens": 7} if is_preempted else {}
    draws: dict[tuple[int, int], dict[int, float]] = {(n, sample): {} for n in numbers for sample in range(2)}
    params = [
        SamplingParams(
            seed=SEEDS[number],
            n=2,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            host_sampler=lambda sample, number=number: Watched(draws[number, sample]),  # type: ignore[misc]
        )
        for number in numbers
    ]
    served = tiny.load(**options)
    serve(served, [PROMPTS[number] for number in numbers], params)
    assert bool(served.stats().num_preemptions) is is_preempted
    return draws


def test_draws_are_the_same_alone_in_any_batch_and_after_a_preemption(tiny: Tiny) -> None:
    together = draws_of(tiny, range(4))
    assert all(sorted(each) == list(range(NUM_TOKENS)) for each in together.values())
    assert draws_of(tiny, range(4), is_preempted=True) == together
    for number in range(3):  # the last one has no seed of its own, but one by its place
        alone = draws_of(tiny, [number])
        assert alone == {key: together[key] for key in alone}
    for key, each in together.items():
        if SEEDS[key[0]] is not None:
            seed = derive_seed(SEEDS[key[0]], key[1])
            expected = uniform(np.full(NUM_TOKENS, seed, np.uint64), np.arange(NUM_TOKENS))
            assert [each[number] for number in range(NUM_TOKENS)] == expected.tolist()


def test_equal_seeds_draw_alike_and_samples_do_not(tiny: Tiny) -> None:
    together = draws_of(tiny, range(4))
    for sample in range(2):
        assert together[0, sample] == together[1, sample]
        assert together[0, sample] != together[2, sample]
    assert together[0, 0] != together[0, 1]


@given(st.data())
def test_the_row_of_a_draw_and_its_neighbours_do_not_matter(data: st.DataObject) -> None:
    seeds = st.integers(-(2**70), 2**70)
    rows = data.draw(st.lists(st.tuples(seeds, st.integers(0, 5000)), min_size=1, max_size=6))
    params = [
        SamplingParams(
            temperature=data.draw(st.sampled_from([0.5, 1.0])), top_k=data.draw(st.sampled_from([0, 2, 3]))
        )
        for _ in rows
    ]
    batch = SamplingBatch.build(
        [SamplingRow(one, seed, number) for one, (seed, number) in zip(params, rows)], vocab_size=11
    )
    got = batch.floats[: batch.route.num_row_floats].reshape(-1, len(rows))[-1]
    for draw, one, (seed, number) in zip(got, params, rows):
        alone = SamplingBatch.build([SamplingRow(one, seed, number)], vocab_size=11)
        assert draw == alone.floats[: alone.route.num_row_floats][-1]
        assert draw == uniform(np.array([seed % 2**64], np.uint64), np.array([number]))[0]
