"""A tiny random Llama with a tokenizer of characters and a head pattern, saved as a user would have them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from hpu_duo.cli.app import app
from hpu_duo.heads import HeadPattern

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}<assistant>"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    # Printable characters only: a terminal, or a test runner, may change others on their way out.
    alphabet = ["\n", *(chr(code) for code in range(32, 127))]
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *alphabet])}
    characters = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    directory = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=len(tokenizer),
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def chat_model_dir(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, tokenizer: PreTrainedTokenizerFast
) -> Path:
    directory = tmp_path_factory.mktemp("tiny-chat-llama")
    for path in model_dir.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    with_template = PreTrainedTokenizerFast.from_pretrained(model_dir)
    with_template.chat_template = CHAT_TEMPLATE
    with_template.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def pattern_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pattern")
    HeadPattern.random(2, 2, seed=0, sink=4, recent=12).save(directory)
    return directory


@pytest.fixture
def hpu_duo() -> Callable[..., Result]:
    """Run the command line in this process; standard output and error are kept apart."""

    def run(*arguments: str | Path, stdin: bytes | None = None) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)

    return run
