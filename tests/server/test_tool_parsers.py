"""Tool calls are found wherever the text is cut, and text that is no call is content."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.server.tools import (
    PARSERS,
    CallArguments,
    CallBegun,
    Content,
    make_parser,
    resolve_parser,
)

Calls = list[tuple[str, str]]


def parsed(parser: str, pieces: Sequence[str], functions: set[str] | None = None) -> tuple[str, Calls]:
    """Content, and calls as names and arguments; arguments never come before the call has begun."""
    made = make_parser(parser, functions)
    found = [one for piece in pieces for one in made.push(piece)] + made.finish()
    content, calls = "", list[tuple[str, str]]()
    for piece in found:
        match piece:
            case Content(text):
                content += text
            case CallBegun(number, name):
                assert number == len(calls)
                calls.append((name, ""))
            case CallArguments(number, text):
                assert number == len(calls) - 1
                calls[number] = (calls[number][0], calls[number][1] + text)
    return content, calls


def cut(text: str, places: Sequence[int]) -> list[str]:
    """A text in pieces."""
    ends = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in pairwise(ends)]


HERMES = "hermes"
LLAMA = "llama3_json"
EXAMPLES = [
    (HERMES, "plain text", "plain text", []),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', "", [("f", '{"x": 1}')]),
    (
        HERMES,
        'Sure. \n<tool_call>{"name": "f", "arguments": {"x": "a}\\"<tool_call>"}}</tool_call>\n'
        '<tool_call>\n{"arguments": {"y": [1, {"z": 2} ] }, "name": "g"}\n</tool_call>\n',
        "Sure.",
        [("f", '{"x": "a}\\"<tool_call>"}'), ("g", '{"y": [1, {"z": 2} ] }')],
    ),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"x": 1', "", [("f", '{"x": 1')]),
    (HERMES, "a <tool_call>no call</tool_call> b", "a <tool_call>no call</tool_call> b", []),
    (HERMES, 'a <tool_call>{"x": 1}</tool_call>', 'a <tool_call>{"x": 1}</tool_call>', []),
    (HERMES, 'a <tool_call>{"name": 5}', 'a <tool_call>{"name": 5}', []),
    (HERMES, "a <tool_call>", "a <tool_call>", []),
    (HERMES, "a <tool_ca", "a <tool_ca", []),
    (HERMES, "a  ", "a  ", []),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_call> then', " then", [("f", "{}")]),
    (LLAMA, "plain text", "plain text", []),
    (LLAMA, '{"name": "f", "parameters": {"x": 1}}', "", [("f", '{"x": 1}')]),
    (LLAMA, '\n<|python_tag|>{"name": "f", "parameters": {"x": 1}}', "", [("f", '{"x": 1}')]),
    (
        LLAMA,
        '{"type": "function", "name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": [1]}}',
        "",
        [("f", "{}"), ("g", '{"x": [1]}')],
    ),
    (LLAMA, '{"answer": 5} is it', '{"answer": 5} is it', []),
    (LLAMA, 'see {"name": "f", "parameters": {}}', 'see {"name": "f", "parameters": {}}', []),
    (LLAMA, '{"name": "f", "parameters": {"x": ', "", [("f", '{"x":')]),
    (LLAMA, "{", "{", []),
    (LLAMA, "<|python", "<|python", []),
    (LLAMA, '{"name": "", "parameters": {}}', '{"name": "", "parameters": {}}', []),
]


@pytest.mark.parametrize(("parser", "text", "content", "calls"), EXAMPLES)
def test_a_text_is_taken_apart_however_it_is_cut(parser: str, text: str, content: str, calls: Calls) -> None:
    for width in (1, 2, 3, 5, 11, len(text)):
        pieces = [text[start : start + width] for start in range(0, len(text), width)]
        assert parsed(parser, pieces) == (content, calls), width


@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        (LLAMA, '{"name": "Alice", "age": 3}', []),
        (LLAMA, '{"age": 3, "name": "Alice", "parameters": {}}', []),
        (HERMES, '<tool_call>{"name": "Alice"}</tool_call>', []),
        (HERMES, '<tool_call>{"arguments": {"x": 1}, "name": "Alice"}</tool_call>', []),
        (HERMES, '<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
        (LLAMA, '{"parameters": {"x": 1}, "name": "f"}', [("f", '{"x": 1}')]),
    ],
)
def test_only_functions_that_there_are_can_be_called(parser: str, text: str, calls: Calls) -> None:
    for pieces in ([text], list(text)):
        assert parsed(parser, pieces, {"f", "g"}) == ("" if calls else text, calls)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.text(min_size=1, max_size=6), st.dictionaries(st.text(max_size=4), VALUES, max_size=3)),
    min_size=1,
    max_size=3,
)


@given(CALLS, st.sampled_from([None, 2]), st.booleans(), st.booleans(), st.lists(st.integers(0, 10**6)))
def test_calls_of_any_names_and_arguments_are_found(
    calls: list[tuple[str, dict[str, object]]],
    indent: int | None,
    is_ascii: bool,
    names_last: bool,
    places: list[int],
) -> None:
    def written(name: str, arguments: object, key: str) -> str:
        members = {"name": name, key: arguments}
        ordered = dict(reversed(members.items())) if names_last else members
        return json.dumps(ordered, indent=indent, ensure_ascii=is_ascii)

    hermes = "\n".join(f"<tool_call>\n{written(*call, 'arguments')}\n</tool_call>" for call in calls)
    llama = "; ".join(written(*call, "parameters") for call in calls)
    for parser, text in ((HERMES, "Hm. " + hermes), (LLAMA, llama)):
        content, found = parsed(parser, cut(text, places))
        assert content == ("Hm." if parser == HERMES else "")
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls


ALPHABET = [
    "<tool_call>",
    "</tool_call>",
    "{",
    "}",
    '"',
    '"name"',
    ":",
    ",",
    "[",
    "]",
    " ",
    "\\",
    '"arguments"',
    "x",
    "<",
]


@given(st.lists(st.sampled_from(ALPHABET), max_size=30), st.lists(st.integers(0, 10**6)))
def test_any_text_is_taken_apart_the_same_way_however_it_is_cut(words: list[str], places: list[int]) -> None:
    text = "".join(words)
    for parser in PARSERS:
        whole = parsed(parser, [text])
        assert parsed(parser, cut(text, places)) == whole
        assert parsed(parser, list(text)) == whole
        if not whole[1]:
            assert whole[0] == text


def test_the_parser_follows_from_the_setting_and_the_chat_template() -> None:
    assert resolve_parser("auto") is None
    assert resolve_parser("auto", "{{ messages }}") is None
    assert resolve_parser("auto", "{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert resolve_parser("auto", '{% if tools %}{"name": f, "parameters": p}{% endif %}') == "llama3_json"
    assert resolve_parser("none", "{% if tools %}<tool_call>{% endif %}") is None
    assert resolve_parser("llama3_json") == "llama3_json"
    with pytest.raises(ValueError, match="hermes"):
        resolve_parser("unknown")
