"""KV budgets with drafts: kept tokens, log-probabilities and outputs are those of steps of one token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pytest

from graphs.backends.compile import CompileBackend
from hpu_duo import HPUDuoModel
from hpu_duo.drafting import Drafter
from hpu_duo.drafting.draft_gain import DraftLengths
from hpu_duo.lab.kept_tokens import kept_positions
from hpu_duo.request import Request, RequestStatus
from hpu_duo.sampling import SamplingParams
from tests.modeling.budget_driving import BUDGET
from tests.modeling.families import Zoo, prompts_of
from tests.tiers import EXHAUSTIVE

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
SEEDED = SamplingParams(temperature=0.7, seed=3, max_tokens=24, ignore_eos=True, logprobs=1)
PROMPTS = prompts_of([19, 13, 22, 5, 1, 9])
Kept: TypeAlias = dict[tuple[bytes, int], list[list[list[int]]]]
"""Positions by prompt and number of tokens in the cache: of each layer and head."""


class Almost(Drafter):
    """Proposes some of what comes, with wrong tokens now and then."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._rng, self._texts = random.Random(0), texts

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """See ``Drafter``; ids of requests are their numbers."""
        begin = request.num_tokens - request.num_prompt_tokens
        text = self._texts[int(request.request_id.split("#")[0])]
        coming = text[begin : begin + self._rng.randint(0, most)]
        return [token if self._rng.random() < 0.8 else self._rng.randrange(3, 40) for token in coming]


def load(zoo: Zoo, policy: str, **options: Any) -> HPUDuoModel:
    defaults: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_chunk_rows": 2,
        "max_model_len": 64,
        "kv_policy": policy,
        "kv_budget": BUDGET,
        "kv_chunk": 8,
        "block_size": 8,
        "enable_prefix_caching": False,
        "attention": "reference",
        "graphs": "eager",
    }
    return HPUDuoModel.from_pretrained(zoo.load("llama")[1], **{**defaults, **options})


def run(served: HPUDuoModel, params: SamplingParams) -> tuple[list[list[int]], np.ndarray, Kept]:
    """Serve all prompts; their outputs, the log-probabilities of these, and what was kept on the way."""
    engine, kept = served.engine, Kept()
    found: dict[str, tuple[list[int], list[float]]] = {}
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, params, request_id=str(number))
    while engine.has_unfinished:
        for each in engine.step():
            tokens, logprobs = found.setdefault(each.request_id, ([], []))
            tokens += each.token_ids
            logprobs += [one.logprob for one in each.logprobs]
        for number in range(len(PROMPTS)):
            request = engine.scheduler.get(f"{number}#0")
            if request is None or request.status is not RequestStatus.RUNNING:
                continue
            num, store = request.num_computed_tokens, engine.runner.store
            if num >= request.num_prompt_tokens:
                layers = kept_positions(store, request.row, num)
                kept[request.tokens[: request.num_prompt_tokens].tobytes(), num] = [
                    [head.tolist() for head in layer] for layer in layers
                ]
    done = [found[str(number)] for number in range(len(PROMPTS))]
    return [tokens for tokens, _ in done], np.array([logprobs for _, logprobs in done]), kept


@pytest.fixture
def any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any length, whether it pays or not."""
    rng = random.Random(1)
    monkeypatch.setattr(DraftLengths, "choose", lambda self, *_: rng.choice(self._lens))
    monkeypatch.setattr(DraftLengths, "pauses", lambda *_: False)


REPLAYED = {"attention": "sdpa", "graphs": "replay"}
WHOLE: dict[str, Any] = {"kv_prompt": "whole", "max_num_batched_tokens": 40, "kv_chunk": 16}


@pytest.mark.usefixtures("any_length")
@pytest.mark.parametrize(
    ("policy", "params", "options"),
    [
        ("h2o", GREEDY, {}),
        ("streaming-llm:sink=2,positions=cache", SEEDED, WHOLE),
        pytest.param("local", SEEDED, {"graphs": CompileBackend("eager")}, marks=EXHAUSTIVE),
        *(
            pytest.param(policy, params, options, marks=marks)
            for marks, policy, params, options in (
                (EXHAUSTIVE, "h2o", SEEDED, WHOLE),
                (pytest.mark.slow, "tova", SEEDED, {}),
                (pytest.mark.slow, "snapkv:window=3,kernel=3", SEEDED, REPLAYED),
                (EXHAUSTIVE, "streaming-llm:sink=2", GREEDY, {}),
                (EXHAUSTIVE, "expected-attention:sink=2,future=4", SEEDED, {}),
                (EXHAUSTIVE, "fixed:stride=16,columns=1", GREEDY, {"kv_budget": 21}),
                (EXHAUSTIVE, "h2o:positions=cache", SEEDED, {}),
            )
        ),
    ],
)
def test_kept_tokens_and_outputs_are_those_without_drafts(
    zoo: Zoo, policy: str, params: SamplingParams, options: dict[str, Any]
) -> None:
    expected, logprobs, kept = run(load(zoo, policy, **{**options, "graphs": "eager"}), params)
    config = {"num_speculative_tokens": 4, "draft_lens": [1, 3, 5]}
    served = load(zoo, policy, **options, speculative_config=config)
    served.engine.drafter = Almost(expected)
    tokens, own_logprobs, own_kept = run(served, params)
    assert tokens == expected
    np.testing.assert_allclose(own_logprobs, logprobs, atol=2e-5)
    assert set(own_kept) < set(kept)
    for key, layers in own_kept.items():
        assert layers == kept[key]
    stats = served.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_drafted_tokens


def test_the_plan_states_slots_and_versions(zoo: Zoo) -> None:
    served = load(zoo, "h2o", speculative_config={"num_speculative_tokens": 4})
    store = served.engine.runner.store
    assert store.num_bytes == store.plan.total_bytes
    heads = sum(group.num_heads for layer in store.plan.layers for group in layer.groups)
    # Keys and values of 8 float32, and a position and a score in each of 5 versions.
    assert store.plan.row_bytes == heads * (BUDGET + 4) * (2 * 8 * 4 + 5 * 8)
    (stats,) = served.stats().budgets
    assert (stats.num_slots, stats.bytes_per_request) == (BUDGET, store.plan.row_bytes)


def test_scores_of_several_tokens_a_step_are_those_of_one(zoo: Zoo) -> None:
    prompts, continuations = prompts_of([12, 21]), [[prompts_of([9])[0]], [prompts_of([11], seed=6)[0]]]
    expected = load(zoo, "h2o").engine.score(prompts, continuations)
    served = load(zoo, "h2o", decode_len=4)
    for (one,), (other,) in zip(served.engine.score(prompts, continuations), expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
    assert served.stats().num_steps < 12
