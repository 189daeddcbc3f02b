"""A config.json whose numbers or names cannot be is refused with a sentence where it is read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from hpu_duo import HPUDuoModel
from hpu_duo.modeling.config_checks import check_numbers
from hpu_duo.modeling.loading import build_without_weights, read_config
from hpu_duo.planning.read_model import read_model
from tests.modeling.families import FAMILIES, LENGTH_DEPENDENT, save_random
from tests.tiers import every

WRONG: tuple[Any, ...] = (0, -1, True, 1.5, "8", [], [0], {}, float("nan"), float("inf"), 10**12, 10**400)
NAMES = [
    name
    for name in ("llama3_rope", "gemma2", "granite", "qwen3_moe", "phi", "mistral_sliding", "gpt2")
    if name in FAMILIES
]


def write(directory: Path, fields: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return directory


def numbers(fields: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of all numbers in nested objects."""
    found: list[tuple[str, ...]] = []
    for name, value in fields.items():
        if isinstance(value, dict):
            found += numbers(value, (*path, name))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found.append((*path, name))
    return found


def changed(fields: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    name, *rest = path
    return {**fields, name: changed(fields[name], tuple(rest), value) if rest else value}


@pytest.mark.slow
@pytest.mark.parametrize("name", every(3, NAMES))
def test_any_wrong_number_is_read_or_refused_with_a_sentence(tmp_path: Path, name: str) -> None:
    """Whatever stands in place of a number, reading ends with a ``ValueError`` at worst, and in no time."""
    fields = FAMILIES[name]().to_dict()
    assert len(numbers(fields)) > 8
    num_refused = 0
    for path in numbers(fields):
        for value in WRONG:
            write(tmp_path, changed(fields, path, value))
            try:
                config = read_config(tmp_path, needs_weights=False)
                read_model(tmp_path)
                build_without_weights(tmp_path, config, torch.float32)
            except ValueError:
                num_refused += 1
    assert num_refused > len(numbers(fields))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 0}, r"expected num_attention_heads in .*config\.json to be an integer >= 1"),
        ({"num_key_value_heads": 0}, "expected num_key_value_heads .* got 0"),
        ({"head_dim": -8}, "expected head_dim .* got -8"),
        ({"intermediate_size": 0}, "expected intermediate_size"),
        ({"max_position_embeddings": 0}, "expected max_position_embeddings"),
        ({"num_hidden_layers": 10**9}, "expected num_hidden_layers .* <= 10000"),
        ({"vocab_size": 2**40}, "expected vocab_size"),
        ({"rms_norm_eps": 0}, "expected rms_norm_eps .* a number > 0"),
        ({"rms_norm_eps": float("nan")}, "expected rms_norm_eps .* got nan"),
        ({"initializer_range": float("inf")}, "expected initializer_range .* finite"),
        ({"rope_theta": 0}, "expected rope_theta"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "expected factor"),
        (
            {"rope_scaling": {**LENGTH_DEPENDENT[1], "long_factor": [1.0, 0.0, 1.0, 1.0]}},
            "expected long_factor",
        ),
        ({"hidden_act": "foo"}, r"expected hidden_act in .* \(.*silu.*\), got 'foo'"),
        (
            {"rope_scaling": {"rope_type": "foo", "factor": 2.0}},
            r"expected rope_type in .* \(.*yarn\), got 'foo'",
        ),
    ],
)
def test_the_sentence_names_the_field_what_was_expected_and_what_came(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    fields = FAMILIES["llama"]().to_dict()
    fields.pop("rope_parameters", None)
    write(tmp_path, {**fields, **changes})
    for read in (lambda path: read_config(path, needs_weights=False), read_model):
        with pytest.raises(ValueError, match=message):
            read(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "7", "[" * 100_000, '{"model_type": 3}', '{"rope_scaling": "foo"}']
)
def test_files_that_are_no_configuration_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    for read in (lambda path: read_config(path, needs_weights=False), read_model):
        with pytest.raises(ValueError, match=r"config\.json"):
            read(tmp_path)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_is_refused_for_its_own_numbers(tmp_path: Path, name: str) -> None:
    config: PretrainedConfig = FAMILIES[name]()
    config.save_pretrained(tmp_path)
    assert type(read_config(tmp_path, needs_weights=False)) is type(config)


def test_every_default_configuration_of_transformers_has_numbers_in_range(tmp_path: Path) -> None:
    """The ranges refuse no architecture: not one of the decoder-only models that transformers knows."""
    num_checked = 0
    for of_class in AutoModelForCausalLM._model_mapping:
        try:
            fields = of_class().to_dict()
        except Exception:
            continue  # It cannot be made of defaults, or is made of other configurations.
        check_numbers(tmp_path / of_class.__name__, fields)
        num_checked += 1
    assert num_checked > 50


def test_a_checkpoint_of_pickles_is_refused_with_how_to_convert_it(tmp_path: Path) -> None:
    model = save_random(FAMILIES["llama"](), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"found pytorch_model\.bin.*AutoModelForCausalLM.*save_pretrained"):
        HPUDuoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("read", [read_config, read_model, HPUDuoModel.from_pretrained])
def test_an_empty_path_is_not_the_current_directory(
    tmp_path: Path, read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random(FAMILIES["llama"](), tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="got ''"):
        read("")
