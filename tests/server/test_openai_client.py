"""The openai package gets what the engine gives."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import text_of
from tests.server.live import Live

PROMPT = "What_is_this?"
PROMPTS = [PROMPT, "Another", "And_a_third_one"]


def ids_of(server: Live, text: str) -> list[int]:
    assert server.model.tokenizer is not None
    return list(server.model.tokenizer(text)["input_ids"])


def generated(server: Live, text: str, **options: object) -> list[str]:
    """Texts that the engine itself makes of a prompt."""
    params = SamplingParams(**{"temperature": 0.0, **options})
    [done] = server.model.engine.generate([ids_of(server, text)], params)
    return [sample.text for sample in done]


def test_a_completion_is_what_the_engine_generates(server: Live) -> None:
    done = server.client().completions.create(model="tiny", prompt=PROMPT, temperature=0, max_tokens=9)
    assert [choice.text for choice in done.choices] == generated(server, PROMPT, max_tokens=9)
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(PROMPT), 9)
    assert done.id.startswith("cmpl-")
    assert done.model == "tiny"


def test_max_tokens_is_16_for_completions_and_all_there_is_room_for_in_chats(server: Live) -> None:
    client = server.client()
    done = client.completions.create(model="tiny", prompt=PROMPT)
    assert done.usage is not None
    assert done.usage.completion_tokens == 16
    chat = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    assert chat.usage is not None
    assert chat.usage.total_tokens == server.model.engine.limits.max_model_len


def test_streams_join_to_whole_answers_of_each_prompt_and_sample(server: Live) -> None:
    asked = {"model": "tiny", "prompt": PROMPTS, "n": 2, "seed": 7, "temperature": 1.3, "max_tokens": 11}
    client = server.client()
    whole = client.completions.create(**asked)
    texts = [""] * 6
    reasons = [None] * 6
    for part in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in part.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        if not part.choices:
            # The second call takes its prompts from the cache.
            assert part.usage.total_tokens == whole.usage.total_tokens
            assert part.usage.completion_tokens == whole.usage.completion_tokens
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert len(set(texts)) > 3
    expected = [
        text
        for prompt in PROMPTS
        for text in generated(server, prompt, n=2, seed=7, temperature=1.3, max_tokens=11)
    ]
    assert texts == expected


def test_a_chat_is_rendered_by_the_template_and_answered(server: Live) -> None:
    asked = {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "be_brief"},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        ],
        "temperature": 0,
        "max_completion_tokens": 8,
    }
    client = server.client()
    done = client.chat.completions.create(**asked, extra_body={"chat_template_kwargs": {"ending": "!"}})
    assert done.choices[0].message.role == "assistant"
    assert [done.choices[0].message.content] == generated(server, "s:be_brief;u:one\ntwo;a:!", max_tokens=8)
    parts = list(client.chat.completions.create(**asked, stream=True))
    assert parts[0].choices[0].delta.role == "assistant"
    assert all(part.choices[0].delta.role is None for part in parts[1:])
    assert parts[-1].choices[0].finish_reason == "length"
    joined = "".join(part.choices[0].delta.content or "" for part in parts)
    assert [joined] == generated(server, "s:be_brief;u:one\ntwo;a:", max_tokens=8)
    for part in parts:
        ChatCompletionChunk.model_validate(part.to_dict(), strict=True)


def test_many_asynchronous_callers_are_one_batch(server: Live) -> None:
    async def ask() -> list[Completion]:
        async with server.async_client() as client:
            return await asyncio.gather(
                *(
                    client.completions.create(model="tiny", prompt=f"No.{n}", temperature=0, max_tokens=20)
                    for n in range(12)
                )
            )

    before = server.model.stats().num_steps
    texts = [done.choices[0].text for done in asyncio.run(ask())]
    num_steps = server.model.stats().num_steps - before
    assert texts == [generated(server, f"No.{n}", max_tokens=20)[0] for n in range(12)]
    assert num_steps < 12 * 20 / 2


def test_a_stop_string_never_shows_not_even_in_part(server: Live) -> None:
    [text] = generated(server, PROMPT, max_tokens=30)
    stop = text[12:15]
    client = server.client()
    asked = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 30, "stop": ["\x7f", stop]}
    expected = text[: text.index(stop)]
    done = client.completions.create(**asked)
    assert (done.choices[0].text, done.choices[0].finish_reason) == (expected, "stop")
    assert done.choices[0].stop_reason == stop  # type: ignore[attr-defined]
    seen = ""
    for part in client.completions.create(**asked, stream=True):
        seen += part.choices[0].text
        assert expected.startswith(seen)
    assert seen == expected


def test_token_ids_are_prompts_and_come_back_when_asked_for(server: Live) -> None:
    ids = ids_of(server, PROMPT)
    done = server.client().completions.create(
        model="tiny", prompt=[ids, ids], temperature=0, max_tokens=5, extra_body={"return_token_ids": True}
    )
    for choice in done.choices:
        assert [choice.text] == generated(server, PROMPT, max_tokens=5)
        assert text_of(choice.token_ids) == choice.text  # type: ignore[attr-defined]


def _extras(part: Any, name: str) -> list[Any]:
    """A field of an answer or event and its choices that only vLLM has, wherever it is."""
    return [each.model_extra[name] for each in (part, *part.choices) if name in (each.model_extra or {})]


def test_token_ids_of_prompts_come_with_those_of_answers(server: Live) -> None:
    client = server.client()
    prompts = [ids_of(server, text) for text in PROMPTS[:2]]
    told = [prompts[0], prompts[0], prompts[1], prompts[1]]
    asked: dict[str, Any] = {"model": "tiny", "prompt": prompts, "n": 2, "max_tokens": 3}
    asked["extra_body"] = {"return_token_ids": True}
    assert _extras(client.completions.create(**asked), "prompt_token_ids") == told
    found = {}
    for part in client.completions.create(**asked, stream=True):
        for ids in _extras(part, "prompt_token_ids"):
            assert part.choices[0].index not in found
            found[part.choices[0].index] = ids
    assert [found[index] for index in range(4)] == told
    chat: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    chat["extra_body"] = {"return_token_ids": True}
    prompt = ids_of(server, "u:hi;a:")
    assert _extras(client.chat.completions.create(**chat), "prompt_token_ids") == [prompt]
    first, *others = client.chat.completions.create(**chat, stream=True)
    assert _extras(first, "prompt_token_ids") == [prompt]
    assert not any(_extras(part, "prompt_token_ids") for part in others)


def test_prompts_are_truncated_on_the_side_that_is_asked_for(server: Live) -> None:
    def kept(**fields: object) -> str:
        done = server.client().completions.create(
            model="tiny", prompt=PROMPT, max_tokens=1, echo=True, extra_body=fields
        )
        return done.choices[0].text[: len(done.choices[0].text) - 1]

    assert PROMPT[-4:] in kept(truncate_prompt_tokens=4)
    assert PROMPT[-4:] in kept(truncate_prompt_tokens=4, truncation_side="left")
    assert kept(truncate_prompt_tokens=4, truncation_side="right").startswith(PROMPT[:4])
    asked: dict[str, Any] = {"model": "tiny", "prompt": "x" * 200, "max_tokens": 6}
    done = server.client().completions.create(**asked, extra_body={"truncate_prompt_tokens": -1})
    assert done.usage is not None
    assert done.usage.prompt_tokens == server.model.engine.limits.max_model_len - 6


def test_a_chat_may_echo_what_the_assistant_has_begun(server: Live) -> None:
    create = server.client().chat.completions.create
    asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 5}
    asked["messages"] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well,"}]
    asked["extra_body"] = {"add_generation_prompt": False, "continue_final_message": True}
    plain = create(**asked).choices[0].message.content
    asked["extra_body"] |= {"echo": True}
    assert create(**asked).choices[0].message.content == f"well,{plain}"
    parts = [part.choices[0].delta for part in create(**asked, stream=True)]
    assert "".join(part.content or "" for part in parts) == f"well,{plain}"
    assert [part.role for part in parts].count("assistant") == 1
    user = {**asked, "messages": asked["messages"][:1], "extra_body": {"echo": True}}
    assert not (create(**user).choices[0].message.content or "").startswith("hi")


def test_log_probabilities_of_completions_are_parallel_lists(server: Live) -> None:
    done = server.client().completions.create(
        model="tiny", prompt=PROMPT, temperature=0, max_tokens=6, logprobs=3
    )
    [choice] = done.choices
    told = choice.logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.top_logprobs is not None
    assert told.token_logprobs is not None
    assert "".join(told.tokens) == choice.text
    assert told.text_offset == list(range(6))
    for token, logprob, top in zip(told.tokens, told.token_logprobs, told.top_logprobs):
        assert len(top) == 3
        assert top[token] == logprob == max(top.values())


def test_log_probabilities_of_chats_are_objects_with_bytes(server: Live) -> None:
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 6,
        "logprobs": True,
        "top_logprobs": 2,
        "seed": 5,
    }
    done = server.client().chat.completions.create(**asked)
    told = done.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert len(told.content) == 6
    for one in told.content:
        assert bytes(one.bytes or ()).decode() == one.token
        assert len(one.top_logprobs) == 2
        assert one.logprob <= max(top.logprob for top in one.top_logprobs)
    tokens = list(told.content)
    assert "".join(one.token for one in tokens) == done.choices[0].message.content
    parts = list(server.client().chat.completions.create(**asked, stream=True))
    streamed = [one for part in parts if (told := part.choices[0].logprobs) for one in told.content or ()]
    assert [one.token for one in streamed] == [one.token for one in tokens]


def test_echo_with_log_probabilities_scores_the_prompt(server: Live) -> None:
    ids = ids_of(server, PROMPT)
    done = server.client().completions.create(
        model="tiny", prompt=ids, temperature=0, max_tokens=2, logprobs=1, echo=True
    )
    [choice] = done.choices
    told = choice.logprobs
    assert told is not None
    assert told.token_logprobs is not None
    assert choice.text.startswith(PROMPT)
    assert len(told.token_logprobs) == len(ids) + 2
    assert told.token_logprobs[0] is None
    [[score]] = server.model.engine.score([ids[:1]], [[ids[1:]]])
    assert told.token_logprobs[1:-2] == pytest.approx(list(score.logprobs), abs=1e-5)
    assert told.top_logprobs is not None
    assert all(math.isfinite(value) for top in told.top_logprobs[1:] for value in top.values())


def test_echo_without_new_tokens_gives_the_prompt(server: Live) -> None:
    for is_streamed in (False, True):
        answer = server.client().completions.create(
            model="tiny", prompt=PROMPTS, max_tokens=0, echo=True, stream=is_streamed
        )
        parts = list(answer) if is_streamed else [answer]
        texts = {choice.index: choice.text for part in parts for choice in part.choices}
        assert [texts[index] for index in range(3)] == PROMPTS
        reasons = [choice.finish_reason for part in parts for choice in part.choices]
        assert reasons == ["length"] * 3


@pytest.mark.parametrize("is_streamed", [False, True])
def test_no_new_tokens_and_no_echo_are_an_answer_all_the_same(server: Live, is_streamed: bool) -> None:
    answer = server.client().completions.create(model="tiny", prompt=PROMPT, max_tokens=0, stream=is_streamed)
    parts = list(answer) if is_streamed else [answer]
    [choice] = [choice for part in parts for choice in part.choices]
    assert (choice.text, choice.finish_reason) == ("", "length")


def test_models_are_listed_by_each_name(server: Live) -> None:
    [card] = server.client().models.list().data
    assert card.id == "tiny"
    assert server.client().models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("gpt")
    with pytest.raises(openai.NotFoundError, match="tiny"):
        server.client().completions.create(model="gpt", prompt="hi")


def test_a_call_has_the_name_of_its_header(server: Live) -> None:
    create = server.client().completions.create
    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1}
    named = create(**asked, extra_headers={"X-Request-Id": "mine"})
    assert (named._request_id, named.id) == ("mine", "cmpl-mine")
    own = create(**asked, extra_headers={"X-Request-Id": "x" * 300})
    assert own._request_id not in (None, "x" * 300)
    assert own.id == f"cmpl-{own._request_id}"
    assert create(**asked, extra_body={"request_id": "body"}).id == "cmpl-body"
    with pytest.raises(openai.BadRequestError) as refused:
        create(**{**asked, "max_tokens": -1}, extra_headers={"X-Request-Id": "mine"})
    assert refused.value.request_id == "mine"
