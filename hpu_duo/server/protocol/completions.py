"""``POST /v1/completions``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from hpu_duo.server.protocol.generation import GenerationRequest, TokenId


class CompletionRequest(GenerationRequest):
    """Prompts to continue.

    Attributes:
        prompt: a text, token ids, or several of either.
        echo: begin each answer with its prompt.
        logprobs: log-probabilities of each token, and of so many of the likeliest.
    """

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
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
