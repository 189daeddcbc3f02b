"""Choice of the cheapest thing that a head can keep and still see most of what it looks at.

Legend: K KV heads, Q measured queries, T tokens.

Source: FastGen (Ge et al. 2023, arXiv:2310.01801), whose choice is made for each prompt; here once, on
calibration prompts, since heads of a served model have fixed shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from hpu_duo.config.kv_plan import Keep, KVPlan
from hpu_duo.heads.eviction.fastgen import TokenClasses
from hpu_duo.lab.kv_calibration.calibrated import PlannedHead
from hpu_duo.lab.kv_calibration.collect import LayerAttention
from hpu_duo.lab.kv_calibration.methods import CalibrationMethod, Measurement, PlannedLayers
from hpu_duo.lab.kv_calibration.sizes import Quantised, quantised


class Kind(IntEnum):
    """Sets of tokens that a head may keep, from cheap to dear; each kind keeps what those before it keep."""

    SPECIAL = 0
    PUNCTUATION = 1
    WINDOW = 2
    HEAVY = 3
    FULL = 4


@dataclass(frozen=True)
class FastGenChoice:
    """The choice of one head.

    Attributes:
        kind: the cheapest that recovers enough.
        recovered: mean share of the attention on what it keeps.
        budget: most tokens that it keeps at the end of a prompt; of all prompts for ``FULL``.
        num_recent: of them, those of the window.
    """

    kind: Kind
    recovered: float
    budget: int
    num_recent: int


@dataclass(frozen=True)
class KindShares:
    """Shares of one prompt's attention that each kind recovers.

    Attributes:
        recovered: float64 ``[kinds, K]``, share of the attention on what it keeps, averaged over queries.
        kept: int64 ``[kinds, K]``, tokens that it keeps at the end of the prompt.
        num_recent: tokens of the window.
    """

    recovered: Tensor
    kept: Tensor
    num_recent: int


Tiles = Callable[[], Iterable[tuple[Tensor, Tensor]]]
"""Makes the weights ``[K, q, T]`` and positions ``[q]`` of all queries of a prompt, some at a time."""


def kind_shares(tiles: Tiles, classes: TokenClasses, window: float = 0.3, heavy: float = 0.3) -> KindShares:
    """Measure what each kind recovers of a prompt, in memory that grows with the tokens of a tile only.

    The window is the last ``window`` of a prompt's tokens before a query, itself included. Heavy hitters are
    the ``heavy`` of its tokens with the largest weights, summed over the queries.

    Args:
        tiles: weights averaged over the query heads of a KV head; what a query does not see is 0. Called
            twice: heavy hitters are known after all queries.
        classes: of the prompt's tokens.
        window, heavy: shares of the prompt's tokens, in (0, 1].

    Raises:
        ValueError: a share out of range.
    """
    for name, value in (("window", window), ("heavy", heavy)):
        check_share(name, value)
    received: Tensor | None = None
    device = classes.special.device
    for weights, _ in tiles():
        # Summed up on the CPU: an HPU has no float64.
        added, device = weights.sum(dim=1).cpu().double(), weights.device
        received = added if received is None else received + added
    assert received is not None, "a prompt has queries"
    num_heads, num_tokens = received.shape
    num_recent = math.ceil(window * num_tokens)
    largest = received.sort(dim=1, descending=True, stable=True).indices
    hit = torch.zeros(num_heads, num_tokens, dtype=torch.bool)
    hit = hit.scatter_(1, largest[:, : math.ceil(heavy * num_tokens)], True).to(device)
    special, punctuation = (each.to(device) for each in (classes.special, classes.punctuation))
    key = torch.arange(num_tokens, device=device)

    def masks(at: Tensor) -> tuple[Tensor, ...]:
        """Masks of what each kind keeps, later tokens among it: bool, to be broadcast to ``[K, q, T]``."""
        marks, near = special | punctuation, key > at.unsqueeze(1) - num_recent
        held = marks | near
        return special, marks, held, held | hit.unsqueeze(1), torch.ones_like(special)

    shares = torch.zeros(len(Kind), num_heads, dtype=torch.float64)
    num_queries = 0
    for weights, at in tiles():
        total = weights.sum(dim=2).clamp_min(torch.finfo(torch.float32).tiny)
        found = [((weights * mask).sum(dim=2) / total).sum(dim=1) for mask in masks(at)]
        shares += torch.stack(found).cpu().double()
        num_queries += len(at)
    last = masks(torch.tensor([num_tokens - 1], device=device))
    kept = [mask.expand(num_heads, 1, num_tokens).sum(dim=(1, 2)) for mask in last]
    return KindShares(shares / num_queries, torch.stack(kept).cpu(), num_recent)


def choose_kinds(
    weights: Sequence[Tensor],
    queries: Sequence[Tensor],
    classes: Sequence[TokenClasses],
    threshold: float,
    window: float = 0.3,
    heavy: float = 0.3,
) -> tuple[FastGenChoice, ...]:
    """Choose for each KV head of a layer, from all weights at once; see ``kind_shares``.

    Args:
        weights: of each prompt ``[K, Q, T]``.
        queries: positions of the queries of each prompt, int64 ``[Q]``.
        classes: of each prompt's tokens.
        threshold: share of the attention to be recovered, in (0, 1].
        window, heavy: shares of a prompt's tokens, in (0, 1].

    Raises:
        ValueError: no prompt, not equally many of everything, or a number out of range.
    """
    if not len(weights) == len(queries) == len(classes):
        raise ValueError(
            f"expected weights, queries and classes of as many prompts, got {len(weights)}, {len(queries)} "
            f"and {len(classes)}"
        )

    def tiles_of(each: Tensor, at: Tensor) -> Tiles:
        return lambda: [(each, at)]

    found = [
        kind_shares(tiles_of(each, at), tokens, window, heavy)
        for each, at, tokens in zip(weights, queries, classes)
    ]
    return cheapest_kinds(found, threshold)


def cheapest_kinds(prompts: Sequence[KindShares], threshold: float) -> tuple[FastGenChoice, ...]:
    """Choose for each KV head of a layer the cheapest kind that recovers enough, averaged over prompts.

    Args:
        threshold: share of the attention to be recovered, in (0, 1].

    Raises:
        ValueError: no prompt, or the threshold out of range.
    """
    check_share("threshold", threshold)
    if not prompts:
        raise ValueError("expected prompts to choose by, got none")
    recovered = torch.stack([each.recovered for each in prompts]).mean(dim=0)
    kept = torch.stack([each.kept for each in prompts]).amax(dim=0)
    num_recent = max(each.num_recent for each in prompts)
    # A sum of all weights may differ from 1 by rounding.
    recovered[Kind.FULL] = 1.0
    chosen = (recovered >= threshold).int().argmax(dim=0).tolist()
    return tuple(
        FastGenChoice(
            Kind(kind),
            float(recovered[kind, head]),
            int(kept[kind, head]),
            num_recent if kind >= Kind.WINDOW else 0,
        )
        for head, kind in enumerate(chosen)
    )


def check_share(name: str, value: float) -> None:
    """Raise ValueError unless a number is above 0 and up to 1."""
    if not 0 < value <= 1:
        raise ValueError(f"expected {name} above 0 and up to 1, got {value}")


def fastgen_plan(
    choices: Sequence[Sequence[FastGenChoice]], num_sizes: int = 3
) -> tuple[KVPlan, Quantised | None]:
    """Return a plan of what the engine can keep in place of each choice, and its budgets of few sizes.

    Heads that need everything keep all tokens, and others a set of ``fastgen`` with as many slots as their
    choice needs: special tokens; punctuation too, with the window in the slots that are left; heavy hitters
    too, with half of the slots for the newest tokens.

    Args:
        choices: by layer and KV head.
        num_sizes: most different budgets.

    Returns:
        None for the budgets if all heads keep everything.
    """
    asked = [max(2, each.budget) for heads in choices for each in heads if each.kind is not Kind.FULL]
    rounded = quantised([asked], num_sizes) if asked else None
    sizes = iter(rounded.budgets[0] if rounded is not None else ())
    layers = tuple(
        tuple(Keep() if each.kind is Kind.FULL else _keep(each, next(sizes)) for each in heads)
        for heads in choices
    )
    return KVPlan(layers), rounded


def _keep(choice: FastGenChoice, budget: int) -> Keep:
    kept = {Kind.SPECIAL: "special", Kind.HEAVY: "heavy"}.get(choice.kind, "punctuation")
    return Keep(f"fastgen:keep={kept}", budget)


@dataclass(frozen=True)
class FastGen(CalibrationMethod):
    """Settings.

    Attributes:
        threshold: share of the attention to be recovered, in (0, 1].
        window, heavy: shares of a prompt's tokens, in (0, 1], that the window and heavy hitters are.
        queries: last tokens whose attention is measured; None for all.

    Raises:
        ValueError: a number out of range.
    """

    threshold: float = 0.95
    window: float = 0.3
    heavy: float = 0.3
    queries: int | None = None
    needs_classes = True

    def __post_init__(self) -> None:
        for name in ("threshold", "window", "heavy"):
            check_share(name, getattr(self, name))
        if self.queries is not None and self.queries < 1:
            raise ValueError(f"expected 1 query or more to measure, got {self.queries}")

    @property
    def num_queries(self) -> int | None:
        """All by default."""
        return self.queries

    def shortest(self, lengths: Sequence[int]) -> int:
        """Two tokens: the first one has nothing to choose from."""
        return 2

    def measurement(self, num_layers: int, lengths: Sequence[int]) -> Measurement:
        """Begin to measure."""
        return _Sharing(self, num_layers)


class _Sharing(Measurement):
    """Shares that each kind recovers, by prompt, layer and head."""

    def __init__(self, method: FastGen, num_layers: int) -> None:
        self._method = method
        self._shares: list[list[KindShares]] = [[] for _ in range(num_layers)]

    def take(self, layer: int, attention: LayerAttention, classes: TokenClasses | None) -> None:
        assert classes is not None, "the method asks for them"
        method = self._method
        self._shares[layer].append(kind_shares(attention.tiles, classes, method.window, method.heavy))

    def planned(self, num_sizes: int) -> PlannedLayers:
        choices = [cheapest_kinds(shares, self._method.threshold) for shares in self._shares]
        plan, _ = fastgen_plan(choices, num_sizes)
        return tuple(
            tuple(
                PlannedHead(
                    choice.kind.name.lower(),
                    keep,
                    None if choice.kind is Kind.FULL else max(2, choice.budget),
                    choice.recovered,
                )
                for choice, keep in zip(heads, keeps)
            )
            for heads, keeps in zip(choices, plan.layers)
        )
