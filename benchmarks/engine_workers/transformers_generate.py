"""transformers' ``generate``: one left-padded batch with its fused attention and dynamic cache."""

from __future__ import annotations

import protocol
import torch
import transformers


class _First(transformers.StoppingCriteria):
    """Tells the watch of tokens; stops nothing."""

    def __init__(self, watch: protocol.Stopwatch) -> None:
        self._watch = watch

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        self._watch.token()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def start(limits: protocol.Limits) -> tuple[str, protocol.Serve]:
    """Load the checkpoint as it is."""
    torch.set_num_threads(1)
    model = transformers.LlamaForCausalLM.from_pretrained(limits.model, attn_implementation="sdpa").eval()

    def serve(prompts: list[list[int]], new: list[int], watch: protocol.Stopwatch) -> None:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=max(new),
                max_new_tokens=max(new),
                pad_token_id=0,
                stopping_criteria=transformers.StoppingCriteriaList([_First(watch)]),
            )

    return f"transformers {transformers.__version__}", serve


if __name__ == "__main__":
    protocol.main(start)
