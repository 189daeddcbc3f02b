"""``hpu-duo audit`` from a config.json alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from hpu_duo.cli.app import app
from hpu_duo.heads import HeadPattern
from hpu_duo.lab import rules
from kernels_ref import reference
from tests.audit.conftest import BUCKETS
from tests.modeling.families import FAMILIES, IS_5
from tests.tiers import every

Run = Callable[..., Result]
LIMITS = ("--max-num-seqs", 4, "--max-num-batched-tokens", 32, "--block-size", 16, "--num-blocks", 64)


@pytest.fixture
def run(config_dir: Path) -> Run:
    def audited(*arguments: object, model: Path = config_dir) -> Result:
        words = ["audit", "--model", str(model), *map(str, (*LIMITS, *arguments))]
        return CliRunner().invoke(app, words, env={"COLUMNS": "160"})

    return audited


@pytest.mark.slow
def test_tables_and_json_show_steps_operators_notes_and_sources(
    run: Run, pattern: HeadPattern, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    normalise = reference.finish

    def sorting(*args: Any) -> torch.Tensor:
        out: torch.Tensor = normalise(*args)
        return out.index_select(0, out[:, 0, 0, 0].argsort())

    monkeypatch.setattr(reference, "finish", sorting)
    result = run("--bucket", BUCKETS[2], "--fail-on-unknown")
    assert result.exit_code == 0, result.output
    for text in (BUCKETS[2], "index_copy_", "gaudi-pytorch-bridge", "(2, 0)", "64 blocks"):
        assert text in result.stdout
    for text in ("Findings", "note", "64-bit tensor", "moe-routing", "topk_gen.cpp", "Nothing forbidden"):
        assert text in result.stdout
    assert "this project has not run on a Gaudi" in " ".join(result.stdout.split())
    pattern.save(tmp_path / "pattern")
    (tmp_path / "table.txt").write_text(BUCKETS[2])
    heads = ("--pattern", tmp_path / "pattern", "--threshold", 0.5)
    fields = json.loads(run(*heads, "--buckets", tmp_path / "table.txt", "--json").stdout)
    assert [(step["name"], step["num_findings"]) for step in fields["buckets"]] == [(BUCKETS[2], 1)]
    assert [(each["num_retrieval"], each["num_layers"]) for each in fields["recipes"]] == [(1, 2), (2, 1)]
    assert fields["unknown"] == fields["violations"] == []
    assert fields["buckets"][0]["work"]["matrix"]["num_operations"] > 0
    assert {key for each in fields["operators"] for key in each["sources"]} <= set(fields["sources"])
    (note,) = fields["notes"]
    assert (note["rule"], note["severity"]) == ("WIDE_DTYPE", "note")
    assert note["operator"] == "aten.index_select.default"
    assert "test_command.py" in note["source"]
    assert set(note["shown_by"]) <= set(fields["sources"])


@pytest.mark.slow
@pytest.mark.parametrize("family", every(3, ["mixtral", "gpt_oss", "qwen3_moe"]))
def test_experts_are_audited_like_any_layer(run: Run, tmp_path: Path, family: str) -> None:
    config = FAMILIES[family]()
    setattr(config, "num_experts" if family == "qwen3_moe" else "num_local_experts", 16)
    config.save_pretrained(tmp_path)
    # Two tokens gather the weights of their experts; more tokens meet all of them.
    result = run("--bucket", "--u/q2/s0/u16/l2", "--bucket", BUCKETS[2], "--json", model=tmp_path)
    if not IS_5 and family == "gpt_oss":
        assert result.exit_code == 1
        assert {each["rule"] for each in json.loads(result.stdout)["violations"]} == {"WIDE_DTYPE", "SCATTER"}
        return
    if not IS_5:
        # Their shapes depend on the routing, so the layers cannot even be looked at without data.
        assert result.exit_code == 2
        assert "nonzero" in result.stderr
        return
    assert result.exit_code == 0, result.output
    fields = json.loads(result.stdout)
    assert fields["violations"] == fields["notes"] == fields["unknown"] == []
    assert all("topk" in step["operators"] for step in fields["buckets"])
    assert all(step["work"]["matrix"]["num_operations"] > 0 for step in fields["buckets"])


def test_a_forbidden_operator_ends_with_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    normalise = reference.finish

    def counting(*args: Any) -> torch.Tensor:
        out: torch.Tensor = normalise(*args)
        return out + (out > 0).sum(dim=0).to(out.dtype)

    monkeypatch.setattr(reference, "finish", counting)
    result = run("--bucket", BUCKETS[1])
    assert result.exit_code == 1, result.output
    for text in ("Findings", "forbidden", "aten.sum", "test_command.py", "1 forbidden"):
        assert text in result.stdout


@pytest.mark.slow
def test_an_operator_without_source_fails_only_when_asked(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {name: each for name, each in rules.native_operators().items() if name != "silu"}
    for module in ("hpu_duo.lab.audit.report", "hpu_duo.lab.rules"):
        monkeypatch.setattr(f"{module}.native_operators", lambda: table)
    shown = run("--bucket", BUCKETS[0])
    assert shown.exit_code == 0, shown.output
    assert "not shown in public sources: silu" in shown.stdout
    assert run("--bucket", BUCKETS[0], "--fail-on-unknown").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--bucket", "csu"), "expected a shape such as"),
        (("--bucket", "c--/q99999999999999999999/s0/u0/l1"), "expected query_len <= 2147483647"),
        (("--bucket", BUCKETS[0], "--buckets", "table.txt"), "got both"),
        (("--buckets", "missing.txt"), "missing.txt"),
        (("--bucket", "--u/q4/s0/u65/l4"), "64 unique blocks"),
        (("--bucket", "-su/q4/s65/u16/l4"), "at most 64 shared blocks in a bucket of phase -su"),
        (("--bucket", "cs-/q32/s33/u0/l4", "--max-model-len", 512), "at most 32 shared blocks"),
        (("--bucket", "csu/q8/s41/u8/l4", "--max-model-len", 256), "max_model_len=256, block_size=16"),
        (("--bucket", "-s-/q4/s8/u0/l4"), "--u, -su, c--, c-u, cs-, csu, got -s-/q4/s8/u0/l4"),
        (("--hardware", "gaudi9"), "gaudi2 or gaudi3"),
        (("--sparsity", 0.5), "needs a head pattern"),
        (("--kv-cache-bytes", "4G"), "expected a size in bytes"),
        (("--max-model-len", 5000), "at most 1024"),
        (("--dtype", "int8"), "int8"),
    ],
)
def test_bad_input_gets_one_sentence(run: Run, arguments: tuple[object, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("hpu-duo: error: ")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_directory_without_configuration_is_refused(run: Run, tmp_path: Path) -> None:
    result = run(model=tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "nowhere" in result.stderr
