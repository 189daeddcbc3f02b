"""Policies of the KV cache at equal budgets: what they load, what is measured once, and the rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpu_duo.heads import HeadPattern
from hpu_duo.lab.eval import KVBytes, ResultFile, policy_curve
from hpu_duo.lab.eval.interval import wilson
from hpu_duo.lab.eval.perplexity import PerplexityResult
from hpu_duo.lab.eval.policy_curve import (
    PolicyPoint,
    PolicyTask,
    measured_points,
    perplexity_interval,
    policy_points,
    policy_rows,
)

SCORES = np.arange(16, dtype=np.float32).reshape(4, 4) / 16
PATTERN = HeadPattern(SCORES, sink=16, recent=64)
KV = {"kv_num_tokens": 10, "held_bytes": 5, "full_bytes": 10, "kv_num_texts": 1}


def test_full_attention_is_measured_once_and_others_at_every_budget() -> None:
    points = policy_points(["h2o", "full", "duo"], [0.5, 0.1])
    assert [(one.policy, one.budget) for one in points] == [
        ("h2o", 0.1),
        ("h2o", 0.5),
        ("full", 1.0),
        ("duo", 0.1),
        ("duo", 0.5),
    ]
    for wrong in ([], ["h2o", "h2o"]):
        with pytest.raises(ValueError, match="policies, each once"):
            policy_points(wrong, [0.1])
    with pytest.raises(ValueError, match=r"budgets above 0 and up to 1, got 1\.5"):
        policy_points(["h2o"], [1.5])


@pytest.mark.parametrize(
    ("budget", "num_heads"), [(0.04, 0), (0.05, 0), (0.1, 1), (0.2, 2), (0.5, 7), (1.0, 16)]
)
def test_duo_keeps_the_most_heads_that_a_budget_holds(budget: float, num_heads: int) -> None:
    """At 2,000 tokens a streaming head keeps 80, which is 4 %, and a retrieval head all of them."""
    pattern = PolicyPoint("duo", budget).loading(PATTERN, 2000)["pattern"]
    assert int(pattern.mask.sum()) == num_heads
    held = num_heads * 2000 + (16 - num_heads) * 80
    assert held <= budget * 16 * 2000 + 1e-6
    assert num_heads == 16 or held + 1920 > budget * 16 * 2000


def test_other_policies_keep_as_many_tokens_in_every_head() -> None:
    streaming = PolicyPoint("streaming", 0.1).loading(PATTERN, 2000)["pattern"]
    assert (streaming.sink, streaming.recent, int(streaming.mask.sum())) == (4, 196, 0)
    assert PolicyPoint("h2o:recent=0.25", 0.1).loading(PATTERN, 2000) == {
        "kv_policy": "h2o:recent=0.25",
        "kv_budget": 200.0,
    }
    assert PolicyPoint("full", 1.0).loading(PATTERN, 2000) == {}


def test_budgets_that_windows_alone_exceed_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 16.0%, which the windows .* of 500 tokens, got 10.0%"):
        PolicyPoint("duo", 0.1).loading(PATTERN, 500)
    with pytest.raises(ValueError, match="more than 4 tokens, got 3"):
        PolicyPoint("streaming", 0.01).loading(PATTERN, 300)


def test_points_that_are_there_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[Any, str]] = []

    def measure(_: PolicyTask, name: str, subject: Any) -> dict[str, Any]:
        measured.append((subject, name))
        return {"value": 0.5, "value_low": 0.2, "value_high": 0.8, "num_answers": 4, **KV}

    monkeypatch.setattr(PolicyTask, "measure", measure)
    points, path = policy_points(["h2o", "full"], [0.2]), tmp_path / "results.jsonl"
    loaded: list[PolicyPoint] = []

    def load(point: PolicyPoint) -> Any:
        loaded.append(point)
        return point

    first = list(measured_points(points, PolicyTask(("passkey",)), load, ResultFile(path, "policies", {})))
    assert measured == [(point, "passkey") for point in points]
    both = PolicyTask(("passkey", "rehearsed"))
    again = list(measured_points(points, both, load, ResultFile(path, "policies", {})))
    assert measured[2:] == [(point, "rehearsed") for point in points]
    assert [record for record in again if record["task"] == "passkey"] == first
    list(measured_points(points, both, load, ResultFile(path, "policies", {})))
    assert len(loaded) == 4
    rows = policy_rows(again)
    assert [(row["task"], row["policy"], row["kv_ratio"]) for row in rows] == [
        ("passkey", "h2o", 0.5),
        ("passkey", "full", 0.5),
        ("rehearsed", "h2o", 0.5),
        ("rehearsed", "full", 0.5),
    ]


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ValueError, match="tasks among passkey, rehearsed, perplexity, ruler, got 'chess'"):
        PolicyTask(("chess",))


def test_the_interval_of_a_perplexity_is_that_of_its_windows() -> None:
    windows = tuple((64 * at, 64, -64 * (1.0 + 0.1 * (-1) ** at)) for at in range(16))
    found = PerplexityResult(1, windows, (KVBytes(1, 1, 1),) * 16)
    low, high = perplexity_interval(found)
    # Standard deviation 0.1 * sqrt(16 / 15), sixteen windows.
    reach = 1.96 * 0.1 * (16 / 15) ** 0.5 / 4
    assert (np.log(low), np.log(high)) == (pytest.approx(1 - reach), pytest.approx(1 + reach))
    assert perplexity_interval(PerplexityResult(1, windows[:1], (KVBytes(1, 1, 1),)))[1] == float("inf")


def test_tasks_are_measured_through_the_engine(builtin: Any) -> None:
    task = PolicyTask(policy_curve.TASKS[:3], 400, 1, 2, 3, rehearsals=policy_curve.Rehearsals(1))
    full = {name: task.measure(name, builtin(None)) for name in task.names}
    assert (full["passkey"]["value"], full["rehearsed"]["value"]) == (1.0, 1.0)
    assert (full["passkey"]["value_low"], full["passkey"]["value_high"]) == wilson(1.0, 2)
    streaming = task.measure("perplexity", builtin(1.0))
    assert (
        1.0 < full["perplexity"]["value_low"] < full["perplexity"]["value"] < full["perplexity"]["value_high"]
    )
    assert streaming["held_bytes"] < full["perplexity"]["held_bytes"]
    assert streaming["num_answers"] == full["perplexity"]["num_answers"]
