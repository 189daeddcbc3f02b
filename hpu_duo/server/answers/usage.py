"""Numbers of tokens of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Usage:
    """Numbers of tokens of all prompts and of all answers of a call.

    Attributes:
        prompt_tokens: each prompt counts once, however many answers it gets.
        completion_tokens: those that were sampled, stop tokens included.
    """

    prompt_tokens: int
    completion_tokens: int = 0

    def fields(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
