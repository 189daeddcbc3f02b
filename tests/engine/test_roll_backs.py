"""Tokens that were verified together and taken back leave nothing behind, wherever blocks and rings stand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpu_duo.engine.engine import Engine
from hpu_duo.engine.samples import forced
from hpu_duo.request import Request
from tests.engine.tiny import PATTERN, Tiny, assert_holds_nothing
from tests.modeling.driving import greedy_logits, step_logits
from tests.modeling.families import VOCAB
from tests.tiers import every

TEXTS = st.lists(st.tuples(st.integers(2, 60), st.integers(1, 20)), min_size=1, max_size=3)


def verified_logits(
    engine: Engine, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], draws: Iterator[int]
) -> list[torch.Tensor]:
    """The logits behind each answer's tokens, ``[len(answer), V]``, of drafts that are taken in part.

    Of the drafts that a step verifies, those behind the last one that is taken are wrong.
    """
    requests = [
        Request(str(number), prompt, forced(answer), engine.limits)
        for number, (prompt, answer) in enumerate(zip(prompts, answers))
    ]
    seen: list[list[torch.Tensor]] = [[] for _ in requests]
    decode_len = engine.runner.executor.geometry.decode_len
    for request in requests:
        engine.scheduler.add(request)
    while engine.scheduler.has_unfinished:
        plan = engine.scheduler.plan()
        assert plan is not None
        accepted = [1 + next(draws) % row.num_samples for row in plan.sampled_rows]
        for row, taken in zip(plan.sampled_rows, accepted):
            wrong = slice(row.request.num_tokens + taken - 1, row.end)
            row.request.tokens[wrong] = (row.request.tokens[wrong] + 1 + next(draws) % (VOCAB - 1)) % VOCAB
        logits = step_logits(engine, plan)
        tokens = []
        for row, taken in zip(plan.sampled_rows, accepted):
            number, done = int(row.request.request_id), row.request.num_output_tokens
            places = range(row.ring_row * decode_len, row.ring_row * decode_len + taken)
            seen[number] += [logits[place].clone() for place in places]
            tokens += answers[number][done : done + row.num_samples]
            row.request.tokens[row.request.num_tokens :] = answers[number][done:]
        engine.scheduler.commit(plan, tokens, accepted)
    for request, answer in zip(requests, answers):
        assert request.output_token_ids.tolist() == list(answer)
    return [torch.stack(each) for each in seen]


@pytest.mark.slow
@pytest.mark.parametrize("attention", every(2, ["sdpa", "reference"]))
def test_logits_are_those_of_one_token_at_a_time_whatever_was_taken_back(tiny: Tiny, attention: str) -> None:
    served = {
        decode_len: tiny.load(
            pattern=PATTERN, attention=attention, decode_len=decode_len, max_num_batched_tokens=32
        )
        for decode_len in (1, 2, 5, 8)
    }

    @settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
    @given(sizes=TEXTS, decode_len=st.sampled_from([2, 5, 8]), seed=st.integers(0, 10**6))
    def check(sizes: list[tuple[int, int]], decode_len: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        prompts, answers = (
            [rng.integers(3, VOCAB, size[which]).tolist() for size in sizes] for which in (0, 1)
        )
        draws = iter(lambda: int(rng.integers(0, 10**6)), None)
        got = verified_logits(served[decode_len].engine, prompts, answers, draws)
        assert_holds_nothing(served[decode_len])
        for logits, prompt, answer in zip(got, prompts, answers):
            ((_, wanted),) = greedy_logits(served[1].engine, [prompt], len(answer), [answer])
            torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)

    check()
