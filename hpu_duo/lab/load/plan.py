"""Requests ready to be sent: bodies made before the clock runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hpu_duo.lab.load.endpoint import Endpoint
from hpu_duo.lab.traces import Arrival, PromptIds


@dataclass(frozen=True)
class PlannedRequest:
    """One request of a run.

    Attributes:
        time_s: planned time of sending, since the run's beginning.
        body: its JSON.
        num_prompt_tokens, num_output_tokens: as planned.
    """

    time_s: float
    body: bytes
    num_prompt_tokens: int
    num_output_tokens: int


def plan_requests(
    arrivals: Iterable[Arrival],
    endpoint: Endpoint,
    model: str,
    prompt_ids: PromptIds,
    *,
    decode: Callable[[list[int]], str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> list[PlannedRequest]:
    """Make the requests of a trace.

    Args:
        prompt_ids: makes prompts if the trace has no texts.
        decode: turns token ids into a text if the endpoint takes no ids. The text may have a few tokens
            more or less when the server reads it.
        extra: fields of every body; they win over those made here.

    Raises:
        ValueError: the endpoint needs texts, and there are neither texts nor ``decode``.
    """
    planned = []
    for index, arrival in enumerate(arrivals):
        prompt: str | list[int]
        if arrival.text is not None:
            prompt = arrival.text
        else:
            ids = prompt_ids.of(arrival, index).tolist()
            prompt = ids if decode is None else decode(ids)
            if not endpoint.takes_ids and not isinstance(prompt, str):
                raise ValueError(
                    f"expected a tokenizer: {endpoint.value} takes texts, and the trace has none"
                )
        fields = endpoint.body(model, prompt, arrival.num_output_tokens, extra or {})
        planned.append(
            PlannedRequest(
                arrival.time_s,
                json.dumps(fields).encode(),
                arrival.num_prompt_tokens,
                arrival.num_output_tokens,
            )
        )
    return planned
