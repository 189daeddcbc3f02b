"""Routes: which operations sample a batch, and with which shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from hpu_duo.sampling.rows import RowTensors

_MIN_STATIC_LIST = 64
_MIN_STATIC_LOGPROBS = 8


@dataclass(frozen=True, order=True)
class SamplingRoute:
    """Everything about a batch that decides which operations run, and with which shapes.

    Two batches of equal route run the same captured graph. The other rows of a batch may change its route,
    and with it the work, but never a row's token.

    Attributes:
        num_rows: N, rows with a request or not.
        vocab_size: V.
        has_random: some row draws; otherwise every token is an argmax.
        num_edits: padded number of addends to logits: logit bias, tokens forbidden by min_tokens, forced
            tokens.
        num_seen: padded number of (token, code) pairs of all penalty histories.
        topk_width: k of the one top-k selection; 0 when no row needs it or ``has_sort``.
        has_sort: a full sort is needed: some row has top_p, or a k above ``MAX_TOPK_WIDTH``.
        has_min_p: some row has min_p.
        num_logprobs: -1 for none, else the padded number of top logprobs (0: the sampled token's only).
        has_masks: some row may sample certain tokens only.
    """

    num_rows: int
    vocab_size: int
    has_random: bool = False
    num_edits: int = 0
    num_seen: int = 0
    topk_width: int = 0
    has_sort: bool = False
    has_min_p: bool = False
    num_logprobs: int = -1
    has_masks: bool = False

    @cached_property
    def has_row_values(self) -> bool:
        """Whether the per-row parameters are needed on the device."""
        return self.has_random or self.num_seen > 0

    @cached_property
    def num_row_floats(self) -> int:
        """Number of per-row values at the start of ``SamplingBatch.floats``."""
        return len(RowTensors._fields) * self.num_rows if self.has_row_values else 0

    @cached_property
    def num_floats(self) -> int:
        """Length of ``SamplingBatch.floats``."""
        return self.num_row_floats + 3 * (self.num_edits + self.num_seen)


def static_route(route: SamplingRoute) -> SamplingRoute:
    """Widen a route to one of few routes that do all it does, and more.

    There are two kinds of routes: every row plainly greedy, and all filters at once. A filter that a row
    does not use leaves its logits as they are, so its token is the same. Sizes of lists are 64 times a power
    of four, and the number of reported logprobs, if any, doubles from eight.
    """
    if route == SamplingRoute(route.num_rows, route.vocab_size):
        return route
    size = _MIN_STATIC_LIST
    while size < max(route.num_edits, route.num_seen):
        size *= 4
    num_logprobs = route.num_logprobs
    if num_logprobs >= 0:
        num_logprobs = min(max(num_logprobs, _MIN_STATIC_LOGPROBS), route.vocab_size)
    return replace(
        route,
        has_random=True,
        num_edits=size,
        num_seen=size,
        topk_width=0,
        has_sort=True,
        has_min_p=True,
        num_logprobs=num_logprobs,
    )


def static_routes(num_rows: int, vocab_size: int, max_len: int) -> Iterator[SamplingRoute]:
    """The routes to warm up for ``num_rows`` rows: those of requests of up to ``max_len`` tokens.

    Longer lists of edits than ``num_rows * max_len``, and more than eight logprobs, are left out. So are
    logprobs and masks with longer lists: their operators are those of other routes here.
    """
    plain = SamplingRoute(num_rows, vocab_size)
    yield plain
    longest = static_route(replace(plain, num_seen=num_rows * min(max_len, vocab_size))).num_seen
    size = _MIN_STATIC_LIST
    while size <= longest:
        yield static_route(replace(plain, num_seen=size))
        size *= 4
    yield static_route(replace(plain, num_logprobs=0))
    yield static_route(replace(plain, has_masks=True))
