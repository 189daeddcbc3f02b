"""Policies by name, with options."""

from __future__ import annotations

import pytest

from hpu_duo.scheduling import POLICIES, make_policy


@pytest.mark.parametrize("name", POLICIES)
def test_policies_are_made_by_their_names_each_time_anew(name: str) -> None:
    first, second = make_policy(name), make_policy(name)
    assert first is not second
    assert first.name == name
    assert type(first) is type(second)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lottery", r"scheduling_policy to be one of fcfs, priority.*, got 'lottery'"),
        ("lottery:patience=1", "got 'lottery:patience=1'"),
        ("", "got ''"),
        ("fcfs:patience=1", r"options of scheduling_policy 'fcfs' \(none\), got 'patience=1'"),
        ("priority:hurry=1", r"options of scheduling_policy 'priority' \(patience=...\), got 'hurry=1'"),
        ("priority:patience", "got 'patience'"),
        ("priority:patience=1,patience=2", "got 'patience=2'"),
        ("priority:patience=soon", "patience of scheduling_policy 'priority' to be a number, got 'soon'"),
        ("priority:patience=-1", "expected patience to be 0 or more, got -1"),
        ("priority:patience=nan", "expected patience to be 0 or more, got nan"),
    ],
)
def test_what_is_not_a_policy_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy(text)
