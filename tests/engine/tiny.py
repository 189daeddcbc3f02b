"""A tiny random Llama with a tokenizer of one character per token, and ways to run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, PreTrainedTokenizerFast

from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.engine.outputs import Completion
from hpu_duo.sampling import SamplingParams
from tests.modeling.families import BASE, BLOCK, VOCAB, save_random

MAX_LEN = 96
PATTERN = HeadPattern(
    np.zeros((2, 2), np.float32), sink=2, recent=6, retrieval=np.array([[True, False], [False, True]])
)


@dataclass(frozen=True)
class Tiny:
    """The checkpoint on disk, and as transformers has it."""

    path: Path
    model: Any

    def load(self, **options: Any) -> HPUDuoModel:
        """Serve it with small blocks and small steps unless told otherwise."""
        defaults = {
            "attention": "reference",
            "dtype": "float32",
            "block_size": BLOCK,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "max_model_len": MAX_LEN,
        }
        return HPUDuoModel.from_pretrained(self.path, **{**defaults, **options})


CHARACTERS = [chr(code) for code in range(ord("!"), ord("!") + VOCAB - 2)] + ["\u0120", "\u010a"]
"""The character of each token; the last two are how byte-level vocabularies write a space and a newline."""


def make_tiny(directory: Path, special: Mapping[int, str] | None = None) -> Tiny:
    """Save the checkpoint and its tokenizer.

    Args:
        special: tokens that are special, and their texts.
    """
    model = save_random(LlamaConfig(**{**BASE, "num_hidden_layers": 2}), directory)
    names = dict(enumerate(CHARACTERS)) | dict(special or {})
    tokenizer = Tokenizer(BPE({name: token for token, name in names.items()}, []))
    tokenizer.add_special_tokens(list((special or {}).values()))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return Tiny(directory, model)


def text_of(token_ids: Sequence[int]) -> str:
    """The text that the tokenizer decodes them to."""
    text = "".join(CHARACTERS[token] for token in token_ids)
    return text.replace(CHARACTERS[-2], " ").replace(CHARACTERS[-1], "\n")


def serve(
    served: HPUDuoModel, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[list[Completion]]:
    """All prompts at once; checks that nothing is held afterwards."""
    done = served.engine.generate(prompts, params)
    assert_holds_nothing(served)
    return done


def tokens_of(done: Sequence[Sequence[Completion]]) -> list[list[list[int]]]:
    """Token ids of each sample of each prompt."""
    return [[sample.token_ids for sample in samples] for samples in done]


def assert_holds_nothing(served: HPUDuoModel) -> None:
    """Every block and row is free again, and no request is left."""
    stats = served.stats()
    assert (stats.used_blocks, stats.used_rows, stats.held_bytes) == (0, 0, 0)
    assert (stats.num_running, stats.num_waiting) == (0, 0)
