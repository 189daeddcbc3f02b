"""Requests that lose their place for lack of blocks continue as if nothing had happened."""

import pytest

from hpu_duo import HeadPattern
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import PATTERN, Tiny, serve, tokens_of
from tests.modeling.families import greedy, prompts_of
from tests.tiers import crossed

pytestmark = pytest.mark.instruction_set

LENGTHS = (13, 5, 22, 9)
GREEDY = SamplingParams(temperature=0, max_tokens=30)
SAMPLED = [
    SamplingParams(temperature=1.5, top_p=0.95, repetition_penalty=1.2, seed=seed, max_tokens=30)
    for seed in range(4)
]


@pytest.mark.parametrize(
    ("num_batched_tokens", "params", "pattern"),
    crossed(
        [4, 16],
        {"greedy": GREEDY, "sampled": SAMPLED},
        {"full": None, "duo": PATTERN},
        fast=("4",),
    ),
)
def test_preempt_and_resume_gives_the_tokens_of_an_uninterrupted_run(
    tiny: Tiny,
    pattern: HeadPattern | None,
    params: SamplingParams | list[SamplingParams],
    num_batched_tokens: int,
) -> None:
    prompts = prompts_of(LENGTHS)
    roomy = tiny.load(pattern=pattern)
    expected = tokens_of(serve(roomy, prompts, params))
    assert roomy.stats().num_preemptions == 0

    # The longest request alone fills 7 of the 9 blocks.
    tight = tiny.load(
        pattern=pattern, num_blocks=9, max_model_len=60, max_num_batched_tokens=num_batched_tokens
    )
    assert tokens_of(serve(tight, prompts, params)) == expected
    assert tight.stats().num_preemptions > 0


def test_preempted_greedy_requests_still_equal_transformers(tiny: Tiny) -> None:
    prompts = prompts_of(LENGTHS)
    tight = tiny.load(num_blocks=9, max_model_len=60)
    done = serve(tight, prompts, GREEDY)
    assert tight.stats().num_preemptions > 0
    assert tokens_of(done) == [[greedy(tiny.model, prompt, 30)] for prompt in prompts]
