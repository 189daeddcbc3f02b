"""The sampler's rules once more, one row at a time, in float64 and plain loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hpu_duo.sampling import PenaltyState, SamplingBatch, SamplingParams, SamplingRow, sample


@dataclass(frozen=True)
class Case:
    """One row: its logits and what the engine knows about its request."""

    logits: Sequence[float]
    params: SamplingParams
    seed: int = 0
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = field(default=())
    eos_token_ids: Sequence[int] = ()

    def row(self) -> SamplingRow:
        history = PenaltyState.from_token_ids(self.params, self.prompt_ids, self.output_ids)
        return SamplingRow(self.params, self.seed, len(self.output_ids), history, self.eos_token_ids)


def sample_cases(cases: Sequence[Case | None], dtype: torch.dtype = torch.float32):  # type: ignore[no-untyped-def]
    """Sample all cases in one batch; ``None`` is a row without request, whose logits are zero."""
    vocab_size = len(next(case for case in cases if case is not None).logits)
    logits = torch.tensor([[0.0] * vocab_size if c is None else list(c.logits) for c in cases]).to(dtype)
    batch = SamplingBatch.build([None if c is None else c.row() for c in cases], vocab_size)
    return sample(logits, batch)


def edited_scores(case: Case) -> list[float]:
    """Logits after bias, min_tokens and penalties."""
    params, scores = case.params, [float(x) for x in case.logits]
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    if len(case.output_ids) < params.min_tokens:
        banned = list(params.stop_token_ids) + ([] if params.ignore_eos else list(case.eos_token_ids))
        for token in banned:
            scores[token] = -np.inf
    for token in range(len(scores)):
        if token in case.prompt_ids or token in case.output_ids:
            factor = params.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        count = list(case.output_ids).count(token)
        scores[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return scores


def kept_tokens(scores: Sequence[float], params: SamplingParams) -> set[int]:
    """Tokens inside top-k, top-p and min-p, ties kept, by walking the tokens from the likeliest down."""
    scaled = np.array(scores) / params.temperature
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    kept = list(order)
    if params.top_k > 0:
        kept = [t for t in kept if scaled[t] >= scaled[order[min(params.top_k, len(order)) - 1]]]
    weights = np.exp(scaled - scaled[order[0]])
    if params.top_p < 1.0:
        total, mass, last = sum(weights[t] for t in kept), 0.0, kept[0]
        for token in kept:
            if mass >= params.top_p * total:
                break
            mass, last = mass + weights[token], token
        kept = [t for t in kept if scaled[t] >= scaled[last]]
    return {t for t in kept if weights[t] >= params.min_p * weights[order[0]]}


def distribution(case: Case) -> np.ndarray:
    """The probability of each token, float64 [V]."""
    scores = edited_scores(case)
    kept = kept_tokens(scores, case.params)
    scaled = np.array(scores) / case.params.temperature
    weights = np.array([np.exp(scaled[t] - scaled.max()) if t in kept else 0.0 for t in range(len(scaled))])
    return weights / weights.sum()
