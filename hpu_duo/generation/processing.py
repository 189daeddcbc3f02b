"""transformers' processors and stopping criteria, one sample at a time, on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PretrainedConfig,
    StoppingCriteriaList,
)

from hpu_duo.generation.arguments import DEFAULT_TOP_K, GenerationRequest
from hpu_duo.modeling.transformers_internals import ENDS, logits_processors
from hpu_duo.sampling import SamplingParams
from hpu_duo.sampling.sampler import draw

# V vocabulary; ids and scores are those of one row, [1, L] and [1, V], as for transformers' classes


@dataclass(frozen=True)
class Hooks:
    """Functions of the caller that are called for each token.

    Attributes:
        processors: ``logits_processor``.
        criteria: ``stopping_criteria``.
        allowed_tokens: ``prefix_allowed_tokens_fn``.
    """

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    allowed_tokens: Callable[[int, Tensor], list[int]] | None

    def allowed_tokens_of(self, number: int) -> Callable[[int, Tensor], list[int]] | None:
        """Return ``prefix_allowed_tokens_fn`` for one prompt, called with its number among the prompts."""
        allowed = self.allowed_tokens
        return None if allowed is None else lambda _, ids: allowed(number, ids)

    @classmethod
    def read(cls, logits_processor: Any, stopping_criteria: Any, prefix_allowed_tokens_fn: Any) -> Hooks:
        """Check the arguments of ``generate``; None and empty lists have no effect.

        Raises:
            ValueError: an element is not callable.
        """
        processors = _callables("logits_processor", logits_processor)
        criteria = _callables("stopping_criteria", stopping_criteria)
        if prefix_allowed_tokens_fn is not None and not callable(prefix_allowed_tokens_fn):
            raise ValueError(
                f"prefix_allowed_tokens_fn: expected a function, got {prefix_allowed_tokens_fn!r}"
            )
        return cls(LogitsProcessorList(processors), StoppingCriteriaList(criteria), prefix_allowed_tokens_fn)


class WholeModel(GenerationMixin):
    """transformers' methods of generation, with the configuration of the whole model.

    The model of a rank has that of its share, with fewer tokens.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config


class ProcessedSample:
    """Chooses the tokens of one sample as transformers does, and stores their scores.

    Args:
        row: the prompt, left padding included.
        processors: None if the device chooses tokens and only criteria run here.
        asked: has whether tokens are drawn, and which scores are returned.

    Attributes:
        scores, logits: float32 ``[1, V]`` of each token, processed and raw; empty if they are not returned.
    """

    def __init__(
        self,
        row: list[int],
        processors: LogitsProcessorList | None,
        criteria: StoppingCriteriaList,
        asked: GenerationRequest,
    ) -> None:
        self._row = torch.tensor(row)
        self._processors, self._criteria = processors, criteria
        self._draws = asked.draws
        self._keeps_scores, self._keeps_logits = asked.returns_scores, asked.returns_logits
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []

    @property
    def chooses(self) -> bool:
        """Whether tokens are chosen here."""
        return self._processors is not None

    def choose(self, output_ids: NDArray[np.int32], logits: Tensor, uniform: float) -> int:
        """Process and store the scores, and choose the best token or draw one; see ``HostSampler``."""
        assert self._processors is not None
        # Ordinary tensors, which a caller may modify and store.
        with torch.inference_mode(False), torch.no_grad():
            raw = logits.to(torch.float32, copy=True)[None]
            scores = _checked(self._processors(self._read(output_ids), raw), raw)
            self._keep(len(output_ids), scores, raw)
            best = float(scores.amax())
            if best == -math.inf or (self._draws and not math.isfinite(best)):
                raise ValueError(f"expected processors to allow a token, got a best score of {best}")
            if self._draws:
                return int(draw(scores, torch.tensor([uniform])))
            return int(scores.argmax(dim=-1))

    def ends(self, output_ids: NDArray[np.int32]) -> bool:
        """Whether a criterion ends the sample."""
        if not self._criteria:
            return False
        with torch.inference_mode(False), torch.no_grad():
            scores = tuple(self.scores) if self._keeps_scores else None
            return bool(torch.as_tensor(self._criteria(self._read(output_ids), scores)).all())

    def _read(self, output_ids: NDArray[np.int32]) -> Any:
        """All tokens, a LongTensor ``[1, L]``."""
        return torch.cat([self._row, torch.tensor(output_ids).long()])[None]

    def _keep(self, number: int, scores: Tensor, raw: Tensor) -> None:
        # A failed step is repeated.
        if self._keeps_scores:
            self.scores[number:] = [scores]
        if self._keeps_logits:
            self.logits[number:] = [raw]


