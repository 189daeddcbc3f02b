"""Triton kernels against the reference: interpreted on a CPU on small steps, compiled on a GPU on large ones.

How far a kernel may be off is derived from the exact answer: the reference is run in float64, and a kernel's
error may be twice what the reference makes of the same inputs in their own type, and a few roundings more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bias_builders import Window
from kernels_ref import (
    FLOOR,
    Implementation,
    KVUnits,
    NewKV,
    Partial,
    Scoring,
    Scratch,
    Step,
    as_units,
    reference,
    unified_attention,
)
from kernels_ref.impl import Kernels, kernels
from kernels_ref.step import PartInputs
from kernels_ref.triton import launch
from kernels_ref.triton.launch import DeviceLimits, Launch
from tests.kernels_ref.scenario import RowSpec, Scenario, World, scenarios
from tests.tiers import crossed
from tests.triton_interpreter import replacing_once

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FEW = settings(deadline=None, max_examples=30, derandomize=True, suppress_health_check=list(HealthCheck))
MIXED = (RowSpec(21, 1), RowSpec(17, 9), RowSpec(0, 12), RowSpec(30, 1, 3), RowSpec(13, 1))
PARTS = [
    "causal",
    "streaming",
    "shared_blocks",
    "shared_rings",
    "split_blocks",
    "even_blocks",
    "unique_rings",
]
"""``split_blocks`` and ``even_blocks`` are the unique part's two kernels, of which shapes choose one."""


@pytest.fixture(autouse=True, scope="module")
def _fast_interpreter() -> Iterator[None]:
    with replacing_once():
        yield


def on_device(values: Any, device: torch.device) -> Any:
    """Every tensor of nested tuples and dictionaries."""
    if isinstance(values, torch.Tensor):
        return values.to(device)
    if isinstance(values, KVUnits):
        scratch = on_device(values.scratch, device)
        return as_units(*(x.to(device) for x in values.tensors), values.layout, scratch)
    if isinstance(values, dict):
        return {key: on_device(value, device) for key, value in values.items()}
    if isinstance(values, tuple):
        moved = [on_device(value, device) for value in values]
        return type(values)(*moved) if hasattr(values, "_fields") else tuple(moved)
    return values


class Inputs:
    """A world with its new tokens written, ready for one part at a time."""

    def __init__(self, scenario: Scenario, dtype: torch.dtype, device: torch.device = DEVICE) -> None:
        world = World(scenario, dtype)
        q, k, v, step = world.inputs()
        assert isinstance(step, Step)
        s = scenario
        self.scenario, self.step = s, on_device(step, device)
        self.t = self.step.tensors
        q = (q * s.head_dim**-0.5).unflatten(1, (-1, s.group))
        self.q, self.k, self.v = q.to(device), k.to(device), v.to(device)
        self.cache = on_device(world.cache, device)
        blocks, rings = self.cache
        self.plan, self.ring = world.plans(self.step)
        new = NewKV(self.k[:, : s.kr], self.v[:, : s.kr])
        blocks.write(self.plan.write_index, blocks.encode(new))
        streaming = NewKV(self.k[:, s.kr :], self.v[:, s.kr :])
        rings.write(self.ring.write_index, rings.encode(streaming))

    def attend(self, run: Kernels, part: str, softcap: float | None, dtype: torch.dtype) -> Partial:
        """One part by one implementation, with inputs brought to ``dtype``."""
        s, t = self.scenario, self.t
        q, k, v = (x.to(dtype) for x in (self.q, self.k, self.v))
        blocks, rings = (as_units(*(y.to(dtype) for y in x.tensors), x.layout) for x in self.cache)
        scratch = Scratch(*(x.to(dtype) for x in self.cache[1].scratch))
        kr, plan = s.kr, self.plan
        scoring = Scoring(softcap)
        full = PartInputs(q[:, :kr], NewKV(k[:, :kr], v[:, :kr]), blocks, t, scoring)
        new = NewKV(k[:, kr:], v[:, kr:])
        streaming = PartInputs(q[:, kr:], new, rings._replace(scratch=scratch), t, scoring, s.window)
        match part:
            case "causal":
                return run.causal(full)
            case "streaming":
                return run.causal(streaming)
            case "shared_blocks":
                return run.shared_blocks(full)
            case "shared_rings":
                return run.shared_rings(streaming, self.ring)
            case "split_blocks" | "even_blocks":
                return run.unique_blocks(full.of_rows(self.step), plan)
            case _:
                return run.unique_rings(streaming.of_rows(self.step), self.ring)


