"""A model under test, whatever runs it: tokens in; decoded answers, scores and bytes kept for them out."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpu_duo.lab.eval.kv_bytes import KVBytes
from hpu_duo.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpu_duo.engine.outputs import Completion, ContinuationScore
    from hpu_duo.llm import HPUDuoModel


_NEAR = 400
"""Characters."""


@dataclass(frozen=True)
class Spent:
    """Seconds that a model has computed scores and answers.

    Attributes:
        time_s: seconds of the clock.
        cpu_s: seconds of processors, those of its process.
    """

    time_s: float = 0.0
    cpu_s: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.time_s + other.time_s, self.cpu_s + other.cpu_s)

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.time_s - other.time_s, self.cpu_s - other.cpu_s)


class ModelUnderTest(ABC):
    """A model and its tokenizer, asked through tokens.

    Args:
        tokenizer: of the model.
        max_len: most tokens of prompt and answer together.
        num_at_once: questions of one batch.

    Attributes:
        spent: seconds of all scores and answers so far.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_len: int, num_at_once: int) -> None:
        self.tokenizer = tokenizer
        self.max_len = max_len
        self.num_at_once = num_at_once
        self.spent = Spent()

    @abstractmethod
    def score(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
    ) -> tuple[list[list[ContinuationScore]], list[list[KVBytes]]]:
        """Scores of continuations, every token decoded, and the bytes kept for each with its prompt."""

    @abstractmethod
    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
        *,
        ends: Sequence[Sequence[int]] | None = None,
        num_decoded: int = 1,
    ) -> tuple[list[str], list[KVBytes]]:
        """Greedy answers, every token decoded, and the bytes kept for each prompt with its answer.

        Args:
            max_new_tokens: limit for each prompt.
            ends: for each prompt, token ids that end its answer, but not before its first token.
            num_decoded: last tokens of each prompt that are decoded, too.
        """

    @abstractmethod
    def kv_before(self, end: KVBytes, num_tokens: int) -> KVBytes:
        """Bytes kept of one continuation's text when only its first tokens had been computed.

        Args:
            end: bytes at its end, as ``score`` tells them.
            num_tokens: of prompt and continuation that were in the cache.
        """

    @contextmanager
    def _clocked(self) -> Iterator[None]:
        """Count the time of what runs in this process."""
        began = Spent(time.perf_counter(), time.process_time())
        yield
        self.spent += Spent(time.perf_counter(), time.process_time()) - began

    def encode(self, text: str, *, is_start: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            is_start: add the special tokens that the tokenizer puts in front of a text.

        Raises:
            ValueError: the tokenizer gives no tokens, or its unknown token.
        """
        return encode_known(self.tokenizer, text, is_start=is_start)

    def encode_chat(self, message: str, beginning: str = "") -> list[int]:
        """Token ids of a user's message in the model's chat template, and of the beginning of the answer.

        Raises:
            ValueError: the tokenizer has no chat template.
        """
        said = chat_text(self.tokenizer, message)
        return list(self.tokenizer(said + beginning, add_special_tokens=False)["input_ids"])

    def behind(self, text: str, added: str) -> tuple[int, list[int]]:
        """Encode a text together with an addition to it, and compare with the tokens of the text alone.

        Returns:
            The number of last tokens of the text that the addition changes, and the tokens of the whole from
            the first of them on.
        """
        # Tokens depend on what is near: the end of the text stands for all of it, from a space on.
        end = text[-_NEAR:]
        end = end.partition(" ")[2] or end
        alone, whole = self.encode(end), self.encode(end + added)
        num_same = num_shared(alone, whole)
        return len(alone) - num_same, whole[num_same:]

    def count(self, text: str) -> int:
        """Tokens of a text, special tokens not counted."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def check_lengths(self, lengths: Sequence[int], what: str, option: str | None = None) -> None:
        """Refuse texts that the model cannot hold, before anything runs.

        Args:
            lengths: tokens of prompt and answer of each text.
            what: their name in the message.
            option: of the command line, that makes them shorter; for the message.

        Raises:
            ValueError: one is too long.
        """
        longest = max(lengths, default=0)
        if longest > self.max_len:
            raise ValueError(
                f"expected {what} of at most {self.max_len} tokens with their answers, which the model can "
                f"hold, got {longest}{'' if option is None else f'; give a smaller {option}'}"
            )


def chat_text(tokenizer: PreTrainedTokenizerBase, message: str) -> str:
    """A user's message in the chat template, up to where the answer begins.

    Raises:
        ValueError: the tokenizer has no chat template.
    """
    if tokenizer.chat_template is None:
        raise ValueError("expected a tokenizer with a chat template for chats, got one without")
    # As text: what apply_chat_template returns for ids differs between transformers 4 and 5.
    return str(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False
        )
    )


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix of two lists."""
    least = min(len(one), len(other))
    return next((at for at in range(least) if one[at] != other[at]), least)


def encode_known(tokenizer: PreTrainedTokenizerBase, text: str, *, is_start: bool = False) -> list[int]:
    """Token ids of a text that the tokenizer can really encode.

    Args:
        is_start: add the special tokens that the tokenizer puts in front of a text; never those behind it.

    Raises:
        ValueError: there are no tokens, or part of the text became the unknown token. That token is accepted
            where the text spells it out, and in front of a text.
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


