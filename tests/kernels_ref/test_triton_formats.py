"""Triton kernels on stores of codes, against the reference on the same codes decoded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bias_builders import Leading, Window
from kernels_ref import FLOOR, Implementation, KVUnits, NewKV, Partial, Scoring, reference
from kernels_ref.formats import format_of
from kernels_ref.impl import Kernels, kernels
from kernels_ref.step import PartInputs
from kernels_ref.units import Encoding, units_of
from tests.kernels_ref.scenario import RowSpec, Scenario
from tests.kernels_ref.test_triton_parity import MIXED, Inputs, take_kernel
from tests.triton_interpreter import replacing_once

pytest.importorskip("triton")

FORMATS = ["int8_per_token_head", "int4_per_token_head", "fp8", "fp8_per_token_head", "k8v4"]
PARTS = ["shared_blocks", "split_blocks", "even_blocks", "unique_rings", "ruled"]
FEW = [
    ("shared_blocks", "k8v4"),
    ("split_blocks", "int4_per_token_head"),
    ("even_blocks", "fp8"),
    ("even_blocks", "k8v4"),
    ("unique_rings", "int4_per_token_head"),
    ("ruled", "fp8_per_token_head"),
]
"""Each part and each format: the interpreter takes seconds for a part."""


@pytest.fixture(autouse=True, scope="module")
def _fast_interpreter() -> Iterator[None]:
    with replacing_once():
        yield


def coded(units: KVUnits, name: str) -> KVUnits:
    """The same keys and values in a format; tensors of what is NaN, unused slots, hold all bits."""
    (k, v), kv_format = units.tensors, format_of(name)
    stored = (*kv_format.keys.encode(k), *kv_format.values.encode(v))
    hidden = (k.isnan() | v.isnan()).any(-1)
    for part in stored:
        part.view(torch.uint8)[hidden] = 0xFF
    encoding = Encoding(kv_format, k.shape[-1], v.shape[-1], k.dtype)
    return units_of(tuple(stored), units.layout, encoding)._replace(scratch=units.scratch)


def run_part(run: Kernels, inputs: Inputs, part: str, name: str, rule: Any) -> Partial:
    """One part on coded stores; ``rule`` for those of rules."""
    kr, t, (blocks, rings) = inputs.scenario.kr, inputs.t, inputs.cache
    nothing = NewKV(inputs.k[:, :kr], inputs.v[:, :kr])
    full = PartInputs(inputs.q[:, :kr], nothing, coded(blocks, name), t, Scoring())
    match part:
        case "shared_blocks":
            return run.shared_blocks(full)
        case "ruled":
            return run.shared_blocks(full._replace(rule=rule))
        case "unique_rings":
            streaming = full._replace(
                q=inputs.q[:, kr:], units=coded(rings, name), rule=inputs.scenario.window
            )
            return run.unique_rings(streaming.of_rows(inputs.step), inputs.ring)
        case _:
            return run.unique_blocks(full.of_rows(inputs.step), inputs.plan)


def assert_close(ours: Partial, theirs: Partial, tolerance: float) -> None:
    seen = theirs.sum > 0
    assert seen.any()
    assert (ours.sum[~seen] == 0).all()
    assert (ours.max[~seen] == FLOOR).all()
    for got, wanted in zip(_mean_and_sum(ours), _mean_and_sum(theirs)):
        torch.testing.assert_close(got[seen], wanted[seen], atol=tolerance, rtol=tolerance)


def _mean_and_sum(p: Partial) -> tuple[torch.Tensor, torch.Tensor]:
    return p.attn / p.sum[..., None], p.max + p.sum.log()


@pytest.mark.parametrize(("part", "name"), FEW)
def test_codes_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch, part: str, name: str) -> None:
    """Vectors of 24 elements in float32, which leave columns of a tile empty."""
    take_kernel(monkeypatch, part)
    scenario = Scenario(MIXED, 4, Window(2, 6), 2, 1, 3, 24, (3, 2, 2, 1), False, 7)
    inputs = Inputs(scenario, torch.float32)
    parts = (
        run_part(run, inputs, part, name, Window(1, 9)) for run in (kernels(Implementation.TRITON), reference)
    )
    assert_close(*parts, tolerance=2e-5)


@pytest.mark.parametrize("name", ["k8v4"])
def test_weights_of_codes_are_those_of_the_reference(name: str) -> None:
    scenario = Scenario(MIXED, 4, Window(2, 6), 2, 1, 3, 24, (3, 2, 2, 1), False, 7)
    inputs = Inputs(scenario, torch.float32)
    kr, rings = scenario.kr, coded(inputs.cache[1], name)
    new = NewKV(inputs.k[:, kr:], inputs.v[:, kr:])
    rows = PartInputs(inputs.q[:, kr:], new, rings, inputs.t, Scoring()).of_rows(inputs.step)
    ring = inputs.ring._replace(seen=Leading(_filled(inputs)))
    ours, theirs = (
        each.unique_with_weights(rows, ring) for each in (kernels(Implementation.TRITON), reference)
    )
    assert_close(ours[0], theirs[0], tolerance=2e-5)
    torch.testing.assert_close(ours[1], theirs[1], atol=2e-5, rtol=0)


def _filled(inputs: Inputs) -> torch.Tensor:
    """Leading slots that rows of decodes have filled, ``[N, 1, 1]``."""
    seen = inputs.ring.seen
    if isinstance(seen, Leading):
        return seen.visible
    is_held = (seen.position >= 0) & (seen.end.amax(1, keepdim=True) > 0)[..., None]
    return is_held.flatten(1).sum(-1).to(torch.int32)[:, None, None]


@pytest.mark.parametrize(
    ("part", "name", "dtype"),
    [
        ("even_blocks", "int4_per_token_head", torch.float16),
        ("even_blocks", "k8v4", torch.bfloat16),
        ("shared_blocks", "k8v4", torch.float16),
    ],
)
def test_codes_of_half_precision_are_as_exact_as_rounded_ones(
    monkeypatch: pytest.MonkeyPatch, part: str, name: str, dtype: torch.dtype
) -> None:
    """Tiles of few queries, and of many."""
    take_kernel(monkeypatch, part)
    rows = (RowSpec(21, 3, 0, 2), RowSpec(17, 9, 0, 3), RowSpec(30, 4, 3), RowSpec(3, 1))
    scenario = Scenario(rows, 8, Window(2, 6), 1, 1, 2, 64, (3, 2, 2, 1), False, 3, 4, 5)
    inputs = Inputs(scenario, dtype)
    parts = (run_part(run, inputs, part, name, None) for run in (kernels(Implementation.TRITON), reference))
    assert_close(*parts, tolerance=4 * torch.finfo(dtype).eps)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("part", PARTS)
def test_codes_of_large_steps_are_read_where_they_lie(
    monkeypatch: pytest.MonkeyPatch, part: str, name: str
) -> None:
    take_kernel(monkeypatch, part)
    rows = (RowSpec(9000, 1), RowSpec(3000, 700), RowSpec(0, 900), RowSpec(9500, 1, 30), RowSpec(40, 1))
    for dtype, head_dim in ((torch.bfloat16, 128), (torch.bfloat16, 64), (torch.float16, 32)):
        inputs = Inputs(
            Scenario(rows, 128, Window(64, 256), 2, 2, 4, head_dim, (33, 5, 7, 3), False, 2), dtype
        )
        parts = (
            run_part(run, inputs, part, name, Window(64, 2048))
            for run in (kernels(Implementation.TRITON), reference)
        )
        assert_close(*parts, tolerance=8 * torch.finfo(dtype).eps)
