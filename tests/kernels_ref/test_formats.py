"""Formats of keys and values: what a store gives back of any vector, and names that are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels_ref.formats import PLAIN, KVFormat, VectorFormat, format_of, names_of_formats
from kernels_ref.formats.fp8 import Fp8, ScaledFp8
from kernels_ref.formats.int4 import Int4
from kernels_ref.formats.int8 import Int8
from kernels_ref.formats.scales import LARGEST

META = 2.0**-8
"""Relative rounding of a scale or a zero."""
FLOAT32 = 2.0**-22
# Other tests register formats of their own, "... of tests".
NAMES = [name for name in names_of_formats() if name != PLAIN.name and not name.endswith("of tests")]


def given_back(vectors: VectorFormat, x: torch.Tensor) -> torch.Tensor:
    """Return what a store gives back."""
    return vectors.decode(vectors.encode(x), torch.float32)


def bound_of(vectors: VectorFormat, x: torch.Tensor) -> torch.Tensor:
    """Return the most that each element may be off by."""
    parts = vectors.encode(x)
    if isinstance(vectors, Int8):
        return parts[1].float() / 2
    if isinstance(vectors, Int4):
        scale, zero = parts[1].float().split(1, dim=-1)
        return scale / 2 + META * (zero.abs() + 15 * scale)
    size = x.abs()
    if isinstance(vectors, ScaledFp8):
        scale = parts[1].float()
        return size * 2**-4 + scale * 2**-10 + 448 * scale * META
    return torch.where(size < 448, torch.clamp(size * 2**-4, min=2**-10), (size - 448).abs())


def _drawn(dim: int, seed: int) -> torch.Tensor:
    return torch.randn(dim, generator=torch.Generator().manual_seed(seed))


def _with(x: torch.Tensor, place: int, number: float) -> torch.Tensor:
    return torch.where(torch.arange(len(x)) == place, number, x)


def vectors_of(dim: int) -> st.SearchStrategy[torch.Tensor]:
    """A vector of anything: denormals, the largest numbers, constants, and one huge element."""
    numbers = st.floats(-LARGEST, LARGEST, width=32) | st.floats(-4, 4, width=32)
    drawn = st.integers(0, 9).map(lambda seed: _drawn(dim, seed))
    place = st.integers(0, dim - 1)
    constant = numbers.map(lambda number: torch.full((dim,), number))
    spoiled = st.builds(_with, drawn, place, numbers)
    few = st.lists(numbers, min_size=4, max_size=4).map(lambda four: torch.tensor(four).repeat(dim // 4))
    return constant | spoiled | few


@pytest.mark.parametrize("vectors", [Int8(), Int4(), Fp8(), ScaledFp8()], ids=str)
@given(st.data(), st.sampled_from((4, 64, 128, 256)))
def test_each_element_is_off_by_at_most_half_a_step(
    vectors: VectorFormat, data: st.DataObject, dim: int
) -> None:
    x = data.draw(vectors_of(dim))
    error = (given_back(vectors, x) - x).abs()
    slack = FLOAT32 * torch.clamp(x.abs().max(), min=2.0**-126)
    assert bool((error <= bound_of(vectors, x) + slack).all())


@pytest.mark.parametrize("name", NAMES)
def test_a_vector_is_stored_alike_whatever_is_beside_it(name: str) -> None:
    x = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(0)) * 30
    x[1, 0] = 0
    for vectors in (format_of(name).keys, format_of(name).values):
        together = vectors.encode(x)
        alone = [vectors.encode(x[token, head]) for token in range(3) for head in range(2)]
        for part, found in zip(together, zip(*alone)):
            assert part.flatten(0, 1).equal(torch.stack(found))
        sizes = [(each.width, each.dtype) for each in vectors.parts(64)]
        assert sizes == [(part.shape[-1], part.dtype) for part in together]
        in_bfloat16 = vectors.decode(together, torch.bfloat16)
        assert in_bfloat16.equal(vectors.decode(together, torch.float32).bfloat16())
        assert not vectors.decode([torch.zeros_like(part) for part in together], torch.float32).any()


def test_two_codes_of_a_byte_are_those_of_an_element_and_of_one_half_a_vector_later() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    meta = torch.tensor([1.0, 0.0]).bfloat16()
    found = Int4().decode((every, meta), torch.float32)
    assert found.equal(torch.cat([every & 15, every >> 4]).float())
    assert Int4().encode(found)[0].equal(every)


def test_each_code_of_fp8_is_that_of_its_own_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8)[:, None]
    values = Fp8().decode((codes,), torch.float32)
    is_nan = (codes & 0x7F) == 0x7F
    assert values.isnan().equal(is_nan)
    assert Fp8().encode(values)[0][~is_nan].equal(codes[~is_nan])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "float32"])
def test_infinities_are_stored_as_large_numbers_and_a_nan_as_one(name: str) -> None:
    for vectors in (format_of(name).keys, format_of(name).values):
        x = torch.randn(64)
        x[3], x[5] = torch.inf, -torch.inf
        found = given_back(vectors, x)
        assert found.isfinite().all()
        assert (found[3], found[5]) == (found.max(), found.min())
        x[7] = torch.nan
        assert given_back(vectors, x)[7].isnan()


def test_a_pair_of_names_is_a_format_of_keys_and_one_of_values() -> None:
    pair, keys, values = (format_of(name) for name in ("fp8:int4_per_token_head", "fp8", "k8v4"))
    assert pair == KVFormat("fp8:int4_per_token_head", keys.keys, values.values)
    assert format_of("k8v4").token_bytes(128, 128, 2) == 128 + 2 + 64 + 4
    assert format_of("fp8_e4m3") is keys
    assert format_of("int8_per_token_head:int4_per_token_head") is values
    assert format_of("auto:auto") is PLAIN


@pytest.mark.parametrize(
    ("name", "reason"),
    {
        "fp8_e5m2": "too few for keys",
        "kivi_2": "not served yet",
        "nvfp4_4over6": "NVIDIA",
        "turboquant_k8v4": "rotates",
        "nvfp4_ds_mla": "latent attention",
        "fp8:int8": "'int8'",
    }.items(),
)
def test_other_names_are_refused_with_those_that_are_served(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"one of auto, .*k8v4.*got .*{reason}"):
        format_of(name)
