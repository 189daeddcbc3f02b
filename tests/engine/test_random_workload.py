"""Some two hundred requests that come and go, against each of them alone."""

import random
from dataclasses import replace
from typing import Any

import pytest

from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.request import FinishReason
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import PATTERN, Tiny, assert_holds_nothing, serve
from tests.modeling.families import prompts_of


def random_params(rng: random.Random) -> SamplingParams:
    common: dict[str, Any] = {"max_tokens": rng.randint(1, 12), "seed": rng.randrange(1000)}
    match rng.randrange(4):
        case 0:
            return SamplingParams(temperature=0, **common)
        case 1:
            return SamplingParams(temperature=1.5, top_k=20, min_p=0.01, **common)
        case 2:
            return SamplingParams(
                temperature=0.9, top_p=0.8, repetition_penalty=1.3, presence_penalty=0.5, **common
            )
        case _:
            return SamplingParams(
                temperature=1.1, frequency_penalty=0.7, logit_bias={7: 3.0}, n=2, min_tokens=1, **common
            )


def run_all(
    served: HPUDuoModel, work: list[tuple[list[int], SamplingParams]], rng: random.Random
) -> dict[tuple[int, int], tuple[list[int], FinishReason]]:
    """Submit a few at a time, abort some; tokens and finish reason of each sample."""
    engine = served.engine
    numbers: dict[str, int] = {}
    tokens: dict[tuple[int, int], list[int]] = {}
    done: dict[tuple[int, int], tuple[list[int], FinishReason]] = {}
    pending = list(enumerate(work))
    while pending or engine.has_unfinished:
        for number, (prompt, params) in pending[: rng.randrange(4)]:
            numbers[engine.add_request(prompt, params, request_id=f"r{number}")] = number
            pending = pending[1:]
        if numbers and rng.random() < 0.04:
            engine.abort(rng.choice(list(numbers)))
        for output in engine.step():
            key = (numbers[output.request_id], output.sample_index)
            tokens.setdefault(key, []).extend(output.token_ids)
            if output.finish_reason is not None:
                assert key not in done
                done[key] = (tokens[key], output.finish_reason)
    return done


def check_against_each_alone(tiny: Tiny, pattern: HeadPattern | None, num_requests: int, seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice((1, 2, 7, 8, 9, 16, rng.randint(1, 45))) for _ in range(num_requests)]
    work = [(prompt, random_params(rng)) for prompt in prompts_of(lengths, seed=8 + seed)]
    busy = tiny.load(
        pattern=pattern, max_num_seqs=6, max_num_batched_tokens=17, num_blocks=14, max_model_len=64
    )
    done = run_all(busy, work, rng)
    assert_holds_nothing(busy)
    assert busy.stats().num_preemptions > 0
    assert len(done) == sum(params.n for _, params in work)
    assert 0 < sum(reason is FinishReason.ABORT for _, reason in done.values()) < len(work) // 3

    alone = tiny.load(pattern=pattern, max_num_seqs=2, max_num_batched_tokens=64)
    for number, (prompt, params) in enumerate(work):
        longest = max(len(done[number, index][0]) for index in range(params.n))
        if not longest:
            continue
        for sample in serve(alone, [prompt], replace(params, max_tokens=max(longest, params.min_tokens)))[0]:
            got, reason = done[number, sample.sample_index]
            assert got == sample.token_ids[: len(got)]
            assert reason is FinishReason.ABORT or len(got) == params.max_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "num_requests"),
    [pytest.param(None, 60, marks=pytest.mark.exhaustive), (PATTERN, 70)],
    ids=["full", "duo"],
)
def test_every_request_gets_what_it_would_get_alone(
    tiny: Tiny, pattern: HeadPattern | None, num_requests: int
) -> None:
    check_against_each_alone(tiny, pattern, num_requests, seed=1)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(3, 9))
def test_every_request_of_many_more_gets_what_it_would_get_alone(tiny: Tiny, seed: int) -> None:
    check_against_each_alone(tiny, PATTERN if seed % 2 else None, 300, seed)
