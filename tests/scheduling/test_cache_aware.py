"""Orders by cached prefixes, against the tree looked through by hand, and against starvation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_duo.request import Request
from hpu_duo.scheduling import DepthFirst, LongestPrefixMatch, Waiting, make_policy
from tests.scheduling.serving import CACHING, Serving

ONE_BY_ONE = replace(CACHING, max_num_seqs=1)
TEXTS = st.lists(
    st.lists(st.sampled_from([1, 2]), min_size=1, max_size=5).map(
        lambda blocks: [token for block in blocks for token in [block] * 4]
    ),
    min_size=1,
    max_size=10,
)


def serving_of(policy: str, known: Sequence[Sequence[int]]) -> Serving:
    """Serve one by one, with texts in the cache."""
    serving = Serving(policy, ONE_BY_ONE)
    for number, text in enumerate(known):
        serving.add(f"known{number}", 1, prompt=[*text, 9])
        serving.finish()
    serving.admissions.clear()
    return serving


def num_shared(text: Sequence[int], known: Sequence[Sequence[int]]) -> int:
    """Whole blocks of four that a text begins with, like one of the known ones."""
    shared = []
    for one in known:
        most = min(len(text), len(one)) // 4
        parts = [text[4 * i : 4 * i + 4] == one[4 * i : 4 * i + 4] for i in range(most)]
        shared.append(parts.index(False) if False in parts else most)
    return max(shared, default=0)


@settings(max_examples=40, deadline=None)
@given(known=TEXTS, texts=TEXTS)
def test_the_longest_cached_prefix_is_admitted_first_then_the_earliest(
    known: list[list[int]], texts: list[list[int]]
) -> None:
    """Blocks that a request leaves in the cache count for the next ones."""
    serving = serving_of("lpm:patience=inf", known)
    left = {str(number): [*text, 9] for number, text in enumerate(texts)}
    for name, text in left.items():
        serving.add(name, 1, prompt=text)
    cached = [[*one, 9] for one in known]
    while left:
        best = max(left, key=lambda name: (num_shared(left[name], cached), -int(name)))
        assert serving.step() == [best]
        cached.append(left.pop(best))


def test_tokens_of_a_partial_block_count() -> None:
    serving = Serving("lpm:patience=inf", replace(ONE_BY_ONE, uses_rows=True, num_snapshots=4))
    serving.add("known", 3, prompt=[1] * 5)
    serving.finish()
    serving.add("a block", 1, prompt=[1, 1, 1, 1, 9, 9])
    serving.add("its end", 1, prompt=[1, 1, 1, 1, 1, 5, 5, 5, 9])
    assert serving.step() == ["its end"]


@settings(max_examples=40, deadline=None)
@given(known=TEXTS, texts=TEXTS)
def test_depth_first_goes_where_most_wait(known: list[list[int]], texts: list[list[int]]) -> None:
    """The order of one moment, against a walk of a tree of dictionaries."""
    serving = serving_of("dfs-weight", known)
    cached = [[*one, 9] for one in known]
    paths = {}
    requests = []
    for number, text in enumerate(texts):
        requests.append(serving.add(str(number), 1, prompt=[*text, 9]))
        paths[str(number)] = [tuple(text[: 4 * (i + 1)]) for i in range(num_shared([*text, 9], cached))]
    waiting = Waiting(LongestPrefixMatch(), serving.scheduler.allocations.find)
    order = [request.request_id for request in DepthFirst().order(requests, waiting)]
    assert order == walk(paths, ())


def walk(paths: dict[str, list[tuple[int, ...]]], node: tuple[int, ...]) -> list[str]:
    """Names below a node: the branches with most names first, then those that end here, as they came."""
    depth = len(node) // 4
    here = [name for name, path in paths.items() if len(path) == depth]
    branches: dict[tuple[int, ...], dict[str, list[tuple[int, ...]]]] = {}
    for name, path in paths.items():
        if len(path) > depth:
            branches.setdefault(path[depth], {})[name] = path
    found: list[str] = []
    for child in sorted(branches, key=lambda each: -len(branches[each])):
        found += walk(branches[child], child)
    return found + here


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
@pytest.mark.parametrize("patience", [0, 3, 10])
def test_a_request_that_shares_nothing_is_overtaken_as_often_as_patience_has_it(
    policy: str, patience: int
) -> None:
    serving = serving_of(f"{policy}:patience={patience}", [[1] * 8])
    serving.add("cold", 1, prompt=[7] * 9)
    for number in range(20):
        serving.add(f"hot{number}", 1, prompt=[1] * 8 + [9])
        serving.step()
    assert serving.admissions.index("cold") == patience


def test_without_patience_a_request_that_shares_nothing_starves() -> None:
    serving = serving_of("lpm:patience=inf", [[1] * 8])
    serving.add("cold", 1, prompt=[7] * 9)
    for number in range(100):
        serving.add(f"hot{number}", 1, prompt=[1] * 8 + [9])
        serving.step()
    assert "cold" not in serving.admissions


def test_only_the_earliest_requests_are_looked_up() -> None:
    looked: list[Request] = []
    serving = serving_of("lpm:window=5,patience=inf", [[1] * 8])
    for number in range(50):
        serving.add(f"cold{number}", 1, prompt=[7] * 9)
    serving.add("hot", 1, prompt=[1] * 8 + [9])
    serving.scheduler._waiting._find = lambda request: looked.append(request)  # type: ignore[assignment]
    assert serving.step() == ["cold0"]
    assert len(looked) == 5


def test_without_a_prefix_cache_it_is_first_come_first_served() -> None:
    for policy in ("lpm", "dfs-weight"):
        serving = Serving(policy, replace(ONE_BY_ONE, caches_prefixes=False))
        for number in range(6):
            serving.add(str(number), 1, prompt=[1 + number % 2] * 9)
        assert serving.finish().admissions == list("012345")


@pytest.mark.parametrize("option", ["window=0", "patience=-1", "patience=nan"])
def test_wrong_options_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match="expected window to be 1 or more and patience 0 or more"):
        make_policy(f"lpm:{option}")
