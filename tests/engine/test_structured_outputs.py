"""Outputs that keep to a grammar: every text, in any batch, after preemptions and failed steps."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from hpu_duo import HPUDuoModel
from hpu_duo.engine import intake
from hpu_duo.lab.replay import replay
from hpu_duo.request import FinishReason
from hpu_duo.sampling import SamplingParams, StructuredOutputs
from hpu_duo.startup.recorded_steps import options_of, read_log
from tests.engine.tiny import PATTERN, Tiny, assert_holds_nothing, make_tiny, serve, text_of, tokens_of
from tests.modeling.families import prompts_of
from tests.tiers import further

EOS = 2
PROMPTS = prompts_of([30, 12, 1, 22], seed=3)
SMALL: dict[str, Any] = {"pattern": PATTERN, "num_blocks": 8, "max_model_len": 64}
"""Few blocks, so that requests are preempted."""

CODE = re.compile(r"[A-Z]{2}-[0-9]{1,4}( [a-z]+)?!")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 5},
        "age": {"type": "integer", "minimum": 7, "maximum": 112},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The tiny model with an end-of-text token."""
    tiny = make_tiny(tmp_path_factory.mktemp("ending"), {EOS: "<eos>"})
    GenerationConfig(pad_token_id=0, eos_token_id=EOS).save_pretrained(tiny.path)
    return tiny


@pytest.fixture(scope="module")
def served(ending: Tiny) -> HPUDuoModel:
    return ending.load(max_model_len=160)


def is_person(text: str) -> bool:
    found = json.loads(text)
    is_named = set(found) == {"name", "age"} and 1 <= len(found["name"]) <= 5
    return is_named and type(found["age"]) is int and 7 <= found["age"] <= 112


def is_nested(text: str) -> bool:
    return bool(re.fullmatch(r"(\(.*\))?a", text)) and text.count("(") == text.count(")")


KINDS: dict[str, tuple[StructuredOutputs, Callable[[str], object]]] = {
    "regex": (StructuredOutputs(regex=CODE.pattern), CODE.fullmatch),
    "choice": (StructuredOutputs(choice=["yes", "no", 'say "\\"']), {"yes", "no", 'say "\\"'}.__contains__),
    "json_object": (StructuredOutputs(json_object=True), lambda text: isinstance(json.loads(text), dict)),
    "json": (StructuredOutputs(json=PERSON), is_person),
    "grammar": (StructuredOutputs(grammar='start: "a" | "(" start ")" "a"'), is_nested),
}


def asked(kind: str, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, "structured_outputs": KINDS[kind][0], **changes})


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_text_that_ends_is_one_of_the_grammar(served: HPUDuoModel, kind: str) -> None:
    params = [
        asked(kind, temperature=0),
        asked(kind, temperature=1.5, seed=1, n=8, max_tokens=120),
        asked(kind, temperature=0.7, top_p=0.8, repetition_penalty=1.4, seed=2, n=4, max_tokens=120),
        asked(kind, temperature=1.0, logit_bias={EOS: -100, 0: 100}, seed=3, n=4),
    ]
    is_good, num_ended = KINDS[kind][1], 0
    for samples in serve(served, PROMPTS, params):
        for sample in samples:
            if sample.finish_reason is FinishReason.STOP:
                num_ended += 1
                assert is_good(sample.text), sample.text
            else:
                assert sample.finish_reason is FinishReason.LENGTH
    assert num_ended >= 5


@dataclass(frozen=True)
class Wanted:
    """A schema, and whether a value keeps to it, found in another way."""

    schema: dict[str, Any]
    holds: Callable[[Any], bool]


def _integers(bounds: tuple[int, int]) -> Wanted:
    low, high = min(bounds), max(bounds)
    schema = {"type": "integer", "minimum": low, "maximum": high}
    return Wanted(schema, lambda value: type(value) is int and low <= value <= high)


def _enum(values: list[Any]) -> Wanted:
    return Wanted(
        {"enum": values}, lambda value: any(value == one and type(value) is type(one) for one in values)
    )


def _array(item: Wanted) -> Wanted:
    schema = {"type": "array", "items": item.schema, "minItems": 1, "maxItems": 3}
    return Wanted(
        schema, lambda value: isinstance(value, list) and 1 <= len(value) <= 3 and all(map(item.holds, value))
    )


def _object(parts: dict[str, Wanted]) -> Wanted:
    schema = {
        "type": "object",
        "properties": {name: part.schema for name, part in parts.items()},
        "required": list(parts),
        "additionalProperties": False,
    }
    return Wanted(
        schema,
        lambda value: (
            isinstance(value, dict)
            and value.keys() == parts.keys()
            and all(part.holds(value[name]) for name, part in parts.items())
        ),
    )


