"""Rankers made of transformers models of several types, and the prompts that these have positions for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_duo.scheduling.ranker import EncoderRanker, load_ranker, save_ranker

VOCAB_SIZE = 40
WIDTHS: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8},
    "distilbert": {"dim": 8, "n_heads": 2, "hidden_dim": 8},
    "opt": {"hidden_size": 8, "num_attention_heads": 2, "ffn_dim": 8, "word_embed_proj_dim": 8},
    "gpt2": {"n_embd": 8, "n_head": 2},
    **{
        name: {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
        for name in ("roberta", "xlm-roberta", "camembert", "mpnet")
    },
}
LAYERS = {"distilbert": "n_layers", "gpt2": "n_layer"}
POSITIONS = {"gpt2": "n_positions"}
BEHIND_PADDING = {"roberta", "xlm-roberta", "camembert", "mpnet"}
"""Types whose positions begin one behind the padding token."""


def _config(name: str, positions: int, num_layers: int = 1, **others: Any) -> dict[str, Any]:
    counts = {LAYERS.get(name, "num_hidden_layers"): num_layers}
    counts[POSITIONS.get(name, "max_position_embeddings")] = positions
    return {"model_type": name, "vocab_size": VOCAB_SIZE, **counts, **WIDTHS[name], **others}


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(WIDTHS)),
    positions=st.integers(6, 40),
    num_layers=st.integers(1, 2),
    excess=st.integers(0, 20),
    pad=st.integers(0, 3),
    seed=st.integers(0, 100),
)
def test_the_longest_prompt_is_scored_and_longer_ones_by_their_beginning(
    name: str, positions: int, num_layers: int, excess: int, pad: int, seed: int
) -> None:
    others = {"pad_token_id": pad} if name in BEHIND_PADDING - {"mpnet"} else {}
    config = _config(name, positions, num_layers, **others)
    taken = positions
    if name in BEHIND_PADDING:
        taken -= others.get("pad_token_id", 1) + 1
    torch.manual_seed(seed)
    ranker = EncoderRanker(config).eval()
    rng = np.random.default_rng(seed)
    # Tokens of every number, that for padding too.
    prompt = rng.integers(0, VOCAB_SIZE, taken + excess)
    score = ranker.score([prompt])
    assert np.isfinite(score).all()
    assert ranker.score([prompt[:taken]]) == pytest.approx(score)
    with torch.no_grad():  # a change of the last token that is looked at changes the score
        other = prompt.copy()
        other[taken - 1] = (other[taken - 1] + 5) % VOCAB_SIZE
        assert ranker.score([other]) != score
    assert ranker.score([prompt, prompt[:3]])[0] == pytest.approx(score[0], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", sorted(WIDTHS))
def test_the_longest_prompt_is_scored_alike_by_a_ranker_from_its_files(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = EncoderRanker(_config(name, 24)).eval()
    save_ranker(first, tmp_path / "ranker")
    prompt = np.arange(60) % VOCAB_SIZE
    assert load_ranker(tmp_path / "ranker").eval().score([prompt]) == first.score([prompt])
    assert first.score([prompt[:24]]) == first.score([prompt])


def test_fewer_tokens_than_there_are_positions_may_be_looked_at() -> None:
    ranker = EncoderRanker(_config("roberta", 24), max_tokens=5).eval()
    prompt = np.arange(30)
    assert ranker.score([prompt]) == ranker.score([prompt[:5]]) != ranker.score([prompt[:4]])


def test_a_configuration_without_room_for_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="expected max_position_embeddings above 2, got 2"):
        EncoderRanker(_config("roberta", 2))
