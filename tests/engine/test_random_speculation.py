"""Random settings of sampling with drafters and predictions: the outputs are those without drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from hpu_duo.drafting.draft_gain import DraftLengths
from hpu_duo.engine.model_drafts.steps import DraftSteps
from hpu_duo.engine.outputs import Completion
from hpu_duo.sampling import SamplingParams, StructuredOutputs
from tests.engine.tiny import PATTERN, Tiny, make_tiny
from tests.tiers import EXHAUSTIVE, further

EOS = 2
SIZES: tuple[dict[str, Any], ...] = (
    {},
    {"pattern": PATTERN},
    {"pattern": PATTERN, "num_blocks": 10, "max_model_len": 64},
    {"num_blocks": 12, "max_model_len": 64},
    {"enable_prefix_caching": False},
)
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
DUO = {"method": "duo", "draft_sink": 2, "draft_recent": 4}


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The tiny model with an end-of-text token."""
    tiny = make_tiny(tmp_path_factory.mktemp("ending"), {EOS: "<eos>"})
    GenerationConfig(pad_token_id=0, eos_token_id=EOS).save_pretrained(tiny.path)
    return tiny


def some_params(rng: random.Random) -> SamplingParams:
    """Each of these settings now and then, also together."""
    most = rng.randint(1, 30)
    settings: tuple[dict[str, Any], ...] = (
        {"repetition_penalty": rng.choice([0.8, 1.3]), "frequency_penalty": rng.choice([-0.5, 0.4])},
        {"min_tokens": rng.randint(0, most)},
        {"logit_bias": {rng.randint(3, 30): 3.0}},
        {"stop": tuple(rng.choices("abcdefABC0123!", k=3)), "include_stop_str_in_output": rng.random() < 0.5},
        {"n": rng.randint(2, 3)},
        {"ignore_eos": True},
        {"structured_outputs": StructuredOutputs(regex=r"([a-c]{1,3}[0-9])*!")},
        {"speculate": rng.choice([0, 1, 2, False])},
        {"cache_salt": rng.choice("ab")},
    )
    chosen = {name: value for each in settings if rng.random() < 0.25 for name, value in each.items()}
    return SamplingParams(
        max_tokens=most, seed=rng.randint(0, 9), temperature=rng.choice([0, 0.3, 0.7, 1.3]), **chosen
    )


def altered(rng: random.Random, tokens: Sequence[int]) -> list[int]:
    """The tokens with up to two of them changed or left out."""
    found = list(tokens)
    for _ in range(min(rng.randint(0, 2), len(found) - 1)):
        place = rng.randrange(len(found))
        found[place : place + 1] = [rng.randint(3, 30)] if rng.random() < 0.5 else []
    return found


def ends_of(done: Sequence[Sequence[Completion]]) -> list[Any]:
    return [
        [(one.token_ids, one.text, one.finish_reason, one.stop_reason) for one in samples] for samples in done
    ]


def instead_of_drafts(rng: random.Random, tokens: torch.Tensor) -> torch.Tensor:
    """The tokens that a model drafted, or wrong ones, the end of the text or any in place of all or some."""
    others = (torch.full_like(tokens, EOS), (tokens + 1) % 40, torch.randint_like(tokens, 3, 40))
    keeps = torch.rand(tokens.shape) < rng.choice([0.0, 0.5, 1.0])
    return torch.where(keeps, tokens, rng.choice(others))


@pytest.mark.parametrize(
    ("seed", "is_duo"),
    [
        *further((1, False)),
        (3, True),
        *(
            pytest.param(seed, seed % 2 == 0, marks=pytest.mark.slow if seed in (4, 7) else EXHAUSTIVE)
            for seed in range(4, 10)
        ),
        *(pytest.param(seed, False, marks=EXHAUSTIVE) for seed in (2, 3, 4, 6, 8)),
        *(pytest.param(seed, True, marks=EXHAUSTIVE) for seed in (5, 7, 9)),
    ],
)
def test_outputs_are_those_without_drafts(
    ending: Tiny, seed: int, is_duo: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    # Rows of any length, whether it pays or not.
    monkeypatch.setattr(DraftLengths, "choose", lambda self, *_: rng.choice(self._lens))
    monkeypatch.setattr(DraftLengths, "pauses", lambda *_: False)
    run = DraftSteps.run
    monkeypatch.setattr(DraftSteps, "run", lambda *args: instead_of_drafts(rng, run(*args)))
    sizes, kind = SIZES[seed % len(SIZES)], DUO if is_duo else rng.choice([{}, NGRAM])
    plain = ending.load(**sizes)
    drafting = ending.load(
        max_num_batched_tokens=48,
        speculative_config={**kind, "num_speculative_tokens": rng.randint(2, 7)},
        **sizes,
    )
    prompts = [rng.choices(range(3, 3 + rng.choice([2, 4, 30])), k=rng.randint(1, 30)) for _ in range(5)]
    for _ in range(3):
        params = [some_params(rng) for _ in prompts]
        expected = plain.engine.generate(prompts, params)
        params = [
            replace(each, prediction_token_ids=altered(rng, done[0].token_ids))
            if rng.random() < 0.7
            else each
            for each, done in zip(params, expected, strict=True)
        ]
        assert ends_of(drafting.engine.generate(prompts, params)) == ends_of(expected)
    ours, theirs = drafting.stats(), plain.stats()
    assert ours.num_output_tokens == theirs.num_output_tokens
    assert ours.num_accepted_tokens > 0
