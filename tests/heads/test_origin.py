"""A head pattern of another model is refused by name; one that does not say is used with a note."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hpu_duo import HPUDuoModel
from hpu_duo.builtin import MODEL_DIR, PATTERN_DIR
from hpu_duo.cli.app import app
from hpu_duo.heads import HeadPattern
from hpu_duo.heads.pattern import FINGERPRINT_KEY, NAME_KEY
from hpu_duo.modeling.hub import model_fingerprint, model_name

SHORT = ("--num-tokens", "400", "--num-documents", "1", "--num-passkeys", "1")
SMALL = {"max_model_len": 64, "max_num_seqs": 2, "sparsity": 0.5}


@pytest.fixture
def pattern_of(tmp_path: Path) -> Callable[..., Path]:
    """Makes the built-in pattern into one with other words about its model; None takes a key away."""

    def make(**changes: str | None) -> Path:
        pattern = HeadPattern.load(PATTERN_DIR)
        fields = {**pattern.config, **changes}
        kept = {key: value for key, value in fields.items() if value is not None}
        replace(pattern, config=kept).save(tmp_path / "pattern")
        return tmp_path / "pattern"

    return make


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_shipped_pattern_says_that_it_is_for_the_shipped_model() -> None:
    config = HeadPattern.load(PATTERN_DIR).config
    assert config[FINGERPRINT_KEY] == model_fingerprint(MODEL_DIR)
    assert config[NAME_KEY] == model_name(MODEL_DIR) == "builtin"
    served = HPUDuoModel.from_pretrained(MODEL_DIR, pattern=PATTERN_DIR, **SMALL)
    assert served.engine.stats().notes == ()


@pytest.mark.parametrize("as_object", [False, True])
def test_a_pattern_of_another_model_is_refused_with_both_names(
    pattern_of: Callable[..., Path], as_object: bool
) -> None:
    directory = pattern_of(model_name="org/other-model", model_fingerprint="0123456789abcdef")
    pattern = HeadPattern.load(directory) if as_object else directory
    with pytest.raises(
        ValueError, match=r"made for 'builtin' .*7e989475e328.*made for 'org/other-model' .*0123"
    ):
        HPUDuoModel.from_pretrained(MODEL_DIR, pattern=pattern, **SMALL)


def test_a_pattern_is_refused_for_the_same_configuration_with_other_weights(tmp_path: Path) -> None:
    copied = tmp_path / "fine-tuned"
    shutil.copytree(MODEL_DIR, copied)
    HPUDuoModel.from_pretrained(copied, pattern=PATTERN_DIR, **SMALL)
    # The last slice that is looked at begins 1/64 before the end.
    weights = bytearray((copied / "model.safetensors").read_bytes())
    weights[len(weights) * 63 // 64] ^= 1
    (copied / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match=r"made for 'fine-tuned' .*, got .*made for 'builtin'"):
        HPUDuoModel.from_pretrained(copied, pattern=PATTERN_DIR, **SMALL)


def test_a_pattern_that_does_not_say_is_used_with_a_note(pattern_of: Callable[..., Path]) -> None:
    directory = pattern_of(model_fingerprint=None, model_name="models/Some-8B")
    served = HPUDuoModel.from_pretrained(MODEL_DIR, pattern=directory, **SMALL)
    (note,) = served.engine.stats().notes
    assert str(directory) in note
    assert "'models/Some-8B'" in note
    assert "'builtin'" in note


@pytest.mark.parametrize("command", [("generate", "--prompt", "a"), ("eval", "passkey", *SHORT)])
def test_commands_show_the_note_and_refuse_a_mismatch(
    pattern_of: Callable[..., Path], command: tuple[str, ...]
) -> None:
    unknown = pattern_of(model_fingerprint=None)
    result = run(*command, "--pattern", unknown, "--sparsity", "0.5")
    assert result.exit_code == 0, result.stderr
    assert "has no model_fingerprint" in result.stderr
    other = pattern_of(model_name="org/other-model", model_fingerprint="0123")
    result = run(*command, "--pattern", other, "--sparsity", "0.5")
    assert result.exit_code == 2
    assert "'org/other-model'" in result.stderr


def test_a_warm_up_shows_the_note_and_has_it_in_its_json(pattern_of: Callable[..., Path]) -> None:
    unknown = pattern_of(model_fingerprint=None)
    limits = ("--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--max-model-len", "64")
    result = run(
        "warmup",
        *limits,
        "--graphs-budget",
        "4",
        "--dry-run",
        "--json",
        "--pattern",
        unknown,
        "--sparsity",
        "0.5",
    )
    assert result.exit_code == 0, result.stderr
    assert "has no model_fingerprint" in result.stderr
    assert any("has no model_fingerprint" in note for note in json.loads(result.stdout)["notes"])


def test_a_curve_shows_the_note_and_refuses_a_mismatch_before_anything_is_measured(
    pattern_of: Callable[..., Path], tmp_path: Path
) -> None:
    command = ("eval", "curve", "--out", tmp_path / "out", "--random-seeds", "0", *SHORT)
    unknown = pattern_of(model_fingerprint=None)
    # A document beyond what the model holds is refused once it is loaded.
    result = run(*command, "--num-tokens", "99999", "--patterns", f"a={unknown}")
    assert result.exit_code == 2
    assert result.stderr.count("has no model_fingerprint") == 1
    other = pattern_of(model_name="org/other-model", model_fingerprint="0123")
    result = run(*command, "--patterns", f"a={other}")
    assert result.exit_code == 2
    assert "'org/other-model'" in result.stderr
    assert not (tmp_path / "out").exists()


def test_json_of_generate_holds_the_note(pattern_of: Callable[..., Path]) -> None:
    unknown = pattern_of(model_fingerprint=None)
    result = run("generate", "--prompt", "a", "--json", "--pattern", unknown, "--sparsity", "0.5")
    (note,) = json.loads(result.stdout)["run"]["stats"]["notes"]
    assert "has no model_fingerprint" in note


def test_pattern_show_says_the_same(pattern_of: Callable[..., Path], tmp_path: Path) -> None:
    shown = run("pattern", "show", PATTERN_DIR, "--model", MODEL_DIR)
    assert shown.exit_code == 0, shown.stderr
    assert "note:" not in shown.stdout
    unknown = run("pattern", "show", pattern_of(model_fingerprint=None), "--model", MODEL_DIR, "--json")
    assert "has no model_fingerprint" in json.loads(unknown.stdout)["note"]
    other = run(
        "pattern", "show", pattern_of(model_fingerprint="0123", model_name="other"), "--model", MODEL_DIR
    )
    assert other.exit_code == 2
    assert "made for 'other'" in other.stderr
    (tmp_path / "config-only").mkdir()
    shutil.copy(MODEL_DIR / "config.json", tmp_path / "config-only")
    alone = run("pattern", "show", PATTERN_DIR, "--model", tmp_path / "config-only")
    assert alone.exit_code == 0, alone.stderr
    assert "cannot be determined without its weights" in " ".join(alone.stdout.split())
