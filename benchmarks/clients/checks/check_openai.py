"""The openai package: synchronous, asynchronous, streams, tools, JSON schemas, errors."""

from __future__ import annotations

import asyncio
from typing import Literal

import openai
from pydantic import BaseModel
from told import ANSWER, MESSAGES, QUESTION, TOOL, Told, check_painting, expect

CHAT = {"model": "builtin", "messages": MESSAGES, "temperature": 0, "max_tokens": 20}
TEXT = {"model": "builtin", "prompt": QUESTION + " The passkey for Joel is", "temperature": 0, "stop": "."}


class Painting(BaseModel):
    """A format."""

    count: Literal[1, 2, 3]
    colour: Literal["red", "blue"]


def check_chats(client: openai.OpenAI, told: Told) -> None:
    """Whole answers, streams and their usage."""
    done = client.chat.completions.create(**CHAT)
    expect((done.choices[0].message.content, done.choices[0].finish_reason), (ANSWER, "stop"))
    expect(done.usage.completion_tokens, 5)
    told.saw("chat", f"{done.usage.total_tokens} tokens")
    parts = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    expect("".join(part.choices[0].delta.content or "" for part in parts if part.choices), ANSWER)
    expect(parts[-1].usage, done.usage)
    told.saw("chat stream with usage", f"{len(parts)} events")
    with client.chat.completions.stream(**CHAT) as stream:
        stream.until_done()
        expect(stream.get_final_completion().choices[0].message.content, ANSWER)
    told.saw("stream helper of the package")
    several = client.chat.completions.create(
        **{**CHAT, "temperature": 1}, n=3, seed=1, logprobs=True, top_logprobs=2
    )
    expect([choice.index for choice in several.choices], [0, 1, 2])
    expect(len(several.choices[0].logprobs.content[0].top_logprobs), 2)
    told.saw("n, seed, logprobs and top_logprobs")


def check_formats(client: openai.OpenAI, told: Told) -> None:
    """Classes, tools that have to be called, and their streams."""
    asked = {**CHAT, "max_tokens": 200}
    parsed = client.chat.completions.parse(**asked, response_format=Painting)
    told.saw("JSON schema, parsed to a class", parsed.choices[0].message.parsed)
    client_tools = {**asked, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    done = client.chat.completions.create(**client_tools)
    [call] = done.choices[0].message.tool_calls
    check_painting(call.function.arguments)
    expect((call.function.name, done.choices[0].finish_reason), ("paint", "tool_calls"))
    parts = list(client.chat.completions.create(**client_tools, stream=True))
    deltas = [part.choices[0].delta.tool_calls[0] for part in parts if part.choices[0].delta.tool_calls]
    expect("".join(delta.function.arguments or "" for delta in deltas), call.function.arguments)
    told.saw("tool call, whole and streamed", call.function.arguments)


def check_completions(client: openai.OpenAI, told: Told) -> None:
    """Texts, lists of prompts, token ids, log-probabilities, echo."""
    done = client.completions.create(**TEXT)
    expect((done.choices[0].text, done.choices[0].finish_reason), (" loom actor camel", "stop"))
    both = client.completions.create(**{**TEXT, "prompt": [TEXT["prompt"], "Once"]}, n=2)
    expect([choice.index for choice in both.choices], [0, 1, 2, 3])
    expect(both.choices[1].text, " loom actor camel")
    told.saw("lists of prompts, n, stop")
    echoed = client.completions.create(**TEXT, echo=True, logprobs=3, max_tokens=1)
    expect(echoed.choices[0].text, TEXT["prompt"] + " loom")
    found = echoed.choices[0].logprobs
    expect(len({len(found.tokens), len(found.token_logprobs), len(found.text_offset)}), 1)
    expect("".join(found.tokens[1:]), echoed.choices[0].text)
    ids = client.completions.create(**{**TEXT, "prompt": [5, 6, 7]}, max_tokens=2)
    expect(ids.usage.prompt_tokens, 3)
    told.saw("echo with logprobs, token ids as prompts")


def check_errors(client: openai.OpenAI, told: Told) -> None:
    """Errors by their classes and parameters."""
    for kind, changes, param in (
        (openai.BadRequestError, {"temperature": -1}, "temperature"),
        (openai.BadRequestError, {"max_tokens": 10**6}, "max_tokens"),
        (openai.NotFoundError, {"model": "none"}, "model"),
    ):
        try:
            client.chat.completions.create(**{**CHAT, **changes})
        except kind as error:
            expect(error.param, param)
        else:
            raise AssertionError(f"expected {kind.__name__}")
    told.saw("errors by class, with param")


async def check_asynchronous(told: Told) -> None:
    """Many calls at once, whole and streamed."""
    async with openai.AsyncOpenAI(base_url=f"{told.url}/v1", api_key="any") as client:

        async def stream() -> str:
            parts = await client.chat.completions.create(**CHAT, stream=True)
            return "".join([part.choices[0].delta.content or "" async for part in parts])

        expect(await asyncio.gather(*(stream() for _ in range(64))), [ANSWER] * 64)
        whole = await asyncio.gather(*(client.chat.completions.create(**CHAT) for _ in range(64)))
        expect([done.choices[0].message.content for done in whole], [ANSWER] * 64)
    told.saw("64 asynchronous streams and 64 calls at once")


def main() -> None:
    """Check all of it."""
    told = Told()
    with openai.OpenAI(base_url=f"{told.url}/v1", api_key="any", max_retries=0) as client:
        expect([card.id for card in client.models.list()], ["builtin"])
        check_chats(client, told)
        check_completions(client, told)
        check_formats(client, told)
        check_errors(client, told)
    asyncio.run(check_asynchronous(told))
    told.end("openai")


if __name__ == "__main__":
    main()
