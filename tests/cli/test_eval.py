"""``hpu-duo eval``: reports, pictures, resuming, and what is refused without touching a file."""

import csv
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from typer.testing import Result

from hpu_duo.builtin import PATTERN_DIR
from hpu_duo.engine.stepper import Runner
from hpu_duo.heads import HeadPattern
from hpu_duo.lab.eval.interval import wilson

Run = Callable[..., Result]
SMALL = ("--passkey-words", "3", "--num-documents", "1")
PNG = b"\x89PNG"


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()} if directory.exists() else {}


def test_passkey_accuracy_stands_beside_bytes_kept(hpu_duo: Run) -> None:
    command = ("eval", "passkey", "--num-tokens", "300", "--num-passkeys", "2", *SMALL)
    done = hpu_duo(*command, "--sparsity", "0.75", "--json")
    report = json.loads(done.stdout)
    assert (report["num_exact"], report["num_answers"]) == (2, 2)
    assert 0 < report["held_bytes"] < report["full_bytes"]
    assert report["kv_ratio"] == pytest.approx(report["held_bytes"] / report["full_bytes"])
    assert (report["accuracy_low"], report["accuracy_high"]) == wilson(1.0, 2)
    shown = hpu_duo(*command, "--sparsity", "0.75").stdout
    assert "of full attention" in shown
    assert "1.000 (0.342 to 1.000)" in shown
    assert f"{report['kv_ratio']:.1%}" in shown


@pytest.mark.slow
def test_a_failure_of_full_attention_itself_is_told(hpu_duo: Run, model_dir: Path, tmp_path: Path) -> None:
    """A random model finds nothing; the built-in one only without its retrieval heads."""
    texts = ("--model", model_dir, "--words", "builtin", *SMALL, "--json")
    pattern = tmp_path / "pattern"
    HeadPattern.random(2, 2, seed=0, sink=4, recent=12).save(pattern)
    for heads in ((), ("--pattern", pattern, "--sparsity", "0.5")):
        done = hpu_duo("eval", "passkey", "--num-tokens", "300", "--num-passkeys", "2", *texts, *heads)
        assert done.exit_code == 0, done.output
        assert "warning: full attention itself answers only 0 of 2 at 300 tokens" in done.stderr
        assert [row["num_exact"] for row in json.loads(done.stdout)["full_attention"]] == [0]
    done = hpu_duo(
        "eval", "niah", "--out", tmp_path / "grid", "--lengths", "150", "200", "--depths", "1", *texts
    )
    assert "answers only 0 of 1 at 150 tokens, 0 of 1 at 200 tokens" in done.stderr
    done = hpu_duo(
        *("eval", "curve", "--out", tmp_path / "curve", "--patterns", f"random={pattern}", "--shares", "0.5"),
        *("--random-seeds", "0", "--num-tokens", "200", "--num-passkeys", "1", *texts),
    )
    assert "answers only 0 of 1 at 200 tokens" in done.stderr

    done = hpu_duo(*("eval", "passkey", "--num-tokens", "400", "--sparsity", "1"), *SMALL, "--json")
    report = json.loads(done.stdout)
    assert report["accuracy"] < 0.5
    assert [row["accuracy"] for row in report["full_attention"]] == [1.0]
    assert "full attention answers 8 of 8 at 400 tokens, so wrong answers are due" in done.stderr
    assert "warning" not in done.stderr


def test_texts_and_words_are_chosen_and_results_know_them(
    hpu_duo: Run, model_dir: Path, tmp_path: Path
) -> None:
    book = tmp_path / "book.txt"
    book.write_text(
        "It rained all day. Nobody came to the house! Then a letter arrived. " * 5, encoding="utf-8"
    )
    command = ("eval", "niah", "--out", tmp_path / "grid", "--lengths", "200", "--depths", "1", *SMALL)
    common = (*command, "--model", model_dir)
    refused = hpu_duo(*common, "--haystack", book)
    assert refused.exit_code == 2
    assert "at least 3 whole words among the model's tokens, got 0" in refused.stderr
    assert not (tmp_path / "grid").exists()
    assert hpu_duo(*common, "--haystack", book, "--words", "builtin").exit_code == 0
    before = files(tmp_path / "grid")
    refused = hpu_duo(*common, "--words", "builtin")
    assert (refused.exit_code, files(tmp_path / "grid")) == (2, before)
    assert "(asked: 'builtin')" in refused.stderr
    for arguments, message in (
        (("--words", "own"), "expected --words builtin, tokenizer or vocabulary, got 'own'"),
        (("--haystack", tmp_path / "none.txt"), "cannot read the haystack"),
    ):
        refused = hpu_duo("eval", "passkey", *arguments)
        assert refused.exit_code == 2
        assert message in refused.stderr


