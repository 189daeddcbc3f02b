"""transformers' ``generate``: one left-padded batch with its fused attention and dynamic cache."""

from __future__ import annotations

import protocol
import torch
import transformers


class _First(transformers.StoppingCriteria):
    """Records the time of the first token; stops nothing."""

    def __init__(self) -> None:
        self.moment: protocol.Moment | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        self.moment = self.moment or protocol.Moment.now()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Generate(protocol.Engine):
    """The checkpoint as transformers loads it."""

    def __init__(self, limits: protocol.Limits) -> None:
        self.name = f"transformers {transformers.__version__}, {limits.dtype}"
        torch.set_num_threads(1)
        self._model = transformers.LlamaForCausalLM.from_pretrained(
            limits.model, attn_implementation="sdpa", dtype=limits.dtype
        ).eval()

    def serve(self, prompts: list[list[int]], new: list[int], late: protocol.Late | None) -> protocol.Reply:
        """Generate until the longest output is done; nothing can arrive late."""
        assert late is None, "generate takes no prompts under way"
        began, first = protocol.Moment.now(), _First()
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=max(new),
                max_new_tokens=max(new),
                pad_token_id=0,
                stopping_criteria=transformers.StoppingCriteriaList([first]),
            )
        whole = protocol.Moment.now().since(began)
        assert first.moment is not None, "the criteria are asked at every token"
        return protocol.Reply(first.moment.since(began), whole, None, None, protocol.peak_bytes())


if __name__ == "__main__":
    protocol.main(Generate)
