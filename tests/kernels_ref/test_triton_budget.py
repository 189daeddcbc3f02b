"""Triton kernels of heads with a budget against softmax in float64, unused slots holding NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bias_builders import Held, Leading
from kernels_ref import FLOOR, Implementation
from kernels_ref.impl import kernels
from kernels_ref.partial import normalise
from kernels_ref.triton import launch, operators
from kernels_ref.triton.launch import DeviceLimits, Launch
from tests.kernels_ref.budget_cases import (
    Chunks,
    Decodes,
    exact_decodes,
    some_chunks,
    some_decodes,
)
from tests.kernels_ref.parts import inputs_of
from tests.tiers import crossed
from tests.triton_interpreter import replacing_once

pytest.importorskip("triton")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
RUN, PORTABLE = kernels(Implementation.TRITON), kernels(Implementation.REFERENCE)
FEW = settings(deadline=None, max_examples=25)
SMALL_TILES = Launch(rows=16, keys=16, num_warps=4, num_stages=2)


@pytest.fixture(autouse=True, scope="module")
def _fast_interpreter() -> Iterator[None]:
    with replacing_once():
        yield


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles and many processors, so that the borders of every loop and range are crossed."""
    monkeypatch.setattr(launch, "columns", lambda *_: SMALL_TILES)
    monkeypatch.setattr(launch, "decode", lambda *_: SMALL_TILES)
    monkeypatch.setattr(launch, "shared_slots", lambda: 32)
    monkeypatch.setattr(launch, "device_limits", lambda _: DeviceLimits(6, 99 << 10, tiles_of_a_split=1))


def assert_decodes_exact(d: Decodes, softcap: float | None = None) -> None:
    outputs, mass = exact_decodes(d, softcap)
    partial, found = d.attend(RUN, softcap)
    again, found_again = d.attend(RUN, softcap)
    rounding = 0 if d.q.dtype == torch.float32 else torch.finfo(d.q.dtype).eps
    largest = float(outputs.abs().max()) + 1
    torch.testing.assert_close(
        normalise(partial, torch.float64).cpu(), outputs, atol=2e-5 + rounding * largest, rtol=0
    )
    torch.testing.assert_close(found.cpu().double(), mass, atol=2e-5, rtol=2e-5)
    empty = [row for row, seen in enumerate(d.visible) if not seen]
    assert (partial.max[empty] == FLOOR).all()
    assert (partial.sum[empty] == 0).all()
    assert (found[empty] == 0).all()
    for one, other in zip((*partial, found), (*again, found_again)):
        assert torch.equal(one, other), "the same bits every time"


HEADS = st.tuples(st.integers(1, 2), st.sampled_from([1, 2, 3, 7, 17]), st.sampled_from([1, 8, 24, 64, 80]))


@pytest.mark.slow
@FEW
@given(
    num_slots=st.integers(1, 90),
    shares=st.lists(st.sampled_from([0.0, 0.01, 0.5, 1.0]), min_size=1, max_size=3),
    heads=HEADS,
    dtype=st.sampled_from(DTYPES),
    softcap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_slots_receive_what_softmax_gives_them(
    num_slots: int,
    shares: list[float],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    softcap: float | None,
    has_sinks: bool,
    seed: int,
) -> None:
    visible = [math.ceil(share * num_slots) for share in shares]
    assert_decodes_exact(some_decodes(visible, num_slots, heads, dtype, seed, has_sinks), softcap)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("dtype", "num_slots", "has_sinks"), crossed(DTYPES, [33, 100], [False, True]))
def test_rings_that_are_cut_receive_the_same(dtype: torch.dtype, num_slots: int, has_sinks: bool) -> None:
    visible = [num_slots, 17, 0]
    d = some_decodes(visible, num_slots, (1, 3, 24), dtype, num_slots, has_sinks)
    assert_decodes_exact(d, softcap=3.0)
    assert_decodes_exact(d._replace(q=d.q[:1], visible=visible[:1]))


