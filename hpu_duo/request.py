"""One sequence being generated: its tokens, limits and KV allocation, and the prefix that it begins with."""

from __future__ import annotations

import reprlib
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

if TYPE_CHECKING:
    from hpu_duo.sampling.params import SamplingParams

_now = time.monotonic


class PrefixHold:
    """A pinned prefix, which stays cached as long as it has references.

    It refers to a node of the tree, not to blocks, whose ids may change.

    Attributes:
        tokens: int32, whole blocks of them.
        num_blocks: blocks of the prefix.
        namespace: see ``Request.namespace``.
        node: the ``PrefixNode`` at its end; None before it is cached, and after it is released or lost.
        refusal: the reason why it did not get there, None without one.
        num_holders: references, of its owner and of the requests that begin with it; the last one releases
            it.
        num_requests: unfinished requests that begin with it.
        last_used: when one ended, or its owner asked for it, in seconds of ``time.monotonic``.
    """

    def __init__(self, tokens: npt.NDArray[np.int32], block_size: int, namespace: Hashable) -> None:
        self.num_blocks = len(tokens) // block_size
        self.tokens, self.namespace = tokens[: self.num_blocks * block_size].copy(), namespace
        self.node: Any = None
        self.refusal: str | None = None
        self.num_holders, self.num_requests = 1, 0
        self.touch()

    def touch(self) -> None:
        """Note a use."""
        self.last_used = _now()

    @property
    def idle_for(self) -> float:
        """Seconds since its last use."""
        return _now() - self.last_used

    @property
    def is_there(self) -> bool:
        """Whether the prefix is cached, and will be."""
        return self.node is not None

    @property
    def is_lost(self) -> bool:
        """Whether it is neither released nor cached: the cache was cleared, or nobody used it for a while."""
        return self.num_blocks > 0 and self.num_holders > 0 and self.node is None

    def check(self, name: str, prompt: npt.NDArray[np.int32], namespace: Hashable) -> None:
        """Raise ValueError unless a request of this name, prompt and namespace can begin with it."""
        if self.num_holders < 1:
            raise ValueError(f"{name}: expected an open context, got a closed one")
        size = len(self.tokens)
        is_prefix = np.array_equal(prompt[:size], self.tokens)
        if not is_prefix or namespace != self.namespace:
            raise ValueError(
                f"{name}: expected a prompt that begins with the {size} tokens of its context, under "
                "its cache_salt, got another one"
            )


NO_ROW = NO_REGION = -1
_MAX_TOKEN_ID = int(np.iinfo(np.int32).max)


class RequestStatus(Enum):
    """State of a request.

    ``WAITING``: queued. ``FOLLOWING``: waits for its parent's prompt, to fork its cache. ``RUNNING``: has a
    row. ``MOVING``: has a row, and leaves to host memory or comes back. ``FINISHED``: has a finish reason and
    no allocation.
    """

    WAITING = "waiting"
    FOLLOWING = "following"
    RUNNING = "running"
    MOVING = "moving"
    FINISHED = "finished"


