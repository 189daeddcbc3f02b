"""Metrics by their definitions, against sums written out."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.lab.load import Failure, Goals, Outcome, Summary, result_fields


def outcome(sent: float, tokens: list[float], end: float | None = None, num: int | None = None) -> Outcome:
    return Outcome(
        planned_s=sent - 0.5,
        num_prompt_tokens=10,
        is_sent=True,
        sent_s=sent,
        token_times_s=tokens,
        end_s=tokens[-1] if end is None else end,
        num_output_tokens=len(tokens) if num is None else num,
        is_counted_by_server=num is not None,
    )


def failed(sent: float, status: int) -> Outcome:
    made = outcome(sent, [sent + 1])
    made.failure, made.status = Failure.STATUS, status
    return made


def test_a_small_run_is_summed_up() -> None:
    outcomes = [
        outcome(1.0, [1.5, 1.75, 2.25]),
        outcome(1.0, [2.0], num=1),
        # Two tokens in the last event: the server counts 4, three events came.
        outcome(2.25, [2.5, 3.0, 3.5], num=4),
        failed(2.0, 429),
    ]
    summary = Summary.of(outcomes, 4.0, Goals(ttft_ms=600, tpot_ms=400), (50, 99))
    assert (summary.num_completed, summary.num_failed) == (3, 1)
    assert summary.failures == {"status 429": 1}
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (30, 8)
    assert summary.requests_per_s == 0.75
    assert summary.output_tokens_per_s == 2
    assert summary.tokens_per_s == 9.5
    assert summary.num_counted_by_events == 1
    ttft, tpot, itl, e2el = (summary.metrics[name] for name in ("ttft", "tpot", "itl", "e2el"))
    assert (ttft.mean, ttft.median) == (pytest.approx(1750 / 3), 500)
    assert tpot.mean == pytest.approx((750 / 2 + 1000 / 3) / 2)
    assert itl.num == 4
    assert itl.mean == pytest.approx((250 + 500 + 500 + 500) / 4)
    assert e2el.mean == pytest.approx((1250 + 1000 + 1250) / 3)
    assert ttft.percentiles[0] == (50, 500)
    # The second one's first token comes after 1 s; its tpot is that of no further token.
    assert summary.goodput_per_s == 0.5
    # The first request ends as the third begins.
    assert summary.peak_concurrency == 2
    # Seconds begin with the first request, at 1.0: tokens at 1.5, 1.75 and then 2.0, 2.25, 2.5.
    assert summary.peak_output_tokens == 3
    assert summary.lag.mean == 500


@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.lists(st.floats(0.001, 5), min_size=1, max_size=6)),
        min_size=1,
        max_size=8,
    ),
    st.floats(1, 4000),
    st.floats(1, 4000),
)
def test_metrics_are_those_of_the_standard_library(
    drawn: list[tuple[float, list[float]]], ttft_ms: float, e2el_ms: float
) -> None:
    outcomes = []
    for sent, gaps in drawn:
        times = [sent]
        for gap in gaps:
            times.append(times[-1] + gap)
        outcomes.append(outcome(sent, times[1:]))
    summary = Summary.of(outcomes, 60.0, Goals(ttft_ms, None, e2el_ms), ())
    ttfts = [(each.token_times_s[0] - each.sent_s) * 1000 for each in outcomes]
    totals = [(each.token_times_s[-1] - each.sent_s) * 1000 for each in outcomes]
    assert summary.metrics["ttft"].mean == pytest.approx(statistics.fmean(ttfts))
    assert summary.metrics["ttft"].median == pytest.approx(statistics.median(ttfts))
    assert summary.metrics["ttft"].std == pytest.approx(statistics.pstdev(ttfts), abs=1e-6)
    assert summary.metrics["e2el"].mean == pytest.approx(statistics.fmean(totals))
    good = sum(first <= ttft_ms and total <= e2el_ms for first, total in zip(ttfts, totals))
    assert summary.num_good == good
    overlaps = [sum(other.sent_s <= each.sent_s < other.end_s for other in outcomes) for each in outcomes]
    assert summary.peak_concurrency == max(overlaps)


def test_a_run_without_a_whole_answer_has_zeros() -> None:
    summary = Summary.of([failed(0.0, 500), failed(1.0, 429), failed(1.0, 500)], 2.0)
    assert summary.failures == {"status 500": 2, "status 429": 1}
    assert summary.metrics["itl"].mean == summary.requests_per_s == summary.peak_concurrency == 0
    assert summary.goodput_per_s is None


def test_the_result_has_the_fields_of_vllms() -> None:
    outcomes = [outcome(0.0, [0.5, 0.75]), failed(0.0, 429)]
    summary = Summary.of(outcomes, 2.0, None, (99, 99.9))
    fields = result_fields(summary, {"model_id": "m"}, outcomes)
    assert fields["format"] == "hpu-duo bench serve 1"
    assert fields["model_id"] == "m"
    assert (fields["completed"], fields["failed"], fields["request_goodput"]) == (1, 1, None)
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for statistic in ("mean", "median", "std", "p99", "p99.9"):
            assert f"{statistic}_{metric}_ms" in fields
    assert fields["p99_itl_ms"] == 250
    assert fields["ttfts"] == [0.5, 1.0]
    assert fields["itls"] == [[0.25], []]
    assert fields["output_lens"] == [2, 0]
    assert "ttfts" not in result_fields(summary, {})


@pytest.mark.parametrize(
    "texts", [["ttft"], ["ttft:x"], ["itl:5"], ["ttft:-1"], ["ttft:nan"], ["ttft:1", "ttft:2"]]
)
def test_what_is_no_goal_is_refused(texts: list[str]) -> None:
    with pytest.raises(ValueError, match="expected goals such as"):
        Goals.parse(texts)


def test_goals_are_read() -> None:
    assert Goals.parse(["ttft:500", "e2el:1e4"]) == Goals(500, None, 10000)
    assert Goals.parse([]).is_empty


def test_a_run_of_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="a duration above 0"):
        Summary.of([], 0.0)
    with pytest.raises(ValueError, match="percentiles from 0 to 100"):
        Summary.of([], 1.0, percentiles=(101,))
