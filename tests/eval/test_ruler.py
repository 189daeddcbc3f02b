"""RULER-style samples: what they hold, how long they are, and that they are the same everywhere."""

import hashlib
import json
import re

import pytest

from hpu_duo.eval import RULER_TASKS, RulerSample, ruler_sample


def words(text: str) -> int:
    return len(text.split())


def sample(task: str, num_tokens: int = 1500, index: int = 0, seed: int = 0) -> RulerSample:
    return ruler_sample(task, words, num_tokens, index, seed)


@pytest.mark.parametrize("task", RULER_TASKS)
def test_a_sample_is_as_long_as_asked_for_but_never_longer(task: str) -> None:
    for num_tokens in (1200, 2000):
        one = sample(task, num_tokens)
        assert one.length == words(one.input) + words(one.answer_prefix) + one.max_new_tokens
        assert num_tokens - 120 < one.length <= num_tokens


@pytest.mark.parametrize("task", RULER_TASKS)
def test_samples_are_functions_of_task_index_and_seed(task: str) -> None:
    assert sample(task) == sample(task)
    assert len({sample(task, index=i, seed=j).input for i in range(3) for j in range(2)}) == 6


def test_samples_are_the_same_on_every_platform() -> None:
    """If this number changes, scores of before and after cannot be compared."""
    records = [sample(task, index=1, seed=5).as_record() for task in RULER_TASKS]
    digest = hashlib.sha256(json.dumps(records).encode()).hexdigest()
    assert digest[:16] == "2de728d77a95987e"


@pytest.mark.parametrize("task", [task for task in RULER_TASKS if task.startswith("niah")])
def test_every_value_asked_for_lies_in_the_haystack_beside_its_key(task: str) -> None:
    one = sample(task)
    haystack, _, question = one.input.rpartition("\n")
    hidden = re.findall(r"The special (?:number|code) of (.+?) is (\S+)\.", haystack)
    asked = {value for key, value in hidden if key in question and key in one.answer_prefix}
    assert asked == set(one.outputs)
    assert len(one.outputs) == {"niah_multivalue": 4, "niah_multiquery": 4}.get(task, 1)
    assert len(hidden) == {"niah_multikey_1": 4, "niah_multivalue": 4, "niah_multiquery": 4}.get(
        task, 1
    ) or task in ("niah_multikey_2", "niah_multikey_3")
    assert one.score(one.answer_prefix + ", ".join(one.outputs)) == 1.0
    assert one.score("nothing") == 0.0


def test_the_variables_asked_for_are_those_that_follow_from_the_value() -> None:
    one = sample("vt")
    known = {re.findall(r"value (\d+)", one.input)[-1]}
    for name, value in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", one.input):
        if value in known:
            known.add(name)
    assert {name for name in known if name.isalpha()} == set(one.outputs)
    assert len(one.outputs) == 5


@pytest.mark.parametrize(("task", "num"), [("cwe", 10), ("fwe", 3)])
def test_the_words_asked_for_are_those_that_occur_most_often(task: str, num: int) -> None:
    text = sample(task).input.split("follows. ")[1].split("\nWhat")[0]
    listed = re.findall(r"[a-z]+\d*", re.sub(r"\d+\. ", "", text))
    counted = sorted(((listed.count(word), word) for word in set(listed)), reverse=True)
    assert {word for _, word in counted[:num]} == set(sample(task).outputs)
    assert counted[num - 1][0] > counted[num][0]


def test_an_unknown_task_and_a_budget_that_is_too_small_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a task among niah_single_1.*got 'niah'"):
        sample("niah")
    with pytest.raises(ValueError, match="num_tokens of at least"):
        sample("cwe", 300)
