"""Python code that a checkpoint brings never runs, whatever is asked for and whatever is answered."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from transformers import AutoModelForCausalLM
from typer.testing import Result

from hpu_duo import HPUDuoModel
from hpu_duo.builtin import MODEL_DIR
from hpu_duo.cli.app import app

Run = Callable[..., Result]

YES = b"y\n" * 50

CODE = """
import pathlib
pathlib.Path({marker!r}).write_text("ran")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""

AUTO_MAP = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}

NEEDED = {
    ("generate",): ("--prompt", "Hi"),
    ("passkey",): (),
    ("show-kept",): ("--prompt", "Hi"),
    ("capacity",): (),
    ("plan",): ("--num-blocks", "64"),
    ("plan-offload",): ("--max-batch", "1"),
    ("warmup",): ("--max-model-len", "64"),
    ("identify",): ("--output", "{tmp}/found"),
    ("calibrate",): ("--output", "{tmp}/plan.yaml"),
    ("audit",): (),
    ("pattern", "show"): ("{pattern}",),
    ("eval", "ruler"): (),
    ("eval", "longbench"): ("--file", "{tmp}/questions.jsonl"),
    ("eval", "longbench-v2"): ("--file", "{tmp}/choices.jsonl"),
    ("eval", "curve"): ("--out", "{tmp}/curve", "--patterns", "one={pattern}"),
    ("eval", "kvpress"): ("--out", "{tmp}/kvpress", "--kvpress-python", "{tmp}/python"),
    ("eval", "passkey"): (),
    ("eval", "niah"): ("--out", "{tmp}/niah"),
    ("eval", "perplexity"): (),
    ("doctor",): (),
    ("replay",): ("{tmp}/steps",),
    ("selftest",): ("--output", "{tmp}/report"),
    ("serve",): ("--port", "0"),
    ("simulate",): ("--num-requests", "2"),
    ("bench", "steps"): ("--out", "{tmp}/steps.json"),
    ("train-ranker",): ("{tmp}/trace.csv", "--output", "{tmp}/ranker"),
}
"""Further arguments of each command that takes a model."""

CHOICE = {"_id": "1", "domain": "d", "sub_domain": "s", "difficulty": "easy", "length": "short"}
CHOICE |= {"question": "q", "context": "c", "answer": "A"}
CHOICE |= {f"choice_{letter}": letter for letter in "ABCD"}
"""A question of LongBench v2."""

NAMES_NO_CHECKPOINT = [("bench", "serve")]
"""There ``--model`` is what a server calls its model."""

READ_NO_TOKENIZER = [
    ("capacity",),
    ("plan",),
    ("plan-offload",),
    ("audit",),
    ("pattern", "show"),
    ("simulate",),
    ("train-ranker",),
]


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that exists once code of a checkpoint has run."""
    return tmp_path / "code-of-the-checkpoint-ran"


@pytest.fixture
def own_model(tmp_path: Path, model_dir: Path, marker: Path) -> Path:
    """A checkpoint whose model type is known to nobody but the Python file in it."""
    return with_code(
        model_dir, tmp_path / "own-model", marker, {"model_type": "own", "auto_map": AUTO_MAP}, {}
    )


@pytest.fixture
def own_tokenizer(tmp_path: Path, model_dir: Path, marker: Path) -> Path:
    """A Llama whose tokenizer's class is in a Python file beside it."""
    tokenizer = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    return with_code(model_dir, tmp_path / "own-tokenizer", marker, {}, tokenizer)


def with_code(
    model_dir: Path, directory: Path, marker: Path, config: dict[str, Any], tokenizer: dict[str, Any]
) -> Path:
    shutil.copytree(model_dir, directory)
    (directory / "own.py").write_text(CODE.format(marker=str(marker)), encoding="utf-8")
    for name, changes in (("config.json", config), ("tokenizer_config.json", tokenizer)):
        fields = json.loads((directory / name).read_text(encoding="utf-8"))
        (directory / name).write_text(json.dumps({**fields, **changes}), encoding="utf-8")
    return directory


