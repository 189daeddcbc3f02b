"""``hpu-duo eval``: benchmarks in the form in which they were published."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Run = Callable[..., Result]
CHOICES = {f"choice_{letter}": f"the {letter}" for letter in "ABCD"}
V2 = {"_id": "1", "question": "Who?", "context": "a b c", "answer": "A", "difficulty": "easy", **CHOICES}


def longbench_file(path: Path, dataset: str, lengths: tuple[int, ...]) -> Path:
    item = {"input": "What?", "context": "a b c", "answers": ["x"], "all_classes": None, "dataset": dataset}
    path.write_text("".join(json.dumps({**item, "length": length}) + "\n" for length in lengths))
    return path


def test_longbench_e_has_a_line_for_each_range_of_lengths(
    hpu_duo: Run, chat_model_dir: Path, tmp_path: Path
) -> None:
    path = longbench_file(tmp_path / "x.jsonl", "hotpotqa_e", (10, 5000, 20, 9000))
    common = ("eval", "longbench", "--file", path, "--model", chat_model_dir, "--metrics", "official")
    done = hpu_duo(*common, "--by-length", "--chat-template", "--simulated-decodes", "5", "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["tasks"]
    assert [(row["dataset"], row["length_bucket"], row["num_samples"]) for row in rows] == [
        ("hotpotqa", "0-4k", 2),
        ("hotpotqa", "4-8k", 1),
        ("hotpotqa", "8k+", 1),
    ]
    shown = hpu_duo(*common, "--by-length").stdout
    assert "length bucket" in shown
    limited = hpu_duo(*common, "--limit", "3", "--json")
    assert json.loads(limited.stdout)["tasks"][0]["num_samples"] == 3


def test_results_of_other_metrics_are_not_mixed(hpu_duo: Run, model_dir: Path, tmp_path: Path) -> None:
    path = longbench_file(tmp_path / "x.jsonl", "hotpotqa", (10,))
    common = ("eval", "longbench", "--file", path, "--model", model_dir, "--out", tmp_path / "run")
    assert hpu_duo(*common).exit_code == 0
    refused = hpu_duo(*common, "--metrics", "official")
    assert (refused.exit_code, "metrics='ours' (asked: 'official')" in refused.stderr) == (2, True)


def test_longbench_v2_is_answered_in_groups(hpu_duo: Run, model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps([{**V2, "length": "short"}, {**V2, "_id": "2", "length": "long"}]))
    common = ("eval", "longbench-v2", "--file", path, "--model", model_dir, "--out", tmp_path / "run")
    done = hpu_duo(*common, "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["tasks"]
    assert [(row["group"], row["num_samples"]) for row in rows] == [
        ("overall", 2),
        ("easy", 2),
        ("short", 1),
        ("long", 1),
    ]
    records = (tmp_path / "run" / "results.jsonl").read_text().splitlines()[1:]
    assert [json.loads(line)["_id"] for line in records] == ["1", "2"]


def test_ruler_asks_questions_of_files_and_knows_them_again(
    hpu_duo: Run, chat_model_dir: Path, tmp_path: Path
) -> None:
    documents = [["Title", ["The baker sold a boat."]], ["Other", ["It rained."]]]
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps([{"question": "Who?", "answer": "baker", "context": documents}] * 3))
    common = ("eval", "ruler", "--model", chat_model_dir, "--hotpotqa", path, "--num-tokens", "700")
    command = (*common, "--tasks", "qa_2", "--limit", "2", "--chat-template", "--out", tmp_path / "run")
    done = hpu_duo(*command, "--json")
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["tasks"]
    assert (row["task"], row["num_samples"]) == ("qa_2", 2)
    records = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    assert all(record["length_w_model_temp"] <= 700 for record in records[1:])
    assert all(record["length_w_model_temp"] > record["length"] for record in records[1:])
    path.write_text(json.dumps([{"question": "Who?", "answer": "potter", "context": documents}] * 3))
    refused = hpu_duo(*command)
    assert (refused.exit_code, "questions=" in refused.stderr) == (2, True)
    too_many = hpu_duo(*common, "--tasks", "qa_2", "--limit", "4", "--write", tmp_path / "samples.jsonl")
    assert (too_many.exit_code, "at least 4 questions in the file, got 3" in too_many.stderr) == (2, True)


def test_published_sizes_are_the_default(hpu_duo: Run) -> None:
    shown = hpu_duo("eval", "ruler", "--help").stdout
    assert "500" in shown
    assert "all 13, or 11" in " ".join(shown.replace("│", " ").split())


def test_policies_are_measured_at_equal_budgets_and_drawn(hpu_duo: Run, tmp_path: Path) -> None:
    sizes = ("--num-tokens", "400", "--num-documents", "1", "--num-passkeys", "2", "--passkey-words", "3")
    common = ("eval", "curve", "--out", tmp_path / "run", "--policies", "full", "duo", "local", *sizes)
    command = (*common, "--budgets", "0.3", "--policy-tasks", "passkey", "--rehearsals", "1", "--json")
    done = hpu_duo(*command)
    assert done.exit_code == 0, done.output
    points = json.loads(done.stdout)["points"]
    assert [(one["policy"], one["budget"]) for one in points] == [("full", 1.0), ("duo", 0.3), ("local", 0.3)]
    assert points[0]["value"] == 1.0
    assert all(one["kv_ratio"] < 0.5 for one in points[1:])
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        *("results.jsonl", "curve.csv", "curve.png", "report.json")
    }
    again = hpu_duo(*command)
    assert again.stdout == done.stdout
    other = hpu_duo(*command, "--block-size", "64")
    assert (other.exit_code, "block_size=128 (asked: 64)" in other.stderr) == (2, True)


def test_passkeys_are_asked_under_a_policy(hpu_duo: Run) -> None:
    sizes = ("--num-tokens", "300", "--num-documents", "1", "--num-passkeys", "1", "--passkey-words", "3")
    done = hpu_duo("eval", "passkey", *sizes, "--kv-policy", "local", "--kv-budget", "32", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["kv_ratio"] < 0.25
    assert [row["num_exact"] for row in report["full_attention"]] == [1]


def test_policies_that_there_are_not_are_refused_before_others_are_measured(
    hpu_duo: Run, tmp_path: Path
) -> None:
    refused = hpu_duo("eval", "curve", "--policies", "full", "h3o", "--out", tmp_path / "out")
    assert (refused.exit_code, "expected kv_policy" in refused.stderr) == (2, True), refused.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("longbench", "--file", "FILE", "--metrics", "mine"), "--metrics ours or official, got 'mine'"),
        (("longbench", "--file", "FILE", "--limit", "0"), "--limit of at least 1, got 0"),
        (("longbench", "--file", "FILE", "--simulated-decodes", "0"), "--simulated-decodes of at least 1"),
        (("longbench", "--file", "FILE", "--max-length", "1"), "max_length of at least 2"),
        (
            ("longbench", "--file", "FILE", "--chat-template", "--model", "MODEL"),
            "a tokenizer with a chat template",
        ),
        (("longbench-v2", "--file", "FILE"), "'_id' to be a text in question 1"),
        (("curve", "--policies", "h3o"), "expected kv_policy"),
        (
            ("curve", "--policies", "full", "tova:protect=900", "--budgets", "0.1"),
            "at least 900 slots, got 200",
        ),
        (("curve", "--policies", "full", "full"), "policies, each once"),
        (
            ("curve", "--policies", "full", "--num-tokens", "300"),
            "4 rehearsals of each and a tail of 105 tokens",
        ),
        (("curve", "--policies", "full", "--num-tokens", "9000"), "texts of at most 8192 tokens"),
        (
            ("curve", "--policies", "full", "--num-tokens", "100", "--policy-tasks", "ruler"),
            "num_tokens of at least 365 for niah_single_1, got 100",
        ),
        (
            ("curve", "--policies", "full", "--num-tokens", "3", "--policy-tasks", "perplexity"),
            "expected a tokenizer that can encode ''",
        ),
        (("curve", "--policies", "duo", "--budgets", "0.01"), "a budget of at least 4.0%"),
        (("curve", "--policies", "full", "--policy-tasks", "chess"), "tasks among passkey, rehearsed"),
        (("curve", "--kv-policy", "h2o", "--kv-budget", "9"), "--policies h2o for curves, got --kv-policy"),
        (("ruler", "--ruler", "FILE"), "of RULER's repository"),
        (("ruler", "--tasks", "qa_1"), "file of questions for qa_1"),
        (("ruler", "--simulated-decodes", "0"), "--simulated-decodes of at least 1"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    hpu_duo: Run, model_dir: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    path = longbench_file(tmp_path / "x.jsonl", "hotpotqa", (10,))
    words = [word.replace("FILE", str(path)).replace("MODEL", str(model_dir)) for word in arguments]
    refused = hpu_duo("eval", *words, "--out", tmp_path / "out")
    assert (refused.exit_code, message in refused.stderr) == (2, True), refused.output
    assert not (tmp_path / "out").exists()


def test_passkeys_are_asked_where_prompts_choose_blocks(hpu_duo: Run) -> None:
    sizes = ("--num-tokens", "400", "--num-documents", "1", "--num-passkeys", "1", "--passkey-words", "3")
    rule = ("--attention-rule", "top_blocks:blocks=4", "--block-size", "32")
    done = hpu_duo("eval", "passkey", *sizes, *rule, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["num_exact"] == 1
