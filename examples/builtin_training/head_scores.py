"""Scores of KV heads: the measured gain from the full cache of each."""

import random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from builtin_training.attention import HeadPlan
from builtin_training.batches import BatchMaker, Task
from builtin_training.evaluation import answer_logits
from hpu_duo.heads.pattern import HeadPattern

SINK, RECENT = 16, 64
_TASK = Task(num_tokens=1024, batch_size=4, num_passkeys=(8, 8), passkey_words=(12, 12))
# Above 2**31, from where the training documents are drawn.
_DOCUMENT_SEED = 2**41

Mask = NDArray[np.bool_]
"""[layers, KV heads], True for a retrieval head."""


def plan_of(retrieval_LK: Mask) -> HeadPlan:
    """The plan in which exactly these heads see everything."""
    return HeadPlan(tuple(tuple(np.flatnonzero(row).tolist()) for row in retrieval_LK), SINK, RECENT)


class HeadScorer:
    """Measures the value of sets of retrieval heads, and from it the value of each head.

    The value of a set is the mean probability of the right answer tokens when only its heads see everything.
    """

    def __init__(self, model: LlamaForCausalLM, batches: BatchMaker) -> None:
        self._model = model
        self._batch = batches.make(_TASK, seed=_DOCUMENT_SEED).to(model.device)
        config: Any = model.config
        self._shape = int(config.num_hidden_layers), int(config.num_key_value_heads)
        self._values: dict[bytes, float] = {}

    def shapley(self, num_orders: int) -> HeadPattern:
        """Average gain in value when a head joins the retrieval heads.

        Heads join one after another in random orders, each order also backwards; the average gain of a head
        is its Shapley value. Unlike removing one head at a time, this also credits heads that can stand in
        for each other. Scores are scaled to [0, 1], order preserved.
        """
        rng = random.Random(0)
        gains_LK = np.zeros(self._shape)
        for index in range(num_orders):
            order = rng.sample(list(np.ndindex(gains_LK.shape)), gains_LK.size)
            for direction in (order, order[::-1]):
                retrieval_LK = np.zeros(gains_LK.shape, dtype=bool)
                before = self.value(retrieval_LK)
                for head in direction:
                    retrieval_LK[head] = True
                    after = self.value(retrieval_LK)
                    gains_LK[head] += after - before
                    before = after
            print(f"head scores: order {index + 1}/{num_orders}", flush=True)
        scores_LK = (gains_LK - gains_LK.min()) / (gains_LK.max() - gains_LK.min())
        config = {
            "method": "shapley",
            "num_orders": 2 * num_orders,
            "context_length": _TASK.num_tokens,
            "num_documents": _TASK.batch_size,
            "num_passkeys": _TASK.num_passkeys[0],
            "passkey_length": _TASK.passkey_words[0],
        }
        return HeadPattern(scores_LK, SINK, RECENT, source="shapley", config=config)

    def ablation(self) -> NDArray[np.float64]:
        """Loss of value [layers, KV heads] when one head alone becomes a streaming head."""
        losses_LK = np.zeros(self._shape)
        for head in np.ndindex(losses_LK.shape):
            retrieval_LK = np.ones(losses_LK.shape, dtype=bool)
            everything = self.value(retrieval_LK)
            retrieval_LK[head] = False
            losses_LK[head] = everything - self.value(retrieval_LK)
        return losses_LK

    def value(self, retrieval_LK: Mask) -> float:
        """Mean probability of the right answer tokens with these retrieval heads; computed once per set."""
        key = retrieval_LK.tobytes()
        if key not in self._values:
            targets = self._batch.targets[self._batch.answer >= 0]
            probabilities = answer_logits(self._model, self._batch, plan_of(retrieval_LK)).softmax(-1)
            self._values[key] = float(probabilities.gather(1, targets.unsqueeze(1)).double().mean())
        return self._values[key]