def commands_with_a_model() -> Iterator[tuple[str, ...]]:
    pending: list[tuple[tuple[str, ...], Any]] = [((), typer.main.get_command(app))]
    while pending:
        name, command = pending.pop()
        pending += [((*name, sub), inner) for sub, inner in getattr(command, "commands", {}).items()]
        if any("--model" in parameter.opts for parameter in command.params):
            yield name


def arguments(command: tuple[str, ...], model: Path, tmp_path: Path, pattern: Path) -> list[str]:
    question = {"input": "q", "context": "c", "answers": ["a"], "dataset": "qasper", "length": 1}
    (tmp_path / "questions.jsonl").write_text(json.dumps(question), encoding="utf-8")
    (tmp_path / "choices.jsonl").write_text(json.dumps(CHOICE), encoding="utf-8")
    lines = ["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"]
    lines += [f"{second},ChatGPT,{20 + second},{5 + second},{25 + second},API log" for second in range(40)]
    (tmp_path / "trace.csv").write_text("\n".join(lines), encoding="utf-8")
    if command == ("replay",):
        recorded = HPUDuoModel.from_pretrained(MODEL_DIR, max_model_len=64, record_steps=tmp_path / "steps")
        recorded.generate([[1, 5]], max_new_tokens=2)
    needed = [text.format(tmp=tmp_path, pattern=pattern) for text in NEEDED[command]]
    return [*command, *needed, "--model", str(model)]


def test_every_command_that_takes_a_model_is_tried_here() -> None:
    assert set(commands_with_a_model()) == {*NEEDED, *NAMES_NO_CHECKPOINT}


@pytest.mark.parametrize("command", NEEDED, ids=" ".join)
def test_no_command_runs_or_offers_to_run_a_models_own_code(
    hpu_duo: Run, own_model: Path, marker: Path, tmp_path: Path, pattern_dir: Path, command: tuple[str, ...]
) -> None:
    result = hpu_duo(*arguments(command, own_model, tmp_path, pattern_dir), stdin=YES)
    assert not marker.exists()
    assert result.exit_code == 2, result.output
    assert "Python code that the checkpoint brings" in result.stderr
    assert "[y/N]" not in result.output


@pytest.mark.parametrize("command", [name for name in NEEDED if name not in READ_NO_TOKENIZER], ids=" ".join)
def test_no_command_runs_or_offers_to_run_a_tokenizers_own_code(
    hpu_duo: Run,
    own_tokenizer: Path,
    marker: Path,
    tmp_path: Path,
    pattern_dir: Path,
    command: tuple[str, ...],
) -> None:
    result = hpu_duo(*arguments(command, own_tokenizer, tmp_path, pattern_dir), stdin=YES)
    assert not marker.exists()
    assert result.exit_code == 2, result.output
    assert "Python code that the checkpoint brings" in result.stderr
    assert "[y/N]" not in result.output


@pytest.mark.slow
def test_a_shell_that_says_yes_to_everything_runs_no_code(own_model: Path, marker: Path) -> None:
    script = f"yes | {sys.executable} -m hpu_duo.cli generate --model {own_model} --prompt Hi"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 2
    assert not marker.exists()
    assert "never run" in done.stderr


def test_loading_runs_no_code_and_does_not_ask(
    own_model: Path, own_tokenizer: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: object) -> str:
        pytest.fail("transformers asked")

    monkeypatch.setattr("builtins.input", asked)
    for directory in (own_model, own_tokenizer):
        with pytest.raises(ValueError, match="never run"):
            HPUDuoModel.from_pretrained(directory)
    assert not marker.exists()


def test_code_beside_a_model_that_transformers_knows_is_passed_over(
    tmp_path: Path, model_dir: Path, marker: Path
) -> None:
    directory = with_code(model_dir, tmp_path / "known", marker, {"auto_map": AUTO_MAP}, {})
    served = HPUDuoModel.from_pretrained(directory, max_model_len=64, max_num_seqs=2)
    expected: Any = AutoModelForCausalLM.from_pretrained(model_dir)
    assert type(served.engine.runner.model.model) is type(expected)
    assert not marker.exists()