def take_kernel(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Let the unique part run by one of its kernels, whatever the shapes say."""
    module = import_module("kernels_ref.triton.unique_blocks")
    monkeypatch.setattr(module, "choose", lambda *_, **__: part == "even_blocks")


def exactly(monkeypatch: pytest.MonkeyPatch, inputs: Inputs, part: str, softcap: float | None) -> Partial:
    """The reference in float64 throughout."""

    def soften(products: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        scores, cap = products.double(), scoring.softcap
        return scores if cap is None else cap * torch.tanh(scores / cap)

    with monkeypatch.context() as patch:
        patch.setattr(reference, "soften", soften)
        return inputs.attend(reference, part, softcap, torch.float64)


def assert_as_exact_as_the_reference(
    monkeypatch: pytest.MonkeyPatch, inputs: Inputs, part: str, softcap: float | None = None
) -> None:
    take_kernel(monkeypatch, part)
    dtype = inputs.q.dtype
    exact = exactly(monkeypatch, inputs, part, softcap)
    ours = inputs.attend(kernels(Implementation.TRITON), part, softcap, dtype)
    theirs = inputs.attend(reference, part, softcap, dtype)
    seen = exact.sum > 0
    assert (ours.sum[~seen] == 0).all()
    assert (ours.attn[~seen] == 0).all()
    assert (ours.max[~seen] == FLOOR).all()
    assert seen.any(), f"{part}: a step in which nobody sees anything compares nothing"
    for view in (_mean, _log_sum):
        wanted = view(exact)[seen]
        error, allowed = ((view(got)[seen].double() - wanted).abs().max() for got in (ours, theirs))
        rounding = 8 * torch.finfo(torch.float32).eps * (1 + float(wanted.abs().max()) + (softcap or 0.0))
        # Weights are rounded to the type of the values before they meet them, here as there.
        rounding += 0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
        assert error <= 2 * allowed + rounding, f"{part}: error {error:.2e}, reference {allowed:.2e}"


def _mean(p: Partial) -> torch.Tensor:
    return p.attn / p.sum[..., None]


def _log_sum(p: Partial) -> torch.Tensor:
    return p.max + p.sum.log()


@pytest.mark.parametrize(
    ("part", "sizes"),
    crossed(PARTS, [(torch.float32, 3, 8), (torch.bfloat16, 1, 80), (torch.float16, 4, 64)]),
)
def test_each_part_is_as_exact_as_the_reference(
    monkeypatch: pytest.MonkeyPatch, part: str, sizes: tuple[torch.dtype, int, int]
) -> None:
    dtype, group, head_dim = sizes
    scenario = Scenario(MIXED, 4, Window(2, 6), 2, 1, group, head_dim, (3, 2, 2, 1), False, 7)
    assert_as_exact_as_the_reference(monkeypatch, Inputs(scenario, dtype), part)


@pytest.mark.parametrize("part", PARTS)
def test_soft_caps_bound_the_scores_of_each_part(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    scenario = Scenario(MIXED, 8, Window(3, 5), 1, 1, 2, 16, (1, 0, 0, 0), False, 8)
    assert_as_exact_as_the_reference(monkeypatch, Inputs(scenario, torch.float32), part, softcap=2.0)


@pytest.mark.parametrize("part", PARTS)
def test_loops_go_round_and_work_is_cut_and_merged(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Small tiles and many processors, so that the borders of every loop and range are crossed."""
    small = Launch(rows=16, keys=16, num_warps=4, num_stages=2)
    monkeypatch.setattr(launch, "prefill", lambda *_: small)
    monkeypatch.setattr(launch, "decode", lambda *_: small)
    monkeypatch.setattr(launch, "device_limits", lambda _: DeviceLimits(6, 99 << 10, tiles_of_a_split=1))
    rows = (RowSpec(70, 1), RowSpec(40, 60), RowSpec(0, 45), RowSpec(75, 1, 4))
    for block_size, window in ((12, Window(3, 37)), (32, Window(20, 30))):
        scenario = Scenario(rows, block_size, window, 1, 1, 3, 24, (2, 1, 1, 1), False, 5)
        assert_as_exact_as_the_reference(monkeypatch, Inputs(scenario, torch.float32), part)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_rows_of_several_tokens_and_spread_stores_are_as_exact(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Tokens taken back, tails of two blocks, heads and units with room between them."""
    rows = (RowSpec(21, 3, 0, 2), RowSpec(17, 9, 0, 3), RowSpec(0, 12), RowSpec(30, 4, 3), RowSpec(3, 1))
    for slack, block_size in ((5, 4), (3, 8)):
        scenario = Scenario(
            rows, block_size, Window(2, 6), 2, 2, 2, 24, (3, 2, 2, 1), False, 3, 4, slack, is_spread=True
        )
        assert_as_exact_as_the_reference(monkeypatch, Inputs(scenario, torch.float32), part)


@pytest.mark.parametrize("part", PARTS)
def test_a_step_in_which_a_part_has_nothing_to_do_leaves_it_empty(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    take_kernel(monkeypatch, part)
    only_single, only_prompt = (RowSpec(0, 1),), (RowSpec(0, 5),)
    rows = only_single if part in ("causal", "streaming", "shared_rings") else only_prompt
    inputs = Inputs(Scenario(rows, 8, Window(1, 3), 1, 1, 1, 16, (3, 1, 0, 2), True, 1), torch.float32)
    got = inputs.attend(kernels(Implementation.TRITON), part, None, torch.float32)
    assert (got.sum == 0).all()
    assert (got.attn == 0).all()
    assert (got.max == FLOOR).all()


def run(world: World, softcap: float | None, sinks: torch.Tensor | None) -> torch.Tensor:
    q, k, v, step = world.inputs()
    assert isinstance(step, Step)
    q, k, v, step, sinks = on_device((q, k, v, step, sinks), DEVICE)
    cache = on_device(world.cache, DEVICE)
    spec = world.spec(Implementation.TRITON, softcap)
    return unified_attention(q, k, v, cache, step, spec, sinks).cpu()


@pytest.mark.slow
@FEW
@given(
    scenario=scenarios().filter(lambda s: s.kr + s.ks > 0),
    softcap=st.sampled_from([None, 5.0]),
    has_sinks=st.booleans(),
)
def test_mixed_steps_equal_dense_attention_although_unused_slots_hold_nan(
    scenario: Scenario, softcap: float | None, has_sinks: bool
) -> None:
    world = World(scenario)
    sinks = torch.randn(world.num_heads, generator=world.gen) * 2 if has_sinks else None
    out = run(world, softcap, sinks)
    expected = world.dense(softcap, sinks)
    torch.testing.assert_close(out[: len(expected)].double(), expected, atol=2e-5, rtol=2e-5)
    assert (out[len(expected) :] == 0).all(), "padded rows are zero"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close_to_the_exact_result_of_the_same_inputs(dtype: torch.dtype) -> None:
    world = World(Scenario(MIXED, 8, Window(4, 8), 1, 1, 3, 32, (2, 1, 1, 1), False, 11), dtype)
    expected = world.dense()
    error = (run(world, None, None)[: len(expected)].double() - expected).abs()
    assert error.max() < 4 * torch.finfo(dtype).eps
    assert error.mean() < torch.finfo(dtype).eps / 2


def test_what_padding_writes_into_trash_never_comes_back() -> None:
    scenario = Scenario((RowSpec(5, 1), RowSpec(6, 4)), 4, Window(1, 3), 1, 1, 1, 8, (6, 2, 2, 2), True, 3)
    outputs = []
    for rubbish in (torch.nan, 1e30):
        world = World(scenario)
        for units in world.cache:
            for view in units.views:
                view[-1] = rubbish
        outputs.append(run(world, None, None))
    torch.testing.assert_close(outputs[0], outputs[1], atol=0, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(torch.bfloat16, 128), (torch.float16, 80), (torch.float32, 64), (torch.bfloat16, 256)],
)
@pytest.mark.parametrize("part", PARTS)
def test_each_part_is_as_exact_as_the_reference_on_large_steps(
    monkeypatch: pytest.MonkeyPatch, part: str, dtype: torch.dtype, head_dim: int
) -> None:
    rows = (RowSpec(9000, 1), RowSpec(3000, 700), RowSpec(0, 900), RowSpec(9500, 1, 30), RowSpec(40, 1))
    scenario = Scenario(rows, 128, Window(64, 256), 2, 2, 4, head_dim, (33, 5, 7, 3), False, 2)
    assert_as_exact_as_the_reference(monkeypatch, Inputs(scenario, dtype), part)


@pytest.mark.gpu
def test_a_captured_graph_follows_its_inputs() -> None:
    scenario = Scenario(MIXED, 16, Window(2, 6), 2, 1, 4, 64, (3, 2, 2, 1), True, 7)
    worlds = [World(replace(scenario, seed=seed), torch.bfloat16) for seed in (7, 8)]
    expected = [run(world, None, None) for world in worlds]

    def inputs(world: World) -> tuple[Any, ...]:
        q, k, v, step = world.inputs()
        assert isinstance(step, Step)
        return on_device((q, k, v, world.cache, step), DEVICE)

    def attend(q: Any, k: Any, v: Any, cache: Any, step: Step) -> torch.Tensor:
        return unified_attention(q, k, v, cache, step, worlds[0].spec(Implementation.TRITON))

    fixed = inputs(worlds[0])
    attend(*fixed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*fixed)
    for world, wanted in zip(worlds, expected):
        _overwrite(fixed, inputs(world))
        graph.replay()
        torch.testing.assert_close(out.cpu(), wanted, atol=0, rtol=0)


def _overwrite(target: Any, source: Any) -> None:
    if isinstance(target, torch.Tensor):
        target.copy_(source)
    elif isinstance(target, dict):
        for key in target:
            _overwrite(target[key], source[key])
    elif isinstance(target, tuple):
        for to, new in zip(target, source):
            _overwrite(to, new)
