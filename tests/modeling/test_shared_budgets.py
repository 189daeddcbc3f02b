"""Layers that share keys evict together, by the weights of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from graphs.backends.compile import CompileBackend
from hpu_duo.sampling import SamplingParams
from kernels_ref import Budget
from tests.modeling.budget_driving import BUDGET, CHUNK, NUM_NEW, Seen, load_budget, run_budget
from tests.modeling.families import greedy, make_config, prompts_of, save_random
from tests.modeling.test_shared_keys import FAMILIES, SHARED
from tests.tiers import further

NUM_LAYERS = 8
SOURCE, READERS = 3, (5, 7)
"""The last layer with keys of its own that sees the whole text, and those that attend to its keys."""
NAME = "shared_budget"


def shared(path: Path, name: str = "Gemma4TextConfig") -> Any:
    fields = {
        **SHARED,
        **FAMILIES[name],
        "num_hidden_layers": NUM_LAYERS,
        "num_kv_shared_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2),
    }
    if name == "Gemma3nTextConfig":
        fields["activation_sparsity_pattern"] = [0.5] + [0.0] * (NUM_LAYERS - 1)
    return save_random(make_config(name, **fields), path)


@dataclass
class Loop:
    """One text, step by step: every layer attends over the tokens that its store has, in float64.

    Attributes:
        score: new scores of a head from the old ones and the weights of the queries of a step, those of all
            query heads and layers of its store, float64 ``[layers, G, queries, L]``; and of all heads.
        recent: newest tokens that stay.
        stored: positions and scores of the heads of each store.
        seen: keys that each query sees, bool ``[K, L, L]``, by store.
        weights: of the queries of a step, by store, of each of its layers.
        logits: behind each step.
    """

    score: Callable[..., torch.Tensor]
    recent: int
    length: int
    start: int = 0
    end: int = 0
    stored: dict[int, list[dict[int, float]]] = field(default_factory=dict)
    seen: dict[int, torch.Tensor] = field(default_factory=dict)
    weights: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    logits: list[torch.Tensor] = field(default_factory=list)

    def begin(self, start: int, end: int, num_kv: int, stores: Sequence[int]) -> None:
        """A step with new tokens: a decode evicts before its token is there."""
        self.start, self.end, self.weights = start, end, {}
        for store in stores:
            heads = self.stored.setdefault(store, [{} for _ in range(num_kv)])
            seen = self.seen.setdefault(
                store, torch.zeros(num_kv, self.length, self.length, dtype=torch.bool)
            )
            for head, scores in enumerate(heads):
                if end - start == 1:
                    self._evict(scores, BUDGET - 1)
                for query in range(start, end):
                    seen[head, query, [*scores, *range(start, query + 1)]] = True

    def finish(self) -> None:
        """Score after all layers, and let prompts evict."""
        for store, of_layers in self.weights.items():
            together = torch.stack(of_layers)
            for head, scores in enumerate(self.stored[store]):
                there = [*scores, *range(self.start, self.end)]
                old = torch.tensor([*scores.values()] + [0.0] * (self.end - self.start), dtype=torch.float64)
                new = self.score(old, together[:, head][..., there], together[..., there])
                self.stored[store][head] = dict(zip(there, new.tolist()))
                self._evict(self.stored[store][head], BUDGET)

    def _evict(self, scores: dict[int, float], most: int) -> None:
        while len(scores) > most:
            free = [(score, p) for p, score in scores.items() if p < self.end - self.recent]
            del scores[min(free)[1]]


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    loop, layer, length = kwargs["loop"], module.layer_idx, query.shape[2]
    group = query.shape[1] // key.shape[1]
    q, k, v = (x[0].double() for x in (query, key, value))
    scores = torch.einsum("kgqd,ksd->kgqs", q.unflatten(0, (-1, group)), k) * kwargs["scaling"]
    window, gap = kwargs.get("sliding_window"), torch.arange(length)[:, None] - torch.arange(length)
    store = SOURCE if layer in READERS else layer
    if window is not None:
        visible = ((gap >= 0) & (gap < window)).expand(key.shape[1], 1, -1, -1)
    else:
        visible = loop.seen[store][:, None, :length, :length]
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    if window is None:
        loop.weights.setdefault(store, []).append(weights[:, :, loop.start : loop.end])
    out = torch.einsum("kgqs,ksd->qkgd", weights, v).flatten(1, 2)
    return out.to(value.dtype)[None], None


AttentionInterface.register(NAME, _attention)


def summed(old: torch.Tensor, own: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return old + own.sum(dim=(0, 1, 2))


def of_newest(_: torch.Tensor, __: torch.Tensor, everyone: torch.Tensor) -> torch.Tensor:
    return everyone[..., -1, :].sum(dim=(0, 1, 2))


def snapped(old: torch.Tensor, own: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    mean = own[:, :, -3:].mean(dim=(0, 1, 2))
    return old + (mean - old) / 3 if own.shape[2] == 1 else mean


POLICIES: dict[str, tuple[Callable[..., torch.Tensor], int]] = {
    "h2o": (summed, BUDGET // 2),
    "tova": (of_newest, 0),
    "snapkv:window=3,kernel=1": (snapped, 3),
    "local": (lambda old, *_: old, 0),
}


@torch.inference_mode()
def expected(model: Any, policy: str, prompt: Sequence[int], new: Sequence[int], chunk: int) -> Loop:
    """Run the loop over a prompt in chunks, and new tokens one by one."""
    text = [*prompt, *new[:-1]]
    loop = Loop(*POLICIES[policy], len(text))
    ends = sorted({*range(chunk, len(prompt), chunk), *range(len(prompt), len(text) + 1)})
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        for start, end in zip([0, *ends], ends):
            loop.begin(start, end, SHARED["num_key_value_heads"], (1, SOURCE))
            mask = torch.zeros(1, 1, 1, 1)
            ids = torch.tensor([text[:end]])
            output = model(input_ids=ids, attention_mask=mask, use_cache=False, loop=loop)
            loop.finish()
            loop.logits.append(output.logits[0, -1].float())
    finally:
        model.set_attn_implementation(before)
    return loop


def assert_evicts_together(
    model: Any, seen: Sequence[Seen], prompts: Sequence[list[int]], policy: str, chunk: int = CHUNK
) -> None:
    for prompt, (new, logits, kept) in zip(prompts, seen):
        loop = expected(model, policy, prompt, new, chunk)
        of_stores = {store: [sorted(head) for head in heads] for store, heads in loop.stored.items()}
        assert [kept[1], *(kept[layer] for layer in (SOURCE, *READERS))] == [
            of_stores[1],
            *[of_stores[SOURCE]] * (1 + len(READERS)),
        ]
        torch.testing.assert_close(logits, torch.stack(loop.logits[-len(new) :]), atol=1e-4, rtol=0)


DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
WHOLE: dict[str, Any] = {"kv_prompt": "whole", "kv_chunk": CHUNK}
CASES: list[Any] = [
    ("Gemma4TextConfig", "h2o", {}),
    ("Gemma4TextConfig", "tova", {}),
    ("Gemma4TextConfig", "snapkv:window=3,kernel=1", {"attention": "sdpa"}),
    ("Gemma3nTextConfig", "h2o", {"graphs": "replay"}),
    ("Gemma4TextConfig", "h2o", WHOLE),
    *further(("Gemma4TextConfig", "h2o", {"graphs": CompileBackend("eager")})),
]


@pytest.mark.usefixtures("default_buckets")
@pytest.mark.parametrize(("name", "policy", "options"), CASES)
def test_a_store_evicts_by_the_weights_of_all_its_readers(
    tmp_path: Path, name: str, policy: str, options: dict[str, Any]
) -> None:
    model = shared(tmp_path, name)
    served = load_budget(tmp_path, policy, **options)
    store = served.engine.runner.store
    assert [layer.source for layer in store.plan.layers] == [None] * 4 + [2, SOURCE] * 2
    assert store.num_bytes == store.plan.total_bytes
    prompts, chunk = prompts_of(), 1 << 20 if "kv_prompt" in options else CHUNK
    assert_evicts_together(model, run_budget(served, prompts, NUM_NEW), prompts, policy, chunk)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("streaming-llm:positions=cache", {}),
        ("streaming-llm:positions=cache", DRAFTS),
        ("streaming-llm", DRAFTS),
        ("streaming-llm", {"ring_dtype": "int8_per_token_head"}),
    ],
)
def test_a_policy_that_observes_nothing_stores_once_what_each_layer_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, options: dict[str, Any]
) -> None:
    shared(tmp_path)
    options = {"max_model_len": 100, **options}
    together = load_budget(tmp_path, policy, **options)
    monkeypatch.setattr(Budget, "shares_units", False)
    alone = load_budget(tmp_path, policy, **options)
    found, wanted = (each.engine.runner.store.plan for each in (together, alone))
    assert [layer.source for layer in wanted.layers[4:]] == [2, None] * 2
    assert found.row_bytes < wanted.row_bytes
    prompts = [each * 2 for each in prompts_of()]
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    tokens = [
        [sample.token_ids for [sample] in each.engine.generate(prompts, params)] for each in (together, alone)
    ]
    assert tokens[0] == tokens[1]
    if options.get("speculative_config"):
        assert together.stats().speculation.num_accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.usefixtures("default_buckets")
def test_graphs_of_a_simulated_hpu_sum_over_layers(tmp_path: Path) -> None:
    shared(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    of_devices = [
        [
            sample.token_ids
            for [sample] in load_budget(tmp_path, "h2o", **options).engine.generate(prompts_of(), params)
        ]
        for options in ({}, {"device": "hpu-sim", "dtype": "float32"})
    ]
    assert of_devices[0] == of_devices[1]


def test_a_budget_above_the_text_is_full_attention_and_a_prefix_is_taken_up(tmp_path: Path) -> None:
    model = shared(tmp_path)
    options = {"kv_budget": 80, "enable_prefix_caching": True, "num_prefix_snapshots": 8}
    options |= {"kv_chunk": 8, "max_num_batched_tokens": 24}
    served = load_budget(tmp_path, "h2o", **options)
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    prompts = prompts_of()
    for _ in range(2):
        done = served.engine.generate(prompts, params)
        assert [sample.token_ids for [sample] in done] == [greedy(model, each, NUM_NEW) for each in prompts]
    prefixes = served.stats().prefixes
    assert prefixes is not None
    assert prefixes.num_hit_tokens > 0


def test_drafts_are_refused_where_later_layers_decide_what_is_evicted(tmp_path: Path) -> None:
    shared(tmp_path)
    with pytest.raises(ValueError, match=r"'h2o' scores keys by the weights of all layers that share them"):
        load_budget(tmp_path, "h2o", decode_len=2)
