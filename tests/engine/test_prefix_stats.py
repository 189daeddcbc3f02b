"""Statistics of the prefix cache: tokens that hit and missed, and bytes idle, held and in snapshots."""

from __future__ import annotations

from typing import Any

import pytest

from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.engine.stats import PrefixStats
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import PATTERN, Tiny
from tests.modeling.families import BLOCK, prompts_of

LAYERS, TOKEN_BYTES = 2, 2 * 8 * 4
"""Bytes of a token in one head of one layer: keys and values of 8 float32 each."""
TEXT = prompts_of((60,))[0]
SHARED = 4 * BLOCK + 3
PATTERNS = pytest.mark.parametrize("pattern", [None, PATTERN], ids=["full", "duo"])


def _load(tiny: Tiny, **options: Any) -> HPUDuoModel:
    """Serve with prompts in one chunk, so that snapshots are taken behind prompts and requests only."""
    return tiny.load(max_num_batched_tokens=64, **options)


def _block_bytes(pattern: HeadPattern | None) -> int:
    return BLOCK * LAYERS * (2 if pattern is None else 1) * TOKEN_BYTES


def _snapshot_bytes(pattern: HeadPattern) -> int:
    return LAYERS * (pattern.sink + pattern.recent) * TOKEN_BYTES


def _prefixes(served: HPUDuoModel) -> PrefixStats:
    found = served.stats().prefixes
    assert found is not None
    return found


def _generate(served: HPUDuoModel, prompt: list[int], num_tokens: int = 1) -> None:
    served.engine.generate([prompt], SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True))


@PATTERNS
def test_tokens_that_were_there_are_counted_with_all_that_were_asked_for(
    tiny: Tiny, pattern: HeadPattern | None
) -> None:
    served = _load(tiny, pattern=pattern)
    assert _prefixes(served).hit_rate == 0
    _generate(served, TEXT[:SHARED])
    found = _prefixes(served)
    assert (found.num_queried_tokens, found.num_hit_tokens) == (SHARED, 0)
    _generate(served, TEXT[:SHARED])
    found = _prefixes(served)
    assert (found.num_queried_tokens, found.num_hit_tokens) == (2 * SHARED, 4 * BLOCK)
    assert found.hit_rate == 4 * BLOCK / (2 * SHARED)
    other = [*TEXT[: 2 * BLOCK], *[5] * BLOCK]
    _generate(served, other)
    found = _prefixes(served)
    assert found.num_queried_tokens == 2 * SHARED + len(other)
    lost = 0 if pattern is None else 2 * BLOCK
    assert (found.num_hit_tokens, found.num_lost_to_snapshots) == (6 * BLOCK - lost, lost)


@PATTERNS
def test_bytes_of_the_cache_are_those_of_its_idle_blocks_and_snapshots(
    tiny: Tiny, pattern: HeadPattern | None
) -> None:
    served = _load(tiny, pattern=pattern)
    assert (_prefixes(served).idle_bytes, _prefixes(served).snapshot_bytes) == (0, 0)
    # The last token is never computed: four blocks behind the prompt, and five in the end.
    _generate(served, TEXT[:SHARED], num_tokens=BLOCK - 3 + 1)
    found = _prefixes(served)
    assert (found.num_idle_blocks, found.num_held_blocks) == (5, 0)
    assert (found.idle_bytes, found.context_bytes) == (5 * _block_bytes(pattern), 0)
    assert found.num_snapshots == (0 if pattern is None else 2)
    assert found.snapshot_bytes == (0 if pattern is None else 2 * _snapshot_bytes(pattern))
    assert served.stats().held_bytes == 0


@PATTERNS
def test_blocks_of_running_requests_are_leased_and_not_idle(tiny: Tiny, pattern: HeadPattern | None) -> None:
    served = _load(tiny, pattern=pattern)
    _generate(served, TEXT[:SHARED])
    num_ends = 0 if pattern is None else 1  # partial blocks, cached with the rings behind them
    served.engine.add_request(TEXT[:SHARED], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    served.engine.step()
    assert _prefixes(served).idle_bytes == num_ends * _block_bytes(pattern)
    assert served.stats().used_blocks == 5
    while served.engine.has_unfinished:
        served.engine.step()
    assert _prefixes(served).idle_bytes == (4 + 2 * num_ends) * _block_bytes(pattern)


@PATTERNS
def test_bytes_of_contexts_are_told_apart_from_idle_ones(tiny: Tiny, pattern: HeadPattern | None) -> None:
    served = _load(tiny, pattern=pattern)
    with served.prefill(TEXT[: 3 * BLOCK]):
        found = _prefixes(served)
        assert (found.num_held_blocks, found.num_idle_blocks) == (3, 0)
        assert (found.context_bytes, found.idle_bytes) == (3 * _block_bytes(pattern), 0)
        assert found.snapshot_bytes == (0 if pattern is None else _snapshot_bytes(pattern))
    found = _prefixes(served)
    assert (found.context_bytes, found.idle_bytes) == (0, 3 * _block_bytes(pattern))


def test_blocks_and_snapshots_that_were_given_up_are_counted(tiny: Tiny) -> None:
    prompts = [[number, *TEXT[: SHARED - 1]] for number in range(6)]
    served = _load(tiny, pattern=PATTERN, num_prefix_snapshots=2)
    for prompt in prompts:
        _generate(served, prompt)
    found = _prefixes(served)
    assert (found.num_snapshots, found.num_evicted_snapshots) == (
        2,
        2 * 6 - 2,
    )  # at the last border and at the end of each
    # The last end has the other snapshot.
    assert (found.num_idle_blocks, found.num_evicted_blocks) == (6 * 4 + 1, 0)
    served = _load(tiny, num_blocks=12)
    for prompt in prompts:
        _generate(served, prompt)
    found = _prefixes(served)
    # A request needs five blocks, and one of them is never full.
    assert (found.num_idle_blocks, found.num_evicted_blocks) == (11, 6 * 4 - 11)


def test_without_a_cache_there_are_none(tiny: Tiny) -> None:
    assert tiny.load(enable_prefix_caching=False).stats().prefixes is None
