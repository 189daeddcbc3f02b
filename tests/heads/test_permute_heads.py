"""The permutation of weights on bare modules, and everything it must refuse."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hpu_duo.heads import HeadLayout, permute_heads

H, K, D, E = 8, 4, 6, 24


class Attention(nn.Module):
    """A bare attention module, so that a test can say exactly what it holds."""

    def __init__(
        self, num_heads: int = H, num_kv_heads: int = K, head_dim: int = D, bias: bool = True
    ) -> None:
        super().__init__()
        self.q_proj = nn.Linear(E, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(E, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(E, num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_dim, E, bias=bias)


SWAPPED = HeadLayout(kv_order=(2, 0, 1, 3), num_heads=H)
IDENTITY = HeadLayout(kv_order=(0, 1, 2, 3), num_heads=H)


@settings(max_examples=30, deadline=None)
@given(
    order=st.integers(1, 5).flatmap(lambda num_kv_heads: st.permutations(range(num_kv_heads))),
    group_size=st.integers(1, 3),
    head_dim=st.integers(1, 4),
)
def test_every_head_moves_with_its_channels(order: list[int], group_size: int, head_dim: int) -> None:
    num_kv_heads, num_heads = len(order), len(order) * group_size
    module = Attention(num_heads, num_kv_heads, head_dim)
    old = {key: value.clone() for key, value in module.state_dict().items()}
    permute_heads([module], [HeadLayout(tuple(order), num_heads)], head_dim)
    new = module.state_dict()

    for to, source in enumerate(order):
        for name in ("k_proj", "v_proj"):
            for leaf in ("weight", "bias"):
                moved, stayed = new[f"{name}.{leaf}"], old[f"{name}.{leaf}"]
                assert torch.equal(
                    moved[to * head_dim : (to + 1) * head_dim],
                    stayed[source * head_dim : (source + 1) * head_dim],
                )
        group = group_size * head_dim
        rows, origin = slice(to * group, (to + 1) * group), slice(source * group, (source + 1) * group)
        assert torch.equal(new["q_proj.weight"][rows], old["q_proj.weight"][origin])
        assert torch.equal(new["q_proj.bias"][rows], old["q_proj.bias"][origin])
        assert torch.equal(new["o_proj.weight"][:, rows], old["o_proj.weight"][:, origin])
    assert torch.equal(new["o_proj.bias"], old["o_proj.bias"])


def test_the_identity_touches_nothing_not_even_what_it_would_not_understand() -> None:
    module = Attention()
    module.add_module("q_proj", nn.Identity())
    before = module.k_proj.weight.clone()
    permute_heads([module], [IDENTITY], D)

    assert torch.equal(module.k_proj.weight, before)


def test_weights_stay_in_the_storage_they_had() -> None:
    module = Attention()
    before = {name: (id(value), value.data_ptr()) for name, value in module.named_parameters()}
    permute_heads([module], [SWAPPED], D)

    assert {name: (id(value), value.data_ptr()) for name, value in module.named_parameters()} == before


def with_attribute(name: str, value: object) -> Attention:
    module = Attention()
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        module.register_buffer(name, value)
    else:
        setattr(module, name, value)
    return module


class PackedLinear(nn.Linear):
    pass


def plain_tensor_attribute() -> Attention:
    module = Attention()
    module.slopes = torch.ones(H)
    return module


def a_scale_on_a_projection() -> Attention:
    module = Attention()
    module.q_proj.register_buffer("weight_scale", torch.ones(H * D))
    return module


def one_weight_for_keys_and_values() -> Attention:
    module = Attention()
    module.v_proj.weight = module.k_proj.weight
    return module


def without_values() -> Attention:
    module = Attention()
    del module.v_proj
    return module


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: with_attribute("gate", nn.Linear(E, H)), r"got gate\.weight, gate\.bias"),
        (lambda: with_attribute("temperature", nn.Parameter(torch.ones(H))), "got temperature"),
        (lambda: with_attribute("slopes", torch.ones(H)), "got slopes"),
        (plain_tensor_attribute, "got slopes"),
        (a_scale_on_a_projection, "got q_proj.weight_scale"),
        (
            lambda: with_attribute("q_proj", PackedLinear(E, H * D)),
            "torch.nn.Linear as q_proj .*PackedLinear",
        ),
        (
            lambda: with_attribute("o_proj", PackedLinear(H * D, E)),
            "torch.nn.Linear as o_proj .*PackedLinear",
        ),
        (
            lambda: with_attribute("q_proj", nn.Linear(E, 3 * H * D)),
            r"size 48 in dimension 0 .*got \[144, 24\]",
        ),
        (lambda: with_attribute("o_proj", nn.Linear(E, E)), r"size 48 in dimension 1 .*got \[24, 24\]"),
        (lambda: Attention(num_kv_heads=2), r"size 24 in dimension 0 of k_proj.weight .*got \[12, 24\]"),
        (lambda: Attention().to(torch.device("meta")), "on meta"),
        (lambda: with_attribute("sinks", nn.Parameter(torch.ones(K))), r"size 8 .*sinks .*got \[4\]"),
        (lambda: with_attribute("q_norm", nn.LayerNorm(2 * D)), r"\[6\], \[48\] or \[8, 6\], got \[12\]"),
        (lambda: with_attribute("k_norm", nn.LayerNorm(H * D)), r"\[6\], \[24\] or \[4, 6\], got \[48\]"),
        (lambda: with_attribute("head_dim", 2 * D), "expected head_dim=12 as in Attention, got 6"),
        (lambda: with_attribute("out_proj", nn.Linear(E, E)), "expected one of o_proj"),
        (lambda: with_attribute("qkv_proj", nn.Linear(E, 1)), "or one fused projection"),
        (without_values, "expected q_proj, k_proj, v_proj or one fused projection"),
        (one_weight_for_keys_and_values, "k_proj.weight shared with another user"),
    ],
)
def test_what_is_not_understood_is_refused_by_name_and_left_as_it_was(
    make: Callable[[], Attention], complaint: str
) -> None:
    good, odd = Attention(), make()
    before = [value.clone() for value in (*good.parameters(), *odd.parameters())]
    with pytest.raises(ValueError, match=complaint):
        permute_heads([good, odd], [SWAPPED, SWAPPED], D)

    for value, old in zip((*good.parameters(), *odd.parameters()), before):
        assert value.is_meta or torch.equal(value, old)
    assert not hasattr(good, "_hpu_duo_kv_order")


def test_weights_of_packed_numbers_are_refused() -> None:
    module = Attention(bias=False)
    module.v_proj.weight = nn.Parameter(torch.ones(K * D, E, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"floating-point tensor as v_proj.weight .*torch.int8"):
        permute_heads([module], [SWAPPED], D)


def test_a_tensor_subclass_inside_a_plain_linear_is_refused() -> None:
    class Wrapped(torch.Tensor):
        pass

    module = Attention(bias=False)
    module.v_proj.weight = nn.Parameter(torch.ones(K * D, E).as_subclass(Wrapped))
    with pytest.raises(ValueError, match=r"plain.* tensor as v_proj.weight .*Wrapped"):
        permute_heads([module], [SWAPPED], D)


def test_a_weight_of_two_layers_is_refused_even_when_one_of_them_stays() -> None:
    first, second = Attention(), Attention()
    second.k_proj.weight = first.k_proj.weight
    for layouts in ([SWAPPED, SWAPPED], [SWAPPED, IDENTITY], [IDENTITY, SWAPPED]):
        with pytest.raises(ValueError, match=r"k_proj\.weight shared with another user"):
            permute_heads([first, second], layouts, D)


def test_a_second_permutation_is_refused() -> None:
    module = Attention()
    permute_heads([module], [SWAPPED], D)

    for layout in (SWAPPED, IDENTITY):
        with pytest.raises(ValueError, match="original head order"):
            permute_heads([module], [layout], D)


def test_a_layout_is_needed_for_every_module() -> None:
    with pytest.raises(ValueError, match="got 1 for 2"):
        permute_heads([Attention(), Attention()], [SWAPPED], D)


class FusedAttention(nn.Module):
    def __init__(self, name: str, output: str) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(E, (H + 2 * K) * D))
        self.add_module(output, nn.Linear(H * D, E))


@pytest.mark.parametrize(
    ("name", "output"), [("Wqkv", "Wo"), ("query_key_value", "dense"), ("qkv_proj", "out_proj")]
)
def test_a_fused_projection_of_unknown_row_order_needs_a_declaration(name: str, output: str) -> None:
    module = FusedAttention(name, output)
    with pytest.raises(ValueError, match=f"to declare that the rows of {name}"):
        permute_heads([module], [SWAPPED], D)

    rows = torch.arange((H + 2 * K) * D, dtype=torch.float32)
    module.get_parameter(f"{name}.bias").data.copy_(rows)
    permute_heads([module], [SWAPPED], D, fused_rows="qkv")
    queries, keys, values = np.split(rows.numpy(), [H * D, (H + K) * D])
    expected = [part.reshape(K, -1)[list(SWAPPED.kv_order)].ravel() for part in (queries, keys, values)]

    assert np.array_equal(module.get_parameter(f"{name}.bias").detach().numpy(), np.concatenate(expected))


def test_an_unknown_declaration_is_refused() -> None:
    with pytest.raises(ValueError, match="fused_rows 'qkv' or None, got 'kvq'"):
        permute_heads([FusedAttention("Wqkv", "Wo")], [SWAPPED], D, fused_rows="kvq")  # type: ignore[arg-type]


def test_rotary_frequencies_inside_the_module_stay() -> None:
    module = Attention()
    rotary = nn.Module()
    rotary.register_buffer("inv_freq", torch.arange(float(D // 2)))
    module.add_module("rotary_emb", rotary)
    permute_heads([module], [SWAPPED], D)

    assert module.get_buffer("rotary_emb.inv_freq").tolist() == [0.0, 1.0, 2.0]
