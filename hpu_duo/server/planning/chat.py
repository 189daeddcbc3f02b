"""Plans for ``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from pydantic_core import from_json

from hpu_duo.sampling import FieldError, SamplingParams, StructuredOutputs
from hpu_duo.sampling.params import ENDLESS, is_endless
from hpu_duo.server.answers import AnswerHead, ChatAnswer, CompletionAnswer, EchoedPrompt, Usage
from hpu_duo.server.answers.answer import TokenNames
from hpu_duo.server.planning.plan import (
    Plan,
    Scoring,
    Served,
    check_length,
    check_options,
    checked_text,
    closed,
    compile_format,
    format_of,
    new_answer_id,
    params_of,
    refusal,
    stream_flags,
    truncated,
)
from hpu_duo.server.prompts import Chat, ChatTemplateError
from hpu_duo.server.protocol import (
    MAX_VALUES,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    FunctionTool,
    TokenizeRequest,
    ToolChoice,
    ValueCount,
    bad_value,
    refuse_unserved,
    refuse_unserved_of_message,
    unsupported,
)
from hpu_duo.server.tools import calls_grammar, make_parser

_PLAIN_CALLS = "llama3_json"
"""The format of tool calls for models without one of their own: plain JSON."""


class ChatPlanner:
    """Validates requests and returns plans.

    Args:
        served: the model.
    """

    def __init__(self, served: Served) -> None:
        self._served = served

    async def plan(self, request: ChatRequest) -> Plan:
        """Return the plan of a request.

        Raises:
            ApiError: it cannot be served.
        """
        served = self._served
        model = served.name_for(request.model)
        refuse_unserved(request)
        check_options(request, request.num_samples, served)
        parser = self._parser(request)
        max_tokens, max_name = request.max_completion_tokens, "max_completion_tokens"
        if max_tokens is None:
            max_tokens, max_name = request.max_tokens, "max_tokens"
        prompt = truncated(request, await self.encode(request, parser is not None), max_tokens, served)
        check_length("messages", len(prompt), max_name, max_tokens, served)
        names = {"max_tokens": max_name, "logprobs": "top_logprobs"}
        params = params_of(
            request,
            served,
            max_tokens=max_tokens,
            logprobs=_num_logprobs(request),
            structured=await self._format(request, parser),
            prediction=await self._prediction(request),
            names=names,
        )
        try:
            await served.engine.check(prompt, params)
        except FieldError as error:
            raise refusal(error, names) from error
        except ValueError as error:
            raise bad_value("messages", str(error)) from error
        answer_id = new_answer_id("chatcmpl", request.request_id)
        return Plan(
            answer_id=answer_id,
            model=model,
            prompts=[prompt],
            params=params,
            answer=ChatAnswer(
                AnswerHead(answer_id, model),
                Usage(len(prompt), has_prediction=request.prediction is not None),
                request.num_samples,
                names=self._names(request),
                make_parser=None if parser is None else partial(make_parser, parser, _functions(request)),
                only_first_call=request.parallel_tool_calls is False,
                only_calls=parser is not None and _is_forced(request),
                echo=_echo(request),
                **stream_flags(request, [prompt]),
            ),
            is_streamed=bool(request.stream),
            user=request.user,
            cache_salt=request.cache_salt,
            texts=lambda: [text for message in request.messages if (text := _text(message))],
        )

    async def encode(self, request: ChatRequest | TokenizeRequest, has_tools: bool) -> list[int]:
        """Token ids of the conversation, by the chat template.

        Raises:
            ApiError: the template rejects it, or it is too long.
        """
        variables = dict(request.chat_template_kwargs or {})
        if isinstance(request, ChatRequest) and request.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", request.reasoning_effort)

        def chat() -> Chat:
            values, messages = ValueCount(), request.messages or ()
            return Chat(
                [_for_template(message, number, values) for number, message in enumerate(messages)],
                tools=[_tool(tool) for tool in request.tools] if has_tools and request.tools else None,
                documents=request.documents,
                add_generation_prompt=request.add_generation_prompt is not False,
                continue_final_message=bool(request.continue_final_message),
                variables=variables,
            )

        encoder = self._served.needs_encoder("messages")
        side = request.truncated_side if isinstance(request, ChatRequest) else None
        try:
            with checked_text("messages", self._served):
                return await encoder.encode_chat(
                    chat,
                    request.num_bytes,
                    add_special_tokens=bool(request.add_special_tokens),
                    truncation_side=side,
                )
        except ChatTemplateError as error:
            raise bad_value(error.field, f"{error.field}: {error}") from error

    async def _prediction(self, request: ChatRequest) -> list[int]:
        """Token ids of the predicted output; those beyond the longest answer are left out."""
        if request.prediction is None:
            return []
        encoder = self._served.needs_encoder("prediction")
        with checked_text("prediction", self._served):
            return await encoder.encode(
                request.prediction.text, add_special_tokens=False, truncation_side="right"
            )

    def _parser(self, request: ChatRequest) -> str | None:
        """Name of the parser for tool calls; None when no tool may be called."""
        choice = request.tool_choice
        if not request.tools:
            if choice not in (None, "none", "auto"):
                raise bad_value("tool_choice", "tool_choice: expected tools with it")
            return None
        if choice == "none":
            return None
        if self._served.tool_parser is None and not _is_forced(request):
            raise unsupported(
                "tools",
                "tools: the model's chat template shows no tool calls of a known format; expected "
                "a tool_choice of required or a function, which force calls",
            )
        return self._served.tool_parser or _PLAIN_CALLS

    async def _format(self, request: ChatRequest, parser: str | None) -> StructuredOutputs | None:
        """Return the format of the answer's text: that of the request, of tool calls, or a choice of both."""
        wanted, is_forced = await format_of(request, self._served), _is_forced(request)
        is_free = wanted is None and not is_forced
        if parser is None or (is_free and not any(tool.function.strict for tool in request.tools or ())):
            return wanted
        if wanted is not None and is_forced:
            raise bad_value(
                "response_format", "response_format: expected a tool_choice of auto or none with it"
            )
        is_one = isinstance(request.tool_choice, ToolChoice) or request.parallel_tool_calls is False
        functions = await asyncio.to_thread(_callable, request, is_free)
        write = partial(calls_grammar, parser, functions, is_one=is_one, answer=wanted, is_free=is_free)
        grammar = await asyncio.to_thread(write)
        try:
            calls = StructuredOutputs(grammar=grammar)
        except FieldError as error:
            raise bad_value(
                "tools", f"tools: {error.reason}, for all their schemas and the response format"
            ) from error
        await compile_format(self._served, calls, "tools")
        return calls

    def _names(self, request: ChatRequest) -> TokenNames | None:
        if not request.logprobs:
            return None
        assert self._served.texts is not None, "expected texts of tokens"
        return TokenNames(self._served.texts, by_id=bool(request.return_tokens_as_token_ids))


