"""Synthetic long-context tasks in the manner of RULER, over any tokenizer.

Source: Hsieh et al. 2024, arXiv:2404.06654. Tasks and sizes are RULER's, sentences are ours, and everything
is a pure function of its arguments. A sample grows until the tokenizer counts as many tokens as asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from hpu_duo.builtin.words import ADJECTIVES, NOUNS, PASSKEY_WORDS
from hpu_duo.eval.draw import Draw
from hpu_duo.eval.metrics import found_share
from hpu_duo.eval.ruler_text import Filler

TokenCounter = Callable[[str], int]


@dataclass(frozen=True)
class RulerSample:
    """One prompt, and the texts that its answer must hold.

    Attributes:
        task: one of ``RULER_TASKS``.
        index: number of the sample.
        input: the prompt, without ``answer_prefix``.
        answer_prefix: beginning of the answer; it follows the prompt.
        outputs: texts that the answer must hold.
        length: tokens of the prompt, its prefix and the longest answer.
        max_new_tokens: of an answer.
    """

    task: str
    index: int
    input: str
    answer_prefix: str
    outputs: tuple[str, ...]
    length: int
    max_new_tokens: int

    @property
    def prompt(self) -> str:
        """All the text before the answer."""
        return self.input + self.answer_prefix

    def score(self, prediction: str) -> float:
        """Share of the outputs that the answer holds."""
        return found_share(prediction, self.outputs)

    def as_record(self) -> dict[str, Any]:
        """The fields of RULER's JSON lines, and the task."""
        return {**asdict(self), "outputs": list(self.outputs)}


@dataclass(frozen=True)
class _Text:
    """A task with its random choices made; ``write`` gives it any amount of filler."""

    write: Callable[[int], str]
    prefix: str
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class _Needles:
    """A needle task.

    Attributes:
        num_keys: keys hidden, ``num_asked`` of them asked for.
        num_values: values of each key.
        filler: "noise", "text" or "needles".
        key_kind, value_kind: "words", "numbers" or "uuids".
    """

    filler: str
    num_keys: int = 1
    num_values: int = 1
    num_asked: int = 1
    key_kind: str = "words"
    value_kind: str = "numbers"


_NEEDLES = {
    "niah_single_1": _Needles("noise"),
    "niah_single_2": _Needles("text"),
    "niah_single_3": _Needles("text", value_kind="uuids"),
    "niah_multikey_1": _Needles("text", num_keys=4),
    "niah_multikey_2": _Needles("needles"),
    "niah_multikey_3": _Needles("needles", key_kind="uuids", value_kind="uuids"),
    "niah_multivalue": _Needles("text", num_values=4),
    "niah_multiquery": _Needles("text", num_keys=4, num_asked=4),
}
_ANSWER_TOKENS = {**dict.fromkeys(_NEEDLES, 128), "vt": 30, "cwe": 120, "fwe": 50}
RULER_TASKS: tuple[str, ...] = tuple(_ANSWER_TOKENS)
"""Single, multi-key, multi-value and multi-query needles, variable tracking, common and frequent words."""


def ruler_sample(
    task: str, count_tokens: TokenCounter, num_tokens: int, index: int = 0, seed: int = 0
) -> RulerSample:
    """Write one sample of at most ``num_tokens`` tokens, as long as whole pieces of filler allow.

    Args:
        task: one of ``RULER_TASKS``.
        count_tokens: length measure without special tokens.
        num_tokens: budget of prompt, prefix and longest answer.
        index, seed: equal arguments give equal samples.

    Raises:
        ValueError: the task is unknown, or the budget too small for it.
    """
    if task not in _ANSWER_TOKENS:
        raise ValueError(f"expected a task among {', '.join(RULER_TASKS)}, got {task!r}")
    text = _text(task, Draw(seed, f"{task}/{index}"))
    answer = _ANSWER_TOKENS[task]
    budget = num_tokens - answer - count_tokens(text.prefix)
    written = text.write(_most_filler(lambda n: count_tokens(text.write(n)), budget, task, num_tokens))
    length = count_tokens(written) + count_tokens(text.prefix) + answer
    return RulerSample(task, index, written, text.prefix, text.outputs, length, answer)


def _text(task: str, draw: Draw) -> _Text:
    match task:
        case "vt":
            return _variables(draw)
        case "cwe":
            return _common_words(draw)
        case "fwe":
            return _frequent_words(draw)
        case _:
            return _needles(_NEEDLES[task], draw)


