"""Exact match on fresh passkey documents, with any set of heads reduced to sink and recent tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from builtin_training.attention import HeadPlan
from builtin_training.batches import Batch, BatchMaker, Task

# Above 2**31, from where the training documents are drawn.
_DOCUMENT_SEED = 2**40


@dataclass(frozen=True)
class Accuracy:
    """Counts over all answers; an answer is exact if each of its tokens, up to <eos>, is the most likely one.

    This is what greedy decoding of the answer would give, computed in one pass.
    """

    num_answers: int
    num_exact: int
    num_tokens: int
    num_right: int

    @property
    def exact_match(self) -> float:
        return self.num_exact / self.num_answers

    @property
    def token_accuracy(self) -> float:
        return self.num_right / self.num_tokens

    def __add__(self, other: "Accuracy") -> "Accuracy":
        return Accuracy(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def measure_accuracy(
    model: LlamaForCausalLM, batches: BatchMaker, task: Task, num_batches: int, plan: HeadPlan | None
) -> Accuracy:
    """Accuracy over ``num_batches`` batches of ``task``; the same documents for every plan."""
    total = Accuracy(0, 0, 0, 0)
    for index in range(num_batches):
        batch = batches.make(task, seed=_DOCUMENT_SEED + index).to(model.device)
        is_answer = batch.answer >= 0
        right = answer_logits(model, batch, plan).argmax(-1) == batch.targets[is_answer]
        misses = torch.zeros(batch.num_answers, dtype=torch.long, device=model.device)
        misses.index_add_(0, batch.answer[is_answer], (~right).long())
        total += Accuracy(batch.num_answers, int((misses == 0).sum()), right.numel(), int(right.sum()))
    return total


@torch.inference_mode()
def answer_logits(model: LlamaForCausalLM, batch: Batch, plan: HeadPlan | None) -> Tensor:
    """Logits [answer tokens, vocabulary] at the positions whose target belongs to an answer."""
    hidden = model.model(batch.ids, use_cache=False, head_plan=plan).last_hidden_state
    return model.lm_head(hidden[batch.answer >= 0]).float()
