"""Requests that begin alike share what was computed, and their tokens are those of a cold engine."""

from __future__ import annotations

from typing import Any

import pytest

from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import PATTERN, Tiny, serve, tokens_of
from tests.modeling.families import BLOCK, prompts_of
from tests.tiers import crossed

GREEDY = SamplingParams(temperature=0, max_tokens=6)
TEXT = prompts_of((60,))[0]


def _cold(tiny: Tiny, **options: Any) -> HPUDuoModel:
    return tiny.load(enable_prefix_caching=False, **options)


def _cached(served: HPUDuoModel) -> int:
    cache = served.engine.scheduler.allocations.prefixes
    assert cache is not None
    return cache.counters.num_hit_tokens


@pytest.mark.parametrize(
    ("options", "pattern"),
    crossed(
        {"eager": {}, "replay": {"graphs": "replay"}, "auto": {"attention": "auto"}},
        {"full": None, "duo": PATTERN},
    ),
)
def test_later_requests_take_up_what_they_share(
    tiny: Tiny, pattern: HeadPattern | None, options: dict[str, Any]
) -> None:
    """The third request with a prefix hits all of its blocks, whatever its length and wherever chunks end."""
    shared = 4 * BLOCK + 3
    prompts = [[*TEXT[:shared], *tail] for tail in ([1, 2, 3] * 5, [4, 5] * 6, [7] * 11, [8] * 9)]
    expected = [tokens_of(serve(_cold(tiny, pattern=pattern), [prompt], GREEDY)) for prompt in prompts]
    warm = tiny.load(pattern=pattern, max_num_batched_tokens=64, **options)
    hits = []
    for prompt, tokens in zip(prompts, expected):
        before = _cached(warm)
        assert tokens_of(warm.engine.generate([prompt], GREEDY)) == tokens
        hits.append(_cached(warm) - before)
    assert hits[0] == 0
    assert hits[2:] == [4 * BLOCK] * 2
    assert hits[1] == (4 * BLOCK if pattern is None else 0)


@pytest.mark.parametrize("pattern", [None, PATTERN], ids=["full", "duo"])
def test_requests_that_arrive_together_compute_what_they_share_once(
    tiny: Tiny, pattern: HeadPattern | None
) -> None:
    prompts = [[*TEXT[: 5 * BLOCK], *tail] for tail in ([1, 2, 3], [4, 5], [7, 8, 9, 1], [8])]
    cold = _cold(tiny, pattern=pattern)
    expected = tokens_of(serve(cold, prompts, GREEDY))
    warm = tiny.load(pattern=pattern)
    assert tokens_of(warm.engine.generate(prompts, GREEDY)) == expected
    saved = cold.stats().num_prompt_tokens - warm.stats().num_prompt_tokens
    assert saved == 3 * 5 * BLOCK


@pytest.mark.parametrize("pattern", [None, PATTERN], ids=["full", "duo"])
def test_a_chat_takes_up_its_own_answers(tiny: Tiny, pattern: HeadPattern | None) -> None:
    warm, cold = tiny.load(pattern=pattern), _cold(tiny, pattern=pattern)
    text = list(TEXT[:20])
    for turn in range(4):
        expected = tokens_of(serve(cold, [text], GREEDY))
        before = _cached(warm)
        assert tokens_of(warm.engine.generate([text], GREEDY)) == expected
        # Behind it are the last token, which was not computed, and three new ones.
        known = len(text) - 4 if turn else 0
        assert _cached(warm) - before == (known if pattern is not None else known // BLOCK * BLOCK)
        text += [*expected[0][0], 3, 1, 2]


def test_salts_share_nothing(tiny: Tiny) -> None:
    warm = tiny.load()
    salted = [SamplingParams(temperature=0, max_tokens=4, cache_salt=salt) for salt in (None, "a", "b", "a")]
    for params, is_hit in zip(salted, (False, False, False, True)):
        before = _cached(warm)
        warm.engine.generate([TEXT], params)
        assert (_cached(warm) > before) is is_hit


@pytest.mark.parametrize("pattern", [None, PATTERN], ids=["full", "duo"])
def test_preempted_requests_resume_from_the_cache(tiny: Tiny, pattern: HeadPattern | None) -> None:
    prompts = prompts_of((13, 5, 22, 9))
    params = SamplingParams(temperature=0, max_tokens=30)
    expected = tokens_of(serve(_cold(tiny, pattern=pattern), prompts, params))
    tight = {"pattern": pattern, "num_blocks": 9, "max_model_len": 60}
    warm = tiny.load(**tight)
    assert tokens_of(warm.engine.generate(prompts, params)) == expected
    stats = warm.stats()
    assert stats.num_preemptions > 0
