"""Recorded steps give the same tokens again, from their messages alone; other engines are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.cli.app import app
from hpu_duo.lab.replay import replay
from hpu_duo.sampling import SamplingParams
from hpu_duo.startup.recorded_steps import StepLog, StepRecorder, options_of, read_log
from tests.engine.tiny import PATTERN, Tiny, make_tiny, serve
from tests.modeling.families import prompts_of
from tests.tiers import further

PROMPTS = prompts_of([30, 12, 1, 22], seed=3)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=9, logprobs=2),
    SamplingParams(temperature=1.3, seed=4, max_tokens=20, n=3),
    SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.3, max_tokens=25),
    SamplingParams(temperature=0, logit_bias={5: 3.0}, max_tokens=5),
]
OPTIONS: dict[str, Any] = {"pattern": PATTERN, "num_blocks": 8, "max_model_len": 64}
OTHER_HEADS = HeadPattern(
    np.zeros((2, 2), np.float32), sink=2, recent=6, retrieval=np.array([[False, True], [False, True]])
)


def recorded(tiny: Tiny, path: Path, **options: Any) -> StepLog:
    """Steps of a mixed workload with preemptions."""
    served = tiny.load(record_steps=path, **{**OPTIONS, **options})
    serve(served, PROMPTS, PARAMS)
    served.engine.step_recorder.close()  # type: ignore[union-attr]
    return read_log(path)


@pytest.fixture(scope="module")
def log(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> StepLog:
    return recorded(tiny, tmp_path_factory.mktemp("recorded") / "steps")


def again(tiny: Tiny, log: StepLog, **changes: Any) -> HPUDuoModel:
    """A fresh engine, loaded as the recording says but for some changes."""
    return HPUDuoModel.from_pretrained(tiny.path, **{**options_of(log.origin), **changes})


@pytest.mark.usefixtures("default_buckets")
@pytest.mark.parametrize(
    "options",
    [
        {},
        *further({"pattern": None}),
        {"graphs": "replay", "attention": "sdpa"},
        *further({"device": "hpu-sim"}),
    ],
    ids=["duo", "full", "captured", "hpu-sim"],
)
def test_a_replay_gives_the_same_tokens(tiny: Tiny, tmp_path: Path, options: dict[str, Any]) -> None:
    log = recorded(tiny, tmp_path / "steps", **options)
    report = replay(again(tiny, log).engine, tiny.path, log)
    assert report.differences == report.versions == ()
    assert report.num_host_sampled == 0
    assert report.num_tokens == sum(len(step.token_ids) for step in log) > 50
    assert report.num_steps == len(list(log)) > 20


def test_a_replay_notices_another_token(tiny: Tiny, tmp_path: Path) -> None:
    log = recorded(tiny, tmp_path / "steps")
    place, tokens = next((place, step.token_ids) for place, step in enumerate(log) if len(step.token_ids))
    changed = StepRecorder(tmp_path / "changed", lambda: log.origin)
    for number, step in enumerate(log):
        step.token_ids[:1] ^= number == place
        changed.add(step.message, step.token_ids)
    (difference,) = replay(again(tiny, log).engine, tiny.path, read_log(changed.path)).differences
    assert (difference.expected, difference.got) == (tokens[0] ^ 1, tokens[0])


def test_tokens_of_the_host_are_counted_as_not_replayable(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "steps"
    served = tiny.load(record_steps=path, **OPTIONS)
    done = served.generate(PROMPTS[:2], max_new_tokens=6, no_repeat_ngram_size=2)
    log = read_log(path)
    report = replay(again(tiny, log).engine, tiny.path, log)
    assert (report.num_tokens, report.num_host_sampled, report.differences) == (0, 12, ())
    plain = served.engine.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=3))
    report = replay(again(tiny, log).engine, tiny.path, log)
    assert (report.num_tokens, report.num_host_sampled, report.differences) == (3, 12, ())
    assert plain
    assert done is not None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pattern": OTHER_HEADS}, "heads: .*'retrieval'"),
        ({"pattern": None}, "heads: .*, not None"),
        ({"dtype": "bfloat16"}, "dtype: float32, not bfloat16"),
        ({"num_blocks": 9}, "limits.num_blocks: 8, not 9"),
        ({"block_size": 16, "num_blocks": 4}, "limits.block_size: 8, not 16"),
        ({"attention": "sdpa"}, "attention.layer_0: reference: "),
        ({"max_num_seqs": 3}, "limits.max_num_seqs: 4, not 3"),
    ],
)
def test_steps_of_another_engine_are_refused(
    tiny: Tiny, log: StepLog, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=f"expected an engine like the one whose steps were .*{named}"):
        replay(again(tiny, log, **changes).engine, tiny.path, log)


def test_steps_of_another_checkpoint_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    log = recorded(tiny, tmp_path / "steps")
    other = make_tiny(tmp_path / "other")
    weights = other.path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    served = HPUDuoModel.from_pretrained(other.path, **options_of(log.origin))
    with pytest.raises(ValueError, match="checkpoint: "):
        replay(served.engine, other.path, log)


def test_an_engine_with_requests_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    log = recorded(tiny, tmp_path / "steps")
    served = again(tiny, log)
    served.engine.add_request(PROMPTS[0])
    with pytest.raises(ValueError, match="expected an engine without requests"):
        replay(served.engine, tiny.path, log)


def test_the_command_replays_a_recording(tiny: Tiny, tmp_path: Path) -> None:
    recorded(tiny, tmp_path / "steps")
    model = ["--model", str(tiny.path)]
    result = CliRunner().invoke(app, ["replay", str(tmp_path / "steps"), *model, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout[result.stdout.index("{") :])
    assert (report["differences"], report["num_hosted"]) == ([], 0)
    assert report["num_tokens"] > 50
    refused = CliRunner().invoke(app, ["replay", str(tmp_path / "steps"), *model, "--dtype", "bfloat16"])
    assert refused.exit_code == 2
    assert "dtype: float32, not bfloat16" in refused.output


def test_the_command_says_where_a_file_is_cut_or_damaged(tiny: Tiny, tmp_path: Path) -> None:
    log = recorded(tiny, tmp_path / "steps")
    num_steps, data = len(list(log)), log.path.read_bytes()
    command = ["replay", str(log.path), "--model", str(tiny.path)]
    log.path.write_bytes(data[:-5])
    cut = CliRunner().invoke(app, command)
    assert cut.exit_code == 0, cut.output
    assert f"{num_steps - 1:,} steps of" in cut.output
    assert f"ends inside of step {num_steps}: expected " in cut.output
    log.path.write_bytes(data[:-5] + b"12345")
    damaged = CliRunner().invoke(app, command)
    assert damaged.exit_code == 2
    assert f"step {num_steps} is damaged: expected the checksum" in " ".join(damaged.output.split())
