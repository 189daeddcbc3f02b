from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphs import BatchShape, Phase

CANONICAL = ["---", "--u", "-s-", "-su", "c--", "c-u", "cs-", "csu"]

phases = st.builds(Phase, st.booleans(), st.booleans(), st.booleans())


@st.composite
def shapes(draw: st.DrawFn) -> BatchShape:
    phase = draw(phases)
    return BatchShape(
        phase,
        draw(st.integers(1, 9000)),
        draw(st.integers(0, 9000)) if phase.shared else 0,
        draw(st.integers(0, 9000)) if phase.unique else 0,
        draw(st.integers(0, 300)),
    )


def test_the_eight_phases_print_as_three_characters_in_ascending_order() -> None:
    assert [str(phase) for phase in Phase.all()] == CANONICAL
    assert sorted(Phase.all()) == list(Phase.all())


def test_a_phase_string_is_accepted_exactly_when_deleting_dashes_of_one_phase_yields_it() -> None:
    readings: dict[str, set[str]] = {}
    for canonical in CANONICAL:
        for kept in product([True, False], repeat=3):
            if all(keep or character == "-" for keep, character in zip(kept, canonical)):
                short = "".join(character for keep, character in zip(kept, canonical) if keep)
                readings.setdefault(short, set()).add(canonical)
    assert all(len(meanings) == 1 for meanings in readings.values())
    readings.pop("")
    for length in range(1, 5):
        for characters in product("csu-x", repeat=length):
            text = "".join(characters)
            if text in readings:
                assert {str(Phase.parse(text))} == readings[text]
            else:
                with pytest.raises(ValueError, match="expected a phase"):
                    Phase.parse(text)


@pytest.mark.parametrize(
    ("short", "full"),
    [("-u", "--u"), ("u", "--u"), ("c", "c--"), ("c-", "c--"), ("cu", "c-u"), ("-s", "-s-")],
)
def test_short_forms_leave_out_dashes_only(short: str, full: str) -> None:
    assert str(Phase.parse(short)) == full


@pytest.mark.parametrize("text", ["", "u-", "-c", "uc", "cc", "CSU", "csu ", "----", "csuu"])
def test_a_string_that_is_no_phase_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a phase"):
        Phase.parse(text)


@given(phases, phases)
def test_a_phase_holds_another_iff_its_letters_include_the_others(a: Phase, b: Phase) -> None:
    letters = [set(str(phase)) - {"-"} for phase in (a, b)]
    assert a.holds(b) == (letters[0] >= letters[1])
    assert set(str(a | b)) - {"-"} == letters[0] | letters[1]


@given(shapes())
def test_parsing_what_a_shape_prints_returns_the_shape(shape: BatchShape) -> None:
    assert BatchShape.parse(str(shape)) == shape


def test_a_shape_prints_its_phase_and_sizes() -> None:
    assert str(BatchShape(Phase.parse("csu"), 2048, 64, 512, 32)) == "csu/q2048/s64/u512/l32"


@given(shapes(), shapes())
def test_a_shape_holds_another_iff_their_union_is_the_shape_itself(a: BatchShape, b: BatchShape) -> None:
    assert a.holds(b) == ((a | b) == a)
    assert (a | b).holds(a)
    assert (a | b).holds(b)


@given(shapes(), shapes())
def test_holding_never_contradicts_the_order(a: BatchShape, b: BatchShape) -> None:
    if a.holds(b):
        assert a >= b


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("csu/q2048/s64/u512", "expected a shape such as"),
        ("csu/q2048/s64/u512/l32/", "expected a shape such as"),
        ("csu/q-1/s0/u0/l0", "expected a shape such as"),
        ("sc/q1/s0/u0/l0", "expected a phase"),
        ("csu/q0/s0/u0/l0", "query_len >= 1, got 0"),
        ("c--/q2147483648/s0/u0/l0", "query_len <= 2147483647, got 2147483648"),
        ("c-u/q1/s4/u0/l0", "no shared part: expected num_shared_blocks=0, got 4"),
        ("cs-/q1/s0/u4/l0", "no unique part: expected num_unique_blocks=0, got 4"),
    ],
)
def test_an_impossible_shape_is_refused_with_expected_and_got(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchShape.parse(text)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="expected num_logits >= 0, got -1"):
        BatchShape(Phase(causal=True), 1, 0, 0, -1)


def test_a_part_may_run_without_blocks_because_rings_follow_its_letter() -> None:
    assert str(BatchShape.parse("csu/q8/s0/u0/l4")) == "csu/q8/s0/u0/l4"


def test_numpy_sizes_make_the_same_key_as_plain_ones() -> None:
    plain = BatchShape(Phase(unique=True), 8, 0, 64, 8)
    from_numpy = BatchShape(Phase(unique=True), np.int32(8), 0, np.int64(64), np.int64(8))  # type: ignore[arg-type]
    assert from_numpy == plain
    assert hash(from_numpy) == hash(plain)
    assert type(from_numpy.query_len) is int


def test_a_fractional_size_is_refused() -> None:
    with pytest.raises(TypeError):
        BatchShape(Phase(unique=True), 8.0, 0, 64, 8)  # type: ignore[arg-type]
