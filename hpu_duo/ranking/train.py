"""Training of a ranker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hpu_duo.ranking.examples import Examples
from hpu_duo.ranking.kendall import kendall_tau
from hpu_duo.ranking.loss import list_mle
from hpu_duo.ranking.ranker import Ranker


@dataclass(frozen=True)
class TrainingPlan:
    """Settings of a training.

    Attributes:
        epochs: times that every example is seen; 1 or more.
        list_len: examples that are put in order together; 2 or more.
        learning_rate: of Adam.
        held_out: share of the examples that tell how good it is.
        seed: of everything random.

    Raises:
        ValueError: a value out of range.
    """

    epochs: int = 5
    list_len: int = 32
    learning_rate: float = 0.01
    held_out: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.list_len < 2 or not 0 < self.learning_rate < float("inf"):
            raise ValueError(
                "expected epochs of 1 or more, list_len of 2 or more and a learning rate above 0, got "
                f"{self.epochs}, {self.list_len} and {self.learning_rate}"
            )


@dataclass(frozen=True)
class TrainingReport:
    """Numbers of a training.

    Attributes:
        num_examples, num_held_out: examples that it learned from, and others.
        tau, held_out_tau: Kendall's tau of scores and lengths of both.
        losses: mean loss of each epoch.
    """

    num_examples: int
    num_held_out: int
    tau: float
    held_out_tau: float
    losses: tuple[float, ...]


def train(
    ranker: Ranker,
    examples: Examples,
    plan: TrainingPlan | None = None,
    progress: Callable[[int, float], None] = lambda epoch, loss: None,
) -> TrainingReport:
    """Train a ranker in place with ListMLE.

    Args:
        progress: called after each epoch with its number, from 1 on, and its mean loss.

    Raises:
        ValueError: there are fewer than four examples.
    """
    plan = TrainingPlan() if plan is None else plan
    learned, held_out = examples.split(plan.held_out, plan.seed)
    generator = torch.Generator().manual_seed(plan.seed)
    optimizer = torch.optim.Adam(ranker.parameters(), lr=plan.learning_rate)
    lengths = torch.from_numpy(learned.lengths)
    losses = []
    ranker.train()
    for epoch in range(1, plan.epochs + 1):
        total, num_lists = 0.0, 0
        for places in torch.randperm(len(learned), generator=generator).split(plan.list_len):
            optimizer.zero_grad()
            scores = ranker([learned.prompts[place] for place in places.tolist()])
            loss = list_mle(scores, lengths[places], generator)
            loss.backward()
            optimizer.step()
            total, num_lists = total + float(loss.detach()), num_lists + 1
        losses.append(total / num_lists)
        progress(epoch, losses[-1])
    ranker.eval()
    return TrainingReport(
        len(learned), len(held_out), _tau(ranker, learned), _tau(ranker, held_out), tuple(losses)
    )


def _tau(ranker: Ranker, examples: Examples, batch_len: int = 64) -> float:
    scores = [
        score
        for start in range(0, len(examples), batch_len)
        for score in ranker.score(examples.prompts[start : start + batch_len])
    ]
    return kendall_tau(scores, examples.lengths)
