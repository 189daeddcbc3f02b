"""Numbers of tokens of a call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpu_duo.engine.outputs import RequestOutput


@dataclass
class Usage:
    """Numbers of tokens of all prompts and of all answers of a call.

    Attributes:
        prompt_tokens: each prompt counts once, however many answers it gets.
        completion_tokens: those that were sampled, stop tokens included.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    _cached: dict[str, int] = field(default_factory=dict)

    def count(self, output: RequestOutput) -> None:
        """Count the tokens of an output, and what its prompt took up from the prefix cache."""
        self.completion_tokens += len(output.token_ids)
        if output.sample_index == 0 and output.token_ids:
            self._cached[output.request_id] = output.num_cached_tokens

    def fields(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }
