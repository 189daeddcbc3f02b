"""Phase filters, order, and tables that lack something."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import BatchShape, BucketTable, Miss, Phase, StepLimits
from hpu_duo.startup.warm_up import check_holds_everything, parse_phases, select
from tests.graphs.planner.drawn import limits_strategy, scheduled_shapes

TABLE = BucketTable.from_strings(
    ["--u/q4/s0/u16/l4", "--u/q1/s0/u4/l1", "csu/q64/s16/u16/l4", "c--/q64/s0/u0/l4"]
)


@given(st.lists(st.sampled_from(list(Phase.all())), min_size=1))
def test_what_phases_print_is_what_a_filter_reads(phases: list[Phase]) -> None:
    assert parse_phases(",".join(map(str, phases))) == tuple(dict.fromkeys(phases))


def test_short_forms_and_spaces_are_read() -> None:
    assert parse_phases("u, cs") == parse_phases("--u,cs-")


@pytest.mark.parametrize("text", ["", "--u,", "x", "u-", "--u cs-", "usc"])
def test_what_is_no_phase_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a phase such as 'csu'"):
        parse_phases(text)


def test_the_most_expensive_bucket_comes_first() -> None:
    costs = [TABLE.cost(bucket) for bucket in select(TABLE, None)]
    assert costs == sorted(costs, reverse=True)
    assert len(costs) == len(TABLE)


def test_a_filter_keeps_its_phases_and_no_others() -> None:
    assert [str(bucket) for bucket in select(TABLE, parse_phases("u"))] == [
        "--u/q4/s0/u16/l4",
        "--u/q1/s0/u4/l1",
    ]


def test_a_phase_without_buckets_is_refused_and_those_with_some_are_named() -> None:
    with pytest.raises(ValueError, match="which are --u, c--, csu, got cs-"):
        select(TABLE, parse_phases("u,cs"))


@settings(deadline=None)
@given(st.data(), limits_strategy)
def test_a_table_is_refused_exactly_if_it_lacks_a_reachable_shape(
    data: st.DataObject, limits: StepLimits
) -> None:
    buckets = data.draw(st.lists(st.sampled_from(list(BucketTable.exponential(limits))), min_size=1))
    table = BucketTable(tuple(buckets))
    try:
        check_holds_everything(table, limits)
    except ValueError as error:
        missing = [BatchShape.parse(text.strip(",;")) for text in str(error).split() if "/q" in text]
        assert missing
        for shape in missing:
            assert limits.reaches(shape)
            assert isinstance(table.fit(shape), Miss)
    else:
        assert table.fit(data.draw(scheduled_shapes(limits))) in table


def test_the_message_names_the_shape_that_no_bucket_holds() -> None:
    limits = StepLimits(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=64,
        block_size=16,
        num_blocks=16,
        decode_len=1,
        max_chunk_rows=1,
    )
    with pytest.raises(
        ValueError, match=r"lacks reachable shapes: .* --u/q4/s0/u16/l4, -su/q4/s8/u16/l4, c-u/"
    ):
        check_holds_everything(BucketTable((limits.largest_of(Phase.parse("cs-")),)), limits)
    check_holds_everything(BucketTable((limits.largest,)), limits)
