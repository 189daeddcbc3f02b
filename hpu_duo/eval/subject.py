"""A loaded model under test: text in, decoded answers and scores out, with the bytes that took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpu_duo.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpu_duo.engine.outputs import ContinuationScore
    from hpu_duo.llm import HPUDuoModel


@dataclass(frozen=True)
class KVBytes:
    """What the cache keeps of one text at its end.

    Attributes:
        num_tokens: tokens of the text in the cache.
        held: bytes of the blocks and the ring row that the engine leases for them.
        full: bytes that they take when every head keeps all of them, unrounded.
    """

    num_tokens: int

    held: int
    full: int

    @property
    def ratio(self) -> float:
        """Bytes kept / bytes of the full cache."""
        return self.held / self.full if self.full else 0.0


class Subject:
    """A model under test and its tokenizer.

    Args:
        model: loaded with the pattern to test.

    Raises:
        ValueError: the model has no tokenizer.
    """

    def __init__(self, model: HPUDuoModel) -> None:
        if model.tokenizer is None:
            raise ValueError(
                f"expected a tokenizer beside the model in {model.config.model.path}, found none"
            )
        self.model = model
        self.tokenizer: PreTrainedTokenizerBase = model.tokenizer

    @property
    def max_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.model.engine.limits.max_model_len

    def encode(self, text: str, *, is_start: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            is_start: add what the tokenizer puts in front of a text.

        Raises:
            ValueError: the tokenizer gives no tokens, or its unknown token.
        """
        return encode_known(self.tokenizer, text, is_start=is_start)

    def count(self, text: str) -> int:
        """Tokens of a text, special tokens not counted."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def check_lengths(self, lengths: Sequence[int], what: str) -> None:
        """Refuse texts that the model cannot hold, before anything runs.

        Args:
            lengths: tokens of prompt and answer of each text.
            what: their name in the message.

        Raises:
            ValueError: one is too long.
        """
        longest = max(lengths, default=0)
        if longest > self.max_len:
            raise ValueError(
                f"expected {what} of at most {self.max_len} tokens with their answers, which the model can "
                f"hold, got {longest}"
            )

    def score(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
    ) -> tuple[list[list[ContinuationScore]], KVBytes]:
        """See ``HPUDuoModel.score``; and what is kept of the longest text."""
        longest = max(
            len(prompt) + max(map(len, each)) for prompt, each in zip(prompts, continuations, strict=True)
        )
        return self.model.score(prompts, continuations), self.kv_bytes(longest - 1)

    def answer(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int], stop: Sequence[str] = ()
    ) -> tuple[list[str], KVBytes]:
        """Greedy answers, every token of them decoded; and what is kept of the longest prompt.

        Args:
            max_new_tokens: for each prompt.
            stop: texts that end an answer and are left out.
        """
        params = [
            SamplingParams(temperature=0.0, max_tokens=most, stop=tuple(stop), decoded_prompt_tokens=1)
            for most in max_new_tokens
        ]
        done = self.model.engine.generate(prompts, params)
        return [samples[0].text for samples in done], self.kv_bytes(max(map(len, prompts)))

    def kv_bytes(self, num_tokens: int) -> KVBytes:
        """What is kept of a text with so many tokens in the cache; other requests add nothing to it."""
        plan = self.model.engine.runner.store.plan
        return KVBytes(num_tokens, plan.bytes_per_request(num_tokens), plan.full_attention_bytes(num_tokens))


def encode_known(tokenizer: PreTrainedTokenizerBase, text: str, *, is_start: bool = False) -> list[int]:
    """Token ids of a text that the tokenizer can really encode.

    Args:
        is_start: add what the tokenizer puts in front of a text; what it puts behind one is left out.

    Raises:
        ValueError: there are no tokens, or the unknown token stands for something in the text. Where the text
            itself has that token written out, and in front of a text, it is a token like others.
    """
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    shown = text if len(text) <= 60 else text[:57] + "..."
    if not ids:
        raise ValueError(f"expected a tokenizer that can encode {shown!r}, got no tokens")
    if tokenizer.unk_token_id is not None:
        num_unknown = ids.count(tokenizer.unk_token_id) - text.count(str(tokenizer.unk_token))
        if num_unknown > 0:
            raise ValueError(
                f"expected a tokenizer that can encode {shown!r}, got its unknown token "
                f"{tokenizer.unk_token!r} in {num_unknown} of {len(ids)} places"
            )
    return _with_start(tokenizer, text, ids) if is_start else ids


def _with_start(tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int]) -> list[int]:
    whole = list(tokenizer(text, add_special_tokens=True)["input_ids"])
    for place in range(len(whole) - len(ids) + 1):
        if whole[place : place + len(ids)] == ids:
            return whole[: place + len(ids)]
    return whole
