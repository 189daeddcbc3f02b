"""A loaded model under test: text in, decoded answers and scores out, and the bytes kept for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpu_duo.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpu_duo.engine.outputs import Completion, ContinuationScore
    from hpu_duo.llm import HPUDuoModel


_NEAR = 400
"""Characters."""
_RECORDED = ("kv_num_tokens", "held_bytes", "full_bytes", "kv_num_texts")


@dataclass(frozen=True)
class KVBytes:
    """Tokens and bytes in the cache at the ends of texts, as sums over the texts.

    Attributes:
        num_tokens: tokens of the texts, answers included, in the cache.
        held: bytes of the blocks and ring rows that the engine leases for them, each text alone.
        full: bytes that they take when every head keeps all of them, unrounded.
        num_texts: one or more.
    """

    num_tokens: int
    held: int
    full: int
    num_texts: int = 1

    @classmethod
    def total(cls, parts: Iterable[KVBytes]) -> KVBytes:
        """Add up several sums."""
        counts = [(one.num_tokens, one.held, one.full, one.num_texts) for one in parts]
        return cls(*map(sum, zip(*counts, strict=True)))

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> KVBytes:
        """Read the sums from a line of results, as ``record_fields`` has written them."""
        return cls(*(record[name] for name in _RECORDED))

    @property
    def ratio(self) -> float:
        """Bytes kept / bytes of the full cache."""
        return self.held / self.full if self.full else 0.0

    @property
    def record_fields(self) -> dict[str, int]:
        """The sums, for a line of results."""
        return dict(zip(_RECORDED, (self.num_tokens, self.held, self.full, self.num_texts), strict=True))

    @property
    def report_fields(self) -> dict[str, float]:
        """Means over the texts, for a row of a report: tokens, bytes kept, bytes of the full cache; ratio."""
        return {
            "kv_num_tokens": self.num_tokens / self.num_texts,
            "held_bytes": self.held / self.num_texts,
            "full_bytes": self.full / self.num_texts,
            "kv_ratio": self.ratio,
        }


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
                f"expected a tokenizer beside the model in {model.engine_config.model.path}, found none"
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
    ) -> tuple[list[list[ContinuationScore]], list[list[KVBytes]]]:
        """Scores as ``HPUDuoModel.score`` gives them, and the bytes kept for each prompt and continuation."""
        kv = [
            # The last token of a text is never written to the cache.
            [self.kv_bytes(len(prompt) + len(one) - 1) for one in each]
            for prompt, each in zip(prompts, continuations, strict=True)
        ]
        return self.model.score(prompts, continuations), kv

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
        stop: Sequence[str] = (),
        *,
        ends: Sequence[Sequence[int]] | None = None,
        num_decoded: int = 1,
    ) -> tuple[list[str], list[KVBytes]]:
        """Greedy answers, every token decoded, and the bytes kept for each prompt with its answer.

        Args:
            max_new_tokens: limit for each prompt.
            stop: texts that end an answer; they are left out of it.
            ends: for each prompt, token ids that end its answer, but not before its first token.
            num_decoded: last tokens of each prompt that are decoded, too.
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
        return self.completed(prompts, self.model.engine.generate(prompts, params))

    def completed(
        self, prompts: Sequence[Sequence[int]], done: Sequence[Sequence[Completion]]
    ) -> tuple[list[str], list[KVBytes]]:
        """Texts of prompts with one sample each, and the bytes kept for each prompt with its sample."""
        kv = [
            self.kv_bytes(len(prompt) + len(samples[0].token_ids) - 1)
            for prompt, samples in zip(prompts, done, strict=True)
        ]
        return [samples[0].text for samples in done], kv

    def kv_bytes(self, num_tokens: int) -> KVBytes:
        """Bytes kept for a text with ``num_tokens`` tokens in the cache.

        Neither other requests count, nor the slack of rings for scoring several tokens together.
        """
        plan = self.model.engine.runner.store.plan.without_slack
        return KVBytes(num_tokens, plan.bytes_per_request(num_tokens), plan.full_attention_bytes(num_tokens))


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
