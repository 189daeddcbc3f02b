"""``hpu-duo calibrate``: the plan, its table, and what is refused."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from hpu_duo import HPUDuoModel
from hpu_duo.builtin import MODEL_DIR
from hpu_duo.config.kv_plan import Keep, KVPlan
from hpu_duo.lab.identify import Progress
from hpu_duo.lab.kv_calibration import ScaleCalibration

Run = Callable[..., Result]
SMALL = ("--num-prompts", "2", "--num-tokens", "300", "--num-passkeys", "2", "--passkey-words", "4")


def test_the_table_says_what_the_file_says(hpu_duo: Run, tmp_path: Path) -> None:
    result = hpu_duo("calibrate", "--output", tmp_path / "plan.yaml", *SMALL, "--budget", "60")
    assert result.exit_code == 0, result.stderr
    assert "2 of 2" in result.stderr
    plan = KVPlan.load(tmp_path / "plan.yaml")
    lines = result.stdout.splitlines()
    rows = [line.split()[-5:] for line in lines[1:17]]
    assert lines[0].split() == ["layer", "head", "kind", "asked", "tokens", "recovered"]
    assert [int(row[3]) for row in rows] == [keep.budget for heads in plan.layers for keep in heads]
    assert {row[1] for row in rows} == {"snapkv"}
    assert sum(int(row[2]) for row in rows) == 16 * 60
    assert "960 tokens asked for in all, " in result.stdout
    assert max(map(len, lines[:20])) <= 80
    head = (tmp_path / "plan.yaml").read_text(encoding="utf-8").splitlines()[:4]
    assert head[0] == "# hpu-duo calibrate"
    assert head[1].startswith("# model builtin, prompts: 2, of 3")
    assert head[2] == "# AdaKV: budget=60.0, policy=snapkv, safeguard=0.2, queries=None"
    assert head[3].startswith("# Documents: haystack=None, num_prompts=2, num_tokens=300")


def test_json_tells_kinds_tokens_and_shares(hpu_duo: Run, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Ada is here. Where is Bob?"}\n{"prompt": "x"}\n')
    result = hpu_duo(
        *("calibrate", "--output", tmp_path / "plan.yaml", "--method", "fastgen", "--threshold", "0.8"),
        *("--prompts", tmp_path / "prompts.jsonl", "--num-prompts", "1", "--num-sizes", "2", "--json"),
    )
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    plan = KVPlan.load(tmp_path / "plan.yaml")
    assert len(told["prompt_tokens"]) == 1
    assert sum(told["heads_by_size"].values()) == sum(
        keep.has_policy for heads in plan.layers for keep in heads
    )
    for heads, keeps in zip(told["layers"], plan.layers, strict=True):
        for head, keep in zip(heads, keeps, strict=True):
            assert (head["keep"], head["num_kept"]) == (keep.what, keep.budget)
            assert (head["kind"] == "full") == (keep == Keep())
            assert head["recovered"] >= 0.8


def test_equal_calls_write_equal_files_and_another_seed_another_one(hpu_duo: Run, tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        result = hpu_duo("calibrate", "--output", tmp_path / name, *SMALL, "--seed", seed)
        assert result.exit_code == 0, result.stderr
    one, again, other = ((tmp_path / name).read_text(encoding="utf-8") for name in "abc")
    assert one == again != other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "best"), "expected --method to be one of ada-kv, fastgen, got 'best'"),
        (("--method", "fastgen", "--budget", "9"), "expected --budget with --method ada-kv only"),
        (("--method", "fastgen", "--kv-policy", "h2o"), "expected --kv-policy with --method ada-kv only"),
        (("--threshold", "0.9", "--heavy", "1"), "expected --threshold, --heavy with --method fastgen only"),
        (
            ("--prompts", "a.jsonl", "--num-tokens", "9"),
            "--prompts or documents, got --prompts and --num-tokens",
        ),
        (("--chat",), "expected --chat with --prompts only"),
        (("--prompts", "none.jsonl"), "cannot read the prompts none.jsonl"),
        (("--form", "verse"), "expected --form to be one of ordinals, names"),
        (("--device", "tpu"), "got 'tpu'"),
        (("--device", "hpu-sim"), "auto, cpu, cuda or hpu to run a whole model on, got 'hpu-sim'"),
        (("--threads", "0"), "expected --threads of at least 1"),
        (("--num-tokens", "30"), "expected a length of at least"),
        (("--model", "{model}", "--num-tokens", "5000"), "at most 4096 tokens, the positions of the model"),
        (("--model", "{model}", "--num-tokens", "5000"), "what fits: --num-tokens "),
    ],
)
def test_what_cannot_be_done_is_refused_and_nothing_is_written(
    hpu_duo: Run, tmp_path: Path, model_dir: Path, arguments: tuple[str, ...], message: str
) -> None:
    given = [argument.format(model=model_dir) for argument in arguments]
    result = hpu_duo("calibrate", "--output", tmp_path / "plan.yaml", *given)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_no_file_is_overwritten(hpu_duo: Run, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("mine")
    for name, message in (("plan.yaml", "exists already"), ("no/plan.yaml", "does not exist")):
        result = hpu_duo("calibrate", "--output", tmp_path / name, *SMALL)
        assert result.exit_code == 2
        assert message in result.stderr
    assert (tmp_path / "plan.yaml").read_text() == "mine"


def test_no_scales_are_written_for_numbers_that_are_not_finite(
    hpu_duo: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: ScaleCalibration) -> Iterator[Progress]:
        self.largest[1, 0] = torch.nan
        yield Progress(1, 1)

    monkeypatch.setattr(ScaleCalibration, "run", run)
    result = hpu_duo("calibrate", "--kv-scales", tmp_path / "scales", *SMALL)
    assert result.exit_code == 2
    assert "expected finite keys and values in layer 1 of" in result.stderr
    assert not (tmp_path / "scales").exists()


def test_scales_of_keys_and_values_are_written_and_read_back(hpu_duo: Run, tmp_path: Path) -> None:
    out = tmp_path / "scales"
    result = hpu_duo("calibrate", "--kv-scales", out, *SMALL, "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)["layers"]
    assert [each["k_scale"] for each in told] == pytest.approx([each["k_max"] / 224 for each in told])
    options: dict[str, Any] = {"dtype": "float32", "num_blocks": 8, "max_model_len": 256, "kv_scales": out}
    served = HPUDuoModel.from_pretrained(MODEL_DIR, kv_cache_dtype="fp8", **options)
    expected = [[each["k_scale"], each["v_scale"]] for each in told]
    assert [pytest.approx(each) for each in expected] == served.engine.runner.model.kv_scales
    with pytest.raises(ValueError, match=r"kv_scales='.*' needs a kv_cache_dtype of fp8"):
        HPUDuoModel.from_pretrained(MODEL_DIR, **options)
    with pytest.raises(ValueError, match=r"calibrate --kv-scales has written, got '.*nothing'"):
        HPUDuoModel.from_pretrained(
            MODEL_DIR, kv_cache_dtype="fp8", **{**options, "kv_scales": tmp_path / "nothing"}
        )
    for arguments in ((), ("--kv-scales", tmp_path / "a", "--output", tmp_path / "b"), ("--kv-scales", out)):
        assert hpu_duo("calibrate", *arguments).exit_code == 2
