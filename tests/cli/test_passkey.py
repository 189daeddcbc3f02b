"""``hpu-duo passkey`` with a model that cannot do it: the task and the verdict, not the skill."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from hpu_duo.cli.text.passkey import Answer
from hpu_duo.lab.tasks.passkeys import Passkey

Run = Callable[..., Result]


def test_every_passkey_is_asked_for_after_the_whole_document(
    hpu_duo: Run, model_dir: Path, pattern_dir: Path
) -> None:
    result = hpu_duo(
        *("passkey", "--model", model_dir, "--pattern", pattern_dir, "--sparsity", "0.5", "--json"),
        *("--num-tokens", "1200", "--num-passkeys", "3", "--passkey-words", "2", "--block-size", "16"),
    )
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert len(told["answers"]) == 3
    assert told["num_right"] == sum(one["is_right"] for one in told["answers"])
    assert all(1100 < one["num_prompt_tokens"] < 1400 for one in told["answers"])
    assert all(len(one["expected"].split()) == 2 for one in told["answers"])
    assert [one["depth"] for one in told["answers"]] == sorted(one["depth"] for one in told["answers"])
    assert told["run"]["kv_ratio"] < 0.55


def test_the_table_shows_expected_and_answered_and_a_verdict_for_each(hpu_duo: Run, model_dir: Path) -> None:
    result = hpu_duo(
        *("passkey", "--model", model_dir, "--num-tokens", "600"),
        *("--num-passkeys", "2", "--passkey-words", "1"),
    )
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("✗") == 2
    assert "0 of 2 passkeys found (95 % interval 0% to 66%)" in result.stdout
    assert "What is the passkey for " in result.stdout
    assert "KV at peak" in result.stdout


def test_an_answer_is_right_when_it_is_the_hidden_words_in_order() -> None:
    hidden = Passkey("Ada", ("otter", "drum"), 0.5)
    assert Answer(hidden, "otter drum").is_right
    assert not Answer(hidden, "drum otter").is_right
    assert not Answer(hidden, "otter drum jar").is_right


def test_documents_that_cannot_be_written_are_refused(hpu_duo: Run, model_dir: Path) -> None:
    for arguments, message in (
        (("--num-passkeys", "0"), "expected --num-passkeys of at least 1"),
        (("--num-tokens", "10"), "more tokens are needed"),
        (("--num-tokens", "9000"), "expected --num-tokens below 4096, the tokens that the model holds"),
    ):
        result = hpu_duo("passkey", "--model", model_dir, *arguments)
        assert result.exit_code == 2
        assert message in result.stderr


def test_the_builtin_model_finds_every_passkey_with_half_of_its_heads_streaming(hpu_duo: Run) -> None:
    result = hpu_duo("passkey", "--num-tokens", "1500", "--num-passkeys", "3", "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["num_right"] == 3, told["answers"]
    assert (told["num_answers"], told["accuracy"], told["accuracy_high"]) == (3, 1.0, 1.0)
    assert told["accuracy_low"] == pytest.approx(0.4385, abs=1e-4)
    assert told["run"]["kv_ratio"] < 0.6


def test_heads_keep_what_a_policy_says_instead_of_half_of_them_streaming(hpu_duo: Run) -> None:
    few = ("passkey", "--num-tokens", "1500", "--num-passkeys", "3", "--max-num-seqs", "3", "--json")
    told = {}
    for policy in ("streaming-llm", "snapkv"):
        result = hpu_duo(*few, "--kv-policy", policy, "--kv-budget", "400")
        assert result.exit_code == 0, result.stderr
        told[policy] = json.loads(result.stdout)
        assert told[policy]["run"]["kv_ratio"] < 0.4, "every head has a budget"
    assert told["streaming-llm"]["num_right"] < 3


def test_it_finds_none_when_all_heads_stream(hpu_duo: Run) -> None:
    result = hpu_duo("passkey", "--num-tokens", "1500", "--num-passkeys", "3", "--sparsity", "1", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["num_right"] == 0
