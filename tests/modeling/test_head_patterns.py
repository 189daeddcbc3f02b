"""Streaming heads against a dense oracle that masks each head token by token."""

from typing import Any

import numpy as np
import pytest
import torch

from hpu_duo import HeadPattern, HPUDuoModel
from tests.modeling.dense_oracle import oracle_logits
from tests.modeling.driving import greedy_logits
from tests.modeling.families import BLOCK, LENGTHS, Zoo, prompts_of
from tests.tiers import further

NUM_NEW = 8
# Layers of retrieval heads only, of streaming heads only, and of both in an order that must be permuted.
MIXED = np.array([[True, True], [False, False], [False, True], [True, False]])
WINDOWS = [(0, 1), (0, 5), (2, 3), (4, 16), (1, 40), (70, 30)]
FUSED_AND_OTHERS = ["llama", "llama_biases_tied", "qwen3", "phi3", "olmo2", "granite", "smollm3", "cohere"]


def make_pattern(mask: np.ndarray, sink: int, recent: int) -> HeadPattern:
    return HeadPattern(mask.astype(np.float32), sink, recent, retrieval=mask)


def load(zoo: Zoo, name: str, pattern: HeadPattern, attention: str, **changes: Any) -> HPUDuoModel:
    options = {"max_num_seqs": len(LENGTHS), "max_num_batched_tokens": 13, "max_model_len": 80, **changes}
    return HPUDuoModel.from_pretrained(
        zoo.load(name)[1], pattern=pattern, attention=attention, block_size=BLOCK, **options
    )


def assert_equals_oracle(zoo: Zoo, name: str, pattern: HeadPattern, served: HPUDuoModel) -> None:
    model, _ = zoo.load(name)
    for prompt, (new, logits) in zip(prompts_of(), greedy_logits(served.engine, prompts_of(), NUM_NEW)):
        expected = oracle_logits(model, pattern, [*prompt, *new[:-1]])[len(prompt) - 1 :]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert new == expected.argmax(dim=-1).tolist()


@pytest.fixture(params=["reference", "sdpa"])
def attention(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(("sink", "recent"), WINDOWS)
def test_every_window_follows_the_token_rule(zoo: Zoo, attention: str, sink: int, recent: int) -> None:
    pattern = make_pattern(MIXED, sink, recent)
    assert_equals_oracle(zoo, "llama", pattern, load(zoo, "llama", pattern, attention))


@pytest.mark.parametrize("seed", [0, 1, *further(2, 3)])
def test_random_patterns_and_step_budgets_follow_the_token_rule(zoo: Zoo, attention: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pattern = make_pattern(rng.random((4, 4)) < 0.5, int(rng.integers(0, 6)), int(rng.integers(1, 20)))
    served = load(
        zoo,
        "llama_mha",
        pattern,
        attention,
        max_num_batched_tokens=int(rng.integers(len(LENGTHS), 90)),
        max_num_seqs=int(rng.integers(2, len(LENGTHS) + 1)),
        max_chunk_rows=int(rng.integers(1, 4)),
    )
    assert_equals_oracle(zoo, "llama_mha", pattern, served)


@pytest.mark.parametrize("name", FUSED_AND_OTHERS)
def test_families_follow_the_token_rule(zoo: Zoo, name: str) -> None:
    num_kv_heads = zoo.load(name)[0].config.num_key_value_heads
    pattern = make_pattern(np.repeat(MIXED, num_kv_heads // 2, axis=1), 3, 6)
    assert_equals_oracle(zoo, name, pattern, load(zoo, name, pattern, "reference"))


def test_all_heads_streaming_need_no_blocks(zoo: Zoo, attention: str) -> None:
    pattern = make_pattern(np.zeros((4, 2), dtype=bool), 2, 7)
    served = load(zoo, "llama", pattern, attention)
    assert_equals_oracle(zoo, "llama", pattern, served)
    assert served.stats().total_blocks == 0


def test_the_oracle_would_notice_a_window_that_is_off_by_one(zoo: Zoo) -> None:
    model, _ = zoo.load("llama")
    text = prompts_of([30])[0]
    logits = [oracle_logits(model, make_pattern(MIXED, 2, recent), text)[-1] for recent in (5, 6)]
    assert (logits[0] - logits[1]).abs().max() > 1e-2


def test_a_sliding_window_layer_keeps_its_window_whatever_the_pattern_says(zoo: Zoo) -> None:
    name = "qwen2_partly_sliding"
    pattern = make_pattern(np.ones((4, 2), dtype=bool), 3, 2)
    served = load(zoo, name, pattern, "reference")
    output = served.generate(prompts_of(), max_new_tokens=NUM_NEW)
    for row, prompt, expected in zip(output, prompts_of(), zoo.greedy(name, NUM_NEW)):
        assert row[: len(prompt) + NUM_NEW].tolist() == prompt + expected
