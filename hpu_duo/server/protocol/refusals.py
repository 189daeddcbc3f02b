"""Fields that are known and not served: refused by name, since to ignore them would change the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpu_duo.server.protocol.errors import unsupported
from hpu_duo.server.protocol.generation import GenerationRequest

REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
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
}
"""Fields by name: the values that ask for nothing, None apart, and what to say of others."""


def refuse_unserved(request: GenerationRequest) -> None:
    """Refuse what a request asks for and nobody here does.

    Raises:
        ApiError: naming the field.
    """
    for field in REFUSED.keys() & request.model_fields_set:
        neutral, reason = REFUSED[field]
        value = getattr(request, field)
        if value is not None and not any(value == one and type(value) is type(one) for one in neutral):
            raise unsupported(field, f"{field}: {reason}")
