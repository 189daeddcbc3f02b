"""Several samples of one prompt, and draws that only the seed decides."""

from typing import Any

import pytest

from hpu_duo import HeadPattern
from hpu_duo.sampling import SamplingParams, derive_seed
from tests.engine.tiny import PATTERN, Tiny, serve, tokens_of
from tests.modeling.families import VOCAB, greedy, prompts_of
from tests.tiers import crossed

pytestmark = pytest.mark.instruction_set

HOT: dict[str, Any] = {"temperature": 1.3, "top_k": 40, "top_p": 0.97, "min_p": 0.001, "max_tokens": 12}
PATTERNS = pytest.mark.parametrize("pattern", [None, PATTERN], ids=["full", "duo"])


@pytest.mark.parametrize(("length", "pattern"), crossed([1, 8, 9, 21], {"full": None, "duo": PATTERN}))
def test_greedy_samples_of_one_prompt_are_copies(
    tiny: Tiny, pattern: HeadPattern | None, length: int
) -> None:
    prompts = prompts_of([length, 6])
    many = serve(tiny.load(pattern=pattern), prompts, SamplingParams(n=3, temperature=0, max_tokens=12))
    one = serve(tiny.load(pattern=pattern), prompts, SamplingParams(temperature=0, max_tokens=12))
    assert tokens_of(many) == [samples * 3 for samples in tokens_of(one)]
    if pattern is None:
        assert tokens_of(one) == [[greedy(tiny.model, prompt, 12)] for prompt in prompts]


@PATTERNS
def test_sampled_samples_are_reproducible_and_differ_from_each_other(
    tiny: Tiny, pattern: HeadPattern | None
) -> None:
    params = SamplingParams(n=4, seed=11, **HOT)
    first, second = (tokens_of(serve(tiny.load(pattern=pattern), prompts_of([17]), params)) for _ in range(2))
    assert first == second
    assert len({tuple(sample) for sample in first[0]}) == 4


def test_forked_samples_equal_samples_that_could_not_share_the_prompt(tiny: Tiny) -> None:
    """With a single row siblings cannot fork, and prefill the prompt again."""
    params = SamplingParams(n=3, seed=5, **HOT)
    forked = tiny.load()
    alone = tiny.load(max_num_seqs=1)
    done = [tokens_of(serve(served, prompts_of([20]), params)) for served in (forked, alone)]
    assert done[0] == done[1]
    assert forked.stats().num_prompt_tokens < alone.stats().num_prompt_tokens


@PATTERNS
def test_draws_do_not_depend_on_batch_mates(tiny: Tiny, pattern: HeadPattern | None) -> None:
    prompts = prompts_of([3, 30, 8, 17, 41, 1])
    params = [SamplingParams(seed=seed, **HOT) for seed in range(6)]
    alone = [serve(tiny.load(pattern=pattern), [p], s)[0] for p, s in zip(prompts, params)]
    together = serve(tiny.load(pattern=pattern, max_num_seqs=3), prompts, params)
    assert tokens_of(together) == tokens_of(alone)


def test_requests_without_a_seed_draw_from_the_engine_seed_and_their_number(tiny: Tiny) -> None:
    prompts = prompts_of([7, 12])
    drawn = serve(tiny.load(seed=3), prompts, SamplingParams(**HOT))
    again = serve(tiny.load(seed=3), prompts, SamplingParams(**HOT))
    other = serve(tiny.load(seed=4), prompts, SamplingParams(**HOT))
    explicit = serve(
        tiny.load(seed=99), prompts, [SamplingParams(seed=derive_seed(3, number), **HOT) for number in (0, 1)]
    )
    assert tokens_of(drawn) == tokens_of(again) == tokens_of(explicit)
    assert tokens_of(drawn) != tokens_of(other)


def test_a_refused_request_does_not_change_what_later_ones_draw(tiny: Tiny) -> None:
    clean, disturbed = tiny.load(), tiny.load()
    with pytest.raises(ValueError):
        disturbed.engine.add_request([])
    with pytest.raises(ValueError):
        disturbed.engine.add_request([VOCAB])
    params = SamplingParams(**HOT)
    done = [tokens_of(serve(served, prompts_of([9]), params)) for served in (clean, disturbed)]
    assert done[0] == done[1]
