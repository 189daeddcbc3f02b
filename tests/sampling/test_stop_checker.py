import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_duo.sampling import Released, SamplingParams, StopChecker, StopMatch

LETTERS = st.text(st.sampled_from("abc"), max_size=25)
STOPS = st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=5), max_size=4)


def _reference(pieces: list[str], stops: list[str], min_tokens: int) -> tuple[str, int, int] | None:
    """(stop, start, end) by looking at the whole text again after every character."""
    text = ""
    for num_tokens, piece in enumerate(pieces, start=1):
        for char in piece:
            text += char
            hits = [stop for stop in stops if text.endswith(stop)]
            if hits and num_tokens >= min_tokens:
                stop = max(hits, key=len)
                return stop, len(text) - len(stop), len(text)
    return None


@settings(max_examples=500)
@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS, include=st.booleans(), min_tokens=st.integers(0, 6))
def test_streaming_equals_the_search_of_the_whole_text(
    pieces: list[str], stops: list[str], include: bool, min_tokens: int
) -> None:
    params = SamplingParams(stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens)
    expected = _reference(pieces, stops, min_tokens)
    checker, shown, match = StopChecker(params), "", None
    for num_tokens, piece in enumerate(pieces, start=1):
        released = checker.push(piece, num_tokens)
        shown, match = shown + released.text, released.match
        if match:
            break
    shown += checker.flush()
    if expected is None:
        assert match is None
        assert shown == "".join(pieces)
        return
    assert match is not None
    assert (match.stop, match.start, match.end) == expected
    assert match.cut == (match.end if include else match.start)
    assert shown == "".join(pieces)[: match.cut]


@settings(max_examples=500)
@given(
    before=LETTERS,
    pieces=st.lists(st.tuples(LETTERS, st.booleans()), max_size=8),
    stops=STOPS,
    include=st.booleans(),
    is_strict=st.booleans(),
)
def test_hidden_pieces_and_the_text_before_are_matched_and_never_shown(
    before: str, pieces: list[tuple[str, bool]], stops: list[str], include: bool, is_strict: bool
) -> None:
    params = SamplingParams(stop=stops, include_stop_str_in_output=include, stop_like_transformers=is_strict)
    text = "".join(piece for piece, _ in pieces)
    visible = [not is_hidden for piece, is_hidden in pieces for _ in piece]
    places = [*range(-len(before), 0), *(at for at, is_seen in enumerate(visible) if is_seen)]
    ends = []
    for end in range(1, len(text) + 1):
        seen = [at for at in places if at < end]
        shown = "".join((before + text)[at + len(before)] for at in seen)
        hits = [(end, stop, end - len(stop)) for stop in stops if (before + text[:end]).endswith(stop)]
        if not is_strict and visible[end - 1]:
            spans = [(end, stop, seen[-len(stop)]) for stop in stops if shown.endswith(stop)]
            hits = spans + hits
        ends += sorted(hits, key=lambda hit: -len(hit[1]))
    end, stop, start = ends[0] if ends else (len(text), None, 0)
    kept = end if stop is None or include else max(start, 0)
    checker, shown, match = StopChecker(params, before), "", None
    for piece, is_hidden in pieces:
        released = checker.push(piece, 1, is_hidden=is_hidden)
        shown, match = shown + released.text, released.match
        if match:
            break
    assert (match.stop if match else None) == stop
    assert shown + checker.flush() == "".join(c for c, is_seen in zip(text[:kept], visible) if is_seen)
    if match:
        assert (match.start, match.end, match.cut) == (start, end, kept)


def test_a_stop_string_may_span_a_piece_that_is_not_shown() -> None:
    checker = StopChecker(SamplingParams(stop=["abcd"]))
    assert checker.push("xab", 1) == Released("x", None)
    assert checker.push("<pad>", 2, is_hidden=True) == Released("", None)
    assert checker.fork().push("cd", 3).match is not None
    assert checker.push("cde", 3) == Released("", StopMatch("abcd", 1, 10, 1))


@settings(max_examples=300)
@given(text=LETTERS, stops=STOPS, include=st.booleans(), cuts=st.sets(st.integers(0, 25)))
def test_the_result_does_not_depend_on_the_split_into_tokens(
    text: str, stops: list[str], include: bool, cuts: set[int]
) -> None:
    def run(pieces: list[str]) -> tuple[str, StopMatch | None]:
        checker, shown = StopChecker(SamplingParams(stop=stops, include_stop_str_in_output=include)), ""
        for piece in pieces:
            released = checker.push(piece, 1)
            shown += released.text
            if released.match:
                return shown, released.match
        return shown + checker.flush(), None

    at = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    assert run([text[a:b] for a, b in itertools.pairwise(at)]) == run(list(text))


@given(text=LETTERS, stop=st.text(st.sampled_from("abc"), min_size=1, max_size=5))
def test_only_a_possible_beginning_of_a_stop_string_is_held_back(text: str, stop: str) -> None:
    checker, shown = StopChecker(SamplingParams(stop=stop)), ""
    for count, char in enumerate(text, start=1):
        released = checker.push(char, 1)
        shown += released.text
        if released.match:
            return
        prefixes = [n for n in range(len(stop)) if text[:count].endswith(stop[:n])]
        assert shown == text[: count - max(prefixes)]


def test_a_stop_string_over_two_tokens_never_leaks() -> None:
    checker = StopChecker(SamplingParams(stop=["</end>"]))
    assert checker.push("hello <", 1).text == "hello "
    assert checker.push("/en", 2).text == ""
    released = checker.push("d> more", 3)
    assert released == Released("", StopMatch("</end>", 6, 12, 6))
    assert checker.flush() == ""


def test_held_text_comes_out_when_it_turns_out_to_be_harmless() -> None:
    checker = StopChecker(SamplingParams(stop=["STOP"]))
    assert checker.push("a ST", 1).text == "a "
    assert checker.push("AR", 2).text == "STAR"
    assert checker.push(" STO", 3).text == " "
    assert checker.flush() == "STO"


def test_the_stop_string_that_is_complete_first_wins_and_the_longest_of_those() -> None:
    first = StopChecker(SamplingParams(stop=["abcd", "bc"])).push("abcd", 1)
    assert first == Released("a", StopMatch("bc", 1, 3, 1))
    longest = StopChecker(SamplingParams(stop=["bc", "abc"])).push("abcd", 1)
    assert longest == Released("", StopMatch("abc", 0, 3, 0))


def test_a_stop_string_begun_before_min_tokens_counts_once_it_completes_after() -> None:
    checker = StopChecker(SamplingParams(stop=["xy"], min_tokens=3))
    assert checker.push("xy", 1).match is None
    assert checker.push("x", 2).text == ""
    assert checker.push("y", 3) == Released("", StopMatch("xy", 2, 4, 2))


def test_an_included_stop_string_is_not_held_back() -> None:
    checker = StopChecker(SamplingParams(stop=["END"], include_stop_str_in_output=True))
    assert checker.push("a E", 1).text == "a E"
    assert checker.push("ND tail", 2) == Released("ND", StopMatch("END", 2, 5, 5))


def test_text_after_the_end_is_refused() -> None:
    checker = StopChecker(SamplingParams(stop=["x"]))
    checker.push("x", 1)
    with pytest.raises(ValueError, match="expected no text after a stop string, got 'y'"):
        checker.push("y", 2)
