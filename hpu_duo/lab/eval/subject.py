"""A model under test in the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpu_duo.lab.eval.kv_bytes import KVBytes
from hpu_duo.lab.eval.model_under_test import ModelUnderTest
from hpu_duo.sampling import SamplingParams

if TYPE_CHECKING:
    from hpu_duo.engine.outputs import Completion, ContinuationScore
    from hpu_duo.llm import HPUDuoModel


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
