"""Training of a ranker on recorded traffic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hpu_duo.lab.traces import Arrival, PromptIds
from hpu_duo.scheduling.ranker import Ranker

VOCABULARY = range(300, 1000)
"""Tokens that prompts without text are made of."""


class TracePrompts:
    """Prompts of a trace as rankers learn from them: its texts, or drawn tokens where it has none.

    Args:
        vocabulary: of requests without text: their tokens are drawn, so that equal blocks are equal.
        encode: makes tokens of texts; None where the trace has none.
    """

    def __init__(
        self, vocabulary: range = VOCABULARY, encode: Callable[[str], Sequence[int]] | None = None
    ) -> None:
        self._ids, self._encode = PromptIds(vocabulary), encode

    def of(self, arrival: Arrival, index: int) -> np.ndarray:
        """Return the prompt of a request; int32 [number of tokens].

        Args:
            index: place of the request in its trace.

        Raises:
            ValueError: a text and nothing to encode it.
        """
        if arrival.text is None:
            return self._ids.of(arrival, index)
        if self._encode is None:
            raise ValueError("expected a tokenizer for a trace with texts: give --tokenizer PATH")
        return np.asarray(self._encode(arrival.text), dtype=np.int32)


@dataclass(frozen=True)
class Examples:
    """Prompts with the output tokens that each had.

    Attributes:
        prompts: token ids of each.
        lengths: int64 [number of prompts].

    Raises:
        ValueError: a prompt is empty, or the numbers differ.
    """

    prompts: tuple[np.ndarray, ...]
    lengths: np.ndarray

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.lengths):
            raise ValueError(f"expected a length for each of {len(self.prompts)}, got {len(self.lengths)}")
        if any(len(prompt) == 0 for prompt in self.prompts):
            raise ValueError("expected prompts of at least one token, got an empty one")

    def __len__(self) -> int:
        return len(self.prompts)

    @classmethod
    def of(
        cls,
        arrivals: Sequence[Arrival],
        encode: Callable[[str], Sequence[int]] | None = None,
        vocabulary: range = VOCABULARY,
    ) -> Examples:
        """Take them from a trace.

        Args:
            encode, vocabulary: see ``TracePrompts``.

        Raises:
            ValueError: a text and nothing to encode it.
        """
        make = TracePrompts(vocabulary, encode)
        prompts = [make.of(arrival, index) for index, arrival in enumerate(arrivals)]
        lengths = np.array([arrival.num_output_tokens for arrival in arrivals], dtype=np.int64)
        return cls(tuple(prompts), lengths)

    def take(self, places: np.ndarray) -> Examples:
        """Return those of some places."""
        return Examples(tuple(self.prompts[place] for place in places), self.lengths[places])

    def split(self, held_out: float, seed: int) -> tuple[Examples, Examples]:
        """Put some aside at random; returns the others first.

        Args:
            held_out: share to put aside, above 0 and below 1; at least two examples stay on each side.

        Raises:
            ValueError: the share is out of range, or there are fewer than four examples.
        """
        if not 0 < held_out < 1:
            raise ValueError(f"expected a share above 0 and below 1 to be held out, got {held_out}")
        if len(self) < 4:
            raise ValueError(f"expected at least 4 requests to learn from, got {len(self)}")
        order = np.random.default_rng(seed).permutation(len(self))
        cut = min(len(self) - 2, max(2, round(len(self) * held_out)))
        return self.take(order[cut:]), self.take(order[:cut])


def list_mle(scores: torch.Tensor, lengths: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return minus the log-likelihood of the right order, lowest score and length first, per place.

    The likelihood is that of drawing the requests one after the other, each with a probability in proportion
    to ``exp(-score)`` among those that are left. Requests of the same length come in a random order.

    Args:
        scores: float32 [N], N at least 1.
        lengths: [N].
        generator: puts requests of the same length in order.

    Source: Xia et al. 2008, Listwise Approach to Learning to Rank.
    """
    shuffled = torch.randperm(len(lengths), generator=generator)
    order = shuffled[torch.sort(lengths[shuffled], stable=True).indices]
    wanted = -scores[order]
    # Of each place the log of the sum over the places from there on.
    left = torch.logcumsumexp(wanted.flip(0), 0).flip(0)
    return (left - wanted).mean()


_SLICE = 512
"""Rows of pairs at a time."""


def kendall_tau(first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray) -> float:
    """Return Kendall's tau-b: 1 for the same order, -1 for the reverse, 0 for none or for equal values.

    Args:
        first, second: values of the same things, at least two.

    Raises:
        ValueError: they are not of the same length, or fewer than two.
    """
    one, other = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if one.shape != other.shape or one.ndim != 1 or len(one) < 2:
        raise ValueError(
            f"expected two lists of the same length, 2 or more, got {one.shape} and {other.shape}"
        )
    agreeing = differs_in_one = differs_in_other = 0
    for start in range(0, len(one), _SLICE):
        rows = slice(start, start + _SLICE)
        a, b = np.sign(one[rows, None] - one), np.sign(other[rows, None] - other)
        agreeing += int((a * b).sum())
        differs_in_one += int(np.abs(a).sum())
        differs_in_other += int(np.abs(b).sum())
    scale = float(np.sqrt(float(differs_in_one) * float(differs_in_other)))
    return agreeing / scale if scale else 0.0


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