def test_rows_may_be_fewer_than_rings_and_stores_may_have_room_between_heads() -> None:
    d = some_decodes([20, 9], 20, (2, 2, 16), torch.float32)
    assert_decodes_exact(d._replace(q=d.q[:1], visible=[20], slack=7))


def assert_sums_exact(texts: list[tuple[int, int]], num_observed: int | None, **options: Any) -> None:
    chunks, exact = some_chunks(texts, **options)
    softcap = options.get("softcap")
    found = chunks.sums(RUN, num_observed, softcap)
    torch.testing.assert_close(found.cpu().double(), exact(num_observed), atol=5e-5, rtol=5e-5)
    assert torch.equal(found, chunks.sums(RUN, num_observed, softcap)), "the same bits every time"


@pytest.mark.slow
@FEW
@given(
    texts=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), min_size=1, max_size=2),
    num_slots=st.sampled_from([0, 5, 33]),
    num_observed=st.sampled_from([None, 1, 6, 300]),
    heads=HEADS,
    dtype=st.sampled_from(DTYPES),
    softcap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 1 << 20),
)
def test_columns_are_those_of_the_matrix_of_weights(
    texts: list[tuple[int, int]], num_observed: int | None, **options: Any
) -> None:
    assert_sums_exact(texts, num_observed, **options)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("dtype", "num_observed"), crossed(DTYPES, [None, 1, 20]))
def test_columns_of_many_tiles_are_the_same(dtype: torch.dtype, num_observed: int | None) -> None:
    options = {"num_slots": 37, "heads": (2, 3, 24), "dtype": dtype}
    assert_sums_exact([(50, 41), (20, 16), (0, 3)], num_observed, **options)


def test_portable_sums_of_the_same_inputs_are_the_same() -> None:
    chunks, exact = some_chunks([(9, 30), (2, 1)], 12, (2, 2, 16), torch.float32, softcap=2.0)
    for num_observed in (None, 4):
        portable = chunks.sums(PORTABLE, num_observed, 2.0)
        torch.testing.assert_close(portable.cpu().double(), exact(num_observed), atol=5e-5, rtol=5e-5)


def test_schemas_and_fakes_of_the_operators_promise_what_comes() -> None:
    d = some_decodes([5, 0], 20, (2, 3, 16), torch.float32, has_sinks=True)
    d = d._replace(k=d.k.nan_to_num(0.5), v=d.v.nan_to_num(0.5))
    assert isinstance(d.ring.seen, Leading)
    decode = (d.q, d.k, d.v, d.ring.seen.visible)
    chunks, _ = some_chunks([(9, 6)], 8, (2, 2, 16), torch.float32)
    q, lse, k, slots, chunk = chunks
    assert slots is not None
    rows = (chunk.start, chunk.num_new, chunk.token, 4, 0.0)
    for operator, arguments in (
        (operators.rings_with_weights, (*decode, d.sinks, 0.0)),
        (operators.rings_with_weights, (*decode, None, 2.5)),
        (operators.column_sums, (q, lse.nan_to_num(0.0), k, slots.nan_to_num(0.5), *rows)),
        (operators.column_sums, (q, lse.nan_to_num(0.0), k, None, *rows)),
    ):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


