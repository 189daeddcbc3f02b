"""LongBench's prompts as its scripts make them: cut, in a chat template or not, ended at a line."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hpu_duo.lab.eval import LongBenchItem, Subject
from hpu_duo.lab.eval.answering import Question, answered, check_questions
from hpu_duo.lab.eval.longbench import DATASETS, LongBenchProtocol, MetricSource

Load = Callable[[float | None], Subject]
OFFICIAL = MetricSource.OFFICIAL
CHAT = "{% for message in messages %}USER{{ message['content'] }}END{% endfor %}"


@pytest.fixture
def chatty(builtin: Load) -> Iterator[Subject]:
    """The built-in model with another chat template, which is taken back."""
    subject = builtin(0.5)
    own = subject.tokenizer.chat_template
    subject.tokenizer.chat_template = CHAT + "{% if add_generation_prompt %}BOT{% endif %}"
    yield subject
    subject.tokenizer.chat_template = own


def item(dataset: str, context: str = "It rained.") -> LongBenchItem:
    return LongBenchItem(dataset, context, "Who?", ("the baker",), ("x",), 4100)


def text(subject: Subject, question: Question) -> str:
    return str(subject.tokenizer.decode(list(question.prompt), skip_special_tokens=True))


def test_only_data_sets_that_end_with_an_example_or_code_go_without_a_chat_template(chatty: Subject) -> None:
    protocol = LongBenchProtocol(OFFICIAL, is_chat=True)
    in_chat = {
        name for name in DATASETS if text(chatty, protocol.question(chatty, item(name), 0))[:4] == "USER"
    }
    assert set(DATASETS) - in_chat == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    asked = text(chatty, protocol.question(chatty, item("qasper"), 0))
    assert asked.endswith("ENDBOT")


def test_a_chat_without_a_template_is_refused(chatty: Subject) -> None:
    chatty.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="a tokenizer with a chat template"):
        LongBenchProtocol(is_chat=True).question(chatty, item("qasper"), 0)


def test_a_long_prompt_is_cut_as_text_before_the_template_is_put_around_it(chatty: Subject) -> None:
    long = item("qasper", "The old baker sold a boat near the river. " * 40)
    protocol = LongBenchProtocol(OFFICIAL, max_length=60, is_chat=True)
    asked = protocol.question(chatty, long, 0)
    whole = chatty.encode(text(chatty, LongBenchProtocol().question(chatty, long, 0)), is_start=True)
    halves = [
        str(chatty.tokenizer.decode(one, skip_special_tokens=True)) for one in (whole[:30], whole[-30:])
    ]
    assert text(chatty, asked) == f"USER{halves[0]}{halves[1]}ENDBOT"


def test_ours_cuts_token_ids(builtin: Load) -> None:
    subject = builtin(0.5)
    long = item("qasper", "The old baker sold a boat near the river. " * 40)
    whole = LongBenchProtocol().question(subject, long, 0).prompt
    cut = LongBenchProtocol(max_length=61).question(subject, long, 0).prompt
    assert cut == whole[:30] + whole[-31:]
    with pytest.raises(ValueError, match="max_length of at least 2"):
        LongBenchProtocol(max_length=1)


def test_only_samsum_ends_at_a_line_and_only_in_the_official_protocol(builtin: Load) -> None:
    subject = builtin(0.5)
    ending = {
        (name, source)
        for name in DATASETS
        for source in MetricSource
        if LongBenchProtocol(source).question(subject, item(name), 0).ends
    }
    assert ending == {("samsum", OFFICIAL)}
    ends = LongBenchProtocol(OFFICIAL).question(subject, item("samsum"), 0).ends
    assert ends == (subject.encode("\n")[-1],)


def test_lengths_fall_into_the_ranges_of_longbench_e() -> None:
    found = {
        length: LongBenchItem("qasper", "", "", ("a",), (), length).length_bucket
        for length in (0, 3999, 4000, 7999, 8000, 90000)
    }
    assert found == {0: "0-4k", 3999: "0-4k", 4000: "4-8k", 7999: "4-8k", 8000: "8k+", 90000: "8k+"}


def test_an_answer_ends_at_a_token_but_not_before_its_first_one(builtin: Load) -> None:
    """Whatever the model says second ends the answer; what it says first does not."""
    subject = builtin(None)
    prompt = subject.encode("The old baker", is_start=True)
    ((free,), _) = subject.answer([prompt], [6])
    said = subject.encode(free)
    assert len(said) > 2
    ((ended,), _) = subject.answer([prompt], [6], ends=[(said[1],)])
    assert subject.encode(ended) == said[:1]
    ((kept,), _) = subject.answer([prompt], [6], ends=[(said[0],)])
    assert kept


def test_simulated_decodes_read_what_heads_have_kept(builtin: Load) -> None:
    """With full attention they change nothing; a prompt that is shorter than they are is decoded whole."""
    subject = builtin(None)
    prompt = subject.encode("The old baker sold a boat near the river. After the winter", is_start=True)
    # Three tokens: the fourth is a near tie, which falls otherwise where products are rounded otherwise.
    (one,), (fifty,) = (subject.answer([prompt], [3], num_decoded=num)[0] for num in (1, 50))
    assert one == fifty
    steps = [subject.model.stats().num_steps]
    for num in (1, 9):
        subject.answer([prompt], [5], num_decoded=num)
        steps.append(subject.model.stats().num_steps)
    assert (steps[2] - steps[1]) - (steps[1] - steps[0]) == 8


def test_answers_go_on_behind_those_that_are_there(builtin: Load, tmp_path: Any) -> None:
    from hpu_duo.lab.eval import ResultFile

    subject, asked = builtin(0.5), []

    def question(at: int) -> Question:
        asked.append(at)
        prompt = tuple(subject.encode(f"The old baker {at}", is_start=True))
        return Question(prompt, 2, {"index": at}, lambda pred: float(at % 2))

    whole = list(answered(subject, 11, question))
    path = tmp_path / "results.jsonl"
    first = ResultFile(path, "x", {})
    for record in whole[:9]:
        first.append(record)
    asked.clear()
    assert list(answered(subject, 11, question, ResultFile(path, "x", {}))) == whole
    assert asked == [9, 10]
    assert [record["score"] for record in whole] == [float(at % 2) for at in range(11)]
    with pytest.raises(ValueError, match="prompts of at most 8192"):
        check_questions(subject, [Question((5,) * 8192, 1, {}, lambda _: 0.0)])
