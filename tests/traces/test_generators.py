"""Random arrivals: their rates, lengths and order, and prompts that share what the trace says they share."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_duo.lab.traces import (
    Arrival,
    PromptIds,
    RandomLengths,
    Rate,
    at_times,
    in_order,
    no_longer_than,
    scaled,
)

NUM = 20_000


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("per_s", [0.5, 40.0])
def test_gaps_have_the_rate_and_spread_of_a_gamma_process(per_s: float, burstiness: float) -> None:
    gaps = Rate(per_s, burstiness).gaps(NUM, rng())
    # Six standard errors: the mean of NUM gaps of this spread, and their coefficient of variation.
    spread = burstiness**-0.5
    assert gaps.mean() * per_s == pytest.approx(1, abs=6 * spread / math.sqrt(NUM))
    assert gaps.std() / gaps.mean() == pytest.approx(spread, rel=0.1)


def test_a_poisson_process_has_as_much_variance_as_mean_in_every_second() -> None:
    counts = np.bincount(Rate(20.0).times(NUM, rng()).astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.2)
    bursts = np.bincount(Rate(20.0, 0.25).times(NUM, rng()).astype(int))[:-1]
    assert bursts.var() / bursts.mean() > 2


@given(
    per_s=st.floats(0.01, 1000) | st.just(math.inf),
    burstiness=st.floats(0.1, 50) | st.just(math.inf),
    num=st.integers(0, 50),
    seed=st.integers(0, 2**32 - 1),
    fixes_mean=st.booleans(),
)
def test_times_are_in_order_and_follow_from_the_seed(
    per_s: float, burstiness: float, num: int, seed: int, fixes_mean: bool
) -> None:
    times = Rate(per_s, burstiness).times(num, rng(seed), fixes_mean=fixes_mean)
    again = Rate(per_s, burstiness).times(num, rng(seed), fixes_mean=fixes_mean)
    assert times.shape == (num,)
    assert np.array_equal(times, again)
    assert (np.diff(times, prepend=0.0) >= 0).all()
    if num and fixes_mean and times[-1] > 0:
        assert times[-1] == pytest.approx(num / per_s)


def test_extremes_of_rates_are_even_gaps_and_none() -> None:
    assert Rate(4.0, math.inf).times(3, rng()).tolist() == [0.25, 0.5, 0.75]
    assert Rate(math.inf).times(3, rng()).tolist() == [0, 0, 0]


@given(
    input_len=st.integers(1, 300),
    output_len=st.integers(1, 300),
    range_ratio=st.floats(0, 0.99),
    prefix_len=st.integers(0, 50),
    num_prefixes=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=50)
def test_lengths_stay_in_their_range(
    input_len: int, output_len: int, range_ratio: float, prefix_len: int, num_prefixes: int, seed: int
) -> None:
    drawn = RandomLengths(input_len, output_len, range_ratio, prefix_len, num_prefixes)
    arrivals = drawn.draw(40, Rate(5.0), rng(seed))
    assert len(arrivals) == 40
    assert arrivals == sorted(arrivals, key=lambda each: each.time_s)
    for each in arrivals:
        own = each.num_prompt_tokens - prefix_len
        for length, middle in ((own, input_len), (each.num_output_tokens, output_len)):
            assert max(1, math.floor(middle * (1 - range_ratio))) <= length
            assert length <= math.ceil(middle * (1 + range_ratio))


def test_lengths_are_even_in_their_range() -> None:
    arrivals = RandomLengths(100, 10, 0.5).draw(NUM, Rate(1.0), rng())
    counts = np.bincount([each.num_prompt_tokens for each in arrivals])[50:]
    assert len(counts) == 101
    # Chi-squared of 100 degrees of freedom: mean 100, standard deviation 14.
    assert ((counts - NUM / 101) ** 2 / (NUM / 101)).sum() < 200


def test_prompts_with_one_prefix_begin_alike_and_go_on_differently() -> None:
    arrivals = RandomLengths(8, 1, prefix_len=16, num_prefixes=2).draw(20, Rate(1.0), rng())
    ids = PromptIds(range(1000), seed=3)
    prompts = [ids.of(each, index) for index, each in enumerate(arrivals)]
    by_prefix = {each.block_ids: prompt[:16].tolist() for each, prompt in zip(arrivals, prompts)}
    assert len(by_prefix) == 2
    assert len({tuple(prefix) for prefix in by_prefix.values()}) == 2
    assert all(prompt[:16].tolist() == by_prefix[each.block_ids] for each, prompt in zip(arrivals, prompts))
    assert len({prompt[16:].tobytes() for prompt in prompts}) == 20


BLOCKS = st.lists(st.integers(-5, 2**63 - 1), max_size=6).map(tuple)


@given(first=BLOCKS, second=BLOCKS, size=st.integers(1, 20), num=st.integers(1, 100), seed=st.integers(0, 9))
def test_prompts_share_what_their_blocks_say(
    first: tuple[int, ...], second: tuple[int, ...], size: int, num: int, seed: int
) -> None:
    ids = PromptIds(range(7, 60_000), seed)
    prompts = [
        ids.of(Arrival(0.0, num, 1, blocks, size), index) for index, blocks in enumerate((first, second))
    ]
    num_equal = next(
        (at for at, pair in enumerate(zip(first, second)) if pair[0] != pair[1]), min(len(first), len(second))
    )
    shared = min(num, num_equal * size)
    assert all(prompt.dtype == np.int32 and prompt.shape == (num,) for prompt in prompts)
    assert all((prompt >= 7).all() and (prompt < 60_000).all() for prompt in prompts)
    assert np.array_equal(prompts[0][:shared], prompts[1][:shared])
    # Behind it they differ: one token in 60,000 may be equal by chance, eight in a row are not.
    if num - shared >= 8:
        assert not np.array_equal(prompts[0][shared:], prompts[1][shared:])


def test_prompts_do_not_depend_on_the_order_in_which_they_are_asked_for() -> None:
    arrivals = RandomLengths(12, 1, 0.5, prefix_len=4).draw(6, Rate(1.0), rng())
    forwards = [PromptIds(range(500)).of(each, at).tolist() for at, each in enumerate(arrivals)]
    ids = PromptIds(range(500))
    backwards = [ids.of(arrivals[at], at).tolist() for at in reversed(range(6))]
    assert forwards == backwards[::-1]


TIMES = st.lists(st.integers(0, 100).map(float), max_size=20)


@given(times=TIMES)
def test_a_trace_in_order_begins_at_zero_and_keeps_equal_times_as_they_were(times: list[float]) -> None:
    ordered = in_order(Arrival(time, at + 1, 1) for at, time in enumerate(times))
    assert len(ordered) == len(times)
    if times:
        assert ordered[0].time_s == 0
        keys = [(each.time_s, each.num_prompt_tokens) for each in ordered]
        assert keys == sorted(keys)
        assert keys[-1][0] == max(times) - min(times)


@given(
    speed=st.floats(0.1, 10), lengths=st.floats(0.01, 4), num=st.integers(1, 5000), size=st.integers(1, 512)
)
def test_scaling_keeps_what_is_shared(speed: float, lengths: float, num: int, size: int) -> None:
    given_ = Arrival(8.0, num, 3, tuple(range(-(-num // size))), size)
    (got,) = scaled([given_], speed=speed, lengths=lengths)
    assert got.time_s == 8 / speed
    assert got.num_prompt_tokens == max(1, round(num * lengths))
    assert got.block_ids == given_.block_ids
    assert got.block_size == max(1, round(size * lengths))


def test_traces_are_cut_and_timed_anew() -> None:
    arrivals = [Arrival(0.0, 5, 5), Arrival(1.0, 6, 5), Arrival(2.0, 1, 1)]
    assert no_longer_than(arrivals, 10) == [arrivals[0], arrivals[2]]
    assert [each.time_s for each in at_times(arrivals, [3.0, 4.0, 5.0])] == [3, 4, 5]
    with pytest.raises(ValueError):
        at_times(arrivals, [1.0])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rate(0.0),
        lambda: Rate(math.nan),
        lambda: Rate(1.0, -1.0),
        lambda: RandomLengths(0, 1),
        lambda: RandomLengths(1, 1, 1.0),
        lambda: RandomLengths(1, 1, prefix_len=-1),
        lambda: Arrival(-1.0, 1, 1),
        lambda: Arrival(math.inf, 1, 1),
        lambda: Arrival(0.0, 0, 1),
        lambda: PromptIds([]),
        lambda: PromptIds([-1]),
        lambda: scaled([], speed=0.0),
        lambda: scaled([], lengths=math.inf),
    ],
)
def test_what_no_trace_has_is_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="expected"):
        make()
