"""guidellm: synthetic texts at several concurrent streams, by both endpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from told import BUILTIN, Told, expect

NUM_REQUESTS, STREAMS, INPUT_LEN, OUTPUT_LEN = 40, 8, 64, 32


def run(told: Told, path: str) -> dict[str, object]:
    """The only benchmark of a report."""
    out = told.folder / "guidellm.json"
    options = {
        "--backend": f"kind=openai_http,target={told.url},model=builtin,request_format={path}",
        "--profile": f"kind=concurrent,streams={STREAMS}",
        "--constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "--tokenizer": f"kind=huggingface_auto,model={BUILTIN}",
        "--data": f"kind=synthetic_text,prompt_tokens={INPUT_LEN},output_tokens={OUTPUT_LEN}",
        "--output": f"kind=json,path={out}",
    }
    guidellm = Path(sys.executable).parent / "guidellm"
    command = [
        str(guidellm),
        "run",
        *(part for pair in options.items() for part in pair),
        "--disable-progress",
    ]
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=sys.stderr)
    [benchmark] = json.loads(out.read_text(encoding="utf-8"))["benchmarks"]
    return dict(benchmark)


def main() -> None:
    """Check that every answer came whole."""
    told = Told()
    for path in ("/v1/completions", "/v1/chat/completions"):
        metrics = run(told, path)["metrics"]
        totals = metrics["request_totals"]
        expect((totals["successful"], totals["errored"]), (NUM_REQUESTS, 0))
        tokens = metrics["output_token_count"]["successful"]
        expect((tokens["mean"], tokens["std_dev"]), (OUTPUT_LEN, 0))
        ttft, itl = (
            metrics[name]["successful"]["mean"]
            for name in ("time_to_first_token_ms", "inter_token_latency_ms")
        )
        told.saw(
            path,
            f"{NUM_REQUESTS} answers of {OUTPUT_LEN} tokens, {STREAMS} at once; "
            f"means in ms: ttft {ttft:.1f}, itl {itl:.1f}",
        )
    told.end("guidellm")


if __name__ == "__main__":
    main()
