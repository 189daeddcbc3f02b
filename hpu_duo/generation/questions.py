"""Prompts that go on behind a text that an engine keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hpu_duo.generation.arguments import GenerationRequest
from hpu_duo.generation.inputs import read_inputs

if TYPE_CHECKING:
    from hpu_duo.prefix_hold import PrefixHold


class Context(Protocol):
    """A text that an engine keeps."""

    @property
    def cache_salt(self) -> str | None:
        """The salt that its keys and values are cached under."""
        ...

    def belongs_to(self, model: Any) -> bool:
        """Whether it is a model's."""
        ...

    def prompt(self, question: str | Sequence[int]) -> list[int]:
        """Return the tokens of the text with a question behind it."""
        ...

    def hold(self) -> PrefixHold:
        """Return what the engine keeps of it, computed again if that was lost."""
        ...


@dataclass(frozen=True)
class Questions:
    """Prompts of a call of ``generate``.

    Attributes:
        shown: token ids that results begin with: rows as they were given.
        rows: those that processors and limits of length count, left padding included.
        prompts: those that are served.
        are_texts: whether texts were given, and texts are the results.
        context: what the prompts begin with.
    """

    shown: list[list[int]]
    rows: list[list[int]]
    prompts: list[list[int]]
    are_texts: bool = False
    context: Context | None = None

    @classmethod
    def read(
        cls,
        inputs: Any,
        attention_mask: torch.Tensor | None,
        asked: GenerationRequest,
        context: Context | None,
    ) -> Questions:
        """Read the inputs of a call.

        Args:
            inputs: token ids as ``read_inputs`` takes them; with a context also a text, or a list of texts.

        Raises:
            ValueError: see ``read_inputs``; or texts come with what they do not go with.
        """
        if context is None:
            rows, prompts = read_inputs(inputs, attention_mask, asked)
            return cls(rows, rows, prompts)
        texts = [inputs] if isinstance(inputs, str) else inputs
        if not isinstance(texts, list | tuple) or not any(isinstance(text, str) for text in texts):
            rows, prompts = read_inputs(inputs, attention_mask, asked)
            prompts = [context.prompt(prompt) for prompt in prompts]
            return cls(rows, prompts, prompts, context=context)
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("expected questions that are all texts or all token ids, got some of each")
        if attention_mask is not None:
            raise ValueError("attention_mask goes with a tensor; texts need no padding")
        if asked.returns_dict:
            raise ValueError(
                "return_dict_in_generate goes with token ids; questions that are texts get texts"
            )
        prompts = [context.prompt(text) for text in texts]
        shown: list[list[int]] = [[] for _ in texts]
        return cls(shown, prompts, prompts, are_texts=True, context=context)
