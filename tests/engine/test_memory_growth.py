"""A long-running process does not grow with the number of shapes that it has seen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from tests.engine.soak import VOCAB
from tests.modeling.families import save_random
from tests.tiers import every

WORKER = Path(__file__).with_name("soak.py")
ROOT = WORKER.parents[2]
NUM_REQUESTS, NUM_WARM = 800, 300
MOST_MB = 20


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("graphs", every(2, ["replay", "eager"]))
def test_hundreds_of_random_requests_in_bfloat16_leave_memory_where_it_was(
    tmp_path: Path, graphs: str
) -> None:
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=1024,
    )
    save_random(config, tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    command = [sys.executable, WORKER, tmp_path, graphs, str(NUM_REQUESTS), str(NUM_WARM)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) <= MOST_MB