DECODE_BAD: list[tuple[Callable[[Decodes], Decodes], str]] = [
    (lambda d: d._replace(q=d.q.double()), "expected q_NKHD to be of one of .* got torch.float64"),
    (lambda d: d._replace(k=d.k.half()), "expected units.k to be torch.float32 like the queries"),
    (lambda d: d._replace(k=d.k[:1], v=d.v[:1]), "expected units.k to have at least 2 rings, got 1"),
    (lambda d: d._replace(visible=[1]), r"expected seen.visible to have shape \[2, 1, 1\], got \[1, 1, 1\]"),
    (lambda d: d._replace(sinks=torch.zeros(3)), r"expected sinks_KG to have shape \[1, 2\], got \[3\]"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at tensors on the CPU")
@pytest.mark.parametrize(("change", "message"), DECODE_BAD)
def test_bad_decodes_are_refused_by_name(change: Callable[[Decodes], Decodes], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        change(some_decodes([4, 2], 4, (1, 2, 16), torch.float32)).attend(RUN)


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at tensors on the CPU")
def test_slots_in_any_order_are_refused() -> None:
    d = some_decodes([4], 4, (1, 2, 16), torch.float32)
    number = torch.zeros(1, 1, dtype=torch.int32)
    held = d.ring._replace(seen=Held(number[None].expand(1, 1, 4), number, number, 0))
    with pytest.raises(ValueError, match="expected leading slots to be visible, got Held"):
        RUN.unique_with_weights(inputs_of(d.q, units=d.units), held)


def chunk_with(c: Chunks, **changes: torch.Tensor) -> Chunks:
    return c._replace(chunk=c.chunk._replace(**changes))


CHUNK_BAD: list[tuple[Callable[[Chunks], Chunks], str]] = [
    (lambda c: c._replace(q=c.q[:-1]), "expected k_QKD to have shape"),
    (lambda c: c._replace(lse=c.lse.half()), "expected lse_QKG to be contiguous torch.float32"),
    (lambda c: c._replace(lse=c.lse[1:]), "expected lse_QKG to have shape"),
    (lambda c: c._replace(slots=c.slots[:1]), r"expected slots_PKCD to have shape \[2, 1, any, 16\]"),  # type: ignore[index]
    (lambda c: c._replace(slots=c.slots[:, :, ::2]), "vectors of a head of slots_PKCD to be contiguous"),  # type: ignore[index]
    (lambda c: chunk_with(c, start=c.chunk.start.long()), "expected chunk.start to be torch.int32"),
    (lambda c: chunk_with(c, num_new=c.chunk.num_new[:1]), "expected chunk.num_new to have shape"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at tensors on the CPU")
@pytest.mark.parametrize(("change", "message"), CHUNK_BAD)
def test_bad_chunks_are_refused_by_name(change: Callable[[Chunks], Chunks], message: str) -> None:
    chunks, _ = some_chunks([(9, 6)], 8, (1, 2, 16), torch.float32)
    with pytest.raises(ValueError, match=message):
        change(chunks).sums(RUN, None)
    with pytest.raises(ValueError, match="expected num_observed of 1 query or more, got 0"):
        chunks.sums(RUN, 0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "dim"),
    [(torch.bfloat16, 128), (torch.float16, 80), (torch.float32, 64), (torch.bfloat16, 256)],
    ids=str,
)
def test_large_steps_are_as_exact(dtype: torch.dtype, dim: int) -> None:
    for visible in ([3277], [3277, 1500, 0, 1] * 12):
        assert_decodes_exact(scaled(some_decodes(visible, 3277, (4, 4, dim), dtype, has_sinks=True)))
    for num_observed in (None, 1, 32):
        options = {"num_slots": 1024, "heads": (2, 4, dim), "dtype": dtype, "softcap": 20.0}
        assert_sums_exact([(5000, 300), (100, 77)], num_observed, **options)


def scaled(d: Decodes) -> Decodes:
    """Queries as models have them, so that many slots receive something."""
    return d._replace(q=d.q * d.q.shape[-1] ** -0.5)


@pytest.mark.gpu
def test_captured_graphs_follow_their_inputs() -> None:
    visible = [400, 33, 0]
    worlds = [some_decodes(visible, 400, (2, 4, 64), torch.bfloat16, seed) for seed in (1, 2)]
    expected = [world.attend(RUN)[1].clone() for world in worlds]
    fixed = worlds[0]._replace(q=worlds[0].q.clone(), k=worlds[0].k.clone(), v=worlds[0].v.clone())
    units, ring = fixed.units, fixed.ring
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, mass = RUN.unique_with_weights(inputs_of(fixed.q, units=units), ring)
    for world, wanted in zip(worlds, expected):
        fixed.q.copy_(world.q)
        for view, wanted_view in zip(units.views, world.units.views):
            view.copy_(wanted_view)
        graph.replay()
        assert torch.equal(mass, wanted)
