"""Drafts from suffixes: the likeliest continuation of the last tokens, by how often each one has followed."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hpu_duo.drafting.drafter import Drafter
from hpu_duo.drafting.text_index import TextIndex
from hpu_duo.request import Request

_GRAM = 2
_MOST_MATCHES = 16
_MOST_LENGTHS = 3
_SEPARATOR = -1
_FEWEST_TOKENS, _MOST_TOKENS = 1 << 10, 1 << 18
"""Tokens of the outputs of a namespace that are stored, at first and at most."""
_TOKEN_BYTES = 16


class SuffixOptions(NamedTuple):
    """Options of suffix decoding, with vLLM's names and defaults but for their prefix.

    Attributes:
        max_tree_depth: most tokens of a match.
        max_cached_requests: earlier outputs that are stored in each namespace; 0 = none.
        max_spec_factor: most drafts for each token of the match.
        min_token_prob: a draft ends before a token whose probability, with that of all tokens before it, is
            lower.
    """

    max_tree_depth: int = 24
    max_cached_requests: int = 10_000
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1


class EarlierOutputs:
    """The outputs of ended requests of one namespace: a window of the last tokens of all of them.

    Args:
        most_outputs: outputs to store.
        most_tokens: tokens to store.
    """

    def __init__(self, most_outputs: int, most_tokens: int) -> None:
        self._most_outputs, self._most_tokens = most_outputs, most_tokens
        self._begins: deque[int] = deque()
        self._restart(_FEWEST_TOKENS)

    def _restart(self, size: int) -> None:
        self._tokens = np.full(min(size, self._most_tokens), _SEPARATOR, np.int32)
        self.index = TextIndex(self._tokens, _GRAM)
        self._begins.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes of tokens and index."""
        return self._tokens.nbytes + self.index.num_bytes

    def add(self, output: npt.NDArray[np.int32]) -> None:
        """Store an output; the oldest ones are dropped for it."""
        output = output[-(self._most_tokens // 2) :]
        num_new, size = len(output) + 1, len(self._tokens)
        end = self.index.num_indexed
        if end + num_new > size and size < self._most_tokens:
            # It has not begun to overwrite its oldest tokens, so they are in order.
            known, begins = self._tokens[:end], list(self._begins)
            while size < end + num_new:
                size *= 2
            self._restart(size)
            kept = known[-len(self._tokens) :]
            self._tokens[: len(kept)] = kept
            self.index.extend(len(kept))
            self._begins.extend(begin for begin in begins if begin >= end - len(kept))
            end, size = self.index.num_indexed, len(self._tokens)
        elif end + num_new >= np.iinfo(np.int32).max:
            self._restart(size)
            end = 0
        places = np.arange(end, end + num_new) % size
        self._tokens[places[:-1]], self._tokens[places[-1]] = output, _SEPARATOR
        self._begins.append(end)
        self.index.extend(end + num_new)
        while self._begins and (
            len(self._begins) > self._most_outputs or self._begins[0] < self.index.oldest
        ):
            self._begins.popleft()
            if self._begins:
                self.index.oldest = max(self.index.oldest, self._begins[0])


class SuffixDrafter(Drafter):
    """Proposes the likeliest continuation of the last tokens in the request's text and in earlier outputs.

    For the longest matches of the last tokens, the token that has followed most often is taken, and so on,
    each among the matches that agree with it. Of the drafts of several lengths of matches, and of both texts,
    the one with the most expected tokens is proposed. Earlier outputs are those of the same ``cache_salt``.

    Source: SuffixDecoding, arXiv:2411.04975. In place of suffix trees, the latest matches are found by a hash
    chain, which takes 12 bytes a token.

    Args:
        options: see there.
        num_drafts: most tokens to propose.
        most_bytes: of earlier outputs of all namespaces; the oldest namespaces are dropped for others.
    """

    def __init__(self, options: SuffixOptions, num_drafts: int, most_bytes: int = 64 << 20) -> None:
        self._options, self._num_drafts, self._most_bytes = options, num_drafts, most_bytes
        self._index_of: dict[Request, TextIndex] = {}
        self._earlier: OrderedDict[Hashable, EarlierOutputs] = OrderedDict()
        self._earlier_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all indices, and of earlier outputs."""
        own = sum(index.num_bytes for index in self._index_of.values())
        return own + self._earlier_bytes

    def begin(self, request: Request) -> None:
        """Create the index of a request."""
        self._index_of[request] = TextIndex(request.tokens, _GRAM, request.num_prompt_tokens)

    def extend(self, request: Request, tokens: npt.NDArray[np.int32]) -> None:
        """Index further tokens."""
        index = self._index_of[request]
        index.extend(index.num_indexed + len(tokens))

    def propose(self, request: Request, most: int) -> Sequence[int] | npt.NDArray[np.integer]:
        """Return the draft with the most expected tokens."""
        num_tokens = request.num_tokens
        end = request.tokens[max(0, num_tokens - self._options.max_tree_depth) : num_tokens]
        most = min(most, self._num_drafts)
        best, expected = self._best(self._index_of[request], end, most)
        if expected < most and (earlier := self._earlier.get(request.namespace)) is not None:
            other, others = self._best(earlier.index, end, most)
            if others > expected:
                return other
        return best

    def _best(self, index: TextIndex, end: npt.NDArray[np.int32], most: int) -> tuple[list[int], float]:
        """The best draft of one text, and its expected tokens."""
        found = index.find(end, _MOST_MATCHES)
        if found is None:
            return [], 0.0
        best, expected = list[int](), 0.0
        rows = index.following(found.places, most).tolist()
        lengths = found.lengths.tolist()
        for length in sorted({*lengths}, reverse=True)[:_MOST_LENGTHS]:
            limit = min(most, int(self._options.max_spec_factor * length))
            # Drafts of shorter matches are shorter.
            if limit <= expected:
                break
            rows_of = [row for row, each in zip(rows, lengths) if each >= length]
            draft, tokens = likeliest(rows_of, limit, self._options.min_token_prob)
            if tokens > expected:
                best, expected = draft, tokens
        return best, expected

    def end(self, request: Request) -> None:
        """Drop the index of a request, and store its output for others."""
        self._index_of.pop(request, None)
        if not self._options.max_cached_requests or not request.num_output_tokens:
            return
        namespace = request.namespace
        if (earlier := self._earlier.get(namespace)) is None:
            most_tokens = min(_MOST_TOKENS, self._most_bytes // _TOKEN_BYTES)
            earlier = EarlierOutputs(self._options.max_cached_requests, most_tokens)
            self._earlier[namespace] = earlier
            self._earlier_bytes += earlier.num_bytes
        before = earlier.num_bytes
        earlier.add(request.output_token_ids)
        self._earlier_bytes += earlier.num_bytes - before
        while len(self._earlier) > 1 and self._earlier_bytes > self._most_bytes:
            self._earlier_bytes -= self._earlier.popitem(last=False)[1].num_bytes


def likeliest(rows: Sequence[Sequence[int]], limit: int, least: float) -> tuple[list[int], float]:
    """Return the likeliest continuation, and how many of its tokens are expected to be right.

    Args:
        rows: continuations that have occurred, each with ``limit`` tokens or more.
        limit: most tokens.
        least: probability that each token, with all before it, has at least.
    """
    draft: list[int] = []
    probability, expected = 1.0, 0.0
    for place in range(limit):
        first = rows[0][place]
        if len(rows) > 1:
            counts: dict[int, int] = {}
            for row in rows:
                counts[row[place]] = counts.get(row[place], 0) + 1
            if len(counts) > 1:
                first = max(counts, key=counts.__getitem__)
                probability *= counts[first] / len(rows)
                rows = [row for row in rows if row[place] == first]
        if first < 0 or probability < least:
            break
        draft.append(first)
        expected += probability
    return draft, expected
