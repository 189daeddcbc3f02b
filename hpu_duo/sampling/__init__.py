"""Choosing the next token: parameters, random numbers, the sampler, text out and stop strings.

The engine, once per request: ``SamplingParams.validate``, ``PenaltyState.from_token_ids``,
``IncrementalDetokenizer``, ``StopChecker``. Once per step: ``SamplingBatch.build`` on the host,
``sample`` (or the capturable ``sample_tokens``) on the device, then ``PenaltyState.append``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hpu_duo.sampling.detokenizer import (
    IncrementalDetokenizer,
    Released,
    StopChecker,
    StopMatch,
    byte_tokens,
    special_token_ids,
)
from hpu_duo.sampling.params import (
    FieldError,
    HostChoice,
    HostSampler,
    RowError,
    SamplingParams,
    StructuredOutputs,
)

if TYPE_CHECKING:
    from hpu_duo.sampling.batch import (
        SamplingBatch,
        SamplingRoute,
        choose_on_host,
        derive_seed,
        static_route,
        static_routes,
        uniform,
    )
    from hpu_duo.sampling.rows import PenaltyState, SamplingRow
    from hpu_duo.sampling.sampler import SampledTokens, TokenLogprobs, sample, sample_tokens

__all__ = [
    "FieldError",
    "HostChoice",
    "HostSampler",
    "IncrementalDetokenizer",
    "PenaltyState",
    "Released",
    "RowError",
    "SampledTokens",
    "SamplingBatch",
    "SamplingParams",
    "SamplingRoute",
    "SamplingRow",
    "StopChecker",
    "StopMatch",
    "StructuredOutputs",
    "TokenLogprobs",
    "byte_tokens",
    "choose_on_host",
    "derive_seed",
    "sample",
    "sample_tokens",
    "special_token_ids",
    "static_route",
    "static_routes",
    "uniform",
]

_HOMES = {
    "PenaltyState": "hpu_duo.sampling.rows",
    "SamplingBatch": "hpu_duo.sampling.batch",
    "TokenLogprobs": "hpu_duo.sampling.sampler",
    "SamplingRoute": "hpu_duo.sampling.batch",
    "choose_on_host": "hpu_duo.sampling.batch",
    "derive_seed": "hpu_duo.sampling.batch",
    "uniform": "hpu_duo.sampling.batch",
    "static_route": "hpu_duo.sampling.batch",
    "static_routes": "hpu_duo.sampling.batch",
    "SamplingRow": "hpu_duo.sampling.rows",
    "SampledTokens": "hpu_duo.sampling.sampler",
    "sample": "hpu_duo.sampling.sampler",
    "sample_tokens": "hpu_duo.sampling.sampler",
}


def __getattr__(name: str) -> Any:
    # Their modules import torch, which planning and simulation do not need.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
