"""Settings of speculative decoding, with the names of vLLM's ``SpeculativeConfig``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import Any

METHODS = ("suffix", "ngram", "duo", "draft_model", "mtp")
MOST_DRAFTS = 31
_OF_METHOD = {
    "prompt_lookup_": ("ngram",),
    "suffix_decoding_": ("suffix", "duo"),
    "draft_sink": ("duo",),
    "draft_recent": ("duo",),
    "draft_sparsity": ("duo",),
    "draft_sample_method": ("duo", "draft_model", "mtp"),
    "model": ("draft_model",),
}
"""Methods of a key, by how it begins."""
_DRAWN = ("shared", "greedy")
_NOT_SERVED = {
    "draft_budget": "heads that store all tokens have no scores of them by which a draft could choose some; "
    "see draft_sink, draft_recent and draft_sparsity"
}
"""Keys that are refused by name, and why."""
_OTHERS = ("eagle", "eagle3", "medusa", "mlp_speculator")


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Settings of speculative decoding: the drafter, and the number of tokens that a step verifies.

    Args:
        method: "suffix" (the likeliest continuation of the last tokens, in the request's text and in earlier
            outputs), "ngram" (what followed the last tokens when they occurred first), "duo" (the model
            itself, which reads the first and the newest tokens only; drafts of "suffix" where it has some),
            "draft_model" (another model) or "mtp" (the checkpoint's own layer of multi-token prediction).
        model: checkpoint of the model that drafts, for "draft_model", with the same vocabulary.
        num_speculative_tokens: most drafts of a request in a step, 1 to 31.
        prompt_lookup_max, prompt_lookup_min: tokens of an n-gram; one is the default of the other, 5 of both.
        suffix_decoding_max_tree_depth: most tokens of a match.
        suffix_decoding_max_cached_requests: earlier outputs to draft from, for each ``cache_salt``; 0 = none.
        suffix_decoding_max_spec_factor: most drafts for each token of the match.
        suffix_decoding_min_token_prob: least probability of a draft, by how often it has followed.
        draft_sink, draft_recent: first and newest tokens of a text that drafts of "duo" read in heads that
            see all of it otherwise, in whole blocks.
        draft_sparsity: share of the heads of a head pattern that read no more than that in drafts of "duo",
            from the served sparsity to 1; the other retrieval heads read the whole text. None = all heads.
        draft_sample_method: how a model draws drafts of rows that are sampled: "shared" (with the number that
            verifies them) or "greedy" (the likeliest token).
        draft_lens: tokens of a row that steps without prompts may verify, ascending from 1; each size is
            captured apart. None = 1, 4 and ``num_speculative_tokens + 1``.
        num_speculative_tokens_per_batch_size: ``[first, last, most]`` for ranges of numbers of rows: most
            drafts of each row in steps of so many rows, in place of the engine's choice.

    Raises:
        ValueError: a value of another type or out of range; the message names key, value and expectation.
    """

    method: str = "suffix"
    model: str | None = None
    num_speculative_tokens: int = 8
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    draft_sink: int = 16
    draft_recent: int = 64
    draft_sparsity: float | None = None
    draft_sample_method: str = "shared"
    draft_lens: tuple[int, ...] | None = None
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = None

    def __post_init__(self) -> None:
        _check_method(self.method)
        for key, methods in _OF_METHOD.items():
            for each in fields(self):
                value = getattr(self, each.name)
                if each.name.startswith(key) and value != each.default and self.method not in methods:
                    needed = " or ".join(map(repr, methods))
                    raise ValueError(
                        f"speculative_config: {each.name}={value!r} needs method {needed}, "
                        f"got {self.method!r}"
                    )
        self._check_model()
        self._check_integers()
        factor, least = self.suffix_decoding_max_spec_factor, self.suffix_decoding_min_token_prob
        if not _is_real(factor) or factor <= 0:
            raise _error("suffix_decoding_max_spec_factor", "a number above 0", factor)
        if not _is_real(least) or not 0 <= least <= 1:
            raise _error("suffix_decoding_min_token_prob", "a number from 0 to 1", least)
        sparsity = self.draft_sparsity
        if sparsity is not None and (not _is_real(sparsity) or not 0 <= sparsity <= 1):
            raise _error("draft_sparsity", "a number from 0 to 1", sparsity)
        if self.draft_sample_method not in _DRAWN:
            raise _error("draft_sample_method", " or ".join(map(repr, _DRAWN)), self.draft_sample_method)
        self._check_lens()
        self._check_batch_sizes()

    def _check_model(self) -> None:
        if isinstance(self.model, Path):
            object.__setattr__(self, "model", str(self.model))
        if self.method == "draft_model" and not (isinstance(self.model, str) and self.model):
            raise _error("model", "a checkpoint's directory or name, for method 'draft_model'", self.model)

    def _check_integers(self) -> None:
        _check_int("num_speculative_tokens", self.num_speculative_tokens, 1, MOST_DRAFTS)
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1, MOST_DRAFTS)
        shortest, longest = self.ngram_sizes
        if shortest > longest:
            raise _error("prompt_lookup_min", f"at most prompt_lookup_max={longest}", shortest)
        _check_int("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, 2, 128)
        _check_int("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests, 0)
        _check_int("draft_sink", self.draft_sink, 0)
        _check_int("draft_recent", self.draft_recent, 1)

    def _check_lens(self) -> None:
        lens = self.draft_lens
        if lens is None:
            return
        most = self.num_speculative_tokens + 1
        is_list = isinstance(lens, Iterable) and not isinstance(lens, str | Mapping)
        each = tuple(lens) if is_list else ()
        is_rising = all(_is_int(one) for one in each) and each == tuple(sorted(set(each)))
        if not each or not is_rising or each[0] != 1 or each[-1] != most:
            raise _error(
                "draft_lens", f"ascending integers from 1 to num_speculative_tokens + 1 = {most}", lens
            )
        object.__setattr__(self, "draft_lens", each)

    def _check_batch_sizes(self) -> None:
        key, ranges = "num_speculative_tokens_per_batch_size", self.num_speculative_tokens_per_batch_size
        if ranges is None:
            return
        is_list = isinstance(ranges, Iterable) and not isinstance(ranges, str | Mapping)
        found, last = [], 0
        for each in ranges if is_list else ():
            numbers = tuple(each) if isinstance(each, Iterable) and not isinstance(each, str) else ()
            if len(numbers) != 3 or not all(map(_is_int, numbers)) or not last < numbers[0] <= numbers[1]:
                break
            if not 0 <= numbers[2] <= self.num_speculative_tokens:
                break
            found.append(numbers)
            last = numbers[1]
        if not found or len(found) != len(tuple(ranges)):
            expected = (
                "a list of [first, last, most] with ascending ranges of rows and most from 0 to "
                f"num_speculative_tokens={self.num_speculative_tokens}"
            )
            raise _error(key, expected, ranges)
        object.__setattr__(self, key, tuple(found))

    @classmethod
    def of(cls, given: SpeculativeConfig | Mapping[str, Any] | str) -> SpeculativeConfig:
        """Read a configuration, a mapping or JSON.

        Raises:
            ValueError: it is none, or has an unknown key or a bad value.
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError):
                raise ValueError(
                    f"expected speculative_config to be a JSON object, got {given!r:.80}"
                ) from None
        if not isinstance(given, Mapping):
            raise ValueError(f"expected speculative_config to be an object with keys, got {given!r:.80}")
        # Keys of another method are no mistakes of their own.
        _check_method(given.get("method", METHODS[0]))
        known = [each.name for each in fields(cls)]
        for key in given:
            if key in _NOT_SERVED:
                raise ValueError(f"speculative_config: {key} is not served: {_NOT_SERVED[key]}")
            if key not in known:
                near = get_close_matches(str(key), known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"speculative_config has no key {key!r}{hint}")
        return cls(**given)

    @property
    def is_by_model(self) -> bool:
        """Whether a model drafts on the device."""
        return self.method in ("duo", "draft_model", "mtp")

    @property
    def has_own_stores(self) -> bool:
        """Whether what drafts has keys and values of its own."""
        return self.method in ("draft_model", "mtp")

    @property
    def text(self) -> str:
        """JSON of the keys that are not the defaults."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return json.dumps({name: values[name] for name in values if values[name] != _DEFAULTS[name]})

    @property
    def ngram_sizes(self) -> tuple[int, int]:
        """Shortest and longest n-gram."""
        longest = self.prompt_lookup_max or self.prompt_lookup_min or 5
        return self.prompt_lookup_min or longest, longest

    @property
    def lens(self) -> tuple[int, ...]:
        """Tokens of a row that steps without prompts may verify, ascending."""
        most = self.num_speculative_tokens + 1
        return self.draft_lens or tuple(sorted({1, min(4, most), most}))


_DEFAULTS = {each.name: each.default for each in fields(SpeculativeConfig)}


def _error(key: str, expected: str, value: object) -> ValueError:
    return ValueError(f"speculative_config: expected {key} to be {expected}, got {value!r:.80}")


def _check_method(method: object) -> None:
    if method not in METHODS:
        known = ", which are served" if method in _OTHERS else ""
        raise _error("method", f"{' or '.join(METHODS)}{known}", method)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)


def _check_int(key: str, value: object, least: int, most: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most and value > most):
        upper = "" if most is None else f" and <= {most}"
        raise _error(key, f"an integer >= {least}{upper}", value)
