"""The host's half of sampling: per-row parameters become one small array and a static route."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from hpu_duo.sampling.params import RowError
from hpu_duo.sampling.rng import PositionList, pad_to_power_of_two, uniform, wrap_seed
from hpu_duo.sampling.rows import (
    FORBIDDEN,
    RowTensors,
    RowValues,
    SamplingRow,
    blank_masks,
    is_plain,
    row_values,
    write_mask,
)

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


#: Added to the logit of a forced token. Finite, as ``FORBIDDEN`` is, also after division by the smallest
#: temperature, and above any other logit after any penalty.
REQUIRED = 1e30

#: Rows and tokens travel as float32, which holds all integers up to this one.
MOST_EXACT = 2**24

#: Above this k a full sort is used for top-k as well.
MAX_TOPK_WIDTH = 1024


@dataclass(frozen=True)
class SamplingBatch:
    """One step's sampling parameters, ready for one host-to-device copy, or two with masks.

    Attributes:
        route: the static part.
        floats: float32 [route.num_floats]: the fields of ``RowTensors`` one after the other (only if
            ``route.has_row_values``), then addends, rows and tokens of the edits, then codes, rows and tokens
            of the seen tokens. Padding has addend or code 0, which changes nothing.
        masks: which tokens each row may sample, int32 [route.num_rows, num_words(route.vocab_size)]; None
            without ``route.has_masks``.
    """

    route: SamplingRoute
    floats: npt.NDArray[np.float32]
    masks: npt.NDArray[np.int32] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that go to the device."""
        return self.floats.nbytes + (0 if self.masks is None else self.masks.nbytes)

    @classmethod
    def build(
        cls, rows: Sequence[SamplingRow | None], vocab_size: int, *, is_static: bool = False
    ) -> SamplingBatch:
        """Gather the rows of one step.

        Args:
            rows: one entry per logit row, in the order of the logits; ``None`` for a row without request.
            vocab_size: V, the width of the logits.
            is_static: widen the route to one of few, for devices that compile each; see ``static_route``.

        Raises:
            RowError: a row lacks its history or names a token outside the vocabulary.
            ValueError: ``len(rows) * vocab_size`` does not fit in int32, or the vocabulary not in float32.
        """
        num_rows = len(rows)
        if num_rows * vocab_size >= 2**31:
            raise ValueError(f"expected fewer than 2**31 logits, got {num_rows} rows of {vocab_size}")
        if max(num_rows, vocab_size) > MOST_EXACT:
            raise ValueError(
                f"expected at most {MOST_EXACT} rows and tokens, got {num_rows} rows of {vocab_size}"
            )
        if all(map(is_plain, rows)):
            return _greedy_batch(num_rows, vocab_size)
        edits, seen = PositionList(num_rows, vocab_size), PositionList(num_rows, vocab_size)
        values = [_NO_REQUEST] * num_rows
        has_masks = any(row is not None and row.grammar is not None for row in rows)
        masks = blank_masks(num_rows, vocab_size) if has_masks else None
        for index, row in enumerate(rows):
            if row is not None:
                try:
                    _collect_edits(edits, index, row)
                    if row.params.needs_penalties:
                        _collect_seen(seen, index, row)
                    values[index] = row_values(row.params, vocab_size)
                    if masks is not None and row.grammar is not None:
                        write_mask(masks[index], row)
                except Exception as error:
                    raise RowError(index, error) from error
        route = _choose_route(rows, values, vocab_size, edits.padded_size, seen.padded_size, has_masks)
        if is_static:
            route = static_route(route)
        floats = np.empty(route.num_floats, np.float32)
        if route.has_row_values:
            block = floats[: route.num_row_floats].reshape(len(RowTensors._fields), num_rows)
            block[:-1] = np.array(values, dtype=np.float32).T
            block[-1] = _draw(rows)
        lists = floats[route.num_row_floats :]
        if route.num_edits:
            edits.write(lists[: 3 * route.num_edits].reshape(3, -1))
        if route.num_seen:
            seen.write(lists[3 * route.num_edits :].reshape(3, -1))
        return cls(route, floats, masks)

    @classmethod
    def padding(cls, route: SamplingRoute) -> SamplingBatch:
        """Return a batch without requests for a given route, to warm it up."""
        floats = np.zeros(route.num_floats, np.float32)
        if route.has_row_values:
            block = floats[: route.num_row_floats].reshape(len(RowTensors._fields), route.num_rows)
            block[:-1] = np.array(_NO_REQUEST, dtype=np.float32)[:, None]
            block[-1] = 0.5
        masks = blank_masks(route.num_rows, route.vocab_size) if route.has_masks else None
        return cls(route, floats, masks)


_NO_REQUEST = RowValues()


@lru_cache(maxsize=256)
def _greedy_batch(num_rows: int, vocab_size: int) -> SamplingBatch:
    floats = np.empty(0, np.float32)
    floats.setflags(write=False)
    return SamplingBatch(SamplingRoute(num_rows, vocab_size), floats)


def _draw(rows: Sequence[SamplingRow | None]) -> npt.NDArray[np.float32]:
    seeds = np.array([0 if row is None else wrap_seed(row.seed) for row in rows], dtype=np.uint64)
    counters = np.array([0 if row is None else row.num_output_tokens for row in rows], dtype=np.int64)
    return uniform(seeds, counters)


def _choose_route(
    rows: Sequence[SamplingRow | None],
    values: Sequence[RowValues],
    vocab_size: int,
    num_edits: int,
    num_seen: int,
    has_masks: bool,
) -> SamplingRoute:
    max_k = int(max(value.top_k for value in values))
    has_sort = max_k > MAX_TOPK_WIDTH or any(value.top_p < 1.0 for value in values)
    topk_width = 0 if has_sort or max_k == 0 else min(pad_to_power_of_two(max_k), vocab_size)
    num_logprobs = max(
        (-1 if row is None or row.params.logprobs is None else row.params.logprobs) for row in rows
    )
    if num_logprobs > 0:
        num_logprobs = min(1 << (num_logprobs - 1).bit_length(), vocab_size)
    return SamplingRoute(
        num_rows=len(rows),
        vocab_size=vocab_size,
        has_random=any(value.is_greedy == 0.0 for value in values),
        num_edits=num_edits,
        num_seen=num_seen,
        topk_width=topk_width,
        has_sort=has_sort,
        has_min_p=any(value.log_min_p > FORBIDDEN for value in values),
        num_logprobs=num_logprobs,
        has_masks=has_masks,
    )


def _collect_edits(edits: PositionList, index: int, row: SamplingRow) -> None:
    params = row.params
    if row.num_output_tokens < len(params.forced_token_ids):
        forced = np.array([params.forced_token_ids[row.num_output_tokens]], dtype=np.int32)
        edits.add(index, forced, np.array([REQUIRED], np.float32))
        return
    if params.logit_bias:
        edits.add(index, *params.bias_arrays)
    # A grammar's mask has left them out already, where it can do without.
    if row.num_output_tokens < params.min_tokens and row.grammar is None:
        forbidden = set(params.stop_token_ids)
        if not params.ignore_eos:
            forbidden.update(row.eos_token_ids)
        token_ids = np.array(sorted(forbidden), dtype=np.int32)
        edits.add(index, token_ids, np.full(len(token_ids), FORBIDDEN, np.float32))


def _collect_seen(seen: PositionList, index: int, row: SamplingRow) -> None:
    if row.penalties is None:
        raise ValueError("expected a PenaltyState for a request with penalties, got None")
    seen.add(index, row.penalties.token_ids, row.penalties.codes)