class FinishReason(str, Enum):
    """Why a request ended; the values are those of the OpenAI API, plus ``abort`` and ``error``."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class TokenLimits:
    """Limits of tokens that the model sets, not the caller.

    Attributes:
        max_model_len: tokens of prompt and output together that the model may see.
        eos_token_ids: tokens that end a text.
        vocab_size: prompt tokens must lie below it; None checks only that they are int32 and not negative.
    """

    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    vocab_size: int | None = None


class Request:
    """One sequence: a prompt, the tokens sampled for it so far, and its allocation in the KV stores.

    A request is data with one writer per part: the scheduler moves it along (``status``, ``arrival``,
    ``admitted_at``, ``num_tokens_when_admitted``, ``num_computed_tokens``, ``num_cached_tokens``, ``stops``,
    ``append``), ``KVAllocations`` writes ``row``, ``region``, ``block_table`` and ``num_blocks``.

    Attributes:
        tokens: int32 ``[capacity]``; prompt, then outputs, valid up to ``num_tokens``; then drafts of the
            next tokens: ``num_drafts`` forced ones, or during a step those of a drafter.
        num_prompt_tokens, num_tokens: tokens of the prompt; of prompt and outputs.
        num_computed_tokens: leading tokens whose keys and values are in the cache.
        num_cached_tokens: leading tokens that hit the prefix cache at the first admission; None before.
        score: place in a learned ranking, lower for shorter outputs; only its order means something.
        context, opens: the pinned prefix that it begins with, and the one that its prompt becomes; None =
            none.
        stops: positions at which chunks end, ascending.
        arrival: rank in order of arrival; -1 until the scheduler has it.
        admitted_at: first admission, by ``time.perf_counter``; None before.
        num_tokens_when_admitted: ``num_tokens`` at the last admission.
        row: ring row, ``NO_ROW`` unless running.
        region: of a prompt that is stored whole until computed, else ``NO_REGION``.
        block_table: int32; entries ``len(host_blocks)`` to ``num_blocks`` are valid.
        host_blocks: blocks in host memory, which are its leading ones; see ``hpu_duo.kv.host_blocks``.
        stop_tokens: tokens that end the output once ``min_tokens`` have been sampled.
        parent, sample_index: for the samples of one prompt: sample 0, which is the parent of all others.

    Args:
        request_id: unique among unfinished requests.
        prompt_token_ids: at least one token.
        params: only ``max_tokens`` (None is up to ``max_model_len``), ``min_tokens``, ``ignore_eos`` and
            ``stop_token_ids`` are read here.
        limits: the model's limits.
        sampling_seed: seed of this sequence's random numbers.
        name: of the request in error messages; None is its id.

    Raises:
        ValueError: the prompt is empty, has a token outside the vocabulary, or leaves too few positions for a
            token or for all forced ones.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | NDArray[np.int32],
        params: SamplingParams,
        limits: TokenLimits,
        *,
        sampling_seed: int = 0,
        name: str | None = None,
    ) -> None:
        self.name = f"request {request_id!r}" if name is None else name
        prompt = _checked_prompt(self.name, prompt_token_ids, limits)
        room = limits.max_model_len - len(prompt)
        max_new = room if params.max_tokens is None else min(params.max_tokens, room)
        if len(params.forced_token_ids) > max_new:
            raise ValueError(
                f"{self.name} has {len(prompt)} prompt tokens and {len(params.forced_token_ids)} "
                f"forced ones, expected at most max_model_len={limits.max_model_len} together"
            )

        self.request_id = request_id
        self.params = params
        self.limits = limits
        self.sampling_seed = sampling_seed
        self.parent: Request | None = None
        self.sample_index = 0

        self.tokens = np.zeros(len(prompt) + max_new, dtype=np.int32)
        self.tokens[: len(prompt)] = prompt
        self.num_prompt_tokens = len(prompt)
        self.num_tokens = len(prompt)
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None
        self.score = 0.0
        self.context: PrefixHold | None = None
        self.opens: PrefixHold | None = None
        self.stops: tuple[int, ...] = ()

        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.arrival = -1
        self.admitted_at: float | None = None
        self.num_tokens_when_admitted = 0

        self.row, self.region = NO_ROW, NO_REGION
        self.block_table = np.zeros(0, dtype=np.int32)
        self.num_blocks = 0
        self.host_blocks: list[int] = []

        stop_tokens = frozenset(params.stop_token_ids)
        num_forced = len(params.forced_token_ids)
        self.tokens[len(prompt) : len(prompt) + num_forced] = params.forced_token_ids
        self._num_prefilled = max(0, len(prompt) - params.decoded_prompt_tokens)
        self.stop_tokens = stop_tokens if params.ignore_eos else stop_tokens | limits.eos_token_ids

    def sibling(
        self,
        request_id: str,
        *,
        sample_index: int,
        sampling_seed: int,
        params: SamplingParams | None = None,
    ) -> Request:
        """Create another sample of the same prompt, with this request as its parent.

        Args:
            params: default the parent's.

        Raises:
            ValueError: this request is itself a sibling, or ``sample_index`` is below 1.
        """
        if self.parent is not None:
            raise ValueError(
                f"expected sample 0 to create further ones from, {self.request_id!r} is {self.sample_index}"
            )
        if sample_index < 1:
            raise ValueError(f"sample_index of a sibling must be 1 or more, got {sample_index}")
        child = Request(
            request_id,
            self.prompt_token_ids,
            self.params if params is None else params,
            self.limits,
            sampling_seed=sampling_seed,
            name=self.name,
        )
        child.parent, child.sample_index = self, sample_index
        return child

    def begin_running(self) -> None:
        """Note that it has a row, and when it got its first one."""
        self.status = RequestStatus.RUNNING
        self.num_tokens_when_admitted = self.num_tokens
        if self.admitted_at is None:
            self.admitted_at = time.perf_counter()

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text of this model."""
        return self.limits.eos_token_ids

    @property
    def max_cached_tokens(self) -> int:
        """The most tokens that ever lie in the cache: the last one a request may sample is never computed."""
        return len(self.tokens) - 1

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far; also the index of the next one."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens that are not in the cache yet: 1 for a decode, more for a prompt or a resumption."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def namespace(self) -> Hashable:
        """Namespace of the prefix cache: keys and values are shared within it only."""
        return self.params.cache_salt

    @property
    def num_reusable_tokens(self) -> int:
        """Leading tokens that may hit the cache: the last known token is always computed."""
        if self.params.decoded_prompt_tokens:
            return min(self._num_prefilled, self.num_tokens - 1)
        return self.num_tokens - 1

    @property
    def prompt_token_ids(self) -> NDArray[np.int32]:
        """The prompt, a view."""
        return self.tokens[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> NDArray[np.int32]:
        """The tokens sampled so far, a view."""
        return self.tokens[self.num_prompt_tokens : self.num_tokens]

    @property
    def num_drafts(self) -> int:
        """Drafts: forced tokens after the known ones, which will be sampled next.

        The last forced token is not counted: no token after it is known.
        """
        if self.params.host_sampler is not None:
            return 0
        return max(0, len(self.params.forced_token_ids) - self.num_output_tokens - 1)

    @property
    def takes_drafts(self) -> bool:
        """Whether a drafter may ever propose tokens for it."""
        params = self.params
        num_left = len(self.tokens) - self.num_prompt_tokens - len(params.forced_token_ids)
        return bool(params.speculate) and params.host_sampler is None and num_left > 1

    @property
    def most_drafts(self) -> int:
        """Most drafts of a drafter behind the known tokens: none while forced tokens are left.

        The last token that a request may sample is sampled behind the last draft.
        """
        params = self.params
        if params.host_sampler is not None or self.num_output_tokens < len(params.forced_token_ids):
            return 0
        most = len(self.tokens) - self.num_tokens - 1
        return most if params.speculate is True else min(most, int(params.speculate))

    @property
    def num_prefilled_tokens(self) -> int:
        """Tokens of the prompt that are computed as a prompt; the others are decoded."""
        return self._num_prefilled

    def num_chunk_tokens(self, grid: int, start: int, last: int = 0) -> int:
        """Return the tokens that a step computes on a grid of chunks: a whole chunk or a decode.

        Args:
            grid: positions between the ends of chunks.
            start: tokens that are in the cache.
            last: fewest tokens of the last of several chunks, below ``grid``.
        """
        if start >= self._num_prefilled:
            return 1
        left, num_new = self._num_prefilled - start, grid - start % grid
        return left if left <= max(num_new, last) else min(num_new, left - last)

    def num_next_tokens(self, decode_len: int = 1, start: int | None = None) -> int:
        """Return the most tokens that the next step may compute: the rest of the prefill, or of a decode.

        Args:
            decode_len: most tokens that are decoded in a step, drafts included.
            start: tokens that are in the cache; None = ``num_computed_tokens``.
        """
        if start is None:
            start = self.num_computed_tokens
        num_left = self._num_prefilled - start
        if not self.params.decoded_prompt_tokens:
            num_left = self.num_tokens - start
            # A prompt of one token, or the last token of one, is decoded.
            if num_left == 1:
                num_left = 0
        if num_left > 0:
            return num_left
        # Drafts are looked for in every step of every request, and matter only to more than one token.
        return 1 if decode_len == 1 else min(decode_len, self.num_tokens - start + self.num_drafts)

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return self.status is RequestStatus.FINISHED

    def append(self, token: int) -> FinishReason | None:
        """Add a sampled token; returns the reason if it ends the request.

        A stop token ends it once ``min_tokens`` tokens have been sampled, this one included. The token
        itself stays in the outputs.

        Raises:
            ValueError: the request has all the tokens it may have.
        """
        if self.num_tokens == len(self.tokens):
            raise ValueError(f"request {self.request_id!r} already has all of its {len(self.tokens)} tokens")
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1
        if token in self.stop_tokens and self.num_output_tokens >= self.params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_tokens == len(self.tokens) else None

    @property
    def device_table(self) -> np.ndarray:
        """The part of ``block_table`` with blocks of the device."""
        return self.block_table[len(self.host_blocks) : self.num_blocks]

    def reserve_block_table(self, num_blocks: int) -> None:
        """Grow ``block_table`` to ``num_blocks`` entries."""
        if num_blocks > len(self.block_table):
            table = np.zeros(num_blocks, dtype=np.int32)
            table[: len(self.block_table)] = self.block_table
            self.block_table = table

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, {self.num_prompt_tokens} + "
            f"{self.num_output_tokens} tokens, {self.num_computed_tokens} computed)"
        )


def token_array(name: str, tokens: Sequence[int] | NDArray[np.int32]) -> np.ndarray:
    """Convert tokens to an array of any dtype and shape.

    Raises:
        ValueError: they are lists of different lengths.
    """
    try:
        return np.asarray(tokens)
    except ValueError:
        raise ValueError(f"{name}: expected a flat list of token ids, got {reprlib.repr(tokens)}") from None


def _checked_prompt(
    name: str, prompt_token_ids: Sequence[int] | NDArray[np.int32], limits: TokenLimits
) -> NDArray[np.int64]:
    prompt = token_array(name, prompt_token_ids)
    if prompt.ndim != 1 or prompt.size == 0:
        raise ValueError(f"{name} needs at least one prompt token, got shape {prompt.shape}")
    if prompt.dtype.kind not in "iu":
        raise ValueError(f"{name} needs integer prompt tokens, got {prompt.dtype}")
    if len(prompt) >= limits.max_model_len:
        raise ValueError(
            f"{name} has {len(prompt)} prompt tokens, at most {limits.max_model_len - 1} "
            f"leave room for an output token in max_model_len={limits.max_model_len}"
        )
    largest = _MAX_TOKEN_ID if limits.vocab_size is None else limits.vocab_size - 1
    if prompt.min() < 0 or prompt.max() > largest:
        raise ValueError(
            f"{name} has prompt tokens from {prompt.min()} to {prompt.max()}, expected 0 to {largest}"
        )
    return prompt
