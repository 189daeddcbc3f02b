"""On devices that compile every shape, few routes serve all requests, and give each its own token."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from hpu_duo.sampling import (
    PenaltyState,
    SamplingBatch,
    SamplingParams,
    SamplingRoute,
    SamplingRow,
    sample,
    static_route,
    static_routes,
)

torch.set_num_threads(1)
V, N, MAX_LEN = 50, 4, 40


def random_row(rng: random.Random) -> SamplingRow | None:
    changes: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": rng.randint(0, 8)},
        {"temperature": 0, "repetition_penalty": 1.5},
        {"top_k": rng.randint(1, 12)},
        {"top_p": 0.7},
        {"min_p": 0.1, "logprobs": rng.randint(0, 8)},
        {"presence_penalty": 0.4, "frequency_penalty": 0.2, "top_k": 9, "top_p": 0.9},
        {"logit_bias": {3: 2.0, 9: -1.0}, "min_tokens": 50, "max_tokens": 60, "stop_token_ids": [7]},
    ]
    if rng.random() < 0.2:
        return None
    params = SamplingParams(**rng.choice(changes))
    output = [rng.randrange(V) for _ in range(rng.randrange(MAX_LEN - 3))]
    history = PenaltyState.from_token_ids(params, [1, 2], output)
    return SamplingRow(params, rng.randrange(99), len(output), history, (0,))


@pytest.mark.parametrize("seed", range(60))
def test_a_wider_route_gives_the_same_tokens_and_logprobs(seed: int) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng) for _ in range(N)]
    logits = torch.randn(N, V, generator=torch.Generator().manual_seed(seed)) * 3
    narrow = SamplingBatch.build(rows, V)
    wide = SamplingBatch.build(rows, V, is_static=True)
    got, expected = sample(logits, wide), sample(logits, narrow)
    for index, row in enumerate(rows):
        if row is not None:
            assert got.token_ids[index] == expected.token_ids[index]
    assert (got.logprobs is None) == (expected.logprobs is None)
    if got.logprobs is not None and expected.logprobs is not None:
        width = narrow.route.num_logprobs
        assert got.logprobs.top_ids[:, :width].equal(expected.logprobs.top_ids)
        assert got.logprobs.top[:, :width].equal(expected.logprobs.top)
    assert wide.route in set(static_routes(N, V, MAX_LEN)) | set(_with_logprobs())


def _with_logprobs() -> list[SamplingRoute]:
    """Logprobs with longer lists: the same operators as those of two routes that are warmed up."""
    return [
        static_route(SamplingRoute(N, V, num_seen=route.num_seen, num_logprobs=8))
        for route in static_routes(N, V, MAX_LEN)
    ]


def test_plainly_greedy_rows_keep_the_shortest_route() -> None:
    rows = [SamplingRow(SamplingParams(temperature=0)), None]
    assert SamplingBatch.build(rows, V, is_static=True).route == SamplingRoute(2, V)


@pytest.mark.parametrize(("num_rows", "max_len", "most"), [(1, 40, 4), (256, 131072, 14)])
def test_the_number_of_routes_grows_with_the_logarithm_of_the_tokens(
    num_rows: int, max_len: int, most: int
) -> None:
    routes = list(static_routes(num_rows, 128256, max_len))
    assert len(set(routes)) == len(routes) <= most


def test_padding_takes_the_route_it_is_asked_for() -> None:
    for route in static_routes(3, V, MAX_LEN):
        batch = SamplingBatch.padding(route)
        assert batch.route == route
        tokens = sample(torch.randn(3, V), batch)
        assert ((tokens.token_ids >= 0) & (tokens.token_ids < V)).all()
