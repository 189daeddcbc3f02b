"""Plans for ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence

from hpu_duo.sampling import FieldError, SamplingParams
from hpu_duo.server.answers import AnswerHead, CompletionAnswer, EchoedPrompt, Usage
from hpu_duo.server.answers.answer import TokenNames
from hpu_duo.server.planning.formats import format_of
from hpu_duo.server.planning.plan import Plan, Scoring, Served, new_answer_id
from hpu_duo.server.planning.sampling import (
    check_length,
    check_options,
    checked_text,
    params_of,
    refusal,
    stream_flags,
    truncated,
)
from hpu_duo.server.protocol import CompletionRequest
from hpu_duo.server.protocol.errors import bad_value, refuse_unserved

_MAX_TOKENS = 16
"""The OpenAI API's default."""


class CompletionPlanner:
    """Validates requests and returns plans.

    Args:
        served: the model.
    """

    def __init__(self, served: Served) -> None:
        self._served = served

    async def plan(self, request: CompletionRequest) -> Plan:
        """Return the plan of a request.

        Raises:
            ApiError: it cannot be served.
        """
        served = self._served
        model = served.name_for(request.model)
        refuse_unserved(request)
        given = request.prompts
        if not given:
            raise bad_value("prompt", "prompt: expected at least one prompt, got an empty list")
        check_options(request, len(given) * request.num_samples, served)
        max_tokens = _MAX_TOKENS if request.max_tokens is None else request.max_tokens
        prompts = [truncated(request, await self._encode(one, request), max_tokens, served) for one in given]
        for prompt in prompts:
            check_length("prompt", len(prompt), "max_tokens", max_tokens, served)
        # Nothing is generated for max_tokens=0, but the other fields are validated.
        params = params_of(
            request,
            served,
            max_tokens=max(1, max_tokens),
            logprobs=request.logprobs,
            structured=await format_of(request, served),
        )
        for prompt in prompts:
            await self._check(prompt, params)
        answer_id = new_answer_id("cmpl", request.request_id)
        answer = CompletionAnswer(
            AnswerHead(answer_id, model),
            Usage(sum(map(len, prompts))),
            len(prompts) * request.num_samples,
            names=self._names(request),
            echoes=await self._echoes(request, given, prompts),
            has_special=request.skip_special_tokens is False,
            generates=max_tokens > 0,
            **stream_flags(request, prompts),
        )
        return Plan(
            answer_id=answer_id,
            model=model,
            prompts=prompts,
            params=params if max_tokens else None,
            answer=answer,
            scoring=self._scoring(request, prompts, answer),
            is_streamed=bool(request.stream),
            user=request.user,
            cache_salt=request.cache_salt,
            texts=lambda: [one for one in given if isinstance(one, str)],
        )

    def _scoring(
        self, request: CompletionRequest, prompts: Sequence[Sequence[int]], answer: CompletionAnswer
    ) -> Scoring | None:
        if not request.echo or request.logprobs is None:
            return None
        return Scoring(prompts, request.logprobs, answer, request.cache_salt)

    async def _encode(self, prompt: str | list[int], request: CompletionRequest) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        encoder = self._served.needs_encoder("prompt")
        with checked_text("prompt", self._served):
            return await encoder.encode(
                prompt,
                add_special_tokens=request.add_special_tokens is not False,
                truncation_side=request.truncated_side,
            )

    async def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        try:
            await self._served.engine.check(prompt, params)
        except FieldError as error:
            raise refusal(error) from error
        except ValueError as error:
            raise bad_value("prompt", str(error)) from error

    def _names(self, request: CompletionRequest) -> TokenNames | None:
        if request.logprobs is None:
            return None
        self._served.needs_encoder("logprobs")
        assert self._served.texts is not None, "expected texts of tokens"
        return TokenNames(self._served.texts, by_id=bool(request.return_tokens_as_token_ids))

    async def _echoes(
        self, request: CompletionRequest, given: Sequence[str | list[int]], prompts: Sequence[Sequence[int]]
    ) -> list[EchoedPrompt]:
        """Return the echoed prompt of each choice."""
        if not request.echo:
            return []
        encoder = self._served.needs_encoder("echo")
        echoes = []
        for one, prompt in zip(given, prompts):
            is_whole = isinstance(one, str) and request.truncate_prompt_tokens is None
            text = one if is_whole and isinstance(one, str) else await encoder.decode(prompt)
            echoes += [EchoedPrompt(text, has_special=not is_whole)] * request.num_samples
        return echoes
