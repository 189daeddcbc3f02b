"""Grammars compiled against a vocabulary, and which tokens they allow next; by llguidance.

Mask of a step: int32 ``[W]`` with ``W = ceil(V / 32)``; bit ``t % 32`` of word ``t // 32`` is token ``t``.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from hpu_duo.sampling.params import ENDLESS, JSON_WHITESPACE, FieldError, StructuredOutputs, is_endless

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_KEPT = 256
_LONGEST_MESSAGE = 300
_MOST_CHOICES = 1024
"""llguidance follows 2,000 alternatives at most, and reports it only when a token has been accepted."""

_NO_TEXT = "NoExtensionBias"
"""llguidance's term for a state of a grammar without a valid text."""


class GrammarState:
    """The state of one output in its grammar; a function of the tokens accepted so far.

    Args:
        matcher: in its initial state; not shared.
        field: of ``StructuredOutputs``, for messages.
    """

    def __init__(self, matcher: LLMatcher, field: str) -> None:
        self._matcher, self._field = matcher, field

    def write_allowed(self, words: npt.NDArray[np.int32]) -> None:
        """Write the mask of the next token, int32 ``[W]``, contiguous. Once complete, only EOS is allowed.

        Raises:
            ValueError: the grammar exceeds its limits, or an earlier error.
        """
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()

    def accept(self, token: int) -> None:
        """Advance by a token.

        Raises:
            ValueError: the token is not allowed here, or an earlier error.
        """
        self._matcher.consume_token(token)
        self._check()

    def fork(self) -> GrammarState:
        """Return a state that goes on from here, to try tokens that are not certain."""
        return GrammarState(self._matcher.deep_copy(), self._field)

    def num_accepted_of(self, tokens: Sequence[int]) -> int:
        """Count the leading tokens that could be accepted one after the other; nothing changes."""
        return self._matcher.validate_tokens(list(tokens))

    @property
    def is_complete(self) -> bool:
        """Whether nothing but EOS may follow."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise FieldError(f"structured_outputs.{self._field}", _sentence(self._matcher.get_error()))


class Grammars:
    """Compiles grammars for one vocabulary; thread-safe.

    Args:
        tokenizer: a fast one, of bytes or with byte fallback.
        vocab_size: V, the width of the logits; ids without a token are never allowed.
        eos_token_ids: tokens that end a text, at least one.

    Raises:
        ValueError: llguidance cannot read the tokenizer, or there is no EOS.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        eos = sorted(eos_token_ids) or ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])
        if not eos:
            raise FieldError("structured_outputs", "expected a model with an end-of-text token")
        try:
            self._tokenizer: LLTokenizer = from_tokenizer(cast(Any, tokenizer), vocab_size, eos)
        except Exception as error:  # the library raises whatever went wrong in reading
            raise FieldError(
                "structured_outputs", f"expected a tokenizer of bytes that llguidance reads: {error}"
            ) from error
        self._lock = threading.Lock()
        self._matchers: OrderedDict[StructuredOutputs, LLMatcher] = OrderedDict()

    def start(self, wanted: StructuredOutputs) -> GrammarState:
        """Return the state before the first token; compiled grammars are cached.

        Raises:
            ValueError: it cannot be compiled; the message has the field and the reason.
        """
        with self._lock:
            matcher = self._matchers.get(wanted)
        if matcher is None:
            matcher = self._compile(wanted)
        with self._lock:
            self._matchers[wanted] = matcher
            self._matchers.move_to_end(wanted)
            while len(self._matchers) > _MOST_KEPT:
                self._matchers.popitem(last=False)
            return GrammarState(matcher.deep_copy(), wanted.field)

    def _compile(self, wanted: StructuredOutputs) -> LLMatcher:
        try:
            grammar = _grammar_of(wanted)
        except ValueError as error:  # of the library, which reads no schema that nests too deep
            raise FieldError(f"structured_outputs.{wanted.field}", _sentence(str(error))) from error
        is_bad, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        # An ignored keyword of a schema would allow outputs that violate it.
        if is_bad or messages:
            raise FieldError(f"structured_outputs.{wanted.field}", _sentence("; ".join(messages)))
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        # Some errors occur only with the first mask.
        beginning = matcher.deep_copy()
        beginning.compute_bitmask()
        if beginning.is_error():
            raise FieldError(f"structured_outputs.{wanted.field}", _sentence(beginning.get_error()))
        if wanted.field == "json" and is_endless(json.loads(str(wanted.json))):
            raise FieldError("structured_outputs.json", ENDLESS)
        return matcher


def _grammar_of(wanted: StructuredOutputs) -> str:
    match wanted.field:
        case "json" | "json_object":
            schema = wanted.json if wanted.json_object is False else '{"type": "object"}'
            return LLMatcher.grammar_from_json_schema(
                str(schema), defaults={"whitespace_pattern": JSON_WHITESPACE}
            )
        case "regex":
            return LLMatcher.grammar_from_regex(str(wanted.regex))
        case "choice":
            choice = tuple(wanted.choice or ())
            if len(choice) > _MOST_CHOICES:
                raise ValueError(f"expected at most {_MOST_CHOICES} choices, got {len(choice)}")
            return LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, choice))}")
        case _:
            return LLMatcher.grammar_from_lark(str(wanted.grammar))


def _sentence(message: str) -> str:
    """Return an error as one line, without its position and the parser's state."""
    if _NO_TEXT in message:
        return "expected parts with a finite text, got one that refers to itself only"
    lines = [line.strip() for line in message.partition("<state>")[0].splitlines()]
    kept = [line for line in lines if line.strip("^ ") and not re.match(r"\d+ \|", line)]
    return " ".join(kept)[:_LONGEST_MESSAGE] or "the grammar cannot be used"
