"""Published formats of traces: what is read, what is skipped, what is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hpu_duo.lab.traces import Arrival, TraceFormat, read_trace, write_mooncake

DATA = Path(__file__).parent.parent / "data" / "traces"


def count_words(text: str) -> int:
    return len(text.split())


def lengths(arrivals: tuple[Arrival, ...]) -> list[tuple[float, int, int]]:
    return [(each.time_s, each.num_prompt_tokens, each.num_output_tokens) for each in arrivals]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("burstgpt.csv", TraceFormat.BURSTGPT),
        ("burstgpt-sessions.csv", TraceFormat.BURSTGPT),
        ("azure-2023.csv", TraceFormat.AZURE),
        ("azure-2024.csv", TraceFormat.AZURE),
        ("mooncake.jsonl", TraceFormat.MOONCAKE),
        ("sharegpt.json", TraceFormat.SHAREGPT),
    ],
)
def test_the_format_is_found_out(name: str, expected: TraceFormat) -> None:
    trace = read_trace(DATA / name, count_tokens=count_words)
    assert trace.format is expected
    assert trace.has_times is (expected is not TraceFormat.SHAREGPT)
    assert trace.arrivals[0].time_s == 0


def test_burstgpt_is_read_in_order_of_time_without_failures() -> None:
    trace = read_trace(DATA / "burstgpt.csv")
    assert lengths(trace.arrivals) == [(0, 311, 24), (34, 902, 310), (56.5, 18, 402), (111, 1204, 96)]
    assert trace.num_skipped == 2


def test_burstgpt_has_sessions_in_later_releases() -> None:
    trace = read_trace(DATA / "burstgpt-sessions.csv")
    assert [each.session for each in trace.arrivals] == ["a1", None, "a1"]
    assert [each.time_s for each in trace.arrivals] == [0, 7.75, 29.5]


def test_azure_times_pass_midnight_and_keep_their_fractions() -> None:
    trace = read_trace(DATA / "azure-2023.csv")
    assert lengths(trace.arrivals) == [(0, 420, 37), (0.375, 1391, 11), (1.75, 88, 209)]
    assert trace.num_skipped == 1


def test_azure_times_of_different_zones_are_compared() -> None:
    assert [each.time_s for each in read_trace(DATA / "azure-2024.csv").arrivals] == [0, 0.25, 0.75]


def test_mooncake_tells_what_prompts_share() -> None:
    trace = read_trace(DATA / "mooncake.jsonl")
    assert lengths(trace.arrivals) == [(0, 1100, 52), (0, 1400, 26), (2.5, 600, 9), (4.0005, 300, 700)]
    assert [each.block_ids for each in trace.arrivals] == [(0, 1, 2), (0, 1, 3), (0, 4), (5,)]
    assert [each.session for each in trace.arrivals] == [None, None, None, "17"]


def test_sharegpt_gives_prompts_and_lengths_of_first_exchanges() -> None:
    trace = read_trace(DATA / "sharegpt.json", count_tokens=count_words)
    assert lengths(trace.arrivals) == [(0, 9, 12), (0, 11, 14)]
    assert trace.arrivals[0].text == "Name three rivers that flow into the North Sea."
    assert trace.num_skipped == 2


def test_no_more_is_read_than_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    good = '{"timestamp": 1, "input_length": 2, "output_length": 3}\n'
    file.write_text(good * 2 + "broken\n")
    assert len(read_trace(file, limit=2).arrivals) == 2
    with pytest.raises(ValueError, match="JSON object in line 3"):
        read_trace(file, limit=3)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    arrivals = (
        Arrival(0.0, 10, 3),
        Arrival(0.5, 700, 1, (4, -(2**63), 9), 256, session="s"),
        Arrival(1.25, 5, 5, (4,)),
    )
    write_mooncake(tmp_path / "trace.jsonl", arrivals)
    assert read_trace(tmp_path / "trace.jsonl").arrivals == arrivals


BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (BURST + "1,m,2.5,3,5,x\n", "whole number of at least 0 in 'Request tokens', line 2 of .*'2.5'"),
        (BURST + "1,m,2,-3,5,x\n", "whole number .*'Response tokens'.*'-3'"),
        (BURST + "nan,m,2,3,5,x\n", "a number in 'Timestamp'"),
        (BURST + "-4,m,2,3,5,x\n", "a time of at least 0 s"),
        (BURST + "1,m,2,3\n", "expected 6 fields in line 2 .* got 4"),
        (AZURE + "2023-13-16 18:15:46.68,2,3\n", "a time such as .*line 2 of .*'2023-13-16"),
        (AZURE + "1,2,3\n", "a time such as"),
        ('{"timestamp": 0}\n', "a number in 'input_length', line 1"),
        ('{"timestamp": 0, "input_length": 1, "output_length": true}\n', "a number in 'output_length'"),
        (
            '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": "abc"}\n',
            "'hash_ids', line 1",
        ),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n[1]\n', "JSON object in line 2"),
        ("[{}]", "an object with 'conversations' in conversation 0"),
        ('[{"conversations": [{"value": 1}, {"value": "b"}]}]', "texts in 'value' of conversation 0"),
        ("[1, 2", "a JSON list of conversations"),
        ("prompt,length\n1,2\n", "one of the formats burstgpt, azure, mooncake, sharegpt, got b'prompt"),
        ("", "one of the formats"),
        (BURST + "1,m,0,0,0,x\n", "at least one served request in .* got none in 1 rows"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "trace"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_trace(file, count_tokens=count_words)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: read_trace(DATA / "missing.csv"), "cannot read the trace .*missing.csv: No such file"),
        (lambda: read_trace(DATA), "cannot read the trace .*Is a directory"),
        (lambda: read_trace(DATA / "sharegpt.json"), "expected a tokenizer"),
        (lambda: read_trace(DATA / "mooncake.jsonl", TraceFormat.AZURE), "expected the columns TIMESTAMP"),
        (lambda: read_trace(DATA / "mooncake.jsonl", limit=0), "limit of at least 1, got 0"),
        (
            lambda: TraceFormat.parse("mooncakes"),
            "among burstgpt, azure, mooncake, sharegpt, got 'mooncakes'",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask()
