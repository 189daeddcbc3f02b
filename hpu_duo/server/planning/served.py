"""The model that a server serves, as far as requests are concerned."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpu_duo.server.planning.defaults import SamplingDefaults
from hpu_duo.server.prompts import PromptEncoder, TokenTexts
from hpu_duo.server.protocol.errors import ApiError, unknown_model

if TYPE_CHECKING:
    from hpu_duo.server.running import AsyncEngine


@dataclass(frozen=True)
class Served:
    """A model and its names.

    Attributes:
        names: the first one is what calls without a model get.
        engine: what serves it.
        encoder: of its tokenizer; None when it has none, so that prompts and answers are token ids.
        texts: of its tokens; None without a tokenizer.
        defaults: of sampling parameters.
        max_model_len: tokens of prompt and output together.
        max_choices: most choices of a call.
        max_logprobs: most of the likeliest tokens that are named beside each; -1 for no limit.
        tool_parser: name of the parser for its tool calls; None when it makes none.
        created: when it was loaded, seconds since 1970.
    """

    names: tuple[str, ...]
    engine: AsyncEngine
    encoder: PromptEncoder | None
    texts: TokenTexts | None
    defaults: SamplingDefaults
    max_model_len: int
    max_choices: int
    max_logprobs: int
    tool_parser: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def name_for(self, asked: str | None) -> str:
        """The name that an answer has.

        Raises:
            ApiError: another model is asked for.
        """
        if asked is None or asked == "":
            return self.names[0]
        if asked not in self.names:
            raise unknown_model(asked, self.names)
        return asked

    def needs_encoder(self, param: str) -> PromptEncoder:
        """The encoder.

        Raises:
            ApiError: there is none, and a field needs it.
        """
        if self.encoder is None:
            raise ApiError(
                400,
                f"{param}: the model has no tokenizer: expected token ids as the prompt of /v1/completions",
                param=param,
            )
        return self.encoder

    def cards(self) -> list[dict[str, Any]]:
        """The models as ``/v1/models`` lists them."""
        return [
            {
                "id": name,
                "object": "model",
                "created": self.created,
                "owned_by": "hpu-duo",
                "root": self.names[0],
                "parent": None,
                "max_model_len": self.max_model_len,
            }
            for name in self.names
        ]
