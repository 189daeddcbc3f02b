"""litellm: its OpenAI and vLLM providers, streams, tools, formats, and errors by its own classes."""

from __future__ import annotations

import asyncio
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is downloaded

import litellm
from told import ANSWER, MESSAGES, SCHEMA, TOOL, Told, check_painting, expect


def main() -> None:
    """Check all of it."""
    told = Told()
    litellm.suppress_debug_info = True
    place = {"api_base": f"{told.url}/v1", "api_key": "any"}
    asked = {"model": "openai/builtin", "messages": MESSAGES, "temperature": 0, "max_tokens": 20, **place}
    for provider in ("openai", "hosted_vllm"):
        done = litellm.completion(**{**asked, "model": f"{provider}/builtin"})
        expect(done.choices[0].message.content, ANSWER)
        told.saw(f"chat as {provider}", f"{done.usage.total_tokens} tokens")
    expect(
        litellm.completion(**{**asked, "model": "hosted_vllm/builtin"}, top_k=3).choices[0].message.content,
        ANSWER,
    )
    parts = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(parts, messages=MESSAGES)
    expect((built.choices[0].message.content, built.usage.total_tokens), (ANSWER, done.usage.total_tokens))
    told.saw("stream with usage", f"{len(parts)} events")

    async def several() -> list[str]:
        answers = await asyncio.gather(*(litellm.acompletion(**asked) for _ in range(8)))
        return [answer.choices[0].message.content for answer in answers]

    expect(asyncio.run(several()), [ANSWER] * 8)
    told.saw("asynchronous calls")
    text = litellm.text_completion(
        model="text-completion-openai/builtin",
        prompt="Once",
        max_tokens=5,
        temperature=0,
        logprobs=2,
        **place,
    )
    expect(len(text.choices[0].logprobs.tokens), 5)
    told.saw("text completion with logprobs")
    long = {**asked, "max_tokens": 200}
    schema = {"type": "json_schema", "json_schema": {"name": "painting", "schema": SCHEMA}}
    check_painting(litellm.completion(**long, response_format=schema).choices[0].message.content)
    told.saw("JSON schema")
    called = litellm.completion(**long, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    check_painting(called.choices[0].message.tool_calls[0].function.arguments)
    told.saw("tool call")
    for kind, changes in (
        (litellm.BadRequestError, {"temperature": -1}),
        (litellm.NotFoundError, {"model": "openai/none"}),
        (litellm.ContextWindowExceededError, {"messages": [{"role": "user", "content": "word " * 9000}]}),
    ):
        try:
            litellm.completion(**{**asked, **changes})
        except kind:
            told.saw(kind.__name__)
        else:
            raise AssertionError(f"expected {kind.__name__}")
    told.end("litellm", "openai")


if __name__ == "__main__":
    main()
