"""Fields that are known and not served: refused by name, since to ignore them would change the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpu_duo.server.protocol.chat import ChatMessage
from hpu_duo.server.protocol.errors import unsupported
from hpu_duo.server.protocol.generation import Fields, GenerationRequest

Refused = Mapping[str, tuple[tuple[Any, ...], str]]

REFUSED: Refused = {
    "prediction": ((), "predicted outputs are not served"),
    "store": ((False,), "answers are not stored"),
    "metadata": (({},), "metadata belongs to stored answers, and none are stored"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "verbosity": (("medium",), "say in a message how long an answer is to be"),
    "web_search_options": ((), "nothing is searched for"),
    "moderation": ((), "nothing is moderated"),
    "prompt_cache_retention": (("in_memory",), "the prefix cache keeps what it has room for"),
    "prompt_cache_options": (({}, {"mode": "implicit"}), "the prefix cache keeps what it has room for"),
    "best_of": ((), "best_of is not served; use n, and choose among the answers"),
    "suffix": (("",), "insertion before a suffix is not served"),
    "use_beam_search": ((False,), "beam search is not served"),
    "length_penalty": ((1, 1.0), "length_penalty belongs to beam search, which is not served"),
    "allowed_token_ids": ((), "allowed_token_ids is not served; use logit_bias"),
    "bad_words": (([],), "bad_words is not served; use logit_bias"),
    "logits_processors": (([],), "code of the caller is not run"),
    "prompt_logprobs": ((), "prompt_logprobs is not served; use echo with logprobs of /v1/completions"),
    "chat_template": ((), "a template of the caller is not run; the server has --chat-template"),
    "functions": (([],), "functions is deprecated and not served; use tools"),
    "function_call": (("none",), "function_call is deprecated and not served; use tool_choice"),
    "audio": ((), "audio is not served"),
    "modalities": ((["text"],), "only text is served"),
    "prompt_embeds": ((), "embeddings are not served as prompts"),
    "mm_processor_kwargs": (({},), "only text is served"),
    "spaces_between_special_tokens": ((True,), "texts are those of the tokenizer"),
    "logprob_token_ids": (([],), "logprob_token_ids is not served; use logprobs"),
    "repetition_detection": ((), "repetition_detection is not served; use repetition_penalty"),
    "thinking_token_budget": ((-1,), "thinking is not told apart"),
    "kv_transfer_params": (({},), "keys and values are not transferred"),
    "vllm_xargs": (({},), "there are no extensions"),
}
"""Fields by name: the values that ask for nothing, None apart, and what to say of others."""

_OF_STREAM_OPTIONS: Refused = {"include_obfuscation": ((False,), "events are not padded")}
_OF_MESSAGES: Refused = {
    "audio": ((), "audio is not served"),
    "function_call": ((), "function_call is deprecated and not served; use tool_calls"),
}


def refuse_unserved(request: GenerationRequest) -> None:
    """Refuse what a request asks for and nobody here does.

    Raises:
        ApiError: naming the field.
    """
    _refuse(request, REFUSED)
    if request.stream_options is not None:
        _refuse(request.stream_options, _OF_STREAM_OPTIONS, "stream_options", "stream_options.")


def refuse_unserved_of_message(message: ChatMessage, number: int) -> None:
    """Refuse what a message has and nobody here reads.

    Args:
        number: of the message among those of its call.

    Raises:
        ApiError: naming the message and its field.
    """
    _refuse(message, _OF_MESSAGES, "messages", f"messages[{number}].")


def _refuse(given: Fields, refused: Refused, param: str | None = None, place: str = "") -> None:
    values = given.model_extra or {}
    for field in refused.keys() & values.keys():
        (neutral, reason), value = refused[field], values[field]
        if value is not None and not any(value == one and type(value) is type(one) for one in neutral):
            raise unsupported(param or field, f"{place}{field}: {reason}")
