"""Slices of ranks, put together, are the whole tensor, and each has the heads of its rank."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from hpu_duo.device.ranks import Ranks
from hpu_duo.parallel.config import RankHeads
from hpu_duo.parallel.cuts import Cut, Cutter, FusedRows, HeadSizes, merged
from hpu_duo.parallel.loading import read_share

DIM = 2


@given(
    size=st.sampled_from((1, 2, 4)),
    per_rank=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    group_size=st.integers(1, 3),
    shuffle=st.randoms(use_true_random=False),
)
def test_every_head_is_on_one_rank_in_equal_numbers(
    size: int, per_rank: list[int], group_size: int, shuffle: object
) -> None:
    heads = list(range(size * sum(per_rank)))
    shuffle.shuffle(heads)  # type: ignore[attr-defined]
    groups, at = [], 0
    for number in per_rank:
        groups.append(heads[at : at + number * size])
        at += number * size
    shares = [RankHeads.of(groups, len(heads) * group_size, Ranks(rank, size)) for rank in range(size)]
    assert sorted(chain.from_iterable(share.kv for share in shares)) == sorted(heads)
    for share in shares:
        assert [head // group_size for head in share.query] == [
            h for h in share.kv for _ in range(group_size)
        ]
        held = iter(share.kv)
        for group, number in zip(groups, per_rank):
            assert {next(held) for _ in range(number)} <= set(group)


@given(num_kv=st.sampled_from((1, 2)), copies=st.sampled_from((2, 4)), per_rank=st.integers(1, 3))
def test_neighbours_share_a_head_where_there_are_fewer_heads_than_ranks(
    num_kv: int, copies: int, per_rank: int
) -> None:
    size, num_heads = num_kv * copies, num_kv * copies * per_rank
    shares = [RankHeads.of([range(num_kv)], num_heads, Ranks(rank, size)) for rank in range(size)]
    assert [share.kv for share in shares] == [(rank // copies,) for rank in range(size)]
    assert list(chain.from_iterable(share.query for share in shares)) == list(range(num_heads))


@pytest.mark.parametrize(
    ("groups", "num_heads", "size"),
    [([[0, 1, 2]], 3, 2), ([[0, 1], [2]], 3, 3), ([[0], [1]], 4, 4), ([[0, 1]], 6, 4)],
)
def test_heads_that_ranks_cannot_share_are_refused(
    groups: list[list[int]], num_heads: int, size: int
) -> None:
    with pytest.raises(ValueError, match="evenly"):
        RankHeads.of(groups, num_heads, Ranks(0, size))


def cutters(
    num_heads: int,
    num_kv: int,
    size: int,
    vocab: int = 7,
    rows: FusedRows = FusedRows.BY_KIND,
    *,
    is_transposed: bool = False,
) -> list[Cutter]:
    plan = {
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
        "layers.*.mlp.gate_up_proj": "colwise_gather_output",
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    }
    shares = [RankHeads.of([range(num_kv)], num_heads, Ranks(rank, size)) for rank in range(size)]
    sizes = [HeadSizes(num_heads, num_kv, DIM, DIM, rows)]
    return [
        Cutter(
            plan,
            "self_attn",
            [share],
            sizes,
            ["lm_head"],
            (vocab, 3),
            Ranks(rank, size),
            is_transposed=is_transposed,
        )
        for rank, share in enumerate(shares)
    ]


@pytest.mark.parametrize(
    ("name", "shape", "dim"),
    [
        ("self_attn.q_proj.weight", (8, 3), 0),
        ("self_attn.q_proj.bias", (8,), 0),
        ("self_attn.k_proj.weight", (4, 3), 0),
        ("self_attn.o_proj.weight", (3, 8), 1),
        ("self_attn.q_norm.weight", (4, 2), 0),
        ("self_attn.q_norm.weight", (8,), 0),
        ("self_attn.gate_proj.weight", (8, 3), 0),
        ("self_attn.g_proj.weight", (4, 3), 0),
        ("self_attn.gate_bias", (4,), 0),
        ("self_attn.sinks", (4,), 0),
        ("self_attn.kv_b_proj.weight", (10, 3), 0),
        ("mlp.gate_proj.weight", (6, 3), 0),
        ("mlp.gate_proj.bias", (6,), 0),
        ("mlp.down_proj.weight", (3, 6), 1),
        ("mlp.experts.2.w1.weight", (6, 3), 0),
        ("mlp.experts.2.w2.weight", (3, 6), 1),
        ("mlp.experts.down_proj", (5, 3, 6), 2),
        ("mlp.shared_experts.up_proj.weight", (6, 3), 0),
        ("mlp.shared_mlp.down_proj.weight", (3, 6), 1),
        ("block_sparse_moe.output_linear.weight", (5, 3, 6), 2),
    ],
)
def test_slices_make_up_the_whole(name: str, shape: tuple[int, ...], dim: int) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape).float()
    key = f"model.layers.0.{name}"
    cuts = [cutter.cut(key, shape) for cutter in cutters(4, 2, 2)]
    pieces = [cut.of(whole) for cut in cuts if cut is not None]
    assert torch.equal(torch.cat(pieces, dim), whole)


@pytest.mark.parametrize(
    "name", ["mlp.gate_up_proj.weight", "mlp.experts.gate_up_proj", "shared_mlp.input_linear.weight"]
)
def test_both_halves_of_a_packed_projection_are_cut(name: str) -> None:
    shape = (12, 3) if "experts" not in name else (5, 12, 3)
    whole = torch.arange(torch.Size(shape).numel()).view(shape).float()
    first, second = (cutter.cut(f"model.layers.0.{name}", shape) for cutter in cutters(4, 2, 2))
    assert first == Cut(len(shape) - 2, ((0, 3), (6, 9)))
    assert second == Cut(len(shape) - 2, ((3, 6), (9, 12)))
    assert first.of(whole).shape[-2] == 6


def test_a_fused_projection_is_cut_by_head() -> None:
    # 4 query heads and 2 key/value heads of 2: rows 0-8 queries, 8-12 keys, 12-16 values.
    first, second = (
        cutter.cut("model.layers.0.self_attn.qkv_proj.weight", (16, 3)) for cutter in cutters(4, 2, 2)
    )
    assert first == Cut(0, ((0, 4), (8, 10), (12, 14)))
    assert second == Cut(0, ((4, 8), (10, 12), (14, 16)))


def test_rows_of_a_projection_that_is_fused_by_head_are_cut_by_head() -> None:
    # For each of 2 key/value heads 2 query heads, a key and a value, of 2 channels.
    first, second = (
        cutter.cut("model.layers.0.self_attn.query_key_value.weight", (16, 3))
        for cutter in cutters(4, 2, 2, rows=FusedRows.BY_GROUP)
    )
    assert (first, second) == (Cut(0, ((0, 8),)), Cut(0, ((8, 16),)))
    # Ranks that share a key/value head have one of its query heads each.
    third = cutters(4, 2, 4, rows=FusedRows.BY_GROUP)[2]
    assert third.cut("model.layers.0.self_attn.query_key_value.weight", (16, 3)) == Cut(
        0, ((8, 10), (12, 16))
    )


def test_transposed_experts_are_cut_in_the_dimension_of_their_width() -> None:
    cutter = cutters(4, 2, 2, is_transposed=True)[1]
    for up, down in (("gate_up_proj", "down_proj"), ("fc1.weight", "fc2.weight")):
        assert cutter.cut(f"model.layers.0.mlp.experts.{up}", (5, 3, 12)) == Cut(2, ((3, 6), (9, 12)))
        assert cutter.cut(f"model.layers.0.mlp.experts.{down}", (5, 6, 3)) == Cut(1, ((3, 6),))


def test_a_table_of_tokens_is_cut_by_whatever_name() -> None:
    cutter = cutters(4, 2, 2)[1]
    assert cutter.cut("embed_out.weight", (7, 3)) == Cut(0, ((4, 8),), is_padded=True)
    assert cutter.cut("positions.weight", (5, 3)) is None


def test_a_part_that_a_tensor_does_not_have_is_refused() -> None:
    cut = cutters(4, 4, 2)[1].cut("model.layers.0.self_attn.k_proj.weight", (4, 3))
    assert cut is not None
    with pytest.raises(ValueError, match=r"expected 8 or more in dimension 0, got a tensor of \[4, 3\]"):
        cut.of(torch.ones(4, 3))


@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_weights_of_another_shape_than_the_configuration_says_are_refused(
    num_kv_heads: int, tmp_path: Path
) -> None:
    whole = nn.Module()
    whole.k_proj = nn.Linear(3, 2 * 2, bias=False)
    save_file({"k_proj.weight": torch.ones(2 * num_kv_heads, 3)}, tmp_path / "model.safetensors")
    expected = rf"expected k_proj.weight of shape \[4, 3\], got \[{2 * num_kv_heads}, 3\]"
    with pytest.raises(ValueError, match=f"do not fit the configuration: {expected}"):
        read_share(tmp_path, whole, cutters(4, 2, 2)[1], Ranks(1, 2))


def test_tensors_without_dimensions_are_read_whole(tmp_path: Path) -> None:
    save_file({"model.layers.0.mlp.act_fn.alpha_p": torch.tensor(0.8)}, tmp_path / "model.safetensors")
    state = read_share(tmp_path, nn.Module(), cutters(4, 2, 2)[1], Ranks(1, 2))
    assert torch.equal(state["model.layers.0.mlp.act_fn.alpha_p"][...], torch.tensor(0.8))


def test_slices_are_read_when_they_are_asked_for_and_held_by_nobody(tmp_path: Path) -> None:
    name, bias = "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.bias"
    whole = torch.arange(18.0).view(3, 6)
    save_file({name: whole, bias: torch.ones(3)}, tmp_path / "model.safetensors")
    first, second = (
        read_share(tmp_path, nn.Module(), cutters(4, 2, 2)[rank], Ranks(rank, 2)) for rank in range(2)
    )
    assert torch.equal(torch.cat([first[name][...], second[name][...]], dim=1), whole)
    assert torch.equal(first[bias][...], torch.ones(3))
    assert torch.equal(second[bias][...], torch.zeros(3)), "the first rank adds it"
    kept, again = second[name][...], second[name][...]
    kept.zero_()
    assert torch.equal(again, whole[:, 3:])


def test_a_tensor_without_a_rank_s_part_is_refused_before_it_is_read(tmp_path: Path) -> None:
    key = "model.layers.0.self_attn.k_proj.weight"
    save_file({key: torch.ones(4, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"expected 8 or more in dimension 0, got a tensor of \[4, 3\]"):
        read_share(tmp_path, nn.Module(), cutters(4, 4, 2)[1], Ranks(1, 2))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("input_layernorm.weight", (3,)), ("self_attn.q_norm.weight", (2,)), ("mlp.gate.weight", (5, 3))],
)
def test_everything_else_is_on_all_ranks(name: str, shape: tuple[int, ...]) -> None:
    assert cutters(4, 2, 2)[1].cut(f"model.layers.0.{name}", shape) is None


def test_a_vocabulary_is_padded_to_equal_shares() -> None:
    whole = torch.arange(14).view(7, 2).float() + 1
    pieces = [cutter.cut("lm_head.weight", (7, 2)).of(whole) for cutter in cutters(4, 2, 2)]  # type: ignore[union-attr]
    assert [len(piece) for piece in pieces] == [4, 4]
    assert torch.equal(torch.cat(pieces)[:7], whole)
    assert not torch.cat(pieces)[7:].any()


def test_one_rank_adds_the_bias_of_a_sum() -> None:
    cutter = cutters(4, 2, 2)[1]
    once = {"self_attn.o_proj.bias", "mlp.down_proj.bias"}
    names = {*once, "self_attn.q_proj.bias", "mlp.gate_proj.bias", "self_attn.o_proj.weight"}
    assert {name for name in names if cutter.is_added_once(f"model.layers.0.{name}")} == once
    assert not cutter.is_added_once("lm_head.bias")


def test_a_width_that_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match="2 ranks share evenly, got 5"):
        cutters(4, 2, 2)[0].cut("model.layers.0.mlp.gate_proj.weight", (5, 3))


def test_spans_that_touch_are_one() -> None:
    assert merged([(0, 2), (2, 4), (6, 7), (7, 9), (4, 5)]) == ((0, 4), (6, 9), (4, 5))
