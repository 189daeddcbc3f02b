"""The host's half of sampling: per-row parameters become one small array and a static route.

Random numbers are a pure function of (seed, draw number). Rows that need more than the device's sampler has
are sampled here, from logits that are copied to the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from hpu_duo.sampling.params import RowError, SamplingParams
from hpu_duo.sampling.rows import (
    FORBIDDEN,
    SamplingRow,
    blank_masks,
    write_mask,
)

if TYPE_CHECKING:
    from torch import Tensor


_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1

# 23 bits, so that the midpoint (k + 0.5) / 2**23 of every cell is exact in float32 and never 0 or 1.
_UNIFORM_BITS = 23


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of uint64 in which every input bit changes about half of the output bits."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    return z ^ (z >> np.uint64(31))


def random_bits(seeds: npt.NDArray[np.uint64], counters: npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    """64 random bits per (seed, counter).

    Args:
        seeds: uint64 [N].
        counters: integer [N], non-negative: the number of the draw within its seed's stream.
    """
    if seeds.dtype != np.uint64:
        raise ValueError(f"seeds: expected dtype uint64, got {seeds.dtype}")
    if seeds.shape != counters.shape:
        raise ValueError(f"counters: expected the shape of seeds {seeds.shape}, got {counters.shape}")
    steps = (counters.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN_GAMMA)
    # The seed is mixed first, since the streams of seeds s and s + gamma would be shifts of each other.
    return _mix(_mix(seeds + np.uint64(_GOLDEN_GAMMA)) + steps)


def uniform(seeds: npt.NDArray[np.uint64], counters: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
    """One uniform number per (seed, counter), in the open interval (0, 1), with a resolution of 2**-23.

    Args:
        seeds: uint64 [N].
        counters: integer [N], non-negative.

    Returns:
        float32 [N], each of the form (k + 0.5) / 2**23, exact.
    """
    cells = random_bits(seeds, counters) >> np.uint64(64 - _UNIFORM_BITS)
    return ((cells.astype(np.float64) + 0.5) * 2.0**-_UNIFORM_BITS).astype(np.float32)


def wrap_seed(seed: int) -> int:
    """Convert any Python integer seed to uint64, negative and large ones included."""
    return seed & _MASK


def derive_seed(base_seed: int, *path: int) -> int:
    """A seed for one branch of a tree of streams, for example ``derive_seed(seed, sample_index)``.

    The order of the path matters, and the seeds of a path's extensions are unrelated to its own.

    Args:
        base_seed: any integer.
        path: indices of the branches to follow from the base, for example (request_index, sample_index).

    Returns:
        An integer in [0, 2**64).
    """
    seed = wrap_seed(base_seed)
    for index in path:
        keyed = np.array([wrap_seed(seed ^ _MIX_2)], dtype=np.uint64)
        seed = int(random_bits(keyed, np.array([wrap_seed(index)], dtype=np.uint64))[0])
    return seed


# Lists are padded to powers of two so that few distinct shapes reach the device.
_MIN_SIZE = 16


class PositionList:
    """Values of (row, token) pairs, gathered row by row.

    Args:
        num_rows: N.
        vocab_size: V, with N * V < 2**31.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._num_positions = num_rows * vocab_size
        self._vocab_size = vocab_size
        self._parts: list[tuple[int, npt.NDArray[np.int32], npt.NDArray[np.float32]]] = []
        self._size = 0

    def add(self, row: int, token_ids: npt.NDArray[np.int32], values: npt.NDArray[np.float32]) -> None:
        """Add the tokens int32 [M] of one row with their values float32 [M].

        Raises:
            ValueError: a token id is not in [0, V); it would silently change a neighbouring row.
        """
        if len(token_ids) == 0:
            return
        # Seen as unsigned, a negative id is too large as well.
        if token_ids.view(np.uint32).max() >= self._vocab_size:
            raise ValueError(
                f"row {row}: expected token ids in [0, {self._vocab_size}), "
                f"got [{token_ids.min()}, {token_ids.max()}]"
            )
        self._parts.append((row, token_ids, values))
        self._size += len(token_ids)

    @property
    def padded_size(self) -> int:
        """Length of the padded lists; 0 if nothing was added."""
        return pad_to_power_of_two(self._size) if self._size else 0

    def write(self, columns: npt.NDArray[np.float32]) -> None:
        """Fill ``columns``, ``[3, padded_size]``: values, rows, tokens.

        Padding has value 0 and distinct places: a device adds colliding ones one after the other.
        """
        values, rows, tokens = columns
        at = 0
        for row, token_ids, part in self._parts:
            end = at + len(token_ids)
            values[at:end], rows[at:end], tokens[at:end] = part, row, token_ids
            at = end
        num_padding = len(values) - at
        distinct = np.arange(min(num_padding, self._num_positions), dtype=np.int32)
        values[at:] = 0.0
        rows[at:], tokens[at:] = np.divmod(np.resize(distinct, num_padding), np.int32(self._vocab_size))


def pad_to_power_of_two(size: int) -> int:
    """The smallest power of two of at least ``size`` and 16."""
    return max(_MIN_SIZE, 1 << (size - 1).bit_length())


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
    """Whether the row needs only an argmax over the raw logits."""
    if row is None:
        return True
    params = row.params
    return params.is_plain_greedy and row.num_output_tokens >= params.min_tokens and row.grammar is None


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

#: Rows and tokens are copied as float32, which is exact for integers up to this one.
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


def choose_on_host(
    host_sampled: Mapping[int, SamplingRow], logits_NV: Tensor
) -> tuple[dict[int, int], dict[int, Exception]]:
    """Return the host's choices, and the errors of rows without one, by index of the row.

    Args:
        host_sampled: rows with ``SamplingRow.choose``, by index.
        logits_NV: float [N, V] on the host.
    """
    vocab_size = logits_NV.shape[1]
    chosen, errors = dict[int, int](), dict[int, Exception]()
    for index, row in host_sampled.items():
        assert row.choose is not None, "only rows with a host sampler are host_sampled"
        draw = uniform(np.array([wrap_seed(row.seed)], np.uint64), np.array([row.num_output_tokens]))
        try:
            token = row.choose(logits_NV[index], float(draw[0]))
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"expected a host sampler to choose a token in [0, {vocab_size}), got {token}"
                )
            chosen[index] = token
        except Exception as error:
            errors[index] = error
    return chosen, errors
