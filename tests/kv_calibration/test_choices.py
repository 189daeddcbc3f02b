"""Calibrated budgets and kinds against a brute force with plain loops."""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.config.kv_plan import Keep
from hpu_duo.lab.kv_calibration import (
    FastGenChoice,
    Kind,
    TokenClasses,
    choose_kinds,
    fastgen_plan,
    head_budgets,
    plan_of_budgets,
    quantised,
)


def causal(num_heads: int, num_tokens: int, seed: int) -> torch.Tensor:
    scores = torch.randn(num_heads, num_tokens, num_tokens, generator=torch.Generator().manual_seed(seed)) * 3
    hidden = torch.ones(num_tokens, num_tokens).triu(1).bool()
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 4))
def test_no_choice_of_sizes_promotes_fewer_tokens(budgets: list[int], num_sizes: int) -> None:
    found = quantised([budgets], num_sizes)
    values = sorted(set(budgets))
    sets = combinations(values, min(num_sizes, len(values)))
    held = [
        sum(min(s for s in sizes if s >= each) for each in budgets)
        for sizes in sets
        if max(sizes) == values[-1]
    ]
    assert found.num_promoted == min(held) - sum(budgets)
    assert len(set(found.budgets[0])) <= num_sizes
    assert sum(found.budgets[0]) - sum(budgets) == found.num_promoted
    assert all(size >= each for size, each in zip(found.budgets[0], budgets))


@given(st.integers(1, 4), st.integers(3, 12), st.integers(0, 99), st.floats(0, 1), st.data())
def test_budgets_of_heads_follow_the_largest_weights_of_all_of_them(
    num_heads: int, num_tokens: int, seed: int, safeguard: float, data: st.DataObject
) -> None:
    total = data.draw(st.integers(num_heads, num_heads * num_tokens))
    weights = [causal(num_heads, num_tokens, seed + prompt).mean(dim=1) for prompt in range(2)]
    found = head_budgets(weights, total, safeguard)
    wanted = [safeguard * total / num_heads] * num_heads
    for each in weights:
        entries = [(-float(each[head, key]), head) for head in range(num_heads) for key in range(num_tokens)]
        for _, head in sorted(entries)[:total]:
            wanted[head] += (1 - safeguard) / 2
    assert sum(found) == total
    assert min(found) >= 1
    if min(wanted) >= 1:
        assert all(abs(budget - share) < 1 + 1e-9 for budget, share in zip(found, wanted))


def test_a_full_safeguard_shares_equally_and_none_gives_all_to_the_broad_head() -> None:
    weights = torch.tensor([[0.97, 0.01, 0.01, 0.01], [0.25, 0.25, 0.25, 0.25]])
    assert head_budgets([weights], 4, safeguard=1.0) == (2, 2)
    assert head_budgets([weights], 5, safeguard=0.0) == (1, 4)


@pytest.mark.parametrize(("total", "safeguard"), [(1, 0.2), (9, 0.2), (4, 1.5)])
def test_totals_and_safeguards_out_of_range_are_refused(total: int, safeguard: float) -> None:
    with pytest.raises(ValueError, match=r"expected a total from 2|a safeguard from 0 to 1"):
        head_budgets([torch.rand(2, 4)], total, safeguard)


def kept_by(
    kind: Kind, query: int, hits: set[int], special: list[bool], punct: list[bool], near: int
) -> set[int]:
    keys = range(query + 1)
    rules = [
        lambda key: special[key],
        lambda key: punct[key],
        lambda key: query - key < near,
        lambda key: key in hits,
        lambda key: True,
    ]
    return {key for key in keys if any(rule(key) for rule in rules[: kind + 1])}


@given(st.integers(2, 9), st.integers(0, 99), st.floats(0.05, 1.0), st.floats(0.1, 1), st.floats(0.1, 1))
def test_the_first_kind_that_recovers_enough_is_chosen(
    num_tokens: int, seed: int, threshold: float, window: float, heavy: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = causal(2, num_tokens, seed)
    special, punct = (torch.rand(2, num_tokens, generator=generator) < 0.3).unbind()
    queries = torch.arange(num_tokens // 2, num_tokens)
    rows = weights[:, queries]
    found = choose_kinds([rows], [queries], [TokenClasses(special, punct)], threshold, window, heavy)
    near, num_hits = math.ceil(window * num_tokens), math.ceil(heavy * num_tokens)
    for head, choice in enumerate(found):
        sums = [float(rows[head, :, key].double().sum()) for key in range(num_tokens)]
        hits = set(sorted(range(num_tokens), key=lambda key: (-sums[key], key))[:num_hits])
        for kind in Kind:
            tokens = special.tolist(), punct.tolist()
            shares = [
                sum(float(weights[head, query, key]) for key in kept_by(kind, query, hits, *tokens, near))
                for query in queries.tolist()
            ]
            recovered = sum(shares) / len(shares)
            if abs(recovered - threshold) < 1e-5 and kind is not Kind.FULL:
                return  # Either choice is right.
            if recovered >= threshold or kind is Kind.FULL:
                last = kept_by(kind, num_tokens - 1, hits, *tokens, near)
                assert (choice.kind, choice.budget) == (kind, len(last))
                assert choice.recovered == pytest.approx(recovered, abs=1e-5)
                break


def test_plans_hold_what_choices_need_in_few_sizes() -> None:
    cheap, near = FastGenChoice(Kind.SPECIAL, 0.9, 1, 0), FastGenChoice(Kind.WINDOW, 0.9, 30, 20)
    heavy, full = FastGenChoice(Kind.HEAVY, 0.9, 31, 20), FastGenChoice(Kind.FULL, 1.0, 100, 30)
    plan, sizes = fastgen_plan([[cheap, near], [heavy, full]], num_sizes=2)
    assert sizes is not None
    assert sizes.num_promoted == 1
    assert plan.layers == (
        (Keep("fastgen:keep=special", 2), Keep("fastgen:keep=punctuation", 31)),
        (Keep("fastgen:keep=heavy", 31), Keep()),
    )
    assert fastgen_plan([[full, full]])[1] is None
    assert plan_of_budgets([[4, 8]], "snapkv:window=2").layers[0][1] == Keep("snapkv:window=2", 8)
    with pytest.raises(ValueError, match="2 tokens or more"):
        plan_of_budgets([[1, 8]], "h2o")
