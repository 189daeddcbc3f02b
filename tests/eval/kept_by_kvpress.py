"""Program for kvpress's own Python: the positions that presses keep of a prompt, by press, layer and KV head.

Reads ``model``, ``prompt``, ``kept`` and ``presses`` (name, arguments, attention) as JSON from its input.
"""

import json
import sys
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, DynamicCache


def positions(model: Any, press: Any, prompt: list[int], kept: int) -> list[list[list[int]]]:
    """Positions with the highest scores, by layer and head."""
    found: dict[int, list[list[int]]] = {}
    score = press.score

    def told(module: Any, *arguments: Any, **named: Any) -> torch.Tensor:
        scores = score(module, *arguments, **named)
        found[module.layer_idx] = [sorted(head.tolist()) for head in scores[0].topk(kept, -1).indices]
        return scores

    press.score = told
    with torch.inference_mode(), press(model):
        model.model(torch.tensor([prompt]), past_key_values=DynamicCache())
    return [found[layer] for layer in sorted(found)]


def main() -> None:
    """Tell the positions as JSON."""
    asked = json.load(sys.stdin)
    told = []
    for one in asked["presses"]:
        model = AutoModelForCausalLM.from_pretrained(
            asked["model"], dtype=torch.float32, attn_implementation=one["attention"]
        ).eval()
        press = getattr(kvpress, one["name"])(**one["arguments"])
        press.compression_ratio = 1.0 - (asked["kept"] + 0.5) / len(asked["prompt"])
        told.append(positions(model, press, asked["prompt"], asked["kept"]))
    print(json.dumps(told))


if __name__ == "__main__":
    main()
