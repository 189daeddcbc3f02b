"""``hpu-duo show-kept``: positions as lines, a file and a picture, by the model's own head numbers."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import Result

from hpu_duo.cli.inspection.show_kept import heat_line
from hpu_duo.config.kv_plan import Keep, KVPlan
from tests.tiers import further

Run = Callable[..., Result]
TEXT = "abcdefghij" * 6
PLAN = KVPlan(
    (
        (Keep("streaming-llm:sink=2", 8), Keep()),
        (Keep(), Keep("ring:sink=3,recent=4")),
    )
)


def show(hpu_duo: Run, *arguments: object) -> Result:
    return hpu_duo(
        "show-kept", "--prompt", TEXT, "--num-new-tokens", "5", "--max-model-len", "96", *arguments
    )


def test_positions_of_heads_of_a_plan_have_the_models_own_numbers(
    hpu_duo: Run, model_dir: Path, tmp_path: Path
) -> None:
    PLAN.save(tmp_path / "plan.yaml")
    out = tmp_path / "kept.json"
    result = show(hpu_duo, "--model", model_dir, "--kv-plan", tmp_path / "plan.yaml", "--out", out)
    assert result.exit_code == 0, result.stderr
    told = json.loads(out.read_text(encoding="utf-8"))
    assert (told["num_prompt_tokens"], told["num_tokens"]) == (60, 65)
    found = [[head["positions"] for head in heads] for heads in told["layers"]]
    every = list(range(65))
    assert found == [[[0, 1, *range(59, 65)], every], [every, [0, 1, 2, *range(61, 65)]]]
    assert result.stdout.count("│") == 8
    # A terminal of 80 columns has room for every row.
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert [line.split(":")[0] for line in result.stdout.splitlines()[-3:]] == ["kind 1", "kind 2", "kind 3"]


def test_a_budget_holds_as_many_tokens_of_each_head_and_json_tells_which(
    hpu_duo: Run, model_dir: Path
) -> None:
    result = show(hpu_duo, "--model", model_dir, "--kv-policy", "h2o", "--kv-budget", "12", "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    kept = [head["positions"] for heads in told["layers"] for head in heads]
    assert [len(positions) for positions in kept] == [12] * 4
    # The newest half is protected, the newest token among them.
    assert all(set(range(59, 65)) <= set(positions) for positions in kept)
    assert {head["kind"].split(",")[0].split()[0] for heads in told["layers"] for head in heads} == {"h2o"}


def test_no_new_token_shows_what_the_prompt_left(hpu_duo: Run, model_dir: Path) -> None:
    result = hpu_duo(
        *("show-kept", "--prompt", TEXT, "--num-new-tokens", "0", "--model", model_dir, "--json"),
        *("--kv-policy", "local", "--kv-budget", "4", "--max-model-len", "96"),
    )
    told = json.loads(result.stdout)
    assert told["num_tokens"] == 60
    assert all(head["positions"] == [56, 57, 58, 59] for heads in told["layers"] for head in heads)


@pytest.mark.parametrize("suffix", ["svg", *further("png")])
def test_equal_runs_draw_equal_pictures(hpu_duo: Run, model_dir: Path, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    pictures = [tmp_path / f"{name}.{suffix}" for name in ("one", "two")]
    for picture in pictures:
        options = ("--kv-policy", "tova", "--kv-budget", "9", "--plot", picture)
        result = show(hpu_duo, "--model", model_dir, *options)
        assert result.exit_code == 0, result.stderr
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--num-new-tokens", "-1"), "expected --num-new-tokens of 0 or more"),
        (("--file", "-"), "expected --prompt or --file, got both"),
        (("--plot", "a.pdf"), "ends in .svg or .png"),
        (("--out", "missing/kept.json"), "expected --out to be a file"),
        (("--max-model-len", "2"), "at most 1 leave room"),
    ],
)
def test_what_cannot_be_done_is_refused(
    hpu_duo: Run, model_dir: Path, options: tuple[str, ...], message: str
) -> None:
    result = hpu_duo("show-kept", "--prompt", "abc", "--model", model_dir, *options, stdin=b"text")
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


@given(st.integers(1, 300), st.data())
def test_lines_tell_none_some_and_all_of_a_stretch_apart(num_tokens: int, data: st.DataObject) -> None:
    kept = data.draw(st.sets(st.integers(0, num_tokens - 1)))
    line = heat_line(np.array(sorted(kept), dtype=np.int32), num_tokens, " .:*#", width=20)
    edges = torch.linspace(0, num_tokens, len(line) + 1, dtype=torch.float64).long().tolist()
    assert len(line) == min(20, num_tokens)
    for shade, start, end in zip(line, edges, edges[1:]):
        held = len(kept & set(range(start, end)))
        assert (shade == " ") == (held == 0)
        assert (shade == "#") == (held == end - start)