def _most_filler(length: Callable[[int], int], budget: int, task: str, num_tokens: int) -> int:
    """The most pieces of filler within the budget; lengths grow with the pieces."""
    least = length(1)
    if least > budget:
        raise ValueError(
            f"expected num_tokens of at least {num_tokens + least - budget} for {task}, got {num_tokens}"
        )
    low, high = 1, 2
    while length(high) <= budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if length(middle) <= budget else (low, middle)
    return low


def _needles(spec: _Needles, draw: Draw) -> _Text:
    keys = _keys(spec.key_kind, spec.num_keys, draw)
    values = {key: [_value(spec.value_kind, draw) for _ in range(spec.num_values)] for key in keys}
    noun = {"numbers": "number", "uuids": "code"}[spec.value_kind]
    hidden = [f"The special {noun} of {key} is {value}." for key in keys for value in values[key]]
    depths = [draw.fraction() for _ in hidden]
    order = draw.below(2**31)
    asked = keys[: spec.num_asked]
    many = len(asked) * spec.num_values > 1
    of = ", ".join(asked[:-1]) + " and " + asked[-1] if len(asked) > 1 else asked[0]
    question = (
        f"\nWhat are all the special {noun}s of {of}?" if many else f"\nWhat is the special {noun} of {of}?"
    )
    prefix = f" The special {noun}s of {of} are" if many else f" The special {noun} of {of} is"

    def distract(one: Draw) -> str:
        key = keys[0]
        while key in keys:
            (key,) = _keys(spec.key_kind, 1, one)
        return f"The special {noun} of {key} is {_value(spec.value_kind, one)}."

    filler = Filler(spec.filler, order, distract if spec.filler == "needles" else None)
    return _Text(
        lambda num: filler.around(hidden, depths, num) + question,
        prefix,
        tuple(value for key in asked for value in values[key]),
    )


def _keys(kind: str, num: int, draw: Draw) -> list[str]:
    if kind == "uuids":
        return [draw.uuid() for _ in range(num)]
    nouns = draw.sample(NOUNS, num)
    return [f"{draw.choice(ADJECTIVES)} {noun}" for noun in nouns]


def _value(kind: str, draw: Draw) -> str:
    return draw.uuid() if kind == "uuids" else draw.digits(7)


def _variables(draw: Draw, num_hops: int = 4) -> _Text:
    names = _variable_names(draw, num_hops + 1)
    value = draw.digits(5)
    chain = [f"VAR {names[0]} = {value}."]
    chain += [f"VAR {new} = VAR {old}." for old, new in pairwise(names)]
    depths = sorted(draw.fraction() for _ in chain)
    filler = Filler("noise", draw.below(2**31), None)
    question = f"\nWhich {len(names)} variables have the value {value}, directly or through others?"
    return _Text(
        lambda num: filler.around(chain, depths, num) + question,
        f" The variables with the value {value} are",
        tuple(names),
    )


def _variable_names(draw: Draw, num: int) -> list[str]:
    names: list[str] = []
    while len(names) < num:
        name = "".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ"[draw.below(26)] for _ in range(5))
        if name not in names:
            names.append(name)
    return names


def _common_words(draw: Draw, num_common: int = 10, often: int = 30, seldom: int = 3) -> _Text:
    words = draw.shuffled(PASSKEY_WORDS)
    common, others = words[:num_common], words[num_common:]
    order = draw.below(2**31)

    def write(num: int) -> str:
        # Past the word list, uncommon words are numbered; each still occurs three times.
        uncommon = [others[i % len(others)] + str(i // len(others) or "") for i in range(num)]
        listed = Draw(order, "cwe").shuffled(common * often + uncommon * seldom)
        text = " ".join(f"{number}. {word}" for number, word in enumerate(listed, start=1))
        return f"A numbered list of words follows. {text}\nWhat are the {num_common} most common words?"

    return _Text(write, f" The {num_common} most common words are", tuple(common))


def _frequent_words(draw: Draw, num_asked: int = 3) -> _Text:
    words = list(dict.fromkeys("".join(draw.sample("abcdefghijklmnopqrstuvwxyz", 6)) for _ in range(50)))
    order = draw.below(2**31)

    def write(num: int) -> str:
        # Zipf's law with exponent 2 in integers: word k occurs 1/k^2 as often as the first one.
        first = 16 + 4 * num
        listed = [word for k, word in enumerate(words, start=1) for _ in range(max(1, first // k**2))]
        text = " ".join(Draw(order, "fwe").shuffled(listed))
        return f"A text in code words follows. {text}\nWhat are the {num_asked} most frequent code words?"

    return _Text(write, f" The {num_asked} most frequent code words are", tuple(words[:num_asked]))
