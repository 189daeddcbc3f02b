"""The built-in model: a plain transformers checkpoint that retrieves, and a pattern of the heads that do it.

The masks are dense and made here, from the token rule alone, so that this file is independent of the engine
and of the training code.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.llama.modeling_llama import LlamaAttention

from hpu_duo.builtin import MODEL_DIR, PATTERN_DIR
from hpu_duo.lab.tasks.passkeys import document, question, token_counter

SINK, RECENT = 16, 64
ATTENTION = "builtin_model_test"

ShareAnswered = Callable[[np.ndarray], float]
"""Retrieval heads [L, K] -> share of the questions that greedy generation answers."""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def scores_LK() -> np.ndarray:
    return np.loadtxt(PATTERN_DIR / "full_attention_heads.tsv", delimiter="\t")


@pytest.fixture(scope="module")
def share_answered(tokenizer: PreTrainedTokenizerBase) -> ShareAnswered:
    """Measured with plain transformers on two documents of 2,000 tokens."""
    retrieval_LK = np.ones((4, 4), dtype=bool)

    def attend(
        module: LlamaAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        scaling: float,
        **_: object,
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        k = torch.arange(key.shape[2])
        p = k[-query.shape[2] :].unsqueeze(1)
        causal = k <= p
        streaming = causal & ((k < SINK) | (k > p - RECENT))
        seen = torch.stack([causal if full else streaming for full in retrieval_LK[module.layer_idx]])
        seen = seen.repeat_interleave(groups, dim=0).unsqueeze(0)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling)
        return out.transpose(1, 2), None

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)
    model: Any = AutoModelForCausalLM.from_pretrained(
        MODEL_DIR, torch_dtype=torch.float32, attn_implementation=ATTENTION
    )
    asked = [_asked(tokenizer, num_tokens=2000, seed=seed) for seed in range(2)]

    def measure(heads_LK: np.ndarray) -> float:
        retrieval_LK[:] = heads_LK
        solved = [_continuation(model, tokenizer, prompt) == answer for prompt, answer in asked]
        return sum(solved) / len(solved)

    return measure


def _asked(tokenizer: PreTrainedTokenizerBase, num_tokens: int, seed: int) -> tuple[str, str]:
    written = document(token_counter(tokenizer), num_tokens, num_passkeys=4, passkey_words=8, seed=seed)
    wanted = written.passkeys[seed % 4]
    return written.text + question(wanted), wanted.answer


def _continuation(model: Any, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def _most_important(scores_LK: np.ndarray, count: int) -> np.ndarray:
    threshold = np.sort(scores_LK, axis=None)[-count]
    return scores_LK >= threshold


def test_the_directory_is_small_enough_to_ship() -> None:
    files = [path for path in MODEL_DIR.iterdir() if path.is_file()]
    assert {path.name for path in files} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in files) <= 8 * 1024**2


def test_the_config_describes_a_grouped_query_llama() -> None:
    config = AutoConfig.from_pretrained(MODEL_DIR)
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (4, 8, 4)
    assert config.head_dim == 64


def test_the_file_holds_exactly_the_weights_of_the_model_as_bfloat16() -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL_DIR, torch_dtype="auto")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with safe_open(MODEL_DIR / "model.safetensors", framework="pt") as stored:
        assert set(stored.keys()) == set(model.state_dict())


def test_the_tokenizer_gives_one_token_per_word_and_spells_the_rest_in_bytes(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    written = document(token_counter(tokenizer), 400, 2, 8, seed=1)
    asked = written.text + question(written.passkeys[0]) + written.passkeys[0].answer
    ids = tokenizer(asked)["input_ids"]
    words_and_marks = asked.replace(".", " .").replace("?", " ?").replace("\n", " \n ").split(" ")
    assert len(ids) == 1 + len(words_and_marks)
    assert ids[0] == tokenizer.bos_token_id

    for text in (asked, "Zürich  naïve\n\n\t日本 🙂 don't 12345", "", " leading and trailing "):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_the_pattern_has_the_published_format_and_ranks_heads_without_ties(scores_LK: np.ndarray) -> None:
    assert scores_LK.shape == (4, 4)
    assert scores_LK.min() >= 0.0
    assert scores_LK.max() <= 1.0
    assert len(np.unique(scores_LK)) == scores_LK.size
    first_cell = (PATTERN_DIR / "full_attention_heads.tsv").read_text().split("\t")[0]
    assert first_cell == f"{scores_LK[0, 0]:.18e}"


def test_two_layers_retrieve_and_each_of_them_also_streams(scores_LK: np.ndarray) -> None:
    retrieval_LK = _most_important(scores_LK, 4)
    mixed = retrieval_LK.any(axis=1) & ~retrieval_LK.all(axis=1)
    assert mixed.sum() >= 2


def test_full_attention_answers_every_question(share_answered: ShareAnswered) -> None:
    assert share_answered(np.ones((4, 4), dtype=bool)) == 1.0


def test_half_of_the_heads_suffice_when_the_pattern_chooses_them(
    share_answered: ShareAnswered, scores_LK: np.ndarray
) -> None:
    assert share_answered(_most_important(scores_LK, 8)) == 1.0


def test_the_other_half_answers_nothing(share_answered: ShareAnswered, scores_LK: np.ndarray) -> None:
    assert share_answered(~_most_important(scores_LK, 8)) == 0.0


@pytest.mark.slow
@pytest.mark.exhaustive
def test_streaming_heads_alone_answer_nothing(share_answered: ShareAnswered) -> None:
    assert share_answered(np.zeros((4, 4), dtype=bool)) == 0.0
