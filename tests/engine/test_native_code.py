"""Engines on a CPU whose C++ is not built yet, or cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from graphs.backends.replay import ReplayBackend
from hpu_duo.config.engine import EngineConfig, GraphConfig, ModelConfig
from hpu_duo.startup.device_side import Place
from kernels_ref.x86.library import is_supported
from tests.modeling.families import BASE, save_random

pytestmark = pytest.mark.skipif(not is_supported(), reason="needs a CPU with AVX512-BF16")

START = """
import sys, warnings
warnings.simplefilter("always")
from hpu_duo import HPUDuoModel, SamplingParams
model = HPUDuoModel.from_pretrained(
    sys.argv[1], device="cpu", graphs="replay", max_num_seqs=2, max_model_len=64, max_num_batched_tokens=16
)
print("loaded", flush=True)
((done,),) = model.engine.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
print(len(done.token_ids), "tokens")
"""

COMPILER = """#!/bin/sh
# The first compiler of a library waits for one of the other; the rest leave their cores to that one.
case "$*" in *rowwise*) own=rowwise other=x86;; *) own=x86 other=rowwise;; esac
mkdir {folder}/$own || exit 1
for turn in $(seq 600); do
    if [ -e {folder}/$other ]; then touch {folder}/$own-beside-$other; exit 1; fi
    sleep 0.1
done
exit 1
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bfloat16")
    sizes = {"hidden_size": 128, "intermediate_size": 160, "head_dim": 32, "num_hidden_layers": 2}
    save_random(LlamaConfig(**{**BASE, **sizes}), directory).to(torch.bfloat16).save_pretrained(directory)
    return directory


def start(checkpoint: Path, cache: Path, path: str) -> tuple[str, str]:
    """Load in a process of its own, with nothing built; what it prints, and warns of."""
    variables = {**os.environ, "PATH": path, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", START, str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=variables)
    return done.stdout, done.stderr


def test_without_a_compiler_each_library_is_told_of_once_and_steps_run(
    checkpoint: Path, tmp_path: Path
) -> None:
    printed, warned = start(checkpoint, tmp_path, str(tmp_path))
    assert printed.endswith("4 tokens\n")
    assert warned.count("small operators of a step run one by one: no C++ compiler") == 1
    assert warned.count("the model runs slower than it could on this CPU: no C++ compiler") == 1


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_all_libraries_are_built_at_the_same_time_before_the_model_is_loaded(
    checkpoint: Path, tmp_path: Path
) -> None:
    programs, started = tmp_path / "programs", tmp_path / "started"
    programs.mkdir()
    started.mkdir()
    (programs / "g++").write_text(COMPILER.format(folder=started))
    (programs / "g++").chmod(0o755)
    printed, _ = start(checkpoint, tmp_path / "cache", f"{programs}:{os.environ['PATH']}")
    assert {path.name for path in started.glob("*beside*")} == {"rowwise-beside-x86", "x86-beside-rowwise"}
    assert printed.endswith("4 tokens\n")


@pytest.mark.parametrize(
    ("graphs", "is_asked_for"),
    [("replay", True), ("auto", True), ("eager", False), (ReplayBackend(), False)],
)
def test_the_interpreter_of_row_programs_is_built_for_those_who_run_them(
    graphs: str | ReplayBackend, is_asked_for: bool
) -> None:
    config = EngineConfig(
        model=ModelConfig(path="somewhere", device="cpu"), graph=GraphConfig(backend=graphs)
    )
    assert Place.of(config).fuses_rows is is_asked_for