# The tokenizer spells all printable characters but the one whose token is the end of a text.
NAMES = st.text(
    st.characters(codec="ascii", exclude_categories=["Cc"], exclude_characters="#"), min_size=1, max_size=4
)
SCHEMAS = st.recursive(
    st.tuples(st.integers(-999, 999), st.integers(-999, 999)).map(_integers)
    | st.lists(NAMES | st.none() | st.integers(0, 9), min_size=1, max_size=3, unique_by=repr).map(_enum),
    lambda inner: inner.map(_array) | st.dictionaries(NAMES, inner, min_size=1, max_size=2).map(_object),
    max_leaves=3,
)


@pytest.mark.slow
@given(wanted=SCHEMAS, seed=st.integers(0, 1000))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_schemas_are_kept(served: HPUDuoModel, wanted: Wanted, seed: int) -> None:
    structured = StructuredOutputs(json=wanted.schema)
    params = SamplingParams(temperature=1.0, seed=seed, n=3, max_tokens=120, structured_outputs=structured)
    for sample in served.engine.generate([[5, 6, 7]], params)[0]:
        if sample.finish_reason is FinishReason.STOP:
            assert wanted.holds(json.loads(sample.text)), sample.text


ANYTHING = StructuredOutputs(regex=r"(?s:.*)")


@pytest.mark.parametrize("options", [{}, SMALL], ids=["roomy", "preempted"])
def test_a_grammar_that_allows_every_text_changes_no_token(ending: Tiny, options: dict[str, Any]) -> None:
    served = ending.load(**options, enable_prefix_caching=False)  # the same sums twice
    free = [
        SamplingParams(temperature=0, max_tokens=9, logprobs=2),
        SamplingParams(temperature=1.3, seed=4, max_tokens=20, n=3),
        SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.3, seed=5, max_tokens=25),
        SamplingParams(temperature=0, logit_bias={5: 3.0}, max_tokens=15, min_tokens=4),
    ]
    expected = serve(served, PROMPTS, free)
    done = serve(served, PROMPTS, [replace(each, structured_outputs=ANYTHING) for each in free])
    assert tokens_of(done) == tokens_of(expected)
    assert [[each.logprobs for each in samples] for samples in done] == [
        [each.logprobs for each in samples] for samples in expected
    ]
    assert (served.stats().num_preemptions > 0) is bool(options)


@pytest.mark.parametrize("kind", ["regex", *further("json")])
def test_preemptions_change_no_output(ending: Tiny, kind: str) -> None:
    params = [asked(kind, temperature=1.2, seed=seed, max_tokens=30) for seed in range(4)]
    small, roomy = ending.load(**SMALL), ending.load(pattern=PATTERN)
    assert tokens_of(serve(small, PROMPTS, params)) == tokens_of(serve(roomy, PROMPTS, params))
    assert small.stats().num_preemptions > 0


class Interrupt(BaseException):
    """Raised where Ctrl-C may be."""


def test_a_failed_step_changes_no_output(ending: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [asked("regex", temperature=1.2, seed=seed) for seed in range(4)]
    served = ending.load()
    expected = tokens_of(serve(served, PROMPTS, params))
    launch, num_runs = served.engine.runner.launch, 0

    def fail_behind_every_ninth(*args: Any) -> Any:
        nonlocal num_runs
        num_runs += 1
        result = launch(*args)
        if num_runs % 9 == 0:
            raise Interrupt
        return result

    monkeypatch.setattr(served.engine.runner, "launch", fail_behind_every_ninth)
    names = [served.engine.add_request(prompt, each) for prompt, each in zip(PROMPTS, params)]
    tokens: dict[str, list[int]] = {name: [] for name in names}
    num_failed = 0
    while served.engine.has_unfinished:
        try:
            outputs = served.engine.step()
        except Interrupt:
            num_failed += 1
            continue
        for output in outputs:
            tokens[output.request_id] += output.token_ids
    assert num_failed > 3
    assert [[tokens[name]] for name in names] == expected


@pytest.mark.parametrize("decode_len", [1, 4])
def test_forced_tokens_are_the_beginning_of_the_output(ending: Tiny, decode_len: int) -> None:
    served = ending.load(decode_len=decode_len, max_model_len=160)
    ids = served.engine.tokenizer("AB-12", add_special_tokens=False)["input_ids"]  # type: ignore[misc]
    params = [asked("regex", temperature=1.5, seed=seed, forced_token_ids=ids) for seed in range(4)]
    for (sample,) in serve(served, PROMPTS, params):
        assert sample.text.startswith("AB-12")
        assert sample.finish_reason is FinishReason.LENGTH or CODE.fullmatch(sample.text)
    wrong = [*ids[:3], ids[0]]
    with pytest.raises(
        ValueError, match=f"forced_token_ids: expected forced tokens that .* got token {ids[0]} at place 3"
    ):
        served.engine.add_request([5], asked("regex", forced_token_ids=wrong))
    assert_holds_nothing(served)


def test_an_output_that_is_whole_with_its_last_token_is_not_cut(served: HPUDuoModel) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, structured_outputs=StructuredOutputs(choice=["yes"]))
    ((sample,),) = serve(served, [[5, 6]], params)
    assert (sample.text, sample.finish_reason) == ("yes", FinishReason.STOP)
    ((cut,),) = serve(served, [[5, 6]], replace(params, max_tokens=2))
    assert (cut.text, cut.finish_reason) == ("ye", FinishReason.LENGTH)


