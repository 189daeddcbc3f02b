"""One row of logits: whose it is, and its parameters as numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from hpu_duo.sampling.params import HostChoice, SamplingParams
from hpu_duo.sampling.penalties import PenaltyState

if TYPE_CHECKING:
    from hpu_duo.sampling.guidance import GrammarState

#: Added to the logit of a token that may not be sampled. Finite, so that no row can become NaN, and so large
#: that it absorbs any logit and bias and still has probability zero at ``MAX_TEMPERATURE``.
FORBIDDEN = -1e30


class SamplingRow(NamedTuple):
    """One logit row that belongs to a request.

    Attributes:
        params: the request's parameters.
        seed: the stream of the request's draws: any integer, used modulo 2**64.
        num_output_tokens: tokens generated so far, which is also the number of this draw.
        penalties: the request's history; required when ``params.needs_penalties``.
        eos_token_ids: the ids that end the output unless ``params.ignore_eos``.
        choose: chooses the token on the host, if given; see ``choose_on_host``.
        grammar: where the output is in its grammar, if that limits this token.
    """

    params: SamplingParams
    seed: int = 0
    num_output_tokens: int = 0
    penalties: PenaltyState | None = None
    eos_token_ids: Sequence[int] = ()
    choose: HostChoice | None = None
    grammar: GrammarState | None = None


class RowValues(NamedTuple):
    """The parameters of one row, on the host. The defaults are those of a row without request."""

    temperature: float = 1.0
    top_p: float = 1.0
    log_min_p: float = FORBIDDEN
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_k: float = 0.0
    is_greedy: float = 1.0


class RowTensors(NamedTuple):
    """The same parameters of all rows, on the device, and each row's uniform number; all float32 [N]."""

    temperature: Tensor
    top_p: Tensor
    log_min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    top_k: Tensor
    is_greedy: Tensor
    uniform: Tensor


def row_values(params: SamplingParams, vocab_size: int) -> RowValues:
    """Return the values of a row with these parameters."""
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    if params.is_greedy:
        return RowValues(1.0, 1.0, FORBIDDEN, *penalties)
    log_min_p = math.log(params.min_p) if params.min_p > 0.0 else FORBIDDEN
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    return RowValues(params.temperature, params.top_p, log_min_p, *penalties, top_k, 0.0)


def is_plain(row: SamplingRow | None) -> bool:
    """Say whether one argmax over the model's logits is all that the row needs."""
    if row is None:
        return True
    params = row.params
    return params.is_plain_greedy and row.num_output_tokens >= params.min_tokens and row.grammar is None
