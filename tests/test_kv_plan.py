"""Plans of what heads keep, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.config.kv_plan import FORMAT, Keep, KVPlan

KEEPS = st.sampled_from([Keep(), Keep("ring:sink=2,recent=6"), Keep("h2o", 0.2), Keep("tova:protect=1", 64)])
SHAPE = {"format": FORMAT, "num_layers": 4, "num_kv_heads": 2}


@st.composite
def plans(draw: st.DrawFn) -> KVPlan:
    num_heads = draw(st.integers(1, 9))
    layers = draw(st.lists(st.lists(KEEPS, min_size=num_heads, max_size=num_heads), min_size=1, max_size=12))
    return KVPlan(tuple(map(tuple, layers)))


@given(plan=plans())
def test_a_file_says_what_the_plan_says(plan: KVPlan) -> None:
    text = yaml.safe_dump(plan.as_dict(), sort_keys=False)
    assert KVPlan.from_dict(yaml.safe_load(text)) == plan


def test_a_file_is_written_once_and_read(tmp_path: Path) -> None:
    plan = KVPlan.of_mask([[True, False], [False, False]], Keep("h2o", 256))
    plan.save(tmp_path / "plan.yaml")
    assert KVPlan.load(tmp_path / "plan.yaml") == plan
    assert plan.layers[0] == (Keep(), Keep("h2o", 256))
    with pytest.raises(FileExistsError):
        plan.save(tmp_path / "plan.yaml")


def test_entries_name_layers_and_heads_and_others_keep_the_default(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(
        "format: hpu-duo kv plan 1\nnum_layers: 4\nnum_kv_heads: 2\n"
        "default: {keep: 'ring:sink=4,recent=60'}\n"
        "heads:\n- {layers: '0,2-3', heads: 1, keep: h2o, budget: 0.5}\n- {layers: 1, keep: all}\n"
    )
    ring, h2o = Keep("ring:sink=4,recent=60"), Keep("h2o", 0.5)
    plan = KVPlan.load(tmp_path / "plan.yaml")
    assert plan.layers == ((ring, h2o), (Keep(), Keep()), (ring, h2o), (ring, h2o))
    assert plan.has_budgets


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([], "expected a KV plan to be a mapping"),
        ({**SHAPE, "format": "2"}, "expected the format 'hpu-duo kv plan 1', got '2'"),
        ({"format": FORMAT, "num_layers": 1}, "expected num_kv_heads in a KV plan"),
        ({**SHAPE, "num_layers": 0}, "expected num_layers to be an integer >= 1, got 0"),
        ({**SHAPE, "sinks": 4}, "in a KV plan, got sinks"),
        ({**SHAPE, "heads": {}}, "expected heads to be a list"),
        ({**SHAPE, "heads": [{"layers": 0}]}, "expected keep in entry 1 of heads"),
        ({**SHAPE, "heads": [{"layer": 0, "keep": "all"}]}, "in entry 1 of heads, got layer"),
        ({**SHAPE, "heads": [{"layers": "0-4", "keep": "all"}]}, "different numbers from 0 to 3, got '0-4'"),
        ({**SHAPE, "heads": [{"heads": "a", "keep": "all"}]}, "as 'all' or such as '0-3,7', got 'a'"),
        ({**SHAPE, "heads": [{"heads": "1,1", "keep": "all"}]}, "different numbers from 0 to 1"),
        ({**SHAPE, "heads": [{"heads": "1-0", "keep": "all"}]}, "such as '0-3,7', got '1-0'"),
        ({**SHAPE, "heads": [{"layers": "3-1,0", "keep": "all"}]}, "such as '0-3,7', got '3-1,0'"),
        ({**SHAPE, "default": {"keep": "h2o", "budget": float("inf")}}, "a whole number of tokens, got inf"),
        ({**SHAPE, "heads": [{"keep": "all"}, {"heads": 1, "keep": "all"}]}, "names head 1 of layer 0 again"),
        ({**SHAPE, "default": {"keep": "h2o"}}, "default: expected a budget for 'h2o', got None"),
        ({**SHAPE, "default": {"keep": "all", "budget": 3}}, "expected no budget for 'all'"),
        ({**SHAPE, "default": {"keep": "h2o", "budget": 2.5}}, "a whole number of tokens, got 2.5"),
        ({**SHAPE, "default": {"keep": 3}}, "expected all, ring or a KV policy, got 3"),
    ],
)
def test_what_is_no_plan_is_refused_in_a_sentence(fields: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        KVPlan.from_dict(fields)
    assert message in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("a: [")
    for name, message in (("plan.yaml", "cannot read the KV plan"), ("missing.yaml", "cannot read")):
        with pytest.raises(ValueError, match=message):
            KVPlan.load(tmp_path / name)
    with pytest.raises(ValueError, match="expected equally many KV heads in each layer"):
        KVPlan(((Keep(),), ()))
