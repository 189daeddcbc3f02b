"""launch.sh from nothing to the first token on the simulated device, each of its steps, and a profile."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from hpu_duo.heads import HeadPattern
from tests.examples.gaudi.gaudi_server import GAUDI, GAUDI3, SIMULATED, Server, refusal
from tests.modeling.families import make_config
from tests.tiers import every

ENV = ("--env", SIMULATED)
QUESTION = {
    "messages": [
        {
            "role": "user",
            "content": "It was a quiet night. The passkey for Joel is loom actor camel. Remember it. "
            "The passkey for Nina is vase oats copper. Remember it. What is the passkey for Joel?",
        }
    ],
    "temperature": 0,
    "max_tokens": 20,
}


@pytest.mark.slow
def test_limits_are_chosen_with_reasons_and_kept(server: Server) -> None:
    variables = {"MAX_MODEL_LEN": "", "MAX_NUM_SEQS": "", "NUM_BLOCKS": ""}
    done = server.launch(*ENV, "limits", **variables)
    assert done.returncode == 0, done.stderr
    assert "MAX_MODEL_LEN=8192: all that the model serves" in done.stderr
    assert "MAX_NUM_SEQS=128: " in done.stderr
    assert re.search(r"measured by nobody: [\d,]+ to [\d,]+ tokens/s", done.stderr)
    written = (server.state / "limits.env").read_text()
    again = server.launch(*ENV, "limits", **variables)
    assert "nothing they follow from has changed" in again.stderr
    assert (server.state / "limits.env").read_text() == written
    anew = server.launch(*ENV, "limits", HARDWARE="gaudi2", PREFIX_CACHING="1", **variables)
    assert "Gaudi 2" in anew.stderr
    # More than requests can use: what is left keeps prefixes.
    blocks = re.search(r"NUM_BLOCKS=(\d+): what fits", anew.stderr)
    assert blocks is not None
    assert int(blocks[1]) > 128 * 8192 // 128


@pytest.mark.slow
@pytest.mark.parametrize("name", every(2, ["limits.env.inputs", "limits.env"]))
def test_a_volume_that_fills_up_on_the_way_ends_with_one_sentence(server: Server, name: str) -> None:
    server.state.mkdir()
    (server.state / f"{name}.new").symlink_to("/dev/full")
    said = refusal(server.launch(*ENV, "limits"))
    assert f"{server.state / name} cannot be written: make room in {server.state}" in said
    assert not (server.state / name).exists()


def test_steps_ask_for_those_before_them(server: Server) -> None:
    for step in ("plan", "warmup", "verify", "serve"):
        assert "run 'launch.sh limits' first" in refusal(server.launch(*ENV, step))


@pytest.mark.slow
def test_a_length_that_does_not_fit_is_refused_with_what_helps(server: Server) -> None:
    said = refusal(server.launch(*ENV, "limits", MAX_MODEL_LEN="9000"))
    assert "no limits were chosen, for the reason above" in said


@pytest.mark.slow
def test_a_server_with_a_card_is_bound_to_the_cores_beside_it(server: Server) -> None:
    """The commands of a dry run, with the files of earlier steps made by hand."""
    server.has_cards(GAUDI3)
    variables = {"MIN_FREE_GIB": "0", "MAX_MODEL_LEN": "512", "MAX_NUM_SEQS": "2"}
    limited = server.launch("--env", str(GAUDI / "env" / "gaudi3.env"), "limits", **variables)
    assert limited.returncode == 0, limited.stderr
    done = server.launch("--env", str(GAUDI / "env" / "gaudi3.env"), "--dry-run", "serve", **variables)
    assert done.returncode == 0, done.stderr
    assert "would run: taskset -c 0 hpu-duo serve " in done.stderr
    unbound = server.launch(
        "--env", str(GAUDI / "env" / "gaudi3.env"), "--dry-run", "serve", BIND_CORES="0", **variables
    )
    assert "would run: hpu-duo serve " in unbound.stderr


@pytest.mark.slow
def test_a_dry_run_writes_nothing_and_shows_replicas_and_ranks_where_a_command_has_to_know(
    server: Server,
) -> None:
    variables = {"REPLICAS": "2", "ROUTER": "least-loaded", "TENSOR_PARALLEL_SIZE": "2"}
    done = server.launch(*ENV, "--dry-run", RETRIEVAL_PARALLEL="context", **variables)
    assert done.returncode == 0, done.stderr
    assert "would run: hpu-duo plan " in done.stderr
    assert not server.state.exists()
    shared = "--tensor-parallel-size 2 --retrieval-parallel context"
    (warmup,) = re.findall(r"would run: (hpu-duo warmup .*)", done.stderr)
    (serve,) = re.findall(r"would run: (hpu-duo serve .*)", done.stderr)
    assert shared in warmup
    assert shared in serve
    assert "--replicas 2 --router least-loaded" in serve
    assert "--replicas" not in warmup
    assert "--record-shapes" not in serve
    assert "note: replicas record no shapes" in done.stderr
    for settings, message in (
        ({"ROUTER": "e2"}, "ROUTER=e2 chooses among replicas: set REPLICAS to 2 or more"),
        (
            {"RETRIEVAL_PARALLEL": "tokens"},
            "expected RETRIEVAL_PARALLEL to be one of auto heads context, got 'tokens'",
        ),
        ({"REPLICAS": "0"}, "expected REPLICAS to be at least 1"),
    ):
        assert message in refusal(server.launch(*ENV, "--dry-run", "check", **settings))


@pytest.mark.slow
def test_limits_follow_the_choice_of_what_cards_share(server: Server) -> None:
    """Eight KV heads on eight cards: half of them may stream by context only."""
    model = server.state.parent / "eight"
    make_config(
        "LlamaConfig",
        num_attention_heads=8,
        num_key_value_heads=8,
        num_hidden_layers=2,
        max_position_embeddings=512,
    ).save_pretrained(model)
    HeadPattern(np.tile(np.arange(8, dtype=np.float32) / 8, (2, 1)), sink=4, recent=16).save(
        model / "pattern"
    )
    variables = {
        "MODEL": str(model),
        "PATTERN": str(model / "pattern"),
        "SPARSITY": "0.5",
        "MIN_FREE_GIB": "0",
    }
    chosen = {}
    for way in ("auto", "context", "heads"):
        done = server.launch(
            *ENV,
            "--dry-run",
            "limits",
            "plan",
            "serve",
            TENSOR_PARALLEL_SIZE="8",
            RETRIEVAL_PARALLEL=way,
            **variables,
        )
        assert done.returncode == 0, done.stderr
        chosen[way] = re.findall(r"would run: (.*)", done.stderr)
        assert ("warning: 8 promoted heads take " in done.stderr) == (way == "heads")
        told = "8 ranks, 8 KV heads: retrieval heads are shared by context, 0 promoted"
        assert (told in done.stderr) == (way == "auto")
    assert chosen["auto"] == chosen["context"] != chosen["heads"]
    plan, serve = chosen["auto"]
    assert "--block-size 1024 " in plan
    assert "--block-size 128 " in serve
    assert "--tensor-parallel-size 8 --retrieval-parallel context" in serve


def profiles_steps(server: Server, directory: Path) -> None:
    """Check that a deployment that is warm serves a load while its first steps are profiled."""
    options = ("--env", SIMULATED, "--steps", "3", "--out", str(directory / "profile"))
    load = ("--", "--num-prompts", "2", "--request-rate", "inf", "--input-len", "8", "--output-len", "8")
    server.has_command("hl-prof-config", f'#!/bin/sh\necho "$@" > {directory}/configured\n')
    done = server.run(str(GAUDI / "operate" / "profile.sh"), *options, *load, PORT="0", DRAIN_SECONDS="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(".pt.trace.json.gz")
    assert Path(done.stdout.strip()).is_file()
    assert (directory / "configured").read_text() == "--use-template profile_api --hw-trace off\n"


@pytest.mark.slow
@pytest.mark.long
def test_a_bare_machine_serves_its_first_token_stops_at_sigterm_and_is_profiled(
    server: Server, tmp_path: Path
) -> None:
    command = [str(GAUDI / "launch.sh"), *ENV]
    server.environment["GRAPHS_BUDGET"] = "2"
    variables = {"PORT": "0", "DRAIN_SECONDS": "5", "LOG_REQUESTS": str(server.state / "calls.jsonl")}
    environment = {**server.environment, **variables}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told, place = "", ""
        # Ends with the pipe if the script does.
        for line in process.stderr:
            told += line
            if found := re.match(r"hpu-duo: serving builtin at ([^\s,]+)", line):
                place = found[1]
                break
        assert place, told
        curl = ("curl", "--silent", "--fail", "--retry", "60", "--retry-delay", "1", "--retry-all-errors")
        ready = server.run(*curl, f"{place}/ready")
        assert ready.returncode == 0, ready.stderr
        asked = ("--header", "Content-Type: application/json", "--data", json.dumps(QUESTION))
        answer = server.run(*curl, f"{place}/v1/chat/completions", *asked)
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(60) == 0, rest
    assert json.loads(answer.stdout)["choices"][0]["message"]["content"] == " loom actor camel."
    for step in (
        "MAX_MODEL_LEN=512",
        "hpu-duo plan",
        "graphs captured in",
        "written just now",
    ):
        assert step in told
    assert sorted(path.name for path in server.state.iterdir() if ".inputs" not in path.name) == [
        "calls.jsonl",
        "limits.env",
        "shapes.jsonl",
        "table.txt",
        "warm.json",
    ]
    assert "--max-model-len 512\n" in (server.state / "shapes.jsonl.inputs").read_text()
    # What was done is not done again, and the recording is there for the next plan.
    second = server.launch(*ENV, "check", "limits", "plan", "warmup", "verify")
    assert second.returncode == 0, second.stderr
    for kept in (
        "limits are those of",
        "is kept",
        "'launch.sh --again plan warmup' plans for them",
        "warm already",
    ):
        assert kept in second.stderr
    profiles_steps(server, tmp_path)
    # Another setting makes the manifest stale, and each step says which command helps.
    stale = server.launch(*ENV, "serve", MAX_NUM_SEQS="1")
    assert "chosen for other settings (MAX_NUM_SEQS=2 -> MAX_NUM_SEQS=1)" in refusal(stale)
    for step in ("verify", "serve"):
        said = refusal(server.launch(*ENV, step, DTYPE="bfloat16"))
        assert "is stale (changed: --dtype auto -> --dtype bfloat16): run 'launch.sh plan warmup'" in said
    # A manifest that was changed behind our back is refused by the package itself.
    manifest = server.state / "warm.json"
    manifest.write_text(manifest.read_text().replace('max_num_seqs": 2', 'max_num_seqs": 3'))
    said = refusal(server.launch(*ENV, "verify"))
    assert "run 'launch.sh --again plan warmup'" in said
    replanned = server.launch(*ENV, "--again", "--dry-run", "plan")
    assert f"--from-shapes {server.state / 'shapes.jsonl'}" in replanned.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), every(2, [(signal.SIGTERM, 143), (signal.SIGINT, 130)]))
def test_a_signal_ends_a_step_and_what_it_runs(
    server: Server, tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    pid_file = tmp_path / "pid"
    server.has_command("hpu-duo", f"#!/bin/sh\necho $$ > {pid_file}\nexec sleep 300\n")
    server.state.mkdir()
    assert server.launch(*ENV, "limits").returncode == 0
    (server.state / "table.txt.inputs").write_text("those of the last plan\n")
    # As from a terminal, even where the tests themselves run in the background.
    command = ["env", "--default-signal=INT", str(GAUDI / "launch.sh"), *ENV, "plan"]
    with subprocess.Popen(command, env=server.environment, stderr=subprocess.PIPE, text=True) as process:
        while not (pid_file.exists() and pid_file.read_text().strip()):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(sent)
        try:
            assert process.wait(30) == code
        finally:
            # A child that lives on would hold the pipe.
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid_file.read_text()), signal.SIGKILL)
                process.kill()
        assert process.stderr is not None
        assert f"stopped by {sent.name}" in process.stderr.read()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert not (server.state / "table.txt.inputs").exists()


@pytest.mark.slow
def test_a_recording_of_other_limits_is_put_aside(server: Server) -> None:
    """Steps as long as 512 tokens cannot occur within 256, which hpu-duo plan refuses."""
    assert server.launch(*ENV, "limits").returncode == 0
    recording = server.state / "shapes.jsonl"
    limits = dict(
        line.split("=") for line in (server.state / "limits.env").read_text().splitlines() if "#" not in line
    )
    recording.write_text('{"a": "step"}\n')
    (server.state / "shapes.jsonl.inputs").write_text(
        f"--max-model-len {limits['MAX_MODEL_LEN']}\n--max-num-seqs {limits['MAX_NUM_SEQS']}\n"
        f"--max-num-batched-tokens 64\n--block-size 128\n--num-blocks {limits['NUM_BLOCKS']}\nMODEL=builtin\n"
    )
    server.has_command("hpu-duo", '#!/bin/sh\necho table > "$STATE_DIR/table.txt"\n')
    same = server.launch(*ENV, "--dry-run", "plan")
    assert f"--from-shapes {recording}" in same.stderr
    variables = {"MAX_MODEL_LEN": "256"}
    (server.state / "limits.env").unlink()
    assert server.launch(*ENV, "limits", **variables).returncode == 0
    for options in (("--dry-run",), ()):
        done = server.launch(*ENV, *options, "plan", **variables)
        assert done.returncode == 0, done.stderr
        assert "was made under other limits (--max-model-len 512" in done.stderr
        assert "--from-shapes" not in done.stderr
        assert recording.exists() == bool(options)
    assert (server.state / "shapes.jsonl.old").read_text() == '{"a": "step"}\n'
    assert not (server.state / "shapes.jsonl.inputs").exists()


@pytest.mark.slow
def test_a_recording_that_cannot_be_planned_for_is_named(server: Server) -> None:
    assert server.launch(*ENV, "limits").returncode == 0
    (server.state / "shapes.jsonl").write_text("no steps\n")
    assert f"remove {server.state / 'shapes.jsonl'}" in refusal(server.launch(*ENV, "plan"))


def test_a_warm_up_that_did_not_end_keeps_its_manifest(server: Server) -> None:
    """It is resumed by the same settings, and replaced by others."""
    server.has_command(
        "hpu-duo",
        '#!/bin/sh\ncase "$1" in\nplan) echo "--u/q1/s0/u1/l1" >"$STATE_DIR/table.txt" ;;\n'
        'warmup) echo "$1" >>"$STATE_DIR/warm.json"; exit "${FAILS:-0}" ;;\nesac\n',
    )
    manifest = server.state / "warm.json"
    ended = server.launch(*ENV, "limits", "plan", "warmup", FAILS="137")
    assert "the warm-up has not ended well" in refusal(ended)
    other = server.launch(*ENV, "warmup", DTYPE="bfloat16", FAILS="137")
    assert f"replaces {manifest}" in other.stderr
    resumed = server.launch(*ENV, "warmup", DTYPE="bfloat16")
    assert resumed.returncode == 0, resumed.stderr
    assert f"goes on with the warm-up of {manifest}, which did not end" in resumed.stderr
    assert manifest.read_text() == "warmup\nwarmup\n"
    assert "warm already" in server.launch(*ENV, "warmup", DTYPE="bfloat16").stderr