class Subject(ModelUnderTest):
    """A model in the engine, loaded with what is to be tested, and its tokenizer.

    Args:
        model: loaded with the pattern to test.

    Raises:
        ValueError: the model has no tokenizer.
    """

    def __init__(self, model: HPUDuoModel) -> None:
        if model.tokenizer is None:
            raise ValueError(
                f"expected a tokenizer beside the model in {model.engine_config.model.path}, found none"
            )
        limits = model.engine.limits
        super().__init__(model.tokenizer, limits.max_model_len, model.engine_config.scheduler.max_num_seqs)
        self.model = model

    def score(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
    ) -> tuple[list[list[ContinuationScore]], list[list[KVBytes]]]:
        """Scores as ``HPUDuoModel.score`` gives them, and the bytes kept for each prompt and continuation."""
        kv = [
            # The last token of a text is never written to the cache.
            [self.kv_bytes(len(prompt) + len(one) - 1) for one in each]
            for prompt, each in zip(prompts, continuations, strict=True)
        ]
        with self._clocked():
            return self.model.score(prompts, continuations), kv

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
        *,
        ends: Sequence[Sequence[int]] | None = None,
        num_decoded: int = 1,
        stop: Sequence[str] = (),
    ) -> tuple[list[str], list[KVBytes]]:
        """Greedy answers, every token decoded, and the bytes kept for each prompt with its answer.

        Args:
            max_new_tokens, ends, num_decoded: see ``ModelUnderTest``.
            stop: texts that end an answer; they are left out of it.
        """
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=most,
                min_tokens=1 if last else 0,
                stop=tuple(stop),
                stop_token_ids=tuple(last),
                decoded_prompt_tokens=min(num_decoded, len(prompt)),
            )
            for prompt, most, last in zip(prompts, max_new_tokens, ends or [()] * len(prompts), strict=True)
        ]
        with self._clocked():
            done = self.model.engine.generate(prompts, params)
        return self.completed(prompts, done)

    def completed(
        self, prompts: Sequence[Sequence[int]], done: Sequence[Sequence[Completion]]
    ) -> tuple[list[str], list[KVBytes]]:
        """Texts of prompts with one sample each, and the bytes kept for each prompt with its sample."""
        kv = [
            self.kv_bytes(len(prompt) + len(samples[0].token_ids) - 1)
            for prompt, samples in zip(prompts, done, strict=True)
        ]
        return [samples[0].text for samples in done], kv

    def kv_before(self, end: KVBytes, num_tokens: int) -> KVBytes:
        """Bytes kept for the first tokens of a text; they do not depend on what came behind."""
        return self.kv_bytes(num_tokens)

    def kv_bytes(self, num_tokens: int) -> KVBytes:
        """Bytes kept for a text with ``num_tokens`` tokens in the cache.

        Neither other requests count, nor the slack of rings for scoring several tokens together.
        """
        plan = self.model.engine.runner.store.plan.without_slack
        return KVBytes(num_tokens, plan.bytes_per_request(num_tokens), plan.full_attention_bytes(num_tokens))
