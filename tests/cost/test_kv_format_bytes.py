"""Tokens of Llama-3-8B with quantised keys and values: a published number, and ours on a Gaudi."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpu_duo.kv.plan import LayerKV, MemoryPlan, in_format
from hpu_duo.planning import GAUDI2, GAUDI3, Deployment, Format, Hardware, Serving, Step
from kernels_ref import PLAIN
from kernels_ref.formats import format_of, names_of_formats
from tests.cost.test_capacity import LLAMA_3_8B

GIB = 1 << 30
WEIGHTS = {
    "bf16": LLAMA_3_8B.weight_bytes(Format.BF16),
    "8 bit": LLAMA_3_8B.weight_bytes(Format.FP8),
}


def layers_of(share: float, name: str) -> tuple[LayerKV, ...]:
    """The layers with this share of heads that stream, and a format for the others."""
    kept = LLAMA_3_8B.kv_layers_of(LLAMA_3_8B.spread(share), 128, 256, 1 << 20)
    return tuple(replace(each, groups=in_format(each.groups, format_of(name))) for each in kept)


def plan_of(share: float, name: str) -> MemoryPlan:
    return MemoryPlan(layers_of(share, name), 2, block_size=128, max_num_seqs=1, num_blocks=1)


def test_the_published_tokens_of_an_80_gb_card_follow_from_their_terms() -> None:
    assert WEIGHTS["8 bit"] == 9_083_953_152
    token_bytes = plan_of(0.5, "int4_per_token_head").block_bytes // 128
    assert token_bytes == 17_408
    # 384 slots and a chunk of 32,000 tokens of the 128 streaming heads, which are in 4 bits there.
    # Activations are what is left, fitted: their size is not published.
    streaming, activations = (384 + 32_000) * 128 * 136, 3.6 * GIB
    left = 79.15 * GIB - WEIGHTS["8 bit"] - streaming - activations
    # Keys and values of the widest layer in float16, for each token and beside them.
    workspace = 8 * 128 * 2 * 2
    assert (left - 0.12 * GIB) / (token_bytes + workspace) == pytest.approx(3.317e6, rel=1e-3)
    assert left / token_bytes == pytest.approx(4.1e6, rel=2e-3)


@pytest.mark.parametrize(
    ("weights", "name", "gaudi2", "gaudi3"),
    [
        ("bf16", "auto", (0.59, 1.17, 2.35), (0.85, 1.70, 3.39)),
        ("8 bit", "auto", (0.64, 1.28, 2.56), (0.90, 1.80, 3.60)),
        ("8 bit", "fp8", (1.28, 2.56, 5.12), (1.80, 3.61, 7.21)),
        ("8 bit", "int8_per_token_head", (1.26, 2.52, 5.04), (1.78, 3.55, 7.10)),
        ("8 bit", "int4_per_token_head", (2.41, 4.82, 9.64), (3.39, 6.79, 13.57)),
    ],
)
def test_tokens_of_one_request_on_a_gaudi(
    weights: str, name: str, gaudi2: tuple[float, ...], gaudi3: tuple[float, ...]
) -> None:
    for usable, expected in ((94.62, gaudi2), (126.5, gaudi3)):
        for share, millions in zip((0.0, 0.5, 0.75), expected):
            plan = plan_of(share, name)
            left = (usable - 8) * GIB - WEIGHTS[weights] - plan.row_bytes
            assert left / (plan.block_bytes / 128) == pytest.approx(millions * 1e6, rel=1e-2)


@pytest.mark.parametrize("hardware", [GAUDI2, GAUDI3], ids=lambda each: each.name)
def test_smaller_formats_fit_more_requests_and_leave_rings_as_they_are(hardware: Hardware) -> None:
    found = {
        name: Deployment(LLAMA_3_8B, Serving(hardware), 0.5, format_of(name), 131_072)
        for name in names_of_formats()
    }
    plain, step = found.pop(PLAIN.name), Step(4, 131_071)
    for name, one in found.items():
        token_bytes, (own, of_plain) = (
            format_of(name).token_bytes(128, 128, 2),
            (one.plan(1, 1), plain.plan(1, 1)),
        )
        assert own.row_bytes == of_plain.row_bytes
        assert own.block_bytes * 512 == of_plain.block_bytes * token_bytes
        assert (one.count_requests(131_072) > plain.count_requests(131_072)) == (token_bytes < 512)
        read, of_floats = (each.engine_work.of(each.shape_of(step)).kv_bytes for each in (one, plain))
        assert (read < of_floats) == (token_bytes < 512)
