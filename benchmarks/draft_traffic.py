"""Count buckets of published patterns with drafts, and steps without drafts of traffic at half load.

Drafts run in steps without prompts. The traffic is simulated on a Gaudi 3 by the cost model, with a stated
mean of accepted tokens: requests arrive at random, with prompts of 1,000 and answers of 200 tokens in the
mean, at half the rate that is served when all of them arrive at once. Nothing here is measured on a Gaudi.

    python -m benchmarks.draft_traffic --patterns DIR [--acceptance-length 3.2]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from transformers import LlamaConfig
from typer.testing import CliRunner

from graphs import BucketTable
from hpu_duo.cli.app import app
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.heads import HeadPattern
from hpu_duo.planning import GAUDI3, Deployment, Serving, step_cost, step_limits
from hpu_duo.planning.read_model import read_model
from hpu_duo.planning.simulation import SyntheticDrafts
from kernels_ref import PLAIN

LLAMA_8B: Mapping[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 32_768,
}
LLAMA_2_7B = {**LLAMA_8B, "intermediate_size": 11_008, "num_key_value_heads": 32, "vocab_size": 32_000}
ROWS, LENS = (32, 64, 256), (1, 4, 9)


def num_buckets(pattern: HeadPattern, path: Path) -> list[tuple[int, int, int]]:
    """Requests, and buckets of the default table without and with drafts."""
    found = []
    for rows in ROWS:
        serving = Serving(
            GAUDI3,
            pattern=pattern,
            sink=pattern.sink,
            recent=pattern.recent,
            decode_len=LENS[-1],
            draft_lens=LENS,
            max_num_seqs=rows,
        )
        deployment = Deployment(read_model(path), serving, 0.5, PLAIN, LLAMA_8B["max_position_embeddings"])
        table = BucketTable.exponential(step_limits(deployment), cost=step_cost(deployment))
        found.append((rows, len(table), len(table.with_drafts(LENS))))
    return found


def simulated(path: Path, acceptance_length: float, per_s: float) -> tuple[float, Counter[str]]:
    """Requests a second, and steps by kind."""
    counts: Counter[str] = Counter()
    ran = SyntheticDrafts.ran

    def counted(self: SyntheticDrafts, plan: StepPlan, num_tokens: int, seconds: float) -> None:
        has_prompts = any(row.num_new_tokens > plan.decode_len or not row.num_samples for row in plan.rows)
        kind = "prompts" if has_prompts else "drafts" if plan.decode_len > 1 else "plain decodes"
        counts[kind] += 1
        ran(self, plan, num_tokens, seconds)

    words = ["simulate", "--model", str(path), "--max-model-len", "16384", "--sparsity", "0.5", "--json"]
    words += [
        "--workload",
        f"poisson:per_s={per_s},prompts=1000~0.8,outputs=200~0.8",
        "--num-requests",
        "400",
    ]
    words += ["--speculative-config", '{"num_speculative_tokens": 8}']
    words += ["--acceptance-length", str(acceptance_length)]
    with patch.object(SyntheticDrafts, "ran", counted):
        done = CliRunner().invoke(app, words)
    if done.exit_code:
        raise SystemExit(done.output)
    return json.loads(done.output)["runs"][0]["request_throughput"], counts


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--patterns", type=Path, help="directory with directories of patterns")
    parser.add_argument("--acceptance-length", type=float, nargs="*", default=[1.2, 3.2, 6.0])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        paths = {}
        for name, sizes in (("8b", LLAMA_8B), ("7b", LLAMA_2_7B)):
            paths[name] = Path(directory) / name
            LlamaConfig(**sizes).save_pretrained(paths[name])
        for each in sorted(asked.patterns.iterdir()) if asked.patterns else ():
            path = paths["7b" if "Llama-2" in each.name else "8b"]
            print(each.name, num_buckets(HeadPattern.load(each), path), flush=True)
        for length in asked.acceptance_length:
            most, _ = simulated(paths["8b"], length, 200.0)
            _, counts = simulated(paths["8b"], length, most / 2)
            total = sum(counts.values())
            shares = {kind: round(num / total, 3) for kind, num in counts.items()}
            print(f"accepted {length}, {most / 2:.1f} of {most:.1f} requests/s: {shares} of {total} steps")


if __name__ == "__main__":
    main()
