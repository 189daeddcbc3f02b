"""``positions=cache``: rotary positions are ranks among the kept tokens of a head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from graphs.backends.compile import CompileBackend
from hpu_duo import HPUDuoModel
from tests.modeling.budget_driving import BUDGET, CHUNK, NUM_NEW, assert_follows, load_budget, run_budget
from tests.modeling.families import BASE, Zoo, prompts_of, save_random
from tests.modeling.rank_stream import RankStream
from tests.modeling.test_kv_budget import MASK, PATTERN, TABLE, WHOLE, assert_served, load
from tests.tiers import crossed, further

H2O = "h2o:positions=cache"
POLICIES = [H2O, "tova:positions=cache", "snapkv:window=3,kernel=3,positions=cache", "local:positions=cache"]
TRAINED, STREAM = 24, 72


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model of few positions, and its folder."""
    path = tmp_path_factory.mktemp("short")
    config = LlamaConfig(**{**BASE, "max_position_embeddings": TRAINED, "num_hidden_layers": 2})
    return save_random(config, path), path


def load_stream(path: Path, policy: str, **options: Any) -> HPUDuoModel:
    return load_budget(path, policy, max_model_len=STREAM + 1, **options)


def assert_streams(served: HPUDuoModel, model: Any, budget: int = BUDGET) -> None:
    """Follow a stream of decoded tokens to its end."""
    prompt = prompts_of([1])
    (seen,) = run_budget(served, prompt, STREAM)
    stream = RankStream(model, budget, budget // 2)
    expected = torch.stack([stream.logits_after(token) for token in [*prompt[0], *seen.new[:-1]]])
    assert torch.isfinite(seen.logits).all()
    torch.testing.assert_close(seen.logits, expected, atol=1e-4, rtol=0)
    assert seen.kept == stream.positions()
    assert stream.largest_position == budget - 1 < TRAINED


@pytest.mark.parametrize(
    "options",
    [
        *further({}, {"attention": "sdpa"}),
        {"graphs": "replay", "buckets": TABLE},
        {"graphs": CompileBackend("eager")},
    ],
    ids=["reference", "sdpa", "replay", "compile"],
)
def test_a_stream_three_times_as_long_as_the_trained_length_is_a_plain_loop_over_ranks(
    short: tuple[Any, Path], options: dict[str, Any]
) -> None:
    model, path = short
    assert_streams(load_stream(path, H2O, **options), model)


def test_streams_beyond_the_trained_length_need_positions_in_the_cache(short: tuple[Any, Path]) -> None:
    with pytest.raises(ValueError, match=f"max_model_len of at most {TRAINED}"):
        load_stream(short[1], "h2o")
    with pytest.raises(ValueError, match=f"of at most {TRAINED} tokens together"):
        load_stream(short[1], H2O, kv_budget=TRAINED)


OPTIONS: dict[str, dict[str, Any]] = {
    "reference": {},
    "sdpa": {"attention": "sdpa"},
    "replay": {"graphs": "replay", "buckets": TABLE},
    "short-chunks": {"kv_chunk": 2},
}


@pytest.mark.parametrize(("policy", "options"), crossed(POLICIES, OPTIONS))
def test_chunks_and_decodes_follow_the_definition(zoo: Zoo, policy: str, options: dict[str, Any]) -> None:
    assert_served(zoo, "llama", policy, **options)


@pytest.mark.parametrize("name", ["llama_mqa", "qwen3"])
def test_families_follow_the_definition(zoo: Zoo, name: str) -> None:
    assert_served(zoo, name, H2O)


@pytest.mark.parametrize("options", [WHOLE, {"kv_prompt": "whole"}], ids=["one-step", "chunks"])
def test_whole_prompts_have_positions_of_the_text_and_decodes_ranks(
    zoo: Zoo, options: dict[str, Any]
) -> None:
    seen = run_budget(load(zoo, "llama", H2O, **options), prompts_of(), NUM_NEW)
    assert_follows(zoo.load("llama")[0], seen, prompts_of(), policy=H2O, budget=BUDGET, chunk=1 << 20)


def test_a_preempted_request_beside_heads_with_positions_of_the_text_comes_to_the_same_state(
    zoo: Zoo,
) -> None:
    served = load(zoo, "llama_mha", H2O, pattern=PATTERN, num_blocks=9, max_model_len=60)
    prompts = prompts_of([19, 13, 22])
    preempted: list[str] = []
    seen = run_budget(served, prompts, 16, preempted)
    heads = [np.flatnonzero(~retrieves).tolist() for retrieves in MASK]
    numbers: dict[str, Any] = {"budget": BUDGET, "chunk": CHUNK, "heads": heads}
    assert_follows(zoo.load("llama_mha")[0], seen, prompts, policy=H2O, **numbers)
    assert preempted


def test_positions_of_another_kind_are_refused(zoo: Zoo) -> None:
    for name in ("h2o", "tova", "snapkv", "fastgen", "local"):
        with pytest.raises(ValueError, match="positions=text or positions=cache"):
            load(zoo, "llama", f"{name}:positions=both")
