"""``hpu-duo train-ranker``, from a trace to an engine that uses what was learned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpu_duo.builtin import MODEL_DIR
from hpu_duo.cli.app import app
from hpu_duo.lab.traces import Arrival, write_mooncake
from hpu_duo.scheduling.ranker import LinearRanker, load_ranker


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Prompts of two kinds: one shares a beginning and has long outputs, the other short ones."""
    arrivals = [Arrival(n, 40, (200, 10)[n % 2] + n % 7, (n % 2,), 32) for n in range(200)]
    write_mooncake(path := tmp_path / "trace.jsonl", arrivals)
    return path


def test_a_ranker_is_trained_told_and_written(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "ranker"
    done = CliRunner().invoke(app, ["train-ranker", str(trace), "--output", str(out), "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["num_examples"], report["num_held_out"]) == (180, 20)
    assert report["held_out_tau"] > 0.4
    assert isinstance(load_ranker(out), LinearRanker)
    again = CliRunner().invoke(app, ["train-ranker", str(trace), "--output", str(out)])
    assert again.exit_code == 2
    assert "expected a directory without a model" in again.output


def test_a_model_from_its_configuration_learns_too(trace: Path, tmp_path: Path) -> None:
    config = {"model_type": "opt", "vocab_size": 1000, "hidden_size": 16, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "ffn_dim": 16, "word_embed_proj_dim": 16}
    (tmp_path / "opt").mkdir()
    (tmp_path / "opt" / "config.json").write_text(json.dumps(config))
    asked = ["train-ranker", str(trace), "--output", str(tmp_path / "ranker"), "--epochs", "4"]
    model = ["--model", str(tmp_path / "opt"), "--learning-rate", "0.01"]
    done = CliRunner().invoke(app, [*asked, *model])
    assert done.exit_code == 0, done.output
    assert "Kendall's tau of scores and lengths: 0." in done.stdout
    assert load_ranker(tmp_path / "ranker").kind == "encoder"


def test_generate_takes_what_was_learned(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "ranker"
    assert CliRunner().invoke(app, ["train-ranker", str(trace), "--output", str(out)]).exit_code == 0
    asked = ["generate", "--prompt", "hi", "--max-new-tokens", "2", "--scheduling-policy", "ltr"]
    done = CliRunner().invoke(app, [*asked, "--ranker", str(out)])
    assert done.exit_code == 0, done.output
    refused = CliRunner().invoke(app, asked)
    assert refused.exit_code == 2
    assert "expected ranker, a directory, with scheduling_policy='ltr', got None" in refused.output


def test_texts_need_a_tokenizer(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "the red fox " * n} for n in range(4, 12)]
    path = tmp_path / "texts.json"
    path.write_text(json.dumps([{"conversations": [turn, turn]} for turn in turns]))
    asked = ["train-ranker", str(path), "--output", str(tmp_path / "ranker")]
    refused = CliRunner().invoke(app, asked)
    assert refused.exit_code == 2
    assert "expected a tokenizer" in refused.output
    done = CliRunner().invoke(app, [*asked, "--tokenizer", str(MODEL_DIR), "--held-out", "0.3"])
    assert done.exit_code == 0, done.output


def test_a_vocabulary_that_is_too_small_is_refused_with_what_to_leave_out(
    trace: Path, tmp_path: Path
) -> None:
    config = {"model_type": "opt", "vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "ffn_dim": 16, "word_embed_proj_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ["train-ranker", str(trace), "--output", str(tmp_path / "ranker"), "--model", str(tmp_path)]
    refused = CliRunner().invoke(app, asked)
    assert refused.exit_code == 2
    assert "got one of 100 tokens; tokens of a trace without texts are drawn" in refused.output
    assert "leave --model out" in refused.output
