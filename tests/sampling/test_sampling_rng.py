import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.sampling import derive_seed, uniform
from hpu_duo.sampling.batch import random_bits

MASK = (1 << 64) - 1


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def _bits(seed: int, counter: int) -> int:
    """The definition in Python integers."""
    gamma = 0x9E3779B97F4A7C15
    return _mix((_mix((seed + gamma) & MASK) + (counter + 1) * gamma) & MASK)


def test_mixing_is_the_published_splitmix64() -> None:
    # The first output of SplitMix64 from state 0 is a widely published constant.
    assert _mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF


@given(st.integers(0, MASK), st.integers(0, 2**40))
def test_bits_equal_the_integer_definition(seed: int, counter: int) -> None:
    got = random_bits(np.array([seed], np.uint64), np.array([counter], np.int64))
    assert int(got[0]) == _bits(seed, counter)


def test_golden_values_never_change() -> None:
    seeds = np.array([0, 0, 1, MASK], np.uint64)
    counters = np.array([0, 1, 0, 123456], np.int64)
    expected = [0.6524484753608704, 0.7012121081352234, 0.3681895136833191, 0.3224838376045227]
    assert uniform(seeds, counters).tolist() == expected


@given(st.lists(st.tuples(st.integers(0, MASK), st.integers(0, 10**6)), min_size=1, max_size=20))
def test_a_draw_depends_only_on_its_own_seed_and_counter(pairs: list[tuple[int, int]]) -> None:
    seeds = np.array([s for s, _ in pairs], np.uint64)
    counters = np.array([c for _, c in pairs], np.int64)
    together = uniform(seeds, counters)
    alone = [uniform(seeds[i : i + 1], counters[i : i + 1])[0] for i in range(len(pairs))]
    assert together.tolist() == alone
    assert ((together > 0) & (together < 1)).all()


@pytest.mark.parametrize("along", ["counter", "seed", "golden seeds"])
def test_numbers_are_uniform_and_uncorrelated(along: str) -> None:
    num, index = 1 << 16, np.arange(1 << 16)
    if along == "counter":
        numbers = uniform(np.full(num, 7, np.uint64), index)
    elif along == "seed":
        numbers = uniform(index.astype(np.uint64), np.zeros(num, np.int64))
    else:
        # Seeds that differ by the golden gamma would be shifted copies without the first mixing.
        numbers = uniform(index.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15), index[::-1])
    counts = np.bincount((numbers * 256).astype(int), minlength=256)
    chi_square = ((counts - num / 256) ** 2 / (num / 256)).sum()
    assert 255 - 5 * np.sqrt(510) < chi_square < 255 + 5 * np.sqrt(510)
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5 / np.sqrt(num)


def test_derived_seeds_are_distinct_and_reproducible() -> None:
    seeds = {derive_seed(42, request, sample) for request in range(100) for sample in range(20)}
    assert len(seeds) == 2000
    assert derive_seed(42, 3, 4) == derive_seed(42, 3, 4)
    assert derive_seed(42, 3, 4) == derive_seed(derive_seed(42, 3), 4)
    assert derive_seed(42, 3, 4) != derive_seed(42, 4, 3)


def test_any_integer_is_a_seed() -> None:
    assert derive_seed(-5, 1) == derive_seed(2**64 - 5, 1)
    assert 0 <= derive_seed(10**30, 0) < 2**64


def test_wrong_dtype_or_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="expected dtype uint64, got int64"):
        uniform(np.array([1], np.int64), np.array([0]))
    with pytest.raises(ValueError, match="expected the shape of seeds"):
        uniform(np.array([1], np.uint64), np.array([0, 1]))
