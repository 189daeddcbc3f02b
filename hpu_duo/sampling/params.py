"""Sampling parameters of a request, validated on construction."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from json import dumps, loads
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor


class FieldError(ValueError):
    """A value is out of range, or does not fit another one.

    Attributes:
        field: name of the field that it is about, with a key where there is one: ``logit_bias[7]``.
        reason: what was expected, and what was passed.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field, self.reason = field, reason

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}"


class RowError(ValueError):
    """One row cannot be sampled; the others can.

    Args:
        row: index of the row in the batch.
        cause: the error, also the ``__cause__``.
    """

    def __init__(self, row: int, cause: Exception) -> None:
        super().__init__(f"row {row}: {cause}")
        self.row, self.cause = row, cause


# One blank, or a new line and its indentation: a model that likes blanks could write them without end.
JSON_WHITESPACE = r"( |\n[ \t]{0,40})?"
"""The blanks between the parts of JSON, as a regular expression."""

_MANY = 2**20
"""Most characters of a specification."""


@dataclass(frozen=True)
class StructuredOutputs:
    """Exactly one of its fields is set; names are vLLM's.

    Immutable, hashable and picklable. Not compiled here: an invalid schema or pattern is rejected when the
    engine compiles it, at the request.

    Args:
        json: a JSON schema, as a mapping or as text. Stored as text.
        json_object: any JSON object.
        regex: a regular expression that the whole output matches, in the syntax of Rust's ``regex``, without
            look-around and back references.
        choice: one of these strings. Stored as a tuple.
        grammar: a context-free grammar in llguidance's dialect of Lark.

    Raises:
        ValueError: not exactly one field, or a value that is none of its kind; the message names the field.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Iterable[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [each.name for each in fields(self) if getattr(self, each.name) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(each.name for each in fields(self))
            raise FieldError(
                "structured_outputs", f"expected exactly one of {names}, got {' and '.join(given) or 'none'}"
            )
        match given[0]:
            case "json":
                object.__setattr__(self, "json", _schema_text(self.json))
            case "choice":
                object.__setattr__(self, "choice", _choices(self.choice))
            case "json_object":
                if self.json_object is not True:
                    raise FieldError(
                        "structured_outputs.json_object", f"expected true or false, got {self.json_object!r}"
                    )
            case "regex" | "grammar" as name:
                _check_text(name, getattr(self, name))

    @property
    def field(self) -> str:
        """Name of the field that is set."""
        return next(each.name for each in fields(self) if getattr(self, each.name) not in (None, False))


def _schema_text(schema: object) -> str:
    if isinstance(schema, str):
        _check_text("json", schema)
        try:
            schema = loads(schema)
        except (ValueError, RecursionError) as error:
            raise FieldError(
                "structured_outputs.json", f"expected a JSON schema, got no JSON: {error}"
            ) from None
    if not isinstance(schema, Mapping):
        raise FieldError("structured_outputs.json", f"expected a JSON schema, an object, got {schema!r:.60}")
    try:
        text = dumps(dict(schema))
    except (TypeError, ValueError) as error:
        raise FieldError("structured_outputs.json", f"expected values of JSON: {error}") from None
    _check_text("json", text)
    return text


def _choices(choices: object) -> tuple[str, ...]:
    found = tuple(choices) if isinstance(choices, Iterable) and not isinstance(choices, (str, bytes)) else ()
    if not found or any(not isinstance(one, str) or not one for one in found):
        raise FieldError(
            "structured_outputs.choice",
            f"expected one or more strings that are not empty, got {choices!r:.60}",
        )
    if sum(map(len, found)) > _MANY:
        raise FieldError("structured_outputs.choice", f"expected at most {_MANY} characters")
    return found


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str) or not text:
        raise FieldError(f"structured_outputs.{name}", f"expected a text that is not empty, got {text!r:.60}")
    if len(text) > _MANY:
        raise FieldError(
            f"structured_outputs.{name}", f"expected at most {_MANY} characters, got {len(text)}"
        )


#: Below this temperature a request is greedy: dividing by less only overflows.
GREEDY_TEMPERATURE = 1e-5

#: Upper bound that keeps a forbidden logit (see ``rows.FORBIDDEN``) at probability zero after the division.
MAX_TEMPERATURE = 1e6

#: The range of the OpenAI API for ``logit_bias`` values.
MAX_LOGIT_BIAS = 100.0


_INTEGERS = (
    *("n", "top_k", "seed", "logprobs", "max_tokens", "min_tokens", "decoded_prompt_tokens", "priority"),
    "expected_tokens",
)
"""Fields that become Python integers: those of numpy overflow, and have other methods."""


_TOKEN_LISTS = ("stop_token_ids", "forced_token_ids", "prediction_token_ids")
"""Fields that are token ids."""

HostChoice: TypeAlias = "Callable[[Tensor, float], int]"
"""From the logits of one row, ``[V]``, and a uniform number in (0, 1) to a token id."""


class HostSampler(Protocol):
    """Chooses the tokens of one sample, and may end it; created by ``SamplingParams.host_sampler``.

    Slow: the logits are copied to the host in every step, and rows are processed one after the other. After a
    failed step, ``choose`` is called again for the same token.
    """

    @property
    def chooses(self) -> bool:
        """Whether ``choose`` is called for tokens; otherwise the device samples them as usual."""
        ...

    def choose(self, output_ids: npt.NDArray[np.int32], logits: Tensor, uniform: float) -> int:
        """Return the next token.

        Args:
            output_ids: the tokens sampled so far, int32 ``[num_output_tokens]``; a view.
            logits: raw logits, ``[V]``, on the host; not to be modified.
            uniform: random number in (0, 1), by the request's seed.
        """
        ...

    def ends(self, output_ids: npt.NDArray[np.int32]) -> bool:
        """Whether the sample ends with its last token; called after each one."""
        ...


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of choosing the tokens of one request, and of stopping. Names and defaults are vLLM's.

    The filters act in the order logit bias, min_tokens, penalties, temperature, top_k, top_p, min_p.
    Instances are immutable, picklable and hashable, and may be shared by many requests.

    Args:
        n: number of samples per prompt. Greedy samples of one prompt are copies of each other.
        temperature: 0 (or anything below 1e-5) means greedy.
        top_k: keep the k most likely tokens; 0 or -1 is off, 1 is greedy. Ties with the k-th are kept.
        top_p: keep the smallest set of most likely tokens whose mass reaches top_p; 1 is off.
        min_p: drop tokens less likely than min_p times the most likely one; 0 is off.
        repetition_penalty: > 1 discourages tokens of the prompt and the output (multiplicative).
        presence_penalty, frequency_penalty: subtracted for tokens of the output, once or per occurrence.
        logit_bias: token id -> addend in [-100, 100]. Keys may be decimal strings, as in JSON.
        seed: of reproducible draws; ``None`` or -1: chosen by the engine.
        logprobs: ``None`` for none, 0 for the sampled token only, k for the top k as well.
        max_tokens: most tokens to generate; ``None`` means until the model's length limit.
        min_tokens: neither EOS, stop ids nor stop strings end the output before this many tokens.
        ignore_eos: EOS does not end the output.
        stop: one string or several that end the output. Special tokens are matched by their text, also where
            they are left out of the text that is shown. Stored as a tuple.
        stop_like_transformers: stop strings as in transformers: one may begin in the prompt and end in
            the output, before ``min_tokens`` too. Otherwise as in vLLM: only the output is searched, from
            ``min_tokens`` on.
        stop_token_ids: token ids that end the output, besides EOS. Stored as a tuple.
        include_stop_str_in_output: keep the stop string (or stop token's text) in the text.
        skip_special_tokens: leave special tokens out of the text.
        forced_token_ids: the first tokens of the output, independent of the model; their log-probabilities
            are the model's, so that a given text can be scored by decoding it. Bias, penalties and min_tokens
            do not apply to them; stop conditions do. Stored as a tuple.
        decoded_prompt_tokens: number of last prompt tokens that are decoded from the cache like generated
            ones, also after a preemption; the others are prefilled. With 1, the first output token comes from
            a decode.
        host_sampler: from the index of a sample to a ``HostSampler``, which chooses its tokens on the host
            instead of the fields above, and may end it. Slow.
        cache_salt: what is cached of the prompt is shared only among requests with the same salt.
        priority: lower values are served earlier; only with a scheduling policy that uses it, others require
            0.
        expected_tokens: how many tokens the output is expected to have, for policies that serve short
            requests first; None = ``max_tokens``.
        user: of the request; fair policies share service among users. None is a user, too.
        structured_outputs: what the text must be like. Tokens that cannot lead to such a text are not
            sampled, whatever their bias; the output ends with ``stop`` where nothing may follow, also before
            ``min_tokens``, and is cut by ``max_tokens``, stop strings and stop tokens as any other. Reported
            log-probabilities are the model's own.
        speculate: whether steps verify drafts of the next tokens, where the engine has a drafter; a number is
            the most drafts of a step. The tokens are the same.
        prediction_token_ids: a text that the output is expected to follow, to draft from. Stored as a tuple.

    Raises:
        FieldError: a value is outside its range; the message names the field, the range and the value.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    seed: int | None = None
    logprobs: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    stop_like_transformers: bool = False
    skip_special_tokens: bool = True
    forced_token_ids: Sequence[int] = ()
    decoded_prompt_tokens: int = 0
    host_sampler: Callable[[int], HostSampler] | None = field(default=None, hash=False)
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = None
    priority: int = 0
    user: str | None = None
    expected_tokens: int | None = None
    speculate: bool | int = True
    prediction_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _as_tuple("stop", stop))
        for name in _TOKEN_LISTS:
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        object.__setattr__(self, "logit_bias", _parse_logit_bias(self.logit_bias))
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        self._check_ranges()
        for name in _INTEGERS:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, int(getattr(self, name)))
        for name in _TOKEN_LISTS:
            object.__setattr__(self, name, tuple(map(int, getattr(self, name))))

    def _check_ranges(self) -> None:
        _check_int("n", self.n, 1)
        _check_real("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_int("top_k", self.top_k, -1)
        _check_real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_real("min_p", self.min_p, 0.0, 1.0)
        _check_real("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        _check_real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token_id, bias in (self.logit_bias or {}).items():
            _check_real(f"logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, Integral)):
            raise FieldError("seed", f"expected an integer or None, got {self.seed!r}")
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1)
        _check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise FieldError(
                "min_tokens", f"expected at most max_tokens={self.max_tokens}, got {self.min_tokens}"
            )
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise FieldError("stop", f"expected non-empty strings, got {text!r}")
        for name in _TOKEN_LISTS:
            for token_id in getattr(self, name):
                _check_int(name, token_id, 0)
        if not isinstance(self.speculate, bool):
            _check_int("speculate", self.speculate, 0)
        if self.max_tokens is not None and len(self.forced_token_ids) > self.max_tokens:
            raise FieldError(
                "forced_token_ids",
                f"expected at most max_tokens={self.max_tokens} tokens, got {len(self.forced_token_ids)}",
            )
        _check_int("decoded_prompt_tokens", self.decoded_prompt_tokens, 0)
        if self.cache_salt is not None and (not isinstance(self.cache_salt, str) or not self.cache_salt):
            raise FieldError("cache_salt", f"expected a non-empty string or None, got {self.cache_salt!r}")
        if isinstance(self.priority, bool) or not isinstance(self.priority, Integral):
            raise FieldError("priority", f"expected an integer, got {self.priority!r}")
        if not isinstance(self.user, (str, type(None))):
            raise FieldError("user", f"expected a string or None, got {self.user!r}")
        if self.expected_tokens is not None:
            _check_int("expected_tokens", self.expected_tokens, 0)
        if self.host_sampler is not None:
            self._check_host_sampler()
        if not isinstance(self.structured_outputs, (StructuredOutputs, type(None))):
            raise FieldError(
                "structured_outputs", f"expected StructuredOutputs or None, got {self.structured_outputs!r}"
            )

    def _check_host_sampler(self) -> None:
        if not callable(self.host_sampler):
            raise FieldError("host_sampler", f"expected a callable or None, got {self.host_sampler!r}")
        # Log-probabilities belong to tokens that the device chose, and forced tokens are chosen already.
        for name in ("logprobs", "forced_token_ids", "structured_outputs"):
            if getattr(self, name) not in (None, ()):
                raise FieldError(name, f"expected none with host_sampler, got {getattr(self, name)!r}")

    def validate(self, vocab_size: int) -> None:
        """Validate the fields with ranges that depend on the model.

        Raises:
            FieldError: a biased, stop or forced token id is not in ``[0, vocab_size)``, or there are more
                logprobs than tokens.
        """
        for name, token_ids in (
            ("logit_bias", list(self.logit_bias or {})),
            ("stop_token_ids", list(self.stop_token_ids)),
            ("forced_token_ids", list(self.forced_token_ids)),
            ("prediction_token_ids", list(self.prediction_token_ids)),
        ):
            for token_id in token_ids:
                if not 0 <= token_id < vocab_size:
                    raise FieldError(name, f"expected token ids in [0, {vocab_size}), got {token_id}")
        if self.logprobs is not None and self.logprobs > vocab_size:
            raise FieldError("logprobs", f"expected at most vocab_size={vocab_size}, got {self.logprobs}")

    @cached_property
    def is_greedy(self) -> bool:
        """Whether decoding is greedy, without draws."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @cached_property
    def needs_penalties(self) -> bool:
        """Whether the request needs a ``PenaltyState``."""
        return self.needs_prompt_history or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @cached_property
    def needs_prompt_history(self) -> bool:
        """Whether a penalty depends on the tokens of the prompt too, not only on the output."""
        return self.repetition_penalty != 1.0

    @cached_property
    def is_plain_greedy(self) -> bool:
        """Whether one argmax over the model's logits is enough, once ``min_tokens`` is reached."""
        is_free = not (self.needs_penalties or self.logit_bias or self.forced_token_ids)
        return self.is_greedy and is_free and self.logprobs is None

    @cached_property
    def bias_arrays(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """``logit_bias`` as token ids int32 [B] and addends float32 [B]."""
        bias = self.logit_bias or {}
        return np.fromiter(bias.keys(), np.int32, len(bias)), np.fromiter(
            bias.values(), np.float32, len(bias)
        )


def _as_tuple(name: str, values: object) -> tuple[Any, ...]:
    if values is None:
        return ()
    if not isinstance(values, Iterable):
        raise FieldError(name, f"expected a sequence or None, got {values!r}")
    return tuple(values)


def _parse_logit_bias(logit_bias: Mapping[int, float] | None) -> dict[int, float] | None:
    """Copy the mapping, so that the caller cannot change it, with integer keys."""
    if logit_bias is None:
        return None
    if not isinstance(logit_bias, Mapping):
        raise FieldError("logit_bias", f"expected a mapping of token ids, got {type(logit_bias).__name__}")
    parsed: dict[int, float] = {}
    for key, bias in logit_bias.items():
        try:
            token_id = int(key)
        except (TypeError, ValueError) as error:
            raise FieldError("logit_bias", f"expected integer token ids as keys, got {key!r}") from error
        if isinstance(key, float) or token_id < 0:
            raise FieldError("logit_bias", f"expected non-negative integer keys, got {key!r}")
        if token_id in parsed:
            raise FieldError("logit_bias", f"expected each token id once, got {token_id} twice")
        parsed[token_id] = bias
    return parsed


def _check_int(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < low:
        raise FieldError(name, f"expected an integer >= {low}, got {value!r}")


def _check_real(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    # NaN fails every comparison, so it is rejected by the range test.
    if not is_number or not low <= float(value) <= high or (open_low and value == low):  # type: ignore[arg-type]
        bracket = "(" if open_low else "["
        raise FieldError(name, f"expected a number in {bracket}{low:g}, {high:g}], got {value!r}")


ENDLESS = "expected a schema with finite instances, got one whose required parts never end"
"""The refusal of such a schema."""

_MOST_PASSES = 16


def is_endless(schema: Mapping[str, Any]) -> bool:
    """Whether a schema has no finite instances, so that outputs would never end.

    False if the check exceeds its time limit.
    """
    reader = _Reader(schema)
    try:
        for _ in range(_MOST_PASSES):
            num_finite = len(reader.finite)
            reader.seen.clear()
            if reader.is_finite(schema):
                return False
            if len(reader.finite) == num_finite:
                return True
    except RecursionError:
        pass
    return False


class _Reader:
    """Fixed-point computation of schemas with finite instances; references count as endless at first.

    Attributes:
        finite: references with finite instances.
        seen: references that were followed in this pass.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self.finite: set[str] = set()
        self.seen: set[str] = set()

    def is_finite(self, schema: object) -> bool:
        if not isinstance(schema, Mapping) or "const" in schema or "enum" in schema:
            return True
        reference = schema.get("$ref")
        if isinstance(reference, str) and not self._is_reference_finite(reference):
            return False
        if not all(map(self.is_finite, _list(schema.get("allOf")))):
            return False
        for several in (_list(schema.get("anyOf")), _list(schema.get("oneOf"))):
            if several and not any(map(self.is_finite, several)):
                return False
        kinds = schema.get("type")
        if kinds is None:
            return True
        return any(self._is_kind_finite(kind, schema) for kind in (_list(kinds) or [kinds]))

    def _is_reference_finite(self, reference: str) -> bool:
        if reference in self.finite:
            return True
        if reference in self.seen:
            return False
        self.seen.add(reference)
        is_finite = self.is_finite(self._target(reference))
        if is_finite:
            self.finite.add(reference)
        return is_finite

    def _target(self, reference: str) -> object:
        """The schema of a reference; None if there is none, which the compiler reports."""
        found: object = self._root if reference == "#" or reference.startswith("#/") else None
        for part in reference.lstrip("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def _is_kind_finite(self, kind: object, schema: Mapping[str, Any]) -> bool:
        if kind == "object":
            required = (name for name in _list(schema.get("required")) if isinstance(name, str))
            return all(self.is_finite(each) for name in required for each in _of_member(schema, name))
        least = schema.get("minItems")
        if kind != "array" or not isinstance(least, int) or least < 1:
            return True
        first = _list(schema.get("prefixItems"))
        return all(map(self.is_finite, first[:least])) and (
            least <= len(first) or self.is_finite(schema.get("items"))
        )


def _of_member(schema: Mapping[str, Any], name: str) -> list[Any]:
    """The schemas of a member of an object."""
    named, patterns = schema.get("properties"), schema.get("patternProperties")
    if isinstance(named, Mapping) and name in named:
        return [named[name]]
    found = []
    for pattern, each in patterns.items() if isinstance(patterns, Mapping) else ():
        with suppress(re.error):  # reported by the compiler
            found += [each] if re.search(pattern, name) else []
    return found or [schema.get("additionalProperties")]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
