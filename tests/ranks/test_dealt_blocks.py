"""Blocks dealt out over ranks: every token on one rank, and attention as if one rank had them all."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bias_builders import Window, leading_slots, leading_visible
from hpu_duo.device.ranks import Ranks
from hpu_duo.parallel import ContextParallelBlocks, HeadExchange, head_exchange, placed
from kernels_ref import (
    HeadGroup,
    Implementation,
    LayerSpec,
    Step,
    UnitLayout,
    as_units,
    prepare_step,
    unified_attention,
)
from tests.kernels_ref.scenario import RowSpec, Scenario, World, scenarios
from tests.ranks.threads import ThreadRanks

QUICK = settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
SIZES = (1, 2, 4)
WORLDS = scenarios().filter(lambda s: s.kr + s.ks > 0)


@given(
    size=st.sampled_from(SIZES), per_rank=st.integers(1, 3), share=st.floats(0, 1), has_second=st.booleans()
)
def test_ranks_have_equally_many_heads_and_nearly_equally_many_of_the_first_group(
    size: int, per_rank: int, share: float, has_second: bool
) -> None:
    total = size * per_rank
    first = round(share * total) if has_second else total
    sizes = [first, total - first] if has_second else [first]
    places = [placed(sizes, Ranks(rank, size), is_even=False) for rank in range(size)]
    for number, length in enumerate(sizes):
        heads = chain.from_iterable(range(length)[place[number]] for place in places)
        assert list(heads) == list(range(length))
    lengths = [[place.stop - place.start for place in rank] for rank in places]
    assert {sum(each) for each in lengths} == {per_rank}
    firsts = [each[0] for each in lengths]
    assert max(firsts) - min(firsts) <= 1
    assert firsts == sorted(firsts), "the first rank has a streaming head if any has"


def of_rank(world: World, exchange: HeadExchange) -> tuple[ContextParallelBlocks, torch.Tensor, torch.Tensor]:
    """The kind of a rank, and its part of a world's blocks."""
    kind = ContextParallelBlocks(exchange)
    size = kind.num_slots(world.s.block_size)
    part = slice(exchange.rank * size, (exchange.rank + 1) * size)
    k, v = (x[:, :, part].contiguous() for x in world.blocks.views)
    return kind, k, v


def retrieving(scenario: Scenario, num_ranks: int, num_heads: int) -> World:
    """A world of retrieval heads alone, with blocks that ranks share."""
    block_size = max(scenario.block_size, num_ranks)
    return World(
        Scenario(**{**vars(scenario), "block_size": block_size, "kr": num_heads, "ks": 0, "is_spread": False})
    )


def step_of(kind: ContextParallelBlocks, layout: UnitLayout, shared: Step) -> Step:
    return prepare_step(shared.parts, shared.tensors, decode_len=shared.decode_len, stores={kind: (layout,)})


