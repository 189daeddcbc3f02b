"""Rows of logits: whose they are, their token history, and the tokens they may sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpu_duo.sampling.params import HostChoice, SamplingParams

if TYPE_CHECKING:
    from hpu_duo.sampling.guidance import GrammarState


class TokenCounts(NamedTuple):
    """The distinct tokens of one request and how often each occurs in its output.

    Attributes:
        token_ids: int32 [M].
        codes: float32 [M], exact integers: ``2 * occurrences in the output + 1``.
    """

    token_ids: npt.NDArray[np.int32]
    codes: npt.NDArray[np.float32]

    def behind(self, token_id: int) -> TokenCounts:
        """Return the counts after one more generated token; these stay as they are."""
        token_ids, codes = self.token_ids, self.codes.copy()
        places = np.flatnonzero(token_ids == token_id)
        if not len(places):
            token_ids, codes = np.append(token_ids, np.int32(token_id)), np.append(codes, np.float32(1))
        codes[places if len(places) else -1] += 2.0
        return TokenCounts(token_ids, codes)


@dataclass
class PenaltyState:
    """The distinct tokens of one request and how often each occurs in its output.

    Owned by the request and changed only by ``append``, in constant time. It is a function of the token ids
    alone, so ``from_token_ids`` returns the same state.

    A token's code is ``2 * (occurrences in the output) + 1``; a token never seen has code 0. So one number
    per token encodes both "was seen" (repetition) and "how often was it generated" (presence, frequency).
    """

    _size: int = 0
    _token_ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(16, np.int32))
    _codes: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(16, np.float32))
    _position: dict[int, int] = field(default_factory=dict)

    @classmethod
    def from_token_ids(
        cls, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int] = ()
    ) -> PenaltyState | None:
        """The state after ``output_ids`` were generated, or ``None`` if ``params`` uses no penalty.

        Args:
            prompt_ids: token ids of the prompt; they count only towards the repetition penalty.
            output_ids: token ids generated so far (none for a new request).
        """
        if not params.needs_penalties:
            return None
        state = cls()
        if params.needs_prompt_history:
            state._extend(np.unique(np.asarray(prompt_ids, dtype=np.int32)))
        for token_id in output_ids:
            state.append(int(token_id))
        return state

    def append(self, token_id: int) -> None:
        """Count one generated token."""
        at = self._position.get(token_id)
        if at is None:
            at = self._size
            self._extend(np.array([token_id], dtype=np.int32))
        self._codes[at] += 2.0

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """The distinct tokens seen, int32 [M], in order of first appearance (prompt tokens ascending)."""
        return self._token_ids[: self._size]

    @property
    def codes(self) -> npt.NDArray[np.float32]:
        """float32 [M], exact integers: ``2 * occurrences in the output + 1``."""
        return self._codes[: self._size]

    @property
    def counts(self) -> TokenCounts:
        """Both, valid up to the next ``append``."""
        return TokenCounts(self.token_ids, self.codes)

    def _extend(self, new_ids: npt.NDArray[np.int32]) -> None:
        start, end = self._size, self._size + len(new_ids)
        if end > len(self._token_ids):
            capacity = max(end, 2 * len(self._token_ids))
            self._token_ids = np.concatenate([self.token_ids, np.empty(capacity - start, np.int32)])
            self._codes = np.concatenate([self.codes, np.empty(capacity - start, np.float32)])
        self._token_ids[start:end] = new_ids
        self._codes[start:end] = 1.0
        self._position.update(zip(new_ids.tolist(), range(start, end)))
        self._size = end


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
        choose: samples the token on the host, if set; see ``choose_on_host``.
        grammar: where the output is in its grammar, if that limits this token.
    """

    params: SamplingParams
    seed: int = 0
    num_output_tokens: int = 0
    penalties: PenaltyState | TokenCounts | None = None
    eos_token_ids: Sequence[int] = ()
    choose: HostChoice | None = None
    grammar: GrammarState | None = None


# N logit rows, V vocabulary, W = ceil(V / 32) words of 32 tokens, B bytes of 8

_WORD, _BYTE = 32, 8


def num_words(vocab_size: int) -> int:
    """Return how many words the mask of a row has."""
    return -(-vocab_size // _WORD)


def blank_masks(num_rows: int, vocab_size: int) -> npt.NDArray[np.int32]:
    """Create masks that allow everything, int32 ``[num_rows, W]``."""
    return np.full((num_rows, num_words(vocab_size)), -1, np.int32)


def write_mask(words_W: npt.NDArray[np.int32], row: SamplingRow) -> None:
    """Write the mask of a row that has a grammar.

    Tokens that end a text are left out while ``min_tokens`` or ``ignore_eos`` require it, unless the grammar
    allows no other: then it ends the text.

    Raises:
        ValueError: see ``GrammarState.write_allowed``, or the grammar allows nothing.
    """
    assert row.grammar is not None, "only rows with a grammar have a mask"
    row.grammar.write_allowed(words_W)
    if not words_W.any():
        raise ValueError("structured_outputs: no token of the vocabulary can continue the output")
    params, allowed = row.params, words_W.copy()
    is_short = row.num_output_tokens < params.min_tokens
    ends = set(params.stop_token_ids) if is_short else set[int]()
    if is_short or params.ignore_eos:
        ends.update(row.eos_token_ids)
    for token in ends:
        words_W[token // _WORD] &= ~_BITS[token % _WORD]
    if not words_W.any():
        words_W[:] = allowed


_BITS = (np.uint32(1) << np.arange(_WORD, dtype=np.uint32)).view(np.int32)


def forbid(scores_NV: Tensor, masks_NW: Tensor, forbidden: float) -> Tensor:
    """Set the scores of tokens that are not allowed; others are unchanged, bit for bit.

    Args:
        scores_NV: float32 [N, V].
        masks_NW: int32 [N, W], on the same device.
        forbidden: absorbs every score that is added to it.
    """
    if scores_NV.device.type == "cpu":
        return scores_NV + _addends(masks_NW, scores_NV.shape[1], forbidden)
    return torch.where(forbidden_bits(masks_NW, scores_NV.shape[1]) > 0, forbidden, scores_NV)


def forbidden_bits(masks_NW: Tensor, vocab_size: int) -> Tensor:
    """Return 1 for each token that is not allowed, else 0; int32 [N, V]."""
    place = torch.arange(_WORD, dtype=torch.int32, device=masks_NW.device)
    bits_NWB = torch.bitwise_right_shift(torch.bitwise_not(masks_NW)[:, :, None], place) & 1
    return bits_NWB.view(len(masks_NW), -1)[:, :vocab_size]


def _addends(masks_NW: Tensor, vocab_size: int, forbidden: float) -> Tensor:
    """On a CPU, eight tokens are looked up at a time: several times as fast as a bit for each."""
    codes = torch.arange(256, dtype=torch.int32)
    place = torch.arange(_BYTE, dtype=torch.int32)
    table = torch.where(((codes[:, None] >> place) & 1) > 0, 0.0, forbidden)
    # Little-endian words, like their bits.
    shifts = torch.arange(0, _WORD, _BYTE, dtype=torch.int32)
    bytes_B = ((masks_NW[:, :, None] >> shifts) & 255).view(-1)
    return table.index_select(0, bytes_B).view(len(masks_NW), -1)[:, :vocab_size]