def _functions(request: ChatRequest) -> frozenset[str]:
    return frozenset(tool.function.name for tool in request.tools or ())


def _is_forced(request: ChatRequest) -> bool:
    """Whether the answer has to be a tool call."""
    return request.tool_choice == "required" or isinstance(request.tool_choice, ToolChoice)


def _callable(request: ChatRequest, only_strict: bool) -> list[tuple[str, dict[str, Any] | None]]:
    """Functions that may be called, with the schemas of their arguments.

    Args:
        only_strict: omit schemas that are not strict.
    """
    choice = request.tool_choice
    functions = [
        (tool.function.name, None if only_strict and not tool.function.strict else _parameters(tool))
        for tool in request.tools or ()
    ]
    if not isinstance(choice, ToolChoice):
        return functions
    chosen = [function for function in functions if function[0] == choice.function.name]
    if not chosen:
        names = ", ".join(name for name, _ in functions)
        raise bad_value(
            "tool_choice", f"tool_choice: expected one of the tools {names}, got {choice.function.name!r}"
        )
    return chosen[:1]


def _parameters(tool: FunctionTool) -> dict[str, Any] | None:
    parameters = tool.function.parameters
    if parameters is not None and is_endless({"type": "object", **parameters}):
        raise bad_value("tools", f"tools: {tool.function.name}: {ENDLESS}")
    if not tool.function.strict:
        return parameters
    return closed({"type": "object", **(parameters or {})}, "tools")


def _num_logprobs(request: ChatRequest) -> int | None:
    if not request.logprobs:
        if request.top_logprobs:
            raise bad_value("top_logprobs", "top_logprobs: expected logprobs=true with it")
        return None
    return request.top_logprobs or 0


def _for_template(message: ChatMessage, number: int, values: ValueCount) -> dict[str, Any]:
    """Convert a message for chat templates.

    Args:
        values: of the arguments of all tool calls.
    """
    refuse_unserved_of_message(message, number)
    plain = message.model_dump(exclude_none=True, exclude={"refusal"})
    plain["content"] = _content(message, number)
    for call in plain.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments(call["function"].get("arguments"), number, values)
    return plain


def _content(message: ChatMessage, number: int) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or message.refusal or ""
    for part in message.content:
        if part.type not in ("text", "input_text", "refusal") or part.words is None:
            raise unsupported(
                "messages", f"messages[{number}].content: expected parts of type text, got {part.type!r}"
            )
    return "\n".join(part.words or "" for part in message.content)


def _echo(request: ChatRequest) -> str:
    """The prefix of each answer: the last message, if it is the assistant's."""
    last = request.messages[-1]
    return _text(last) if request.echo and last.role == "assistant" else ""


def _text(message: ChatMessage) -> str:
    return _content(message, 0)


def _arguments(arguments: str | None, number: int, values: ValueCount) -> Any:
    if values.add((arguments or "").encode("utf-8", "replace")) > MAX_VALUES:
        raise bad_value(
            "messages", f"messages[{number}].tool_calls: expected arguments of at most {MAX_VALUES:,} values"
        )
    try:
        return from_json(arguments or "{}")
    except ValueError as error:
        raise bad_value(
            "messages", f"messages[{number}].tool_calls: expected JSON as arguments, got {arguments!r:.60}"
        ) from error


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return tool.model_dump(exclude_none=True)


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
