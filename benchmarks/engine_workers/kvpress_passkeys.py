"""Worker of ``kvpress_peer.py``: answers passkey questions with kvpress, in an environment of its own.

Reads one JSON object from standard input: ``model``, ``documents`` (token ids of prompts, and of questions
and answers behind them) and ``runs`` (name of a press and its compression ratio). Writes one JSON object for
each run. The prompt is prefilled and compressed as kvpress does it; question and answer then go through the
model behind the compressed cache, at their true positions.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from typing import Any

import kvpress
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache


def answer(model: Any, press: Any, document: dict[str, Any]) -> dict[str, int]:
    """Exact answers of a document, and bytes of the cache behind its prompt."""
    prompt, cache = torch.tensor([document["prompt"]]), DynamicCache()
    with nullcontext() if press is None else press(model):
        model.model(prompt, past_key_values=cache)
    kept = [(layer.keys, layer.values) for layer in cache.layers]
    num_exact = 0
    for asked, wanted in document["questions"]:
        ids = torch.tensor([[*asked, *wanted]])
        positions = torch.arange(prompt.shape[1], prompt.shape[1] + ids.shape[1])[None]
        logits = model(ids[:, :-1], past_key_values=cache, position_ids=positions[:, :-1]).logits[0]
        num_exact += logits[len(asked) - 1 :].argmax(-1).tolist() == wanted
        for layer, (keys, values) in zip(cache.layers, kept, strict=True):
            layer.keys, layer.values = keys, values
    held = sum(keys.nbytes + values.nbytes for keys, values in kept)
    return {"num_answers": len(document["questions"]), "num_exact": num_exact, "held_bytes": held}


def main() -> None:
    torch.set_num_threads(1)
    work = json.load(sys.stdin)
    for name, ratio in work["runs"]:
        # Weights of attention are needed by some presses, and only this implementation returns them.
        kind = "eager" if name == "ObservedAttentionPress" else "sdpa"
        model = AutoModelForCausalLM.from_pretrained(
            work["model"], dtype="auto", attn_implementation=kind
        ).eval()
        press = None if name is None else getattr(kvpress, name)(compression_ratio=ratio)
        began = time.process_time()
        with torch.inference_mode():
            found = [answer(model, press, one) for one in work["documents"]]
        row = {key: sum(one[key] for one in found) for key in found[0]}
        row |= {"name": name, "ratio": ratio, "cpu_s": time.process_time() - began}
        row["versions"] = f"kvpress {work['version']}, transformers {transformers.__version__}"
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
