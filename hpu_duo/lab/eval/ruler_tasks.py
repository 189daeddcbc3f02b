"""The thirteen tasks of RULER: what a prompt of any size consists of.

Source: Hsieh et al. 2024, arXiv:2404.06654, and the public scripts; sizes, formats and in-context examples
are RULER's, texts are those of ``RulerTexts``. Random choices are our own streams, so samples are the same on
every platform, and not those of RULER's generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from hpu_duo.lab.eval.ruler_questions import DocumentQuestions, Draw, RulerTexts

TokenCounter = Callable[[str], int]

_SHORT = 4096
"""Prompts of fewer tokens have shorter lists of words."""
_EXAMPLE_TOKENS = 500
_NUM_COMMON = 10
_NUM_DEPTHS = 40
_HOPS = 4
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Written:
    """A prompt of some size.

    Attributes:
        input: the prompt without the beginning of its answer.
        prefix: that beginning.
        outputs: texts that the answer must hold.
    """

    input: str
    prefix: str
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """A task with its random choices made.

    Attributes:
        least: the smallest size.
        write: writes the prompt of a size, which is a number of words, remarks, needles or documents.
    """

    least: int
    write: Callable[[int], Written]


@dataclass(frozen=True)
class Needles:
    """A needle task.

    Attributes:
        filler: "noise", "essay" or "needle".
        num_keys: keys hidden, ``num_asked`` of them asked for.
        num_values: values of each key.
        key_kind, value_kind: "words", "numbers" or "uuids".
    """

    filler: str
    num_keys: int = 1
    num_values: int = 1
    num_asked: int = 1
    key_kind: str = "words"
    value_kind: str = "numbers"


def needle_task(spec: Needles, texts: RulerTexts, draw: Draw) -> Task:
    """Values of keys, hidden in noise, in an essay or among other needles.

    Raises:
        ValueError: the task needs an essay, and the texts have none.
    """
    keys: list[str] = []
    while len(keys) < spec.num_keys:
        keys.append(_key(spec.key_kind, texts, draw, keys))
    values = [[_value(spec.value_kind, draw) for _ in range(spec.num_values)] for _ in keys]
    hidden = draw.shuffled(
        [_needle(texts, spec, key, value) for key, each in zip(keys, values, strict=True) for value in each]
    )
    depths = sorted(
        draw.sample([round(100 * at / (_NUM_DEPTHS - 1)) for at in range(_NUM_DEPTHS)], len(hidden))
    )
    asked = draw.sample(range(spec.num_keys), spec.num_asked)
    order = draw.below(2**31)
    query = ", ".join(keys[at] for at in asked[:-1]) + ", and " if len(asked) > 1 else ""
    query += keys[asked[-1]]
    outputs = tuple(value for at in asked for value in values[at])
    template, kind = texts.templates["niah"], spec.value_kind
    if len(outputs) == 1:
        template, kind = template.singular, kind[:-1]
    around = _surroundings(spec, texts, order, keys)

    def write(size: int) -> Written:
        pieces = around(size)
        if spec.filler == "essay":
            places = [int(len(pieces) * depth / 100) for depth in depths]
            context = " ".join(_inserted(pieces, hidden, places))
        else:
            places = sorted(Draw(order, "places").sample(range(len(pieces)), len(hidden)))
            context = "\n".join(_inserted(pieces, hidden, places))
        return Written(*template.fill(type_needle_v=kind, context=context, query=query), outputs)

    return Task(len(hidden), write)


def variable_task(texts: RulerTexts, draw: Draw, count_tokens: TokenCounter) -> Task:
    """A chain of assignments in noise, behind an example of up to 500 tokens that is solved.

    Where a tokenizer spells the smallest example with more tokens, that is taken.
    """
    example = _chain(texts, draw, 3)

    def length(num: int) -> int:
        written = example.write(num)
        return count_tokens(written.input + written.prefix)

    budget = max(_EXAMPLE_TOKENS, length(example.least))
    size = most_filler(length, example.least, budget, "an example")
    solved = example.write(size)
    before = f"{solved.input}{solved.prefix} {' '.join(solved.outputs)}\n\n"
    main = _chain(texts, draw, 5)

    def write(num: int) -> Written:
        written = main.write(num)
        return Written(before + written.input, written.prefix, written.outputs)

    return Task(main.least, write)


def common_words_task(texts: RulerTexts, draw: Draw, num_tokens: int) -> Task:
    """Ten words that come up more often than others, behind an example that is solved."""
    size, example, often = (20, (3, 1), (6, 1)) if num_tokens < _SHORT else (40, (10, 3), (30, 3))
    template, seed = texts.templates["common_words_extraction"], draw.below(2**31)

    def written(num: int, repeats: tuple[int, int], name: str) -> Written:
        one = Draw(seed, name)
        words = one.sample(texts.words_for(num), num)
        common, others = words[:_NUM_COMMON], words[_NUM_COMMON:]
        listed = one.shuffled(common * repeats[0] + others * repeats[1])
        return Written(*template.fill(num_cw=_NUM_COMMON, context=_numbered(listed), query=""), tuple(common))

    solved = written(size, example, "example")
    before = f"{solved.input}{solved.prefix} {_numbered(solved.outputs)}\n"

    def write(num: int) -> Written:
        found = written(num, often, "list")
        return Written(before + found.input, found.prefix, found.outputs)

    return Task(_NUM_COMMON, write)


def frequent_words_task(texts: RulerTexts, draw: Draw, num_tokens: int) -> Task:
    """Code words whose frequencies fall with the square of the rank; the most frequent one is noise.

    Args:
        num_tokens: for the prompt alone; one word of the vocabulary for each 50 of them.

    Raises:
        ValueError: too few tokens for three words beside the noise.
    """
    num_words = num_tokens // 50
    if num_words < 4:
        raise ValueError(f"expected at least 200 tokens for the prompt of frequent words, got {num_tokens}")
    words: dict[str, None] = {}
    while len(words) < num_words:
        words["".join(draw.choice(_LETTERS) for _ in range(6))] = None
    ranked, order = ["...", *list(words)[1:]], draw.below(2**31)
    template = texts.templates["freq_words_extraction"]

    def write(num: int) -> Written:
        # Zeta(2) = pi^2 / 6 makes the frequencies of all ranks add up to ``num``.
        counts = (int(6 * num / (math.pi**2 * rank**2)) for rank in range(1, num_words + 1))
        listed = [word for word, often in zip(ranked, counts, strict=True) for _ in range(often)]
        context = " ".join(Draw(order, "order").shuffled(listed))
        return Written(*template.fill(context=context, query=""), tuple(ranked[1:4]))

    # With fewer, the word of rank 4 would not come up.
    return Task(27, write)


def question_task(asked: DocumentQuestions, number: int, texts: RulerTexts, draw: Draw) -> Task:
    """A question among documents: its own first, then those of the same article, then any.

    Raises:
        ValueError: there are fewer questions.
    """
    if number >= len(asked.questions):
        raise ValueError(f"expected at least {number + 1} questions in the file, got {len(asked.questions)}")
    one = asked.questions[number]
    taken = {*one.documents, *one.related}
    others = draw.shuffled([at for at in range(len(asked.documents)) if at not in taken])
    more = [*draw.shuffled(one.related), *others]
    order = draw.below(2**31)

    def write(num: int) -> Written:
        if num < len(asked.documents):
            texts_of = [asked.documents[at] for at in (*one.documents, *more)[:num]]
        else:
            repeats = -(-num // len(asked.documents))
            texts_of = [*asked.documents * repeats][:num]
        shuffled = Draw(order, "documents").shuffled(texts_of)
        context = "\n\n".join(f"Document {at}:\n{text}" for at, text in enumerate(shuffled, start=1))
        return Written(*texts.templates["qa"].fill(context=context, query=one.query), one.outputs)

    return Task(len(one.documents), write)


def most_filler(length: Callable[[int], int], least: int, budget: int, name: str) -> int:
    """The largest size within the budget; lengths grow with the size.

    Raises:
        ValueError: the smallest does not fit.
    """
    shortest = length(least)
    if shortest > budget:
        raise ValueError(
            f"expected num_tokens to leave {shortest} tokens for the prompt of {name}, got {budget}"
        )
    low, high = least, 2 * least
    while length(high) <= budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if length(middle) <= budget else (low, middle)
    return low


def _chain(texts: RulerTexts, draw: Draw, name_len: int) -> Task:
    names: dict[str, None] = {}
    while len(names) <= _HOPS:
        names["".join(draw.choice(_LETTERS.upper()) for _ in range(name_len))] = None
    order, value = list(names), draw.digits(5)
    hidden = [f"VAR {order[0]} = {value}", *(f"VAR {new} = VAR {old} " for old, new in pairwise(order))]
    seed = draw.below(2**31)

    def write(num: int) -> Written:
        places = sorted(Draw(seed, "places").sample(range(num), len(hidden)))
        context = "\n".join(_inserted([texts.noise] * num, hidden, places))
        template = texts.templates["variable_tracking"]
        return Written(*template.fill(context=context, query=value, num_v=len(order)), tuple(order))

    return Task(len(hidden), write)


def _surroundings(
    spec: Needles, texts: RulerTexts, order: int, hidden: Sequence[str]
) -> Callable[[int], list[str]]:
    """The text around needles by its size, in pieces; longer ones begin with the pieces of shorter ones."""
    made: list[str] = []
    if spec.filler == "noise":
        return lambda size: [texts.noise] * size
    if spec.filler == "needle":

        def distract(size: int) -> list[str]:
            for at in range(len(made), size):
                one = Draw(order, f"needle/{at}")
                key, value = _key(spec.key_kind, texts, one, hidden), _value(spec.value_kind, one)
                made.append(_needle(texts, spec, key, value))
            return made[:size]

        return distract
    if texts.haystack is None:
        raise ValueError("expected a haystack for needles in an essay, got none")
    pieces: Iterator[str] = texts.haystack.pieces(Random(order))
    num_words = [0]

    def essay(size: int) -> list[str]:
        while num_words[-1] < size:
            made.append(next(pieces))
            num_words.append(num_words[-1] + len(made[-1].split()))
        last = next(at for at, words in enumerate(num_words) if words >= size)
        whole = made[:last]
        # The last piece is cut to the word.
        whole[-1:] = [" ".join(whole[-1].split()[: size - num_words[last - 1]])]
        return whole

    return essay


def _needle(texts: RulerTexts, spec: Needles, key: str, value: str) -> str:
    return texts.needle.format(type_needle_v=spec.value_kind, key=key, value=value)


def _key(kind: str, texts: RulerTexts, draw: Draw, taken: Sequence[str]) -> str:
    """A key that is none of those taken: RULER's word lists are long enough to leave that to chance."""
    while True:
        pair = f"{draw.choice(texts.adjectives)}-{draw.choice(texts.nouns)}" if kind == "words" else None
        key = pair or _value(kind, draw)
        if key not in taken:
            return key


def _value(kind: str, draw: Draw) -> str:
    return draw.uuid() if kind == "uuids" else draw.digits(7)


def _inserted(pieces: Sequence[str], added: Sequence[str], places: Sequence[int]) -> list[str]:
    """The pieces, with each added one before the piece of its place; places do not fall."""
    found: list[str] = []
    start = 0
    for place, one in zip(places, added, strict=True):
        found += [*pieces[start:place], one]
        start = place
    return [*found, *pieces[start:]]


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))
