"""Checks prompts and parameters, and makes the samples that an engine serves."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from hpu_duo.engine.samples import SampleState
from hpu_duo.extras import install_command
from hpu_duo.request import Request, TokenLimits
from hpu_duo.sampling import (
    FieldError,
    SamplingParams,
    StructuredOutputs,
    byte_tokens,
    derive_seed,
    special_token_ids,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpu_duo.ranking import Ranker
    from hpu_duo.sampling.guidance import Grammars, GrammarState

Prompt = Sequence[int] | np.ndarray


class Intake:
    """Makes samples; holds no request.

    Args:
        limits: the model's limits of tokens.
        tokenizer: for text and stop strings; None for token ids only.
        seed: base of the seeds of requests without one.
        ranker: scores prompts; None gives all of them 0.
    """

    def __init__(
        self,
        limits: TokenLimits,
        tokenizer: PreTrainedTokenizerBase | None,
        seed: int,
        ranker: Ranker | None = None,
    ) -> None:
        assert limits.vocab_size is not None, "the engine needs the size of the vocabulary"
        self.vocab_size = limits.vocab_size
        self._limits, self._tokenizer, self._seed = limits, tokenizer, seed
        self.ranker = ranker
        # Checkpoints may name tokens that the model does not have; they never come up.
        self._eos = tuple(token for token in limits.eos_token_ids if token < limits.vocab_size)
        self._special_ids = None if tokenizer is None else special_token_ids(tokenizer)
        self._byte_of = None if tokenizer is None else byte_tokens(tokenizer)
        self._grammars: Grammars | None = None
        self._grammars_lock = Lock()

    def score(self, prompt: Prompt, each: Sequence[SamplingParams], name: str) -> float:
        """Score a prompt that has not been checked yet, from any thread; 0 without a ranker.

        Raises:
            ValueError: see ``requests``.
        """
        if self.ranker is None:
            return 0.0
        [first, *_] = self.requests("", 0, prompt, each, name)
        return self.ranker.score([first.prompt_token_ids])[0]

    def prepare(self, params: SamplingParams) -> None:
        """Compile what the output must be like, and check forced tokens against it; any thread may ask.

        It takes time, once for each grammar, that no step should wait for.

        Raises:
            ValueError: that cannot be done; the message names the field.
        """
        if params.structured_outputs is None:
            return
        state = self._grammar(params.structured_outputs)
        num_taken = state.num_accepted_of(params.forced_token_ids)
        if num_taken < len(params.forced_token_ids):
            raise FieldError(
                "forced_token_ids",
                "expected the beginning of what structured_outputs allow, got token "
                f"{params.forced_token_ids[num_taken]} at place {num_taken}",
            )

    def _grammar(self, wanted: StructuredOutputs) -> GrammarState:
        """Return the state before the first token."""
        with self._grammars_lock:
            if self._grammars is None:
                self._grammars = self._make_grammars()
        return self._grammars.start(wanted)

    def _make_grammars(self) -> Grammars:
        if self._tokenizer is None:
            raise FieldError(
                "structured_outputs", "expected a model with a tokenizer, and this one was loaded without"
            )
        if find_spec("llguidance") is None:
            raise FieldError(
                "structured_outputs",
                f"expected llguidance, which is not installed: {install_command('structured')}",
            )
        from hpu_duo.sampling.guidance import Grammars

        return Grammars(self._tokenizer, self.vocab_size, self._eos)

    def requests(
        self,
        request_id: str,
        number: int,
        prompt: Prompt,
        each: Sequence[SamplingParams],
        name: str | None = None,
    ) -> list[Request]:
        """Make a request for each sample of one prompt.

        Args:
            number: of the prompt, in order of arrival; part of the seed of requests without one.
            each: parameters of each sample.
            name: of the request in error messages; None is its id.

        Raises:
            ValueError: the prompt or the parameters do not fit the model, or stop strings have no tokenizer.
        """
        for params in each:
            params.validate(self.vocab_size)
            self.prepare(params)
        if any(params.stop for params in each) and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this model was loaded without one")
        seed = derive_seed(self._seed, number) if each[0].seed is None else each[0].seed
        first = Request(
            f"{request_id}#0",
            prompt,
            each[0],
            self._limits,
            sampling_seed=derive_seed(seed, 0),
            name=f"request {request_id!r}" if name is None else name,
        )
        siblings = [
            first.sibling(
                f"{request_id}#{index}",
                sample_index=index,
                sampling_seed=derive_seed(seed, index),
                params=params,
            )
            for index, params in enumerate(each[1:], start=1)
        ]
        return [first, *siblings]

    def states(self, request_id: str, requests: Sequence[Request]) -> list[SampleState]:
        """Make the engine's state of each sample."""
        return [
            SampleState(
                request,
                request_id,
                self._eos,
                self._tokenizer,
                self._special_ids,
                None if (wanted := request.params.structured_outputs) is None else self._grammar(wanted),
                self._byte_of,
            )
            for request in requests
        ]
