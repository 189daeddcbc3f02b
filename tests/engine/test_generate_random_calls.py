"""Random greedy calls of ``generate`` give the tensor that transformers gives."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from hpu_duo import HPUDuoModel
from tests.engine.test_generate_like_transformers import left_padded
from tests.engine.tiny import Tiny, assert_holds_nothing, make_tiny
from tests.modeling.families import IS_5, VOCAB, greedy, prompts_of
from tests.tiers import further

MAX_NEW = 14


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("special"), {5: "<|im_end|>", 60: "<s>"})


@pytest.fixture(scope="module")
def served(special: Tiny) -> HPUDuoModel:
    return special.load()


def arguments(rng: random.Random, has_padding: bool) -> dict[str, Any]:
    """Up to five arguments, with values that have an effect now and then."""

    def tokens(count: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(count)]

    choices: dict[str, Callable[[], Any]] = {
        "eos_token_id": lambda: rng.choice([tokens(1)[0], tokens(25), -1, torch.tensor(tokens(9))]),
        "min_new_tokens": lambda: rng.randint(0, MAX_NEW),
        "min_length": lambda: rng.randint(0, 35),
        "repetition_penalty": lambda: rng.choice([0.5, 1.3, 2.0]),
        "no_repeat_ngram_size": lambda: rng.randint(1, 3),
        "bad_words_ids": lambda: [tokens(rng.randint(1, 2)) for _ in range(rng.randint(1, 10))],
        "suppress_tokens": lambda: tokens(30),
        "begin_suppress_tokens": lambda: tokens(30),
        "sequence_bias": lambda: {tuple(tokens(rng.randint(1, 2))): rng.uniform(-9, 9) for _ in range(4)},
        "encoder_repetition_penalty": lambda: 1.5,
        "encoder_no_repeat_ngram_size": lambda: 2,
        "renormalize_logits": lambda: True,
        "return_dict_in_generate": lambda: True,
        "output_scores": lambda: True,
        "output_logits": lambda: True,
        "pad_token_id": lambda: rng.choice([0, 7]),
        "early_stopping": lambda: True,
        "top_k": lambda: 3,
        "typical_p": lambda: 0.5,
    }
    if not IS_5 and has_padding:
        # Versions before 5 count padding.
        del choices["repetition_penalty"]
    return {name: choices[name]() for name in rng.sample(sorted(choices), rng.randint(0, 5))}


def stop_strings(rng: random.Random, special: Tiny, prompt: list[int]) -> dict[str, Any]:
    """One or two, some of which begin in the prompt or hold a special token."""
    tokenizer = AutoTokenizer.from_pretrained(special.path)
    new = greedy(special.model, prompt, 6)
    texts = [tokenizer.decode(tokens) for tokens in (prompt[-1:] + new[:1], new[1:3], new[3:4], new[2:6])]
    return {"stop_strings": rng.sample([*texts, "<|im_end|>"], 2), "tokenizer": tokenizer}


@pytest.mark.parametrize("seed", [*range(15), *further(*range(15, 40))])
def test_a_random_call_gives_the_tensor_that_transformers_gives(
    special: Tiny, served: HPUDuoModel, seed: int
) -> None:
    rng = random.Random(seed)
    prompts = prompts_of([rng.randint(1, 30) for _ in range(rng.randint(1, 4))], seed=seed)
    inputs, mask = left_padded(prompts)
    kwargs = {"attention_mask": mask, "max_new_tokens": rng.randint(1, MAX_NEW)}
    kwargs |= arguments(rng, has_padding=not mask.all())
    if len(prompts) == 1 and rng.random() < 0.5:
        kwargs |= stop_strings(rng, special, prompts[0])
    ours, theirs = served.generate(inputs, **kwargs), special.model.generate(inputs, **kwargs)
    assert_holds_nothing(served)
    if kwargs.get("return_dict_in_generate"):
        assert set(ours.keys()) == set(theirs.keys()) - {"past_key_values", "cache"}
        ours, theirs = ours.sequences, theirs.sequences
    assert ours.tolist() == theirs.tolist()
