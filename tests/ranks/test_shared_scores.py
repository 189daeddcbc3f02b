"""Scores that ranks make together are those of one rank that has all heads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpu_duo.device.ranks import Ranks
from hpu_duo.heads.eviction import KV_POLICIES, make_kv_policy
from hpu_duo.parallel import RankHeads, ScoreExchange, SharedPolicy, modules, placed
from kernels_ref import FutureQueries, KVPolicy, SlotView
from tests.ranks.threads import ThreadRanks

Patch = Callable[[int], ThreadRanks]
SHARED = ("h2o", "snapkv:window=3,kernel=3", "tova", "expected-attention:sink=1,future=3", "fastgen")
QUICK = settings(
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Patch:
    def patch(size: int) -> ThreadRanks:
        ranks = ThreadRanks(size)
        monkeypatch.setattr(modules, "sum_over_ranks", ranks.sum)
        return ranks

    return patch


@QUICK
@given(
    name=st.sampled_from(SHARED),
    heads=st.sampled_from([(1, 4, 2), (1, 4, 4), (2, 2, 4), (2, 4, 8), (4, 1, 2), (4, 2, 4)]),
    is_chunk=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_scores_of_ranks_are_those_of_one(
    patched: Patch, name: str, heads: tuple[int, int, int], is_chunk: bool, seed: int
) -> None:
    (num_heads, group, size), generator = heads, torch.Generator().manual_seed(seed)
    policy, dim, num_slots = make_kv_policy(name), 4, 7
    shape = (2, num_heads, num_slots)
    weights = torch.rand(2, num_heads, group, num_slots, generator=generator)
    score = torch.rand(shape, generator=generator)
    k, v = (torch.randn(*shape, dim, generator=generator) for _ in range(2))
    mean = torch.randn(2, num_heads, group, dim, generator=generator)
    covariance = torch.randn(2, num_heads, group, dim, dim, generator=generator)

    def scored(policy: KVPolicy, own: RankHeads) -> torch.Tensor:
        kv, first = list(own.kv), own.query[0] % group
        members = slice(first, first + len(own.query) // len(kv))
        position = torch.arange(num_slots, dtype=torch.int32).expand(2, len(kv), num_slots)
        end = torch.full((2, 1, 1), num_slots, dtype=torch.int32)
        slots = SlotView(
            score[:, kv], position, torch.ones_like(position, dtype=torch.bool), end, 7, is_chunk
        )
        if is_chunk and policy.num_ahead:
            queries = FutureQueries(mean[:, kv][:, :, members], covariance[:, kv][:, :, members])
            return policy.expect(slots, queries, k[:, kv], v[:, kv])
        mass = weights[:, kv][:, :, members].sum(dim=2)
        return policy.observe(slots, mass if is_chunk or policy.weighs_decodes else torch.zeros_like(mass))

    everything = [list(range(num_heads))]
    whole = scored(policy, RankHeads.of(everything, num_heads * group, Ranks()))
    ranks = patched(size)

    def one(rank: int) -> tuple[RankHeads, torch.Tensor]:
        own = RankHeads.of(everything, num_heads * group, Ranks(rank, size))
        exchange = ScoreExchange.of(num_heads, Ranks(rank, size), "")
        return own, scored(SharedPolicy.of(policy, exchange), own)

    found = ranks.run(one)
    for own, part in found:
        torch.testing.assert_close(part, whole[:, list(own.kv)])
    # Copies of a head keep the same tokens only if their scores are equal to the last bit.
    for head in range(num_heads):
        copies = [part[:, own.kv.index(head)] for own, part in found if head in own.kv]
        assert all(torch.equal(each, copies[0]) for each in copies)
    is_summed = (policy.pools_heads or size > num_heads) and (is_chunk or policy.weighs_decodes)
    assert len(ranks.sent_bytes) == is_summed


@pytest.mark.parametrize("name", KV_POLICIES)
def test_only_scores_that_other_ranks_have_a_part_in_are_exchanged(name: str) -> None:
    policy = make_kv_policy(name)
    own_heads, copies = (ScoreExchange.of(num, Ranks(1, 4), "") for num in (4, 2))
    looks_at_weights = name in ("h2o", "snapkv", "tova", "expected-attention", "fastgen")
    assert isinstance(SharedPolicy.of(policy, copies), SharedPolicy) == looks_at_weights
    assert isinstance(SharedPolicy.of(policy, own_heads), SharedPolicy) == (name == "tova")


@pytest.mark.parametrize("name", SHARED)
def test_a_shared_policy_says_all_that_the_policy_says(name: str) -> None:
    policy = make_kv_policy(name)
    shared = SharedPolicy.of(policy, ScoreExchange.of(2, Ranks(3, 4), ""))
    public = {each for each in vars(KVPolicy) if not each.startswith("_")}
    assert public <= vars(SharedPolicy).keys()
    numbers = {each for each in public if isinstance(vars(KVPolicy)[each], property)} - {"key"}
    assert {each: getattr(shared, each) for each in numbers} == {
        each: getattr(policy, each) for each in numbers
    }
    assert (shared.name, shared.key) == (policy.name, (*policy.key, "2 copies"))
    assert shared == SharedPolicy.of(policy, ScoreExchange.of(2, Ranks(0, 4), ""))


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5), size=st.sampled_from([1, 2, 4]))
def test_every_head_of_several_groups_has_one_rank_and_ranks_differ_by_one(
    sizes: list[int], size: int
) -> None:
    sizes[-1] += -sum(sizes) % size
    places = [placed(sizes, Ranks(rank, size), is_even=False) for rank in range(size)]
    for number, length in enumerate(sizes):
        parts = [range(length)[place[number]] for place in places]
        assert [head for part in parts for head in part] == list(range(length))
        counts = [len(part) for part in parts]
        assert max(counts) - min(counts) <= 1
    assert len({sum(part.stop - part.start for part in place) for place in places}) == 1