def test_a_needle_grid_is_drawn_and_resumed(hpu_duo: Run, tmp_path: Path) -> None:
    command = ("eval", "niah", "--out", tmp_path / "grid", "--lengths", "150", "200", "--depths", "0.4", "1")
    first = hpu_duo(*command, *SMALL, "--json")
    assert first.exit_code == 0, first.output
    whole = files(tmp_path / "grid")
    assert set(whole) == {"results.jsonl", "heatmap.png", "report.json"}
    assert whole["heatmap.png"].startswith(PNG)
    report = json.loads(first.stdout)
    assert report == json.loads(whole["report.json"])
    assert all(cell["num_answers"] == 1 for cell in report["cells"])
    assert [cell["kv_num_tokens"] > cell["num_tokens"] for cell in report["cells"]] == [True] * 4
    lines = whole["results.jsonl"].splitlines(keepends=True)
    (tmp_path / "grid" / "results.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:7])
    (tmp_path / "grid" / "heatmap.png").unlink()
    again = hpu_duo(*command, *SMALL, "--json")
    assert again.stdout == first.stdout
    assert files(tmp_path / "grid") == whole


def test_results_of_other_settings_and_foreign_files_are_left_alone(hpu_duo: Run, tmp_path: Path) -> None:
    command = ("eval", "niah", "--out", tmp_path, "--lengths", "150", "--depths", "1", *SMALL)
    (tmp_path / "heatmap.png").write_bytes(b"mine")
    refused = hpu_duo(*command)
    assert (refused.exit_code, files(tmp_path)) == (2, {"heatmap.png": b"mine"})
    assert "expected output files that do not exist yet" in refused.stderr
    (tmp_path / "results.jsonl").write_bytes(b"notes\n")
    refused = hpu_duo(*command)
    assert "another one" in refused.stderr
    assert files(tmp_path) == {"heatmap.png": b"mine", "results.jsonl": b"notes\n"}


def test_results_of_other_blocks_or_of_another_window_are_not_mixed(hpu_duo: Run, tmp_path: Path) -> None:
    """Bytes kept depend on the size of blocks, and what is kept on the window in the pattern's config."""
    pattern, out = tmp_path / "pattern", tmp_path / "out"
    shutil.copytree(PATTERN_DIR, pattern)
    command = ("eval", "niah", "--out", out, "--pattern", pattern, "--sparsity", "0.5", *SMALL)
    command = (*command, "--lengths", "150", "--depths", "1")
    assert hpu_duo(*command).exit_code == 0
    before = files(out)
    refused = hpu_duo(*command, "--block-size", "64")
    assert (refused.exit_code, files(out)) == (2, before)
    assert "block_size=128 (asked: 64)" in refused.stderr
    config = json.loads((pattern / "config.json").read_text())
    (pattern / "config.json").write_text(json.dumps({**config, "recent_size": 32}))
    refused = hpu_duo(*command)
    assert (refused.exit_code, files(out)) == (2, before)
    assert "same settings, got pattern=" in refused.stderr


def test_results_of_a_model_whose_weights_have_changed_are_not_mixed(
    hpu_duo: Run, model_dir: Path, tmp_path: Path
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(model_dir, model)
    command = ("eval", "niah", "--out", out, "--model", model, "--lengths", "150", "--depths", "1", *SMALL)
    command = (*command, "--words", "builtin")
    assert hpu_duo(*command).exit_code == 0
    before = files(out)
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    refused = hpu_duo(*command)
    assert (refused.exit_code, files(out)) == (2, before)
    assert f"the model in {model} as it is now, got results of another config.json" in refused.stderr


@pytest.mark.parametrize("command", ["passkey", "perplexity", "niah", "ruler"])
def test_a_bug_in_a_step_keeps_its_traceback(
    hpu_duo: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    arguments = {
        "passkey": ("--num-tokens", "200", "--num-passkeys", "1", *SMALL),
        "perplexity": ("--num-tokens", "40"),
        "niah": ("--out", tmp_path, "--lengths", "150", "--depths", "1", *SMALL),
        "ruler": ("--tasks", "vt", "--num-tokens", "2000", "--limit", "1"),
    }[command]

    def fail(*_: object) -> None:
        raise ValueError("operands could not be broadcast together")

    monkeypatch.setattr(Runner, "launch", fail)
    done = hpu_duo("eval", command, *arguments)
    assert done.exit_code == 1
    assert isinstance(done.exception, ValueError)
    assert "broadcast" in str(done.exception)


def test_an_interrupted_evaluation_ends_with_one_word(hpu_duo: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "launch", interrupt)
    done = hpu_duo("eval", "passkey", "--num-tokens", "200", "--num-passkeys", "1", *SMALL)
    assert (done.exit_code, done.stderr) == (130, "hpu-duo: interrupted\n")


def test_a_missing_matplotlib_is_told_before_anything_is_measured(
    hpu_duo: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpu_duo.cli.terminal.find_spec", lambda _: None)
    for command, what in (("niah", "the heat map"), ("curve", "the picture of the curve")):
        refused = hpu_duo("eval", command, "--out", tmp_path / "out")
        assert refused.exit_code == 2
        assert f"{what} needs matplotlib" in refused.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_curve_has_a_picture_and_a_table(hpu_duo: Run, tmp_path: Path) -> None:
    out = tmp_path / "curve"
    done = hpu_duo(
        *("eval", "curve", "--out", out, "--patterns", f"gates={PATTERN_DIR}", "--shares", "0.25"),
        *("--random-seeds", "1", "--recents", "16", "--sweep-share", "0.25"),
        *("--num-tokens", "200", "--num-passkeys", "2", *SMALL, "--json"),
    )
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader((out / "curve.csv").read_text().splitlines()))
    found = {(row["label"], row["sweep"]): float(row["accuracy"]) for row in rows}
    assert found["full attention", "share"] == found["gates", "share"] == 1.0
    assert found["all streaming", "share"] < 1.0
    assert ("gates", "recent") in found
    assert ("random heads", "share") in found
    assert (out / "curve.png").read_bytes().startswith(PNG)
    assert len(json.loads(done.stdout)["points"]) == len(rows) == 5
    shown = hpu_duo(
        *("eval", "curve", "--out", out, "--patterns", f"gates={PATTERN_DIR}", "--shares", "0.25"),
        *("--random-seeds", "1", "--recents", "16", "--sweep-share", "0.25"),
        *("--num-tokens", "200", "--num-passkeys", "2", *SMALL),
    ).stdout
    assert "random heads " in shown
    assert "…" not in shown


def test_ruler_samples_are_written_and_answered(hpu_duo: Run, model_dir: Path, tmp_path: Path) -> None:
    common = ("eval", "ruler", "--model", model_dir, "--tasks", "niah_single_1", "vt", "--limit", "2")
    written = hpu_duo(*common, "--num-tokens", "2500", "--write", tmp_path / "samples.jsonl")
    assert written.exit_code == 0, written.output
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [sample["task"] for sample in samples] == ["niah_single_1"] * 2 + ["vt"] * 2
    assert all(sample["length"] <= 2500 for sample in samples)
    again = hpu_duo(*common, "--num-tokens", "2500", "--write", tmp_path / "samples.jsonl")
    assert again.exit_code == 2
    nowhere = hpu_duo(*common, "--num-tokens", "2500", "--write", tmp_path / "samples.jsonl" / "more.jsonl")
    assert (nowhere.exit_code, "expected --write to be a file" in nowhere.stderr) == (2, True)
    answered = hpu_duo(*common, "--num-tokens", "2500", "--out", tmp_path / "run", "--json")
    assert answered.exit_code == 0, answered.output
    rows = json.loads(answered.stdout)["tasks"]
    assert [row["task"] for row in rows] == ["niah_single_1", "vt", "average of 2"]
    assert [row["num_samples"] for row in rows] == [2, 2, 4]
    records = (tmp_path / "run" / "results.jsonl").read_text().splitlines()[1:]
    assert all({"input", "outputs", "pred", "score"} <= set(json.loads(line)) for line in records)


def test_bytes_of_a_length_are_the_same_alone_and_beside_longer_ones(hpu_duo: Run) -> None:
    common = (
        "eval",
        "ruler",
        "--sparsity",
        "0.75",
        "--tasks",
        "niah_single_1",
        "--limit",
        "1",
        "--json",
    )
    alone, both = (
        json.loads(hpu_duo(*common, "--num-tokens", *lengths, "--json").stdout)["tasks"]
        for lengths in (("400",), ("400", "900"))
    )
    assert alone[0] == both[0]
    assert both[0]["kv_ratio"] > both[1]["kv_ratio"]
    assert both[0]["kv_num_tokens"] <= 400


def test_longbench_files_are_answered_and_scored(hpu_duo: Run, model_dir: Path, tmp_path: Path) -> None:
    item = {"input": "What?", "context": "a b c", "answers": ["x"], "all_classes": None, "length": 3}
    path = tmp_path / "hotpotqa.jsonl"
    path.write_text(json.dumps(item) + "\n" + json.dumps({**item, "dataset": "trec", "all_classes": ["x"]}))
    done = hpu_duo(
        "eval", "longbench", "--file", path, "--model", model_dir, "--out", tmp_path / "run", "--json"
    )
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert [row["dataset"] for row in report["tasks"]] == ["hotpotqa", "trec"]
    assert all(row["kv_ratio"] > 0 for row in report["tasks"])
    assert [(row["score_low"], row["score_high"]) for row in report["tasks"]] == [
        wilson(row["score"], 1) for row in report["tasks"]
    ]


def test_perplexity_is_reported_by_position(hpu_duo: Run, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The small teacher watched a letter near the river. " * 8)
    done = hpu_duo("eval", "perplexity", "--file", text, "--window", "32", "--sparsity", "0.5", "--json")
    report = json.loads(done.stdout)
    assert [row["from_token"] for row in report["windows"]] == [
        1 + 32 * i for i in range(len(report["windows"]))
    ]
    values = [row["perplexity"] for row in report["windows"]]
    assert min(values) < report["perplexity"] < max(values)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ruler", "--tasks", "niah_quadruple"), "expected --tasks among"),
        (("ruler", "--limit", "0"), "--limit of at least 1, got 0"),
        (("passkey", "--num-tokens", "9000"), "at most 8192 tokens"),
        (("passkey", "--pattern", "WRONG", "--sparsity", "0.5"), "4 layers x 4 KV heads"),
        (("curve", "--out", "OUT", "--patterns", "gates"), "LABEL=DIR"),
        (("curve", "--out", "OUT", "--patterns", "gates=WRONG"), "4 layers x 4 KV heads"),
        (("niah", "--out", "OUT", "--depths", "2"), "depths in [0, 1]"),
        (("niah", "--out", "OUT", "--lengths", "8190"), "haystacks of at most 8192"),
        (("longbench", "--file", "MISSING"), "cannot read"),
        (("perplexity", "--file", "MISSING"), "cannot read"),
        (("perplexity", "--num-tokens", "9000"), "at most 8192 tokens"),
        (("ruler", "--num-tokens", "9000000"), "samples of at most 8192 tokens"),
        (("perplexity", "--num-tokens", "-5"), "--num-tokens of at least 1, got -5"),
    ],
)
def test_what_cannot_be_measured_is_refused_and_nothing_is_written(
    hpu_duo: Run, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    HeadPattern.random(2, 2, seed=0, sink=4, recent=12).save(tmp_path / "wrong")
    places = {"WRONG": tmp_path / "wrong", "OUT": tmp_path / "out", "MISSING": tmp_path / "no.jsonl"}
    words = [word.replace("WRONG", str(places["WRONG"])) for word in arguments]
    done = hpu_duo("eval", *(places.get(word, word) for word in words))
    assert done.exit_code == 2
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_harness_is_run_with_the_name_known(hpu_duo: Run) -> None:
    pytest.importorskip("lm_eval")
    done = hpu_duo("eval", "lm-eval", "run", "--help")
    assert done.exit_code == 0
    assert "--model" in done.stdout


@pytest.mark.slow
def test_a_task_that_the_harness_does_not_know_is_told_in_a_sentence(
    hpu_duo: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = pytest.importorskip("lm_eval.tasks")
    # To read all of its own tasks takes the harness 10 s.
    monkeypatch.setattr(tasks, "TaskManager", partial(tasks.TaskManager, include_defaults=False))
    done = hpu_duo("eval", "lm-eval", "run", "--model", "hpu-duo", "--tasks", "no_such_task")
    assert done.exit_code == 2
    assert "hpu-duo: error: Tasks not found: no_such_task" in done.stderr
