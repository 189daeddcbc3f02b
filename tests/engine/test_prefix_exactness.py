"""Cached prefixes change no samples, scores, recorded steps, processed scores and log-probabilities."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.lab.replay import replay
from hpu_duo.sampling import SamplingParams
from hpu_duo.startup.recorded_steps import options_of, read_log
from tests.engine.tiny import PATTERN, Tiny, tokens_of
from tests.modeling.families import BLOCK, prompts_of

pytestmark = pytest.mark.instruction_set

TEXT = prompts_of((5 * BLOCK + 1,), seed=5)[0]
PROMPTS = [[*TEXT, *tail] for tail in ([1, 2, 3], [4, 5, 6, 7, 8], [1, 2, 9])]
PATTERNS = pytest.mark.parametrize("pattern", [None, PATTERN], ids=["full", "duo"])


def _both(tiny: Tiny, **options: Any) -> tuple[HPUDuoModel, HPUDuoModel]:
    """An engine without a cache, and one whose cache holds the text, with snapshots where texts part."""
    cold, warm = (tiny.load(enable_prefix_caching=cached, **options) for cached in (False, True))
    for tail in (1, 2):
        warm.engine.generate([[*TEXT, tail, tail]], SamplingParams(temperature=0, max_tokens=1))
    return cold, warm


def _hits(served: HPUDuoModel) -> int:
    prefixes = served.stats().prefixes
    assert prefixes is not None
    return prefixes.num_hit_tokens


@PATTERNS
def test_samples_of_a_cached_prompt_are_those_of_a_computed_one(
    tiny: Tiny, pattern: HeadPattern | None
) -> None:
    cold, warm = _both(tiny, pattern=pattern)
    params = SamplingParams(temperature=1.2, seed=3, n=3, max_tokens=7, ignore_eos=True)
    before = _hits(warm)
    assert tokens_of(warm.engine.generate(PROMPTS, params)) == tokens_of(
        cold.engine.generate(PROMPTS, params)
    )
    assert _hits(warm) - before >= 3 * 5 * BLOCK


@PATTERNS
@pytest.mark.parametrize("decode_len", [1, 3])
def test_scores_behind_a_cached_prompt_are_those_behind_a_computed_one(
    tiny: Tiny, pattern: HeadPattern | None, decode_len: int
) -> None:
    cold, warm = _both(tiny, pattern=pattern, decode_len=decode_len)
    continuations = [[[5, 6, 7, 8], [9, 3]], [[4]], [[7, 7, 7], [1, 2], [3, 4, 5, 6, 7]]]
    before = _hits(warm)
    expected, found = (each.score(PROMPTS, continuations) for each in (cold, warm))
    assert _hits(warm) - before >= 3 * 5 * BLOCK
    for one, other in zip(chain(*expected), chain(*found), strict=True):
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)
        assert other.is_likeliest == one.is_likeliest


@PATTERNS
def test_logprobs_of_tokens_behind_a_cached_prompt(tiny: Tiny, pattern: HeadPattern | None) -> None:
    cold, warm = _both(tiny, pattern=pattern)
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3)
    expected, found = (each.engine.generate(PROMPTS, params) for each in (cold, warm))
    assert tokens_of(found) == tokens_of(expected)
    for one, other in zip(chain(*expected), chain(*found), strict=True):
        assert [each.logprob for each in other.logprobs] == pytest.approx(
            [each.logprob for each in one.logprobs], abs=1e-4
        )


@PATTERNS
def test_processors_of_transformers_see_the_whole_text(tiny: Tiny, pattern: HeadPattern | None) -> None:
    """They look at the prompt's tokens too, of which most are not computed."""
    cold, warm = _both(tiny, pattern=pattern)
    options = {"max_new_tokens": 8, "no_repeat_ngram_size": 2, "repetition_penalty": 1.4, "do_sample": False}
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        expected, found = (each.generate(tokens, **options) for each in (cold, warm))
        assert torch.equal(found, expected)


@PATTERNS
def test_recorded_steps_with_hits_are_carried_out_again(
    tiny: Tiny, pattern: HeadPattern | None, tmp_path: Path
) -> None:
    """Copies to and from snapshots, and of blocks that move, are in the messages."""
    served = tiny.load(pattern=pattern, record_steps=tmp_path / "steps", num_blocks=40)
    for prompt in [*PROMPTS, *PROMPTS]:
        served.engine.generate([prompt], SamplingParams(temperature=0, max_tokens=4))
    assert _hits(served) > 5 * BLOCK
    served.engine.step_recorder.close()  # type: ignore[union-attr]
    log = read_log(tmp_path / "steps")
    again = HPUDuoModel.from_pretrained(tiny.path, **options_of(log.origin))
    assert again.engine.scheduler.limits == served.engine.scheduler.limits
    assert replay(again.engine, tiny.path, log).differences == ()


def test_a_replay_leaves_no_prefix_that_it_has_overwritten(tiny: Tiny, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=6)
    served = tiny.load(record_steps=tmp_path / "steps")
    served.engine.generate([prompts_of((30,), seed=8)[0]], params)
    served.engine.step_recorder.close()  # type: ignore[union-attr]
    log = read_log(tmp_path / "steps")
    other = HPUDuoModel.from_pretrained(tiny.path, **options_of(log.origin))
    expected = tokens_of(other.engine.generate([PROMPTS[0]], params))
    replay(other.engine, tiny.path, log)
    assert tokens_of(other.engine.generate([PROMPTS[0]], params)) == expected
