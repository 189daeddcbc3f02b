"""Offline batches: many prompts at once, of which a bad one costs the others nothing."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from hpu_duo.engine.outputs import Completion, RequestOutput
from hpu_duo.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpu_duo.engine.engine import Engine

OfflinePrompt: TypeAlias = "str | Sequence[int]"


@dataclass(frozen=True)
class OfflineResult:
    """Outputs of one prompt, or its error.

    Attributes:
        index: place of the prompt in the call, from 0.
        prompt_token_ids: empty if the prompt was not read.
        samples: ``n`` of them; those of a request that an error ended have the tokens before it.
        error: why the prompt was refused, or what ended its request; None = all samples are complete.
    """

    index: int
    prompt_token_ids: tuple[int, ...]
    samples: tuple[Completion, ...] = ()
    error: Exception | None = None

    @property
    def text(self) -> str:
        """Text of the first sample.

        Raises:
            Exception: ``error``, if there is one.
        """
        if self.error is not None:
            raise self.error
        return self.samples[0].text


class OfflineBatch:
    """The prompts of a call, each checked before any is computed.

    Args:
        tokenizer: of texts; None = the checkpoint has none.
        prompts: texts or token ids.
        params: one for all prompts, or one each.
        places: of the prompts in error messages; None = 0, 1 and so on.

    Raises:
        ValueError: the numbers of prompts and params differ, or there is no prompt.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase | None,
        prompts: Sequence[OfflinePrompt],
        params: SamplingParams | Sequence[SamplingParams],
        places: Sequence[int] | None = None,
    ) -> None:
        if isinstance(prompts, str) or not len(prompts):
            raise ValueError(f"expected a list of one prompt or more, got {prompts!r:.60}")
        self._params = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(self._params) != len(prompts):
            raise ValueError(
                f"expected one SamplingParams for all prompts or one each, got {len(self._params)} for "
                f"{len(prompts)}"
            )
        self._engine = engine
        self._ids: dict[int, tuple[int, ...]] = {}
        self._refused: dict[int, Exception] = {}
        for index, (prompt, one) in enumerate(zip(prompts, self._params)):
            name = f"prompts[{index if places is None else places[index]}]"
            try:
                ids = _ids_of(tokenizer, prompt, name)
                engine.check_request(ids, one, name=name)
            except ValueError as error:
                self._refused[index] = error
            else:
                self._ids[index] = ids

    def run(self, on_result: Callable[[OfflineResult], None] | None = None) -> list[OfflineResult]:
        """Serve all prompts that can be; returns their results in order.

        Args:
            on_result: called with each result as soon as it is there, in any order.
        """
        results: dict[int, OfflineResult] = {}

        def put(result: OfflineResult) -> None:
            results[result.index] = result
            if on_result is not None:
                on_result(result)

        for index, error in self._refused.items():
            put(OfflineResult(index, (), error=error))
        batch = uuid.uuid4().hex
        index_of = {f"offline-{batch}-{index}": index for index in self._ids}
        samples: dict[int, dict[int, Completion]] = {index: {} for index in self._ids}
        errors: dict[int, Exception] = {}

        def end(index: int) -> None:
            of_prompt = samples[index]
            in_order = tuple(of_prompt[each] for each in sorted(of_prompt))
            put(OfflineResult(index, self._ids[index], in_order, errors.get(index)))

        def add(output: RequestOutput) -> None:
            index, number = index_of[output.request_id], output.sample_index
            samples[index].setdefault(number, Completion(output.request_id, number)).add(output)
            if output.error is not None:
                errors[index] = output.error
            ended = [each for each in samples[index].values() if each.finish_reason is not None]
            if len(ended) == self._params[index].n:
                end(index)

        if self._ids:
            self._engine.generate(
                list(self._ids.values()),
                [self._params[index] for index in self._ids],
                add,
                request_ids=list(index_of),
                raises=False,
            )
        for index in self._ids:
            if index not in results:  # an error, before all samples had begun
                end(index)
        return [results[index] for index in sorted(results)]


def _ids_of(tokenizer: PreTrainedTokenizerBase | None, prompt: OfflinePrompt, name: str) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        try:
            return tuple(prompt)
        except TypeError:
            raise ValueError(f"{name}: expected a text or token ids, got {prompt!r:.60}") from None
    if tokenizer is None:
        raise ValueError(f"{name}: expected token ids of a checkpoint without a tokenizer, got a text")
    try:
        return tuple(tokenizer(prompt)["input_ids"])
    except (TypeError, ValueError) as error:  # TypeError for half of a surrogate pair
        raise ValueError(f"{name}: expected a text that can be tokenized, got {prompt!r:.60}") from error
