"""``POST /v1/completions``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from hpu_duo.server.protocol.bounds import MAX_PROMPTS
from hpu_duo.server.protocol.generation import GenerationRequest, TokenIds


def _kind_of_prompt(prompt: object) -> str:
    """Tell what a prompt is by its first element, so that it is read once and not as each kind in turn."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else ""
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "tokens"


_Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("texts")]
    | Annotated[TokenIds, Tag("tokens")]
    | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("lists")],
    Discriminator(_kind_of_prompt),
]


class CompletionRequest(GenerationRequest):
    """Prompts to continue.

    Attributes:
        prompt: a text, token ids, or several of either.
        echo: begin each answer with its prompt.
        logprobs: log-probabilities of each token, and of so many of the likeliest.
    """

    prompt: _Prompt
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        return [prompt] if is_one else prompt
