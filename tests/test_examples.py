"""The examples run as they are written, and say what their texts promise."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_generate_prints_a_full_answer_for_each_of_its_four_prompts() -> None:
    lines = run("generate.py").splitlines()
    assert all(re.fullmatch(r"[A-Z]\w+:( \w+){3}\.", line) for line in lines[:4]), lines
    assert lines[4].removesuffix("<eos>") == lines[0].partition(":")[2]
    share = re.fullmatch(r"KV cache: (\d+)% of full attention", lines[5])
    assert share is not None
    assert 50 <= int(share[1]) <= 60


def run_here(
    name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Run an example in this process, which has imported already what it needs."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_generate_shows_no_share_of_full_attention_for_short_prompts() -> None:
    source = (EXAMPLES / "generate.py").read_text(encoding="utf-8")
    assert "num_tokens=1500, num_passkeys=4" in source
    short = source.replace("num_tokens=1500, num_passkeys=4", "num_tokens=40, num_passkeys=1")
    done = subprocess.run([sys.executable, "-c", short], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"KV cache: [\d.]+ MiB in whole blocks and rings \(.*\)", done.stdout.splitlines()[-1]
    )


def test_a_document_is_read_once_and_its_questions_are_answered() -> None:
    read, *answers, loaded = run("document_questions.py").splitlines()
    assert re.fullmatch(r"read 1\d{3} tokens in [\d.]+ s", read)
    assert len(answers) == 4
    assert all(re.fullmatch(r"[A-Z]\w+:( \w+){3}\.", line) for line in answers), answers
    assert re.fullmatch(r"loaded it in [\d.]+ s", loaded)


@pytest.mark.slow
def test_streaming_heads_halve_the_memory_before_they_cost_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--num-tokens", "800", "--num-passkeys", "2")
    lines = run_here("streaming_heads.py", *asked, monkeypatch=monkeypatch, capsys=capsys).splitlines()[1:]
    table = {}
    for line in lines:
        sparsity, _, _, ratio, right, _, total, low, _, high = line.split()
        assert (total, low, high) in {("2", "(34%", "100%)"), ("2", "(0%", "66%)")}
        table[sparsity] = (float(ratio.rstrip("%")), int(right))
    assert list(table) == ["0%", "25%", "50%", "75%", "100%"]
    ratios = [ratio for ratio, _ in table.values()]
    assert ratios == sorted(ratios, reverse=True)
    assert table["0%"][1] == table["50%"][1] == 2
    assert table["50%"][0] < 60
    assert table["100%"][1] == 0


@pytest.mark.slow
def test_heads_are_identified_and_enough_to_answer_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--steps", "20", "--max-length", "288", "--num-tokens", "800")
    lines = run_here("identify_heads.py", *asked, monkeypatch=monkeypatch, capsys=capsys).splitlines()
    assert "retrieval heads (layer.head): 1.0, 1.2, 2.1, 2.3" in lines
    assert lines[-1] == "passkeys found with the other heads streaming: 4 of 4"
