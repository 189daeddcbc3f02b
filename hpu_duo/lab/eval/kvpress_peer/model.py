"""A model under test in kvpress."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpu_duo.engine.outputs import ContinuationScore
from hpu_duo.lab.eval.kv_bytes import KVBytes
from hpu_duo.lab.eval.kvpress_peer.presses import Press
from hpu_duo.lab.eval.kvpress_peer.process import KVPressProcess
from hpu_duo.lab.eval.model_under_test import ModelUnderTest, Spent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NUM_AT_ONCE = 8


class KVPressModel(ModelUnderTest):
    """A model in kvpress's process, under one press or with full attention.

    A prompt is read but for its last token, or for as many as are to be decoded, and cut once. All tokens
    behind stay, so a text holds ``kept`` tokens and those.

    Args:
        process: has loaded the model.
        tokenizer: of the model.
        max_len: most tokens of prompt and answer together.
        eos: token ids that end answers.
        press: None for full attention.
        kept: tokens of each prompt that the press keeps.
    """

    def __init__(
        self,
        process: KVPressProcess,
        tokenizer: PreTrainedTokenizerBase,
        max_len: int,
        eos: Collection[int],
        press: Press | None = None,
        kept: int = 0,
    ) -> None:
        super().__init__(tokenizer, max_len, _NUM_AT_ONCE)
        self._process = process
        self._setting = {
            "press": None if press is None else press.as_request(),
            "kept": kept,
            "eos": sorted(eos),
        }

    def score(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
    ) -> tuple[list[list[ContinuationScore]], list[list[KVBytes]]]:
        """Scores of continuations behind a cut prompt, and the bytes of the cache at the end of each.

        Raises:
            KVPressError: the process has ended.
        """
        documents = [
            {"prompt": list(prompt), "continuations": [list(one) for one in each]}
            for prompt, each in zip(prompts, continuations, strict=True)
        ]
        found = self._ask("score", documents)
        scores = [
            [ContinuationScore(tuple(one["logprobs"]), tuple(one["is_likeliest"])) for one in each]
            for each in found
        ]
        return scores, [[_kv(one) for one in each] for each in found]

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
        *,
        ends: Sequence[Sequence[int]] | None = None,
        num_decoded: int = 1,
    ) -> tuple[list[str], list[KVBytes]]:
        """Greedy answers behind a cut prompt, and the bytes of the cache at the end of each.

        Raises:
            KVPressError: the process has ended.
        """
        documents = [
            {"prompt": list(prompt), "max_new_tokens": most, "ends": list(last), "num_decoded": num_decoded}
            for prompt, most, last in zip(prompts, max_new_tokens, ends or [()] * len(prompts), strict=True)
        ]
        found = self._ask("answer", documents)
        texts = [str(self.tokenizer.decode(one["ids"], skip_special_tokens=True)) for one in found]
        return texts, [_kv(one) for one in found]

    def kv_before(self, end: KVBytes, num_tokens: int) -> KVBytes:
        """Bytes kept before the last tokens came, each of which is stored in full."""
        token_bytes = end.full // end.num_tokens
        held = end.held - (end.num_tokens - num_tokens) * token_bytes
        return KVBytes(num_tokens, held, num_tokens * token_bytes)

    def _ask(self, what: str, documents: list[dict[str, Any]]) -> list[Any]:
        reply = self._process.ask({**self._setting, "do": what, "documents": documents})
        self.spent += Spent(reply["time_s"], reply["cpu_s"])
        found: list[Any] = reply["documents"]
        return found


def _kv(told: Mapping[str, Any]) -> KVBytes:
    return KVBytes(told["num_tokens"], told["held_bytes"], told["full_bytes"])