def processors_for(
    model: WholeModel,
    asked: GenerationRequest,
    params: SamplingParams,
    row: list[int],
    prompt_len: int,
    hooks: Hooks,
    number: int,
) -> LogitsProcessorList:
    """Return the processors of one sample, chosen and ordered by transformers itself.

    Args:
        row: the prompt; all but its last ``prompt_len`` tokens are padding.
        number: index of the prompt among all prompts of the call.

    Raises:
        ValueError: a value that a processor rejects.
    """
    config = _processor_config(asked, params, len(row))
    mask = torch.tensor([[0] * (len(row) - prompt_len) + [1] * prompt_len])
    has_counts = params.presence_penalty or params.frequency_penalty
    counts = [_CountPenalties(params, len(row))] if has_counts else []
    try:
        # The same function as in ``generate``, since the order of processors depends on the version.
        processors = logits_processors(
            model,
            generation_config=config,
            input_ids_seq_length=len(row),
            encoder_input_ids=torch.tensor([row]),
            prefix_allowed_tokens_fn=hooks.allowed_tokens_of(number),
            logits_processor=LogitsProcessorList([*counts, *hooks.processors]),
            device="cpu",
            model_kwargs={"attention_mask": mask if prompt_len < len(row) else None},
        )
    except (TypeError, AttributeError) as error:
        raise ValueError(f"generation arguments that transformers rejects: {error}") from error
    # In the order of the device's sampler: bias, penalties, filters.
    return LogitsProcessorList([*([_LogitBias(params)] if params.logit_bias else []), *processors])


def _processor_config(asked: GenerationRequest, params: SamplingParams, row_len: int) -> GenerationConfig:
    config = copy(asked.config)
    new: dict[str, Any] = {
        "num_beams": 1,
        "num_return_sequences": 1,
        "temperature": 1.0 if config.temperature is None else config.temperature,
        "top_k": DEFAULT_TOP_K if config.top_k is None else config.top_k,
        "top_p": 1.0 if config.top_p is None else config.top_p,
        "min_p": config.min_p or None,
        "max_length": row_len + (params.max_tokens or 0),
        "min_length": 0,
        "min_new_tokens": params.min_tokens,
        "bad_words_ids": config.bad_words_ids or None,
        "sequence_bias": config.sequence_bias or None,
    }
    ends = list(params.stop_token_ids)
    new[ENDS] = torch.tensor(ends) if ends else None
    for name, value in new.items():
        setattr(config, name, value)
    return config


class _LogitBias(LogitsProcessor):
    """``logit_bias``, which transformers does not have."""

    def __init__(self, params: SamplingParams) -> None:
        tokens, addends = params.bias_arrays
        self._tokens, self._addends = torch.tensor(tokens).long(), torch.tensor(addends)[None]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_add(1, self._tokens, self._addends)


class _CountPenalties(LogitsProcessor):
    """``presence_penalty`` and ``frequency_penalty``, which transformers does not have either."""

    def __init__(self, params: SamplingParams, num_prompt: int) -> None:
        self._presence, self._frequency = params.presence_penalty, params.frequency_penalty
        self._num_prompt = num_prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(input_ids[0, self._num_prompt :], minlength=scores.shape[-1]).to(scores)
        return scores - self._frequency * counts - self._presence * (counts > 0).to(scores)


def _checked(scores: Any, raw: Tensor) -> Tensor:
    if not isinstance(scores, Tensor) or scores.shape != raw.shape:
        got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"logits_processor: expected scores of shape {list(raw.shape)}, got {got}")
    return scores


def _callables(name: str, value: Any) -> list[Callable[..., Any]]:
    if value is None:
        return []
    if not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise ValueError(f"{name}: expected a list of functions, got {value!r}")
    given = list(value)
    for one in given:
        if not callable(one):
            raise ValueError(f"{name}: expected functions, got {one!r}")
    return given
