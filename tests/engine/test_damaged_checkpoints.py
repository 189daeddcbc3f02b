"""Checkpoints that are damaged or lack something: refused by name, or served as far as they go."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpu_duo import HPUDuoModel
from tests.engine.tiny import Tiny
from tests.modeling.families import IS_5, greedy, prompts_of


def copy_of(tiny: Tiny, directory: Path) -> Path:
    directory.mkdir()
    for file in tiny.path.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# From 5 on transformers checks the configuration; before, the weights do not fit it.
IMPOSSIBLE_HEADS = (
    r"hidden size \(32\) is not a multiple of the number of attention heads \(5\)"
    if IS_5
    else r"(?s)\[32, 32\]\) from checkpoint.* current model is .*\[32, 40\]"
)


OTHER_SHAPES = (
    r"expected model.layers.0.mlp.down_proj.weight of shape \[32, 40\], got \[32, 48\]"
    if IS_5
    else r"(?s)\[32, 48\]\) from checkpoint.* current model is .*\[32, 40\]"
)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no_config": (lambda d: (d / "config.json").unlink(), "config.json"),
    "no_weights": (lambda d: (d / "model.safetensors").unlink(), "safetensors"),
    "broken_config": (lambda d: (d / "config.json").write_text("{"), "config.json"),
    "no_model_type": (lambda d: (d / "config.json").write_text("{}"), "config.json"),
    "unknown_model_type": (lambda d: edit_json(d / "config.json", model_type="zzz"), "zzz"),
    "impossible_heads": (lambda d: edit_json(d / "config.json", num_attention_heads=5), IMPOSSIBLE_HEADS),
    "wrong_type_of_a_size": (
        lambda d: edit_json(d / "config.json", hidden_size="big"),
        r"hidden_size.*expected int.*'big'|expected hidden_size.*integer.*got 'big'",
    ),
    "other_shapes": (
        lambda d: edit_json(d / "config.json", intermediate_size=40),
        OTHER_SHAPES,
    ),
    "missing_layers": (
        lambda d: edit_json(d / "config.json", num_hidden_layers=3),
        r"expected model.layers.2\S*, got none",
    ),
    "truncated_weights": (
        lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:5000]),
        "expected whole .*safetensors.*, got: .*not fully covered",
    ),
    "weights_that_are_not": (
        lambda d: (d / "model.safetensors").write_text("hello"),
        "expected whole .*safetensors.*, got: .*too small",
    ),
    "broken_generation_config": (
        lambda d: (d / "generation_config.json").write_text("["),
        "generation_config.json",
    ),
    "broken_tokenizer": (lambda d: (d / "tokenizer.json").write_text("{"), "tokenizer"),
    "tokenizer_that_is_not": (lambda d: (d / "tokenizer.json").write_text('{"a": 1}'), "tokenizer"),
    "quantised": (
        lambda d: edit_json(d / "config.json", quantization_config={"quant_method": "bitsandbytes"}),
        r"gptq, .*, got bitsandbytes \(quantization_config in .*: its codes are those of its CUDA kernels",
    ),
    "adapter": (
        lambda d: (d / "adapter_config.json").write_text(
            '{"peft_type": "LORA", "base_model_name_or_path": "a/b"}'
        ),
        r"a whole model, got a LORA adapter of a/b .*merge_and_unload",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoints_are_refused(tiny: Tiny, tmp_path: Path, damage: str) -> None:
    directory = copy_of(tiny, tmp_path / "copy")
    inflict, message = DAMAGE[damage]
    inflict(directory)
    with pytest.raises(ValueError, match=message):
        HPUDuoModel.from_pretrained(directory)


def test_a_directory_that_is_none_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="directory"):
        HPUDuoModel.from_pretrained(tiny.path / "config.json")
    with pytest.raises(ValueError, match="nowhere"):
        HPUDuoModel.from_pretrained("/nowhere/at/all")


def test_a_checkpoint_whose_defaults_are_unsupported_loads_and_can_be_overruled(
    tiny: Tiny, tmp_path: Path
) -> None:
    directory = copy_of(tiny, tmp_path / "copy")
    edit_json(directory / "generation_config.json", guidance_scale=3.0, chat_format="of its own")
    served = HPUDuoModel.from_pretrained(directory, block_size=8, max_num_seqs=2, max_model_len=64)
    prompt = prompts_of([5])
    with pytest.raises(ValueError, match="guidance_scale"):
        served.generate(prompt, max_new_tokens=3)
    output = served.generate(prompt, max_new_tokens=3, guidance_scale=1.0)
    assert output.tolist() == [prompt[0] + greedy(tiny.model, prompt[0], 3)]


def test_stop_strings_without_a_tokenizer_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    directory = copy_of(tiny, tmp_path / "copy")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    served = HPUDuoModel.from_pretrained(directory, block_size=8, max_num_seqs=2, max_model_len=64)
    with pytest.raises(ValueError, match="tokenizer"):
        served.generate(prompts_of([5]), stop_strings=["x"])
    assert served.generate(prompts_of([5]), max_new_tokens=3).shape == (1, 8)


def test_a_checkpoint_of_an_undocumented_dtype_needs_another_to_be_named(tiny: Tiny, tmp_path: Path) -> None:
    directory = copy_of(tiny, tmp_path / "copy")
    name = next(n for n in json.loads((directory / "config.json").read_text()) if n.endswith("dtype"))
    edit_json(directory / "config.json", **{name: "float64"})
    with pytest.raises(ValueError, match=r"float32, bfloat16, float16, got float64"):
        HPUDuoModel.from_pretrained(directory, block_size=8, max_num_seqs=2, max_model_len=64)
    served = HPUDuoModel.from_pretrained(
        directory, block_size=8, max_num_seqs=2, max_model_len=64, dtype="float32"
    )
    assert served.generate(prompts_of([5]), max_new_tokens=3).shape == (1, 8)