@QUICK
@given(scenario=WORLDS, num_ranks=st.sampled_from(SIZES))
def test_every_token_has_one_owner_and_the_masks_of_ranks_make_up_that_of_one(
    scenario: Scenario, num_ranks: int
) -> None:
    world = retrieving(scenario, num_ranks, 1)
    _, _, _, shared = world.inputs()
    t, size, null = shared.tensors, world.s.block_size, world.num_blocks
    written, tails, starts = [], [], []
    for rank in range(num_ranks):
        kind, k, _ = of_rank(world, HeadExchange(1, num_ranks, rank, ""))
        slots = k.shape[2]
        layout = UnitLayout.dense(null + 1, 1, slots)
        plan = step_of(kind, layout, shared).plans[kind.key, layout]
        place = plan.own.write_index.long()
        is_kept = place // slots != null
        slot = place % slots + rank * slots
        written.append(torch.where(is_kept, place // slots * size + slot, -1))
        tails.append(leading_slots(plan.own.tails.visible, slots))
        starts.append(plan.shared_start[:, None] + torch.arange(slots))
    # Where one rank would write a token, exactly one does.
    owners = torch.stack(written)
    is_real = t.write_block != null
    assert ((owners >= 0).sum(dim=0) == is_real.int()).all()
    expected = torch.where(is_real, t.write_block * size + t.write_offset, -1)
    assert torch.equal(owners.amax(dim=0), expected.long())
    # Positions of the slots of shared blocks, in order of ranks, are those of the whole block.
    assert torch.equal(torch.cat(starts, dim=1), t.shared_start[:, None] + torch.arange(size))
    if shared.parts.unique:
        no_row = t.row_start.shape[0]
        start = t.row_start + 1
        stop = torch.where((t.row_num_new > 0) & (t.row_num_new <= world.s.decode_len), start, 0)
        first_token = torch.cat(tails, dim=-1)[:, :, 0]
        whole = leading_slots(leading_visible(t.tail_start, stop[:, None], size), size)
        assert first_token.shape == (no_row, t.tail_block.shape[1], size)
        assert torch.equal(first_token, whole)


def attended(
    world: World, ranks: ThreadRanks, impl: Implementation, softcap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """The output of all ranks, each of which has its part of the heads and of the blocks."""
    q, k, v, shared = world.inputs()
    assert isinstance(shared, Step)
    s = world.s

    def one(rank: int) -> torch.Tensor:
        exchange = HeadExchange(s.kr, ranks.size, rank, "")
        kind, k_units, v_units = of_rank(world, exchange)
        layout = UnitLayout.dense(world.num_blocks + 1, s.kr, k_units.shape[2])
        units = as_units(k_units.view(-1, s.head_dim), v_units.view(-1, s.head_dim), layout)
        own, queries = exchange.own, slice(exchange.own.start * s.group, exchange.own.stop * s.group)
        group = HeadGroup(own.stop - own.start, kind)
        spec = LayerSpec((group,), s.group, s.head_dim, s.head_dim**-0.5, softcap, impl)
        step = step_of(kind, layout, shared)
        own_sinks = None if sinks is None else sinks[queries]
        return unified_attention(q[:, queries], k[:, own], v[:, own], [units], step, spec, own_sinks)

    return torch.cat(ranks.run(one), dim=1)


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> object:
    def patch(size: int) -> ThreadRanks:
        ranks = ThreadRanks(size)
        monkeypatch.setattr(head_exchange, "gather_from_ranks", ranks.gather)
        monkeypatch.setattr(head_exchange, "send_to_ranks", ranks.send)
        return ranks

    return patch


@pytest.mark.parametrize("impl", [Implementation.REFERENCE, Implementation.SDPA])
@settings(QUICK, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    scenario=WORLDS,
    num_ranks=st.sampled_from(SIZES),
    num_heads=st.integers(1, 5),
    softcap=st.sampled_from([None, 5.0]),
    has_sinks=st.booleans(),
)
@example(
    scenario=Scenario((RowSpec(9, 1), RowSpec(17, 9)), 4, Window(1, 2), 1, 0, 1, 8, (0, 0, 0, 0), False, 0),
    num_ranks=4,
    num_heads=3,
    softcap=None,
    has_sinks=True,
)
def test_attention_of_ranks_is_that_of_one_although_unused_slots_hold_nan(
    patched: object,
    impl: Implementation,
    scenario: Scenario,
    num_ranks: int,
    num_heads: int,
    softcap: float | None,
    has_sinks: bool,
) -> None:
    ranks = patched(num_ranks)  # type: ignore[operator]
    world = retrieving(scenario, num_ranks, num_heads)
    softcap = None if impl is Implementation.SDPA else softcap
    sinks = torch.randn(world.num_heads, generator=world.gen) * 2 if has_sinks else None
    out = attended(world, ranks, impl, softcap, sinks)
    expected = world.dense(softcap, sinks)
    torch.testing.assert_close(out[: len(expected)].double(), expected, atol=2e-5, rtol=2e-5)
    assert len(ranks.sent_bytes) <= 2, "one gather, and one exchange of triples"
