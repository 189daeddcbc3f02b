"""langchain-openai: chats, streams, structured output by each of its methods, tools, and its text model."""

from __future__ import annotations

import asyncio
from typing import Literal

from langchain_core.exceptions import ContextOverflowError
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict
from told import ANSWER, QUESTION, Told, check_painting, expect


class Painting(BaseModel):
    """A painting."""

    model_config = ConfigDict(extra="forbid")

    count: Literal[1, 2, 3]
    colour: Literal["red", "blue"]


@tool
def paint(count: Literal[1, 2, 3], colour: Literal["red", "blue"]) -> str:
    """Paint."""
    return f"{count} {colour}"


def main() -> None:
    """Check all of it."""
    told = Told()
    place = {"model": "builtin", "base_url": f"{told.url}/v1", "api_key": "any", "temperature": 0}
    chat = ChatOpenAI(**place, max_tokens=20, stream_usage=True)
    answer = chat.invoke(QUESTION)
    expect(answer.content, ANSWER)
    told.saw("invoke", f"{answer.usage_metadata['total_tokens']} tokens")
    parts = list(chat.stream(QUESTION))
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    expect(
        (whole.content, whole.usage_metadata["total_tokens"]), (ANSWER, answer.usage_metadata["total_tokens"])
    )
    told.saw("stream with usage", f"{len(parts)} events")
    expect([one.content for one in chat.batch([QUESTION] * 4)], [ANSWER] * 4)
    expect(asyncio.run(chat.ainvoke(QUESTION)).content, ANSWER)
    told.saw("batch and asynchronous call")
    with_logprobs = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    expect(len(with_logprobs.response_metadata["logprobs"]["content"]), 5)
    told.saw("logprobs")
    patient = ChatOpenAI(**place, max_tokens=300)
    for method in ("json_schema", "function_calling"):
        found = patient.with_structured_output(Painting, method=method).invoke(QUESTION)
        expect(isinstance(found, Painting), True)
        told.saw(f"structured output by {method}", found)
    called = patient.bind_tools([paint], tool_choice="any", parallel_tool_calls=False).invoke(QUESTION)
    check_painting(called.tool_calls[0]["args"])
    told.saw("tool call", called.tool_calls[0]["args"])
    try:
        chat.invoke("word " * 9000)
    except ContextOverflowError:
        told.saw("ContextOverflowError")
    else:
        raise AssertionError("expected ContextOverflowError")
    text = OpenAI(**place, max_tokens=8)
    expect("".join(text.stream("Once")), text.invoke("Once"))
    told.saw("text model, whole and streamed")
    told.end("langchain-openai", "langchain-core", "openai")


if __name__ == "__main__":
    main()
