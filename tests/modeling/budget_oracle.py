"""The definition of a KV budget: transformers' model, with sets of positions for each head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface

from tests.modeling.turned_vectors import Vectors

NAME = "budget_oracle"


@dataclass
class Rule:
    """A policy, written with dictionaries.

    Attributes:
        update: new scores of one head from old ones, weights of each query on each position (a list of
            dictionaries, member after member of its query heads), those of the newest query in each query
            head of the layer, and the number of queries.
        protects: whether a position may not go, by position, end of the text and budget.
    """

    update: Callable[..., dict[int, float]]
    protects: Callable[[int, int, int], bool] = lambda position, end, budget: False


def _same(scores: dict[int, float], *_: Any) -> dict[int, float]:
    return dict.fromkeys(scores, 0.0)


def _summed(scores: dict[int, float], own: list[dict[int, float]], *_: Any) -> dict[int, float]:
    return {p: score + sum(weights.get(p, 0.0) for weights in own) for p, score in scores.items()}


def _unchanged(scores: dict[int, float], *_: Any) -> dict[int, float]:
    return dict(scores)


def _summed_but_marks(scores: dict[int, float], own: list[dict[int, float]], *_: Any) -> dict[int, float]:
    return {p: scores[p] if scores[p] >= 1e9 else score for p, score in _summed(scores, own).items()}


def _of_last(
    scores: dict[int, float], own: Any, everyone: list[list[dict[int, float]]], *_: Any
) -> dict[int, float]:
    # The weights of each head end with those of the newest query, one dictionary for each query head.
    return {p: sum(head[-1].get(p, 0.0) for head in everyone) for p in scores}


def _snapped(
    window: int,
    kernel: int,
    scores: dict[int, float],
    own: list[dict[int, float]],
    everyone: Any,
    num_queries: int,
) -> dict[int, float]:
    last = [each for number, each in enumerate(own) if num_queries - number % num_queries <= window]
    mean = {p: sum(each.get(p, 0.0) for each in last) / len(last) for p in scores}
    if num_queries == 1:
        return {p: score + (mean[p] - score) / window for p, score in scores.items()}
    order, side = sorted(scores), kernel // 2
    return {
        p: sum(mean[q] for q in order[max(0, at - side) : at + side + 1]) / kernel
        for at, p in enumerate(order)
    }


RULES = {
    "local": Rule(_same),
    "streaming-llm": Rule(_same, lambda position, end, budget: position < 4),
    "streaming-llm:sink=2": Rule(_same, lambda position, end, budget: position < 2),
    "fixed:stride=16,columns=1": Rule(
        _same, lambda position, end, budget: position // 16 == (end - 1) // 16 or position % 16 == 15
    ),
    "strided:stride=14": Rule(
        _same, lambda position, end, budget: end - 1 - position < 14 or position in range(0, 999, 14)
    ),
    "h2o": Rule(_summed, lambda position, end, budget: end - position <= budget // 2),
    "h2o:recent=0": Rule(_summed),
    "h2o:positions=cache": Rule(_summed, lambda position, end, budget: end - position <= budget // 2),
    "tova:positions=cache": Rule(_of_last),
    "local:positions=cache": Rule(_same),
    "snapkv:window=3,kernel=3,positions=cache": Rule(
        partial(_snapped, 3, 3), lambda position, end, budget: end - position <= 3
    ),
    "streaming-llm:positions=cache": Rule(_same, lambda position, end, budget: position < 4),
    "streaming-llm:sink=5,positions=cache": Rule(_same, lambda position, end, budget: position < 5),
    "expected-attention:sink=2,future=20": Rule(_same, lambda position, end, budget: position < 2),
    "snapkv:window=3,kernel=3": Rule(
        partial(_snapped, 3, 3), lambda position, end, budget: end - position <= 3
    ),
    "snapkv:window=8,kernel=1": Rule(
        partial(_snapped, 8, 1), lambda position, end, budget: end - position <= 8
    ),
    "fastgen:keep=special": Rule(_unchanged),
    "fastgen:keep=punctuation": Rule(_unchanged),
    "fastgen": Rule(_summed_but_marks, lambda position, end, budget: end - position <= budget // 2),
    "tova": Rule(_of_last),
    "tova:protect=3": Rule(_of_last, lambda position, end, budget: end - position <= 3),
}


@dataclass
class BudgetOracle:
    """One text under a policy.

    Attributes:
        prompt_len: tokens that come in chunks; the others come one by one.
        heads: KV heads of each layer that have the budget; None = all.
        marks: score with which a token begins, by its id; 0 for all others.
        first: the same by position, once the text is known.
        kept: positions that each of these heads holds at the end, by layer.
    """

    policy: str
    budget: int
    chunk: int
    prompt_len: int
    heads: Sequence[Sequence[int]] | None = None
    marks: Mapping[int, float] = field(default_factory=dict)
    first: list[float] = field(default_factory=list)
    kept: dict[int, list[list[int]]] = field(default_factory=dict)

    def steps(self, length: int) -> list[tuple[int, int]]:
        """Begins and ends of chunks."""
        ends = sorted({*range(self.chunk, self.prompt_len, self.chunk), self.prompt_len})
        ends += range(self.prompt_len + 1, length + 1)
        return list(zip([0, *ends], ends))

    def visible(self, layer: int, scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """Visible keys of each query head, bool ``[H, L, L]``, from the scores of all pairs."""
        num_heads, length, _ = scores.shape
        mask = torch.zeros(scores.shape, dtype=torch.bool)
        num_kv = self.num_kv
        group = num_heads // num_kv
        mine = list(range(num_kv)) if self.heads is None else list(self.heads[layer])
        for head in range(num_heads):
            if head // group not in mine:
                mask[head] = torch.ones(length, length, dtype=torch.bool).tril()
        held: dict[int, dict[int, float]] = {head: {} for head in mine}
        for start, end in self.steps(length):
            weights: dict[int, list[dict[int, float]]] = {head: [] for head in mine}
            for head in mine:
                if end - start == 1:
                    self._make_room(held[head], end, self.budget - 1)
                if "positions=cache" in self.policy:
                    self._renumber(scores, range(head * group, (head + 1) * group), held[head], start, end)
                there = [*held[head], *range(start, end)]
                sees = torch.ones(end - start, len(there), dtype=torch.bool).tril(len(held[head]))
                for own in range(head * group, (head + 1) * group):
                    mask[own, start:end][:, there] = sees
                    shown = scores[own, start:end][:, there].where(sees, -torch.inf)
                    if sinks is not None:
                        shown = torch.cat([shown, sinks[own].expand(end - start, 1)], dim=1)
                    for number, line in enumerate(torch.softmax(shown, dim=1).tolist(), len(held[head]) + 1):
                        weights[head].append(dict(zip(there[:number], line)))
            everyone = [
                [weights[head][(number + 1) * (end - start) - 1]] for head in mine for number in range(group)
            ]
            for head in mine:
                old = {
                    **held[head],
                    **dict(zip(range(start, end), self.first[start:end] or [0.0] * (end - start))),
                }
                held[head] = RULES[self.policy].update(old, weights[head], everyone, end - start)
                if self.policy.startswith("expected"):
                    held[head] = self._expected(head, old, start, end)
                self._make_room(held[head], end, self.budget)
        self.kept[layer] = [sorted(held[head]) for head in mine]
        return mask

    def _make_room(self, scores: dict[int, float], end: int, most: int) -> None:
        protects = RULES[self.policy].protects
        while len(scores) > most:
            free = [(score, p) for p, score in scores.items() if not protects(p, end, self.budget)]
            del scores[min(free)[1]]

    def _renumber(
        self, scores: torch.Tensor, heads: Iterable[int], held: dict[int, float], start: int, end: int
    ) -> None:
        """Put scores of a chunk's queries in place, with positions counted among what is kept."""
        assert self.vectors is not None
        for head in heads:
            places = [*sorted(held), *range(start, end)]
            scores[head, start:end][:, places] = self.vectors.scores_by_place(head, places, end - start)

    def _expected(self, head: int, old: dict[int, float], start: int, end: int) -> dict[int, float]:
        """Scores of expected attention; a decoded token gets the highest one."""
        assert self.vectors is not None
        if end - start == 1:
            return {**old, start: max(old.values())}
        positions = list(old)
        return dict(zip(positions, self.vectors.expected(head, positions, start, end, 2, 20)))

    num_kv: int = 0
    rotary_share: float = 1.0
    vectors: Vectors | None = None


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    scaling: float,
    oracle: BudgetOracle,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    group, length = query.shape[1] // key.shape[1], query.shape[2]
    keys, values = (x[0].double().repeat_interleave(group, dim=0) for x in (key, value))
    scores = query[0].double() @ keys.transpose(1, 2) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    sinks = None if s_aux is None else s_aux.double()
    oracle.num_kv = key.shape[1]
    oracle.vectors = Vectors(*(x[0].double() for x in (query, key, value)), scaling, oracle.rotary_share)
    if sliding_window is None:
        mask = oracle.visible(module.layer_idx, scores, sinks)
    else:
        gap = torch.arange(length)[:, None] - torch.arange(length)
        mask = ((gap >= 0) & (gap < sliding_window)).expand(scores.shape)
    weights = torch.exp(scores).where(mask, 0)
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None, None])
    return (weights / total @ values).to(value.dtype).transpose(0, 1)[None], None


AttentionInterface.register(NAME, _attention)


@torch.inference_mode()
def budget_logits(model: Any, oracle: BudgetOracle, tokens: Sequence[int]) -> torch.Tensor:
    """Logits after each token of one text, float ``[len(tokens), V]``; the oracle then knows what is kept."""
    oracle.first = [oracle.marks.get(token, 0.0) for token in tokens]
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        output = model(
            input_ids=torch.tensor([list(tokens)]),
            attention_mask=torch.zeros(1, 1, 1, 1),
            use_cache=False,
            oracle=oracle,
        )
    finally:
        model.set_attn_implementation(before)
    logits: torch.Tensor = output.logits[0].float()
    return logits
