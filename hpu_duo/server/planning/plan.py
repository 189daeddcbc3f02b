"""A validated call: its requests to the engine, and its model."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpu_duo.sampling import SamplingParams
from hpu_duo.server.answers import Answer, Choice, CompletionAnswer
from hpu_duo.server.prompts import PromptEncoder, TokenTexts
from hpu_duo.server.protocol import ApiError, unknown_model
from hpu_duo.server.running import OutputStream, Submission

if TYPE_CHECKING:
    from hpu_duo.server.running import AsyncEngine

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class SamplingDefaults:
    """Those of the OpenAI API, unless a checkpoint has others.

    ``do_sample`` of the checkpoint is ignored: the API's temperature is 1 either way.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def read(cls, checkpoint: str | Path) -> SamplingDefaults:
        """Read generation_config.json, if there is one.

        The file itself is read, since transformers fills in its own defaults.
        """
        file = Path(checkpoint) / "generation_config.json"
        if not file.is_file():
            return cls()
        said: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return cls(**{name: said[name] for name in _NAMES if said.get(name) is not None})


@dataclass(frozen=True)
class Served:
    """A model and its names.

    Attributes:
        names: the first one is used for calls without a model.
        engine: of the model.
        encoder: of its tokenizer; None without one, so that prompts and answers are token ids.
        texts: of its tokens; None without a tokenizer.
        defaults: of sampling parameters.
        max_model_len: tokens of prompt and output together.
        max_choices: most choices of a call.
        max_logprobs: most top log-probabilities of each token; -1 for no limit.
        tool_parser: name of the parser for its tool calls; None without tool calls.
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
        """Return the model name of an answer.

        Raises:
            ApiError: another model is requested.
        """
        if asked is None or asked == "":
            return self.names[0]
        if asked not in self.names:
            raise unknown_model(asked, self.names)
        return asked

    def needs_encoder(self, param: str) -> PromptEncoder:
        """Return the encoder.

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


@dataclass(frozen=True)
class Scoring:
    """Scoring of prompts: the log-probability of each token, given those before it.

    Tokens are decoded, ``decode_len`` per step, so probabilities are those of generation, from the same
    cache; see ``Engine.score``.

    Attributes:
        prompts: token ids of each.
        num_top: number of top log-probabilities of each token.
        answer: echoes the prompts.
        cache_salt: see ``SamplingParams``.
    """

    prompts: Sequence[Sequence[int]]
    num_top: int
    answer: CompletionAnswer
    cache_salt: str | None = None

    @property
    def submissions(self) -> list[Submission]:
        """Return the requests to submit, one for each prompt of more than a token."""
        name = uuid.uuid4().hex
        return [
            Submission(f"{name}-{index}", prompt[:1], self._forcing(prompt[1:]), index)
            for index, prompt in enumerate(self.prompts)
            if len(prompt) > 1
        ]

    async def read(self, stream: OutputStream) -> None:
        """Read all outputs of the submissions, and pass them to the answer.

        Raises:
            RequestFailedError: the engine failed.
        """
        scored = [Choice() for _ in self.prompts]
        while (batch := await stream.read()) is not None:
            for choice, output in batch:
                scored[choice].add(output)
        # The first token of a prompt has no log-probability.
        self.answer.score([[int(one[0]), *choice.logprobs] for one, choice in zip(self.prompts, scored)])

    def _forcing(self, tokens: Sequence[int]) -> SamplingParams:
        return SamplingParams(
            temperature=0.0,
            logprobs=self.num_top,
            max_tokens=len(tokens),
            ignore_eos=True,
            forced_token_ids=tuple(tokens),
            decoded_prompt_tokens=1,
            cache_salt=self.cache_salt,
        )


@dataclass(frozen=True)
class Plan:
    """A validated call.

    Attributes:
        answer_id: the ``id`` of the answer.
        model: the requested name.
        prompts: token ids of each prompt.
        params: of all of them; None if nothing is to be generated.
        answer: collects the outputs.
        is_streamed: whether it is sent as events.
        user: of the call.
        cache_salt: see ``SamplingParams``.
        texts: returns the prompts as text, for logs with prompts.
        scoring: of the prompts, before generation; None if not requested.
    """

    answer_id: str
    model: str
    prompts: Sequence[Sequence[int]]
    params: SamplingParams | None
    answer: Answer
    is_streamed: bool
    user: str | None = None
    cache_salt: str | None = None
    texts: Callable[[], Sequence[str]] = tuple
    scoring: Scoring | None = None

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return 0 if self.params is None else self.params.n * len(self.prompts)

    @property
    def submissions(self) -> list[Submission]:
        """Return the requests to submit. Their ids are unique, even if the caller chose the answer's id."""
        params = self.params
        if params is None:
            return []
        params, name = replace(params, cache_salt=self.cache_salt), uuid.uuid4().hex
        return [
            Submission(f"{name}-{index}", prompt, params, index * params.n)
            for index, prompt in enumerate(self.prompts)
        ]


def new_answer_id(prefix: str, asked: str | None) -> str:
    """The ``id`` of an answer: that of the caller, or a new one."""
    return f"{prefix}-{uuid.uuid4().hex if asked is None else asked}"