def test_a_grammar_ends_an_output_before_min_tokens_and_despite_ignore_eos(served: HPUDuoModel) -> None:
    letters = StructuredOutputs(regex="a{2,4}")
    params = SamplingParams(temperature=0, logit_bias={EOS: 100}, structured_outputs=letters, max_tokens=20)
    changed = [({}, 2), ({"min_tokens": 3}, 3), ({"min_tokens": 9}, 4), ({"ignore_eos": True}, 4)]
    for changes, num_letters in changed:
        ((sample,),) = serve(served, [[5, 6]], replace(params, **changes))
        assert (sample.text, sample.finish_reason) == ("a" * num_letters, FinishReason.STOP)


def test_others_in_the_batch_are_as_they_would_be_alone(served: HPUDuoModel) -> None:
    free = SamplingParams(temperature=1.1, seed=9, max_tokens=20)
    alone = tokens_of(serve(served, PROMPTS[:1], free))
    together = tokens_of(
        serve(served, PROMPTS[:3], [free, asked("json", temperature=0), asked("regex", seed=1)])
    )
    assert together[:1] == alone


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"regex": "[a"}, r"structured_outputs.regex: .*unclosed character class"),
        ({"json": {"type": "objekt"}}, "structured_outputs.json: Invalid type: objekt"),
        ({"json": {"$ref": "#/no"}}, "structured_outputs.json: .*/no.* does not exist"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "structured_outputs.json: Unsatisfiable"),
        ({"json": {"type": "object", "if": {}}}, r"structured_outputs.json: Unimplemented keys: \[\"if\"\]"),
        ({"grammar": "start: x"}, 'structured_outputs.grammar: .*unknown name: "x"'),
    ],
)
def test_what_cannot_be_compiled_is_refused_and_leaves_nothing(
    served: HPUDuoModel, wanted: dict[str, Any], message: str
) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(**wanted))
    for ask in (served.engine.prepare, lambda given: served.engine.add_request([5, 6], given)):
        with pytest.raises(ValueError, match=message) as error:
            ask(params)
        assert "\n" not in str(error.value)
    assert_holds_nothing(served)


def test_a_model_without_what_it_needs_refuses(
    tiny: Tiny, ending: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="expected a model with an end-of-text token"):
        tiny.load().engine.prepare(asked("regex"))
    for file in ending.path.iterdir():
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match="structured_outputs: expected a model with a tokenizer"):
        HPUDuoModel.from_pretrained(tmp_path, max_model_len=64).engine.prepare(asked("regex"))
    monkeypatch.setattr(intake, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"llguidance, which is not installed: pip install .*structured"):
        ending.load().engine.add_request([5], asked("regex"))


def test_recorded_steps_with_grammars_are_replayed(ending: Tiny, tmp_path: Path) -> None:
    served = ending.load(record_steps=tmp_path / "steps", **SMALL)
    params = [asked("json", temperature=0), asked("regex", seed=1, n=2), asked("choice", temperature=0)]
    serve(served, PROMPTS[:3], params)
    served.engine.step_recorder.close()  # type: ignore[union-attr]
    log = read_log(tmp_path / "steps")
    assert any(step.message.sampling.masks is not None for step in log if step.message.sampling)
    again = HPUDuoModel.from_pretrained(ending.path, **options_of(log.origin))
    report = replay(again.engine, ending.path, log)
    assert report.differences == ()
    assert report.num_tokens > 20


def test_text_is_that_of_its_tokens(served: HPUDuoModel) -> None:
    ((sample,),) = serve(served, [[5, 6]], asked("regex", temperature=1.0, seed=4))
    assert sample.text == text_of([token for token in sample.token_ids if token != EOS])
