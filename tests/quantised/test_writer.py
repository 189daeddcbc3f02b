"""Checkpoints that are quantised and written are those that quantising at load gives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hpu_duo.cli.app import app
from hpu_duo.modeling.loading import build_without_weights, load_model, read_config, stored_codes
from hpu_duo.modeling.quantised.checkpoint import stored_tensors
from hpu_duo.modeling.quantised.linear import WeightExecution
from hpu_duo.modeling.quantised.rounding import FORMATS
from hpu_duo.modeling.quantised.state import quantised_layers
from hpu_duo.modeling.quantised.writer import quantise_checkpoint, write_quantised
from tests.modeling.families import make_config, save_random
from tests.quantised.test_checkpoints import SIZES, load, tokens
from tests.quantised.test_ranks import CODES
from tests.tiers import crossed

# Groups of 128 and of 32.
WIDE: dict[str, Any] = {**SIZES, "hidden_size": 128, "intermediate_size": 160}


def plain_at(directory: Path, **fields: Any) -> Path:
    config = make_config("LlamaConfig", **{**WIDE, **fields})
    save_random(config, directory)
    return directory


def assert_same_codes(first: Path, second: Path, name: str) -> None:
    """Of a plain checkpoint that is rounded at load, and of one that was written."""
    models = [
        load_model(path, read_config(path), torch.float32, torch.device("cpu"), execution)
        for path, execution in ((first, replace(CODES, rounding=name)), (second, CODES))
    ]
    expected, got = (quantised_layers(model) for model in models)
    assert expected.keys() == got.keys() != set()
    for layer, each in expected.items():
        own = dict(each.named_buffers())
        for buffer, tensor in got[layer].named_buffers():
            assert torch.equal(own[buffer].view(torch.uint8), tensor.view(torch.uint8)), (layer, buffer)
    rest, read = (model.state_dict() for model in models)
    assert rest.keys() == read.keys()
    assert all(torch.equal(tensor, read[key]) for key, tensor in rest.items())


@pytest.mark.parametrize(("name", "tied"), crossed(list(FORMATS), [False, True]))
def test_what_is_written_is_read_back(name: str, tied: bool, tmp_path: Path) -> None:
    plain = plain_at(tmp_path / "plain", tie_word_embeddings=tied)
    written = quantise_checkpoint(plain, tmp_path / "out", name)
    assert written.num_quantised == 14
    assert_same_codes(plain, tmp_path / "out", name)
    assert tokens(load(tmp_path / "out")) == tokens(load(plain, quantization=name))


def test_files_are_split_and_named_by_an_index(tmp_path: Path) -> None:
    plain, out, dtype = plain_at(tmp_path / "plain"), tmp_path / "out", torch.float32
    tensors = stored_tensors(plain, dtype)
    whole = build_without_weights(plain, read_config(plain), dtype)
    codes = stored_codes(tensors, whole, WeightExecution(rounding="int8"), dtype)
    written = write_quantised(plain, out, tensors, codes, "int8", file_bytes=1 << 16)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert {*index["weight_map"].values()} == {file.name for file in files}
    assert index["metadata"]["total_size"] == written.num_bytes
    assert_same_codes(plain, out, "int8")


def test_the_command(tmp_path: Path) -> None:
    plain, out = plain_at(tmp_path / "plain"), tmp_path / "out"
    run = CliRunner().invoke(app, ["quantise", str(plain), str(out), "--format", "int4"])
    assert run.exit_code == 0, run.output
    assert "14 linear layers in int4, 2 other matrices plain" in " ".join(run.output.split())
    again = CliRunner().invoke(app, ["quantise", str(plain), str(out), "--format", "int4"])
    assert again.exit_code == 2
    assert "expected a new or empty directory" in again.output
    twice = CliRunner().invoke(app, ["quantise", str(out), str(tmp_path / "other"), "--format", "int8"])
    assert "expected plain weights, got compressed-tensors" in twice.output
    unknown = CliRunner().invoke(app, ["quantise", str(plain), str(tmp_path / "other"), "--format", "int3"])
    assert "expected a format of int8, int4, fp8, got 'int3'" in unknown.output
