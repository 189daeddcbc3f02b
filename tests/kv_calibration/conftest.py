"""Random checkpoints of several families, each with a tokenizer of characters beside it."""

import string
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.modeling.families import Zoo

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
ALPHABET = [" ", *string.ascii_letters, *".,;:!?'-()"]


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(Path(tmp_path_factory.mktemp("zoo")))


@pytest.fixture(scope="session")
def characters() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *ALPHABET])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def with_tokenizer(zoo: Zoo, characters: PreTrainedTokenizerFast) -> Callable[[str], Path]:
    """The directory of a family's checkpoint, once it has a tokenizer."""

    @cache
    def directory(name: str) -> Path:
        path = zoo.load(name)[1]
        characters.save_pretrained(path)
        return path

    return directory
