"""``speculative_config``: the tokens are those without it, and it takes effect."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpu_duo import HPUDuoModel
from hpu_duo.drafting import Drafter
from hpu_duo.lab.replay import replay
from hpu_duo.request import Request
from hpu_duo.sampling import FieldError, SamplingParams
from hpu_duo.startup.recorded_steps import options_of, read_log
from tests.engine.tiny import PATTERN, Tiny, serve, tokens_of
from tests.modeling.families import prompts_of
from tests.tiers import EXHAUSTIVE, further

LOOPS = [[5, 9, 6, 8, 7] * 5, [3, 4] * 8, *prompts_of([17, 1], seed=4)]
"""Prompts of which two repeat themselves, so that drafts are found at once."""
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.3, top_p=0.95, seed=5, max_tokens=30, repetition_penalty=0.8)
SUFFIX = {"num_speculative_tokens": 5}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.mark.parametrize(
    ("config", "params", "options"),
    [
        (SUFFIX, GREEDY, {"pattern": PATTERN}),
        *further((NGRAM, replace(SEEDED, n=3), {})),
        *further((SUFFIX, SEEDED, {"num_blocks": 14, "max_model_len": 64})),
        (SUFFIX, SEEDED, {"graphs": "replay", "attention": "sdpa", "num_blocks": 14, "max_model_len": 64}),
        pytest.param(NGRAM, GREEDY, {"enable_prefix_caching": False}, marks=pytest.mark.slow),
        pytest.param(
            SUFFIX, replace(SEEDED, n=3), {"graphs": "replay", "pattern": PATTERN}, marks=EXHAUSTIVE
        ),
        pytest.param(SUFFIX, GREEDY, {"device": "hpu-sim", "num_blocks": 30}, marks=pytest.mark.slow),
        pytest.param(NGRAM, SEEDED, {"graphs": "compile", "pattern": PATTERN}, marks=EXHAUSTIVE),
        pytest.param(NGRAM, GREEDY, {"tensor_parallel_size": 2}, marks=EXHAUSTIVE),
    ],
)
@pytest.mark.usefixtures("default_buckets")
def test_tokens_are_those_without_drafts(
    tiny: Tiny, config: dict[str, Any], params: SamplingParams, options: dict[str, Any]
) -> None:
    as_eager = {"graphs": "eager", "tensor_parallel_size": 1, "device": "cpu", "attention": "reference"}
    plain = tiny.load(**{**options, **as_eager})
    drafting = tiny.load(**{"max_num_batched_tokens": 24, **options}, speculative_config=config)
    # Twice: the second time from the prefix cache, and with earlier outputs to draft from.
    for _ in range(2):
        assert tokens_of(serve(drafting, LOOPS, params)) == tokens_of(serve(plain, LOOPS, params))
    stats = drafting.stats()
    assert stats.speculation is not None
    assert 0 < stats.speculation.num_accepted_tokens <= stats.speculation.num_draft_tokens
    assert stats.num_accepted_tokens == sum(stats.speculation.num_accepted_tokens_per_pos)
    assert stats.num_output_tokens == plain.stats().num_output_tokens
    assert stats.num_steps <= plain.stats().num_steps
    assert stats.num_graph_misses == 0


def test_the_most_drafts_may_be_given_by_the_number_of_rows(tiny: Tiny) -> None:
    expected = serve(tiny.load(), LOOPS[:2], GREEDY)
    for ranges, most in (([[1, 1, 2], [2, 4, 2]], 2), ([[1, 4, 0]], 0)):
        config = {**SUFFIX, "num_speculative_tokens_per_batch_size": ranges}
        drafting = tiny.load(max_num_batched_tokens=24, speculative_config=config)
        assert tokens_of(serve(drafting, LOOPS[:2], GREEDY)) == tokens_of(expected)
        stats = drafting.stats().speculation
        assert stats is not None
        assert stats.num_draft_tokens <= most * stats.num_drafts
        assert bool(stats.num_drafts) == bool(most)


def test_drafts_that_are_not_verified_show_whether_they_were_right(tiny: Tiny) -> None:
    config = {**SUFFIX, "num_speculative_tokens_per_batch_size": [[1, 4, 0]]}
    drafting = tiny.load(max_num_batched_tokens=24, speculative_config=config)
    ((done,),) = serve(drafting, LOOPS[:1], replace(GREEDY, prediction_token_ids=[7] * 30))
    lengths = drafting.engine.scheduler.drafting._lengths  # type: ignore[union-attr]
    unknown, wrong = 2.5, lengths._all[False].expected(5)
    serve(drafting, LOOPS[:1], replace(GREEDY, prediction_token_ids=done.token_ids))
    assert wrong < unknown < lengths._all[False].expected(5)


def test_one_request_may_take_fewer_drafts_or_none(tiny: Tiny) -> None:
    expected = serve(tiny.load(), LOOPS[:1], GREEDY)
    for speculate, most in ((False, 0), (0, 0), (2, 2), (True, 5)):
        drafting = tiny.load(max_num_batched_tokens=24, speculative_config=SUFFIX)
        done = serve(drafting, LOOPS[:1], replace(GREEDY, speculate=speculate))
        assert tokens_of(done) == tokens_of(expected)
        stats = drafting.stats().speculation
        assert stats is not None
        assert stats.num_draft_tokens <= most * stats.num_drafts
        assert bool(stats.num_drafts) == bool(most)


def test_a_predicted_output_is_verified_from_its_first_token(tiny: Tiny) -> None:
    """The prompt gives the first token, and all others are those of the prediction."""
    prompt = prompts_of([20], seed=9)
    ((expected,),) = serve(tiny.load(), prompt, SEEDED)
    config = {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_min": 31,
        "prompt_lookup_max": 31,
    }
    drafting = tiny.load(max_num_batched_tokens=24, speculative_config=config)
    params = replace(SEEDED, prediction_token_ids=expected.token_ids)
    ((done,),) = serve(drafting, prompt, params)
    assert done.token_ids == expected.token_ids
    stats = drafting.stats()
    assert stats.num_accepted_tokens == stats.num_drafted_tokens > 10
    wrong = [(token + 1) % 40 for token in expected.token_ids]
    ((done,),) = serve(drafting, prompt, replace(SEEDED, prediction_token_ids=wrong))
    assert done.token_ids == expected.token_ids


def test_scores_are_those_of_an_engine_without_drafts(tiny: Tiny) -> None:
    """Forced tokens are verified together in steps without prompts."""
    prompts, continuations = (
        prompts_of([12, 20], seed=3),
        [prompts_of([9, 4], seed=5), prompts_of([11], seed=6)],
    )
    expected = tiny.load().engine.score(prompts, continuations)
    drafting = tiny.load(max_num_batched_tokens=24, speculative_config=SUFFIX)
    for each, others in zip(drafting.engine.score(prompts, continuations), expected, strict=True):
        for score, other in zip(each, others, strict=True):
            assert np.allclose(score.logprobs, other.logprobs, atol=1e-4)
    stats = drafting.stats()
    assert stats.num_steps < sum(len(each) for texts in continuations for each in texts)
    assert stats.num_drafted_tokens == 0
    assert stats.speculation is not None
    assert (stats.speculation.num_steps, stats.speculation.num_drafts) == (0, 0)


def test_rows_that_are_sampled_on_the_host_say_that_they_take_no_drafts(tiny: Tiny) -> None:
    drafting = tiny.load(max_num_batched_tokens=24, speculative_config=SUFFIX)
    serve(drafting, LOOPS[:1], GREEDY)
    assert not any("take no drafts" in note for note in drafting.stats().notes)
    drafting.generate(LOOPS[:1], max_new_tokens=9, no_repeat_ngram_size=2)
    assert any("take no drafts" in note for note in drafting.stats().notes)


def test_drafters_keep_nothing_of_requests_that_have_ended(tiny: Tiny) -> None:
    drafting = tiny.load(max_num_batched_tokens=24, speculative_config=NGRAM)
    serve(drafting, LOOPS, replace(SEEDED, n=2))
    ended = drafting.engine.add_request(LOOPS[0], GREEDY)
    for _ in range(4):
        drafting.engine.step()
    assert drafting.engine.drafter.num_bytes > 0  # type: ignore[union-attr]
    drafting.engine.abort(ended)
    assert drafting.engine.drafter.num_bytes == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("graphs", ["eager", "replay"])
def test_recorded_steps_of_several_lengths_are_replayed(tiny: Tiny, tmp_path: Path, graphs: str) -> None:
    options = {"max_num_batched_tokens": 24, "pattern": PATTERN, "graphs": graphs}
    served = tiny.load(**options, speculative_config=SUFFIX, record_steps=tmp_path / "steps")
    serve(served, LOOPS, SEEDED)
    assert served.stats().num_accepted_tokens > 0
    served.engine.step_recorder.close()  # type: ignore[union-attr]
    log = read_log(tmp_path / "steps")
    again = HPUDuoModel.from_pretrained(tiny.path, **options_of(log.origin))
    assert again.engine.scheduler.limits.draft_lens == (1, 4, 6)
    assert replay(again.engine, tiny.path, log).differences == ()


class Always(Drafter):
    """Proposes the same token for ever."""

    def __init__(self, token: int) -> None:
        self._token = token

    def propose(self, request: Request, most: int) -> list[int]:
        return [self._token] * most


def chi_square(tiny: Tiny, prompt: list[int], outputs: list[list[int]], temperature: float) -> float:
    """Chi-square over 50 bins of the places of tokens in transformers' distributions, less its mean, by its
    deviation. A token's place is drawn evenly from its own part of the cumulative distribution."""
    tokens = torch.tensor([[*prompt, *output] for output in outputs])
    with torch.no_grad():
        logits = tiny.model(tokens[:, :-1]).logits[:, len(prompt) - 1 :].double()
    chances, sampled = (logits / temperature).softmax(-1), tokens[:, len(prompt) :, None]
    own = chances.gather(-1, sampled)
    before = chances.cumsum(-1).gather(-1, sampled) - own
    drawn = torch.from_numpy(np.random.default_rng(0).random(own.shape))
    found = torch.histc(before + drawn * own, 50, 0, 1).numpy()
    expected = found.sum() / 50
    return float((((found - expected) ** 2 / expected).sum() - 49) / (2 * 49) ** 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("of_model", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_draws_behind_and_in_place_of_drafts_follow_the_distribution(tiny: Tiny, of_model: bool) -> None:
    """A second, independent check: chi-square of 10,000 tokens, most of which had a draft."""
    (prompt,), num_tokens = prompts_of([9], seed=2), 20
    config = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 16, 3]]}
    if of_model:
        config |= {"method": "duo", "draft_sink": 1, "draft_recent": 4}
    drafting = tiny.load(max_num_seqs=16, max_num_batched_tokens=64, speculative_config=config)
    if not of_model:
        drafting.engine.drafter = drafter = Always(7)
        drafter.most_by_rows = ((1, 16, 3),)
    params = [SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=seed) for seed in range(500)]
    done = drafting.engine.generate([prompt] * len(params), params)
    assert drafting.stats().num_drafted_tokens >= 7_500
    outputs = [sample.token_ids for (sample,) in done]
    # With fixed seeds the result is the same in every run.
    assert abs(chi_square(tiny, prompt, outputs, 1.0)) < 3
    assert chi_square(tiny, prompt, outputs, 1.3) > 5


def test_what_is_no_configuration_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="speculative_config has no key 'num_tokens'"):
        tiny.load(speculative_config={"num_tokens": 3})
    with pytest.raises(ValueError, match="max_num_batched_tokens to be an integer >= 36, got 16"):
        tiny.load(speculative_config='{"num_speculative_tokens": 8}')
    with pytest.raises(FieldError, match="speculate: expected an integer >= 0, got -1"):
        SamplingParams(speculate=-1)
    with pytest.raises(FieldError, match="prediction_token_ids"):
        tiny.load().engine.add_request([1, 2], SamplingParams(prediction_token_ids=np.array([5, 9999])))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"block_size": 4},
            "decode_len of at most block_size=4, got num_speculative_tokens \\+ 1 = 6 of speculative_config",
        ),
        (
            {"max_num_batched_tokens": 16},
            "integer >= 24, got 16: max_num_seqs=4 times num_speculative_tokens \\+ 1 = 6 of spec",
        ),
    ],
)
def test_settings_that_allow_no_drafts_name_the_configuration(
    tiny: Tiny, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.load(**{"max_num_batched_tokens": 24, **options}, speculative_config=SUFFIX)
