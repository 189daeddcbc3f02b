"""FastGen's sets: special tokens and punctuation stay first, then heavy hitters or the newest tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphs import BucketTable
from graphs.backends.compile import CompileBackend
from hpu_duo.config.kv_plan import Keep, KVPlan
from kernels_ref import TokenClass
from tests.modeling.budget_driving import BUDGET, CHUNK, NUM_NEW, assert_follows, load_budget, run_budget
from tests.modeling.families import BLOCK, Zoo, prompts_of
from tests.modeling.words import PUNCTUATION, SPECIAL, save_words
from tests.tiers import crossed

MARKS = {
    "fastgen:keep=special": dict.fromkeys(SPECIAL, 2e9),
    "fastgen:keep=punctuation": {**dict.fromkeys(PUNCTUATION, 1e9), **dict.fromkeys(SPECIAL, 2e9)},
    "fastgen": {**dict.fromkeys(PUNCTUATION, 1e9), **dict.fromkeys(SPECIAL, 2e9)},
}
TABLE = BucketTable.from_strings(["csu/q20/s0/u0/l6"])


@pytest.fixture(scope="module")
def path(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer of one word for each token, some of them special, some of punctuation."""
    model, source = zoo.load("llama")
    directory = tmp_path_factory.mktemp("worded") / "model"
    shutil.copytree(source, directory)
    save_words(directory, model.config.vocab_size)
    return directory


def assert_served(zoo: Zoo, path: Path, policy: str, chunk: int = CHUNK, **options: Any) -> None:
    seen = run_budget(load_budget(path, policy, **options), prompts_of(), NUM_NEW)
    numbers: dict[str, Any] = {"budget": BUDGET, "chunk": chunk, "marks": MARKS[policy]}
    assert_follows(zoo.load("llama")[0], seen, prompts_of(), policy=policy, **numbers)


OPTIONS: dict[str, dict[str, Any]] = {
    "reference": {},
    "sdpa": {"attention": "sdpa"},
    "replay": {"graphs": "replay", "buckets": TABLE},
    "compile": {"graphs": CompileBackend("eager"), "buckets": TABLE},
}


@pytest.mark.parametrize(("policy", "options"), crossed(list(MARKS), OPTIONS))
def test_sets_follow_the_definition(zoo: Zoo, path: Path, policy: str, options: dict[str, Any]) -> None:
    assert any(token in MARKS[policy] for prompt in prompts_of() for token in prompt)
    assert_served(zoo, path, policy, **options)


@pytest.mark.parametrize("policy", crossed(MARKS.keys(), fast=("fastgen",)))
def test_sets_are_chosen_from_whole_prompts_too(zoo: Zoo, path: Path, policy: str) -> None:
    assert_served(zoo, path, policy, 1 << 20, kv_prompt="whole")


def test_cached_prefixes_keep_their_marks(zoo: Zoo, path: Path) -> None:
    options = {"enable_prefix_caching": True, "kv_chunk": BLOCK, "max_num_batched_tokens": 2 * BLOCK + 6}
    policy, prompt = "fastgen:keep=punctuation", prompts_of([37])[0]
    served = load_budget(path, policy, num_prefix_snapshots=8, **options)
    prompts = [[*prompt, *more] for more in ([], [1, 5], [2, 3, 9])]
    for each in prompts:
        (seen,) = run_budget(served, [each], NUM_NEW)
        numbers: dict[str, Any] = {"budget": BUDGET, "chunk": BLOCK, "marks": MARKS[policy]}
        assert_follows(zoo.load("llama")[0], [seen], [each], policy=policy, **numbers)
    prefixes = served.stats().prefixes
    assert prefixes is not None
    assert prefixes.num_hit_tokens > 0


def test_every_token_of_the_vocabulary_has_its_class(path: Path) -> None:
    served = load_budget(path, "fastgen")
    found = served.engine.runner.builder.class_of
    assert found is not None
    assert set(np.flatnonzero(found == TokenClass.SPECIAL).tolist()) >= set(SPECIAL)
    assert np.flatnonzero(found == TokenClass.PUNCTUATION).tolist() == list(PUNCTUATION)
    assert len(found) == served.engine.limits.vocab_size


def test_sets_of_a_plan_lie_side_by_side(path: Path) -> None:
    heads = (Keep("fastgen:keep=special", 6), Keep("fastgen", BUDGET))
    options = {"kv_policy": None, "kv_budget": None, "kv_plan": KVPlan((heads,) * 4)}
    seen = run_budget(load_budget(path, "", **options), prompts_of(), NUM_NEW)
    for prompt, each in zip(prompts_of(), seen):
        text = [*prompt, *each.new[:-1]]
        special = [position for position, token in enumerate(text) if token in SPECIAL]
        for layer in each.kept:
            # The oldest special tokens go where there are more than slots; the others are the newest tokens.
            newest = [position for position in range(len(text)) if position not in special]
            room = max(0, 6 - len(special))
            assert layer[0] == sorted([*special[-6:], *newest[len(newest) - room :]])[-6:]
            assert len(layer[1]) == min(BUDGET, len(text))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("fastgen:keep=window", "keep of kv_policy 'fastgen' to be one of"),
        ("fastgen:recent=1.0", r"recent in \[0, 1\)"),
    ],
)
def test_other_sets_are_refused(path: Path, policy: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_budget(path, policy)


def test_a_model_without_a_tokenizer_is_refused(zoo: Zoo) -> None:
    with pytest.raises(ValueError, match="needs the model's tokenizer"):
        load_budget(zoo.load("llama")[1], "fastgen")
