"""``docs/compatibility.md`` against the installed transformers and the code."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin

from hpu_duo import HPUDuoModel
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import Tiny

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \|", re.MULTILINE)


def rows_of(heading: str) -> dict[str, str]:
    """The verdict on each argument in the table below a heading."""
    text = PAGE.read_text(encoding="utf-8")
    below = text[text.index(heading + "\n") + len(heading) :]
    found = ROW.findall(re.split(r"^#", below, maxsplit=1, flags=re.MULTILINE)[0])
    assert len(dict(found)) == len(found) > 10
    assert {verdict for _, verdict in found} == {"same", "differs", "refused"}
    return dict(found)


ARGUMENTS = rows_of("### Arguments of `generate`")
FIELDS = rows_of("### Fields of `GenerationConfig`")
PARAMS = rows_of("## vLLM")
KNOWN = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
KNOWN_FIELDS = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {
    "transformers_version"
}


@pytest.fixture(scope="module")
def served(tiny: Tiny) -> HPUDuoModel:
    return tiny.load()


def test_every_argument_of_transformers_is_listed() -> None:
    assert sorted(KNOWN - set(ARGUMENTS)) == []
    assert sorted(KNOWN_FIELDS - set(FIELDS)) == []


def test_arguments_are_listed_where_they_belong() -> None:
    assert not set(ARGUMENTS) & set(FIELDS)


REFUSED = [name for name, verdict in {**ARGUMENTS, **FIELDS}.items() if verdict == "refused"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_listed_as_refused_is_refused_by_name(served: HPUDuoModel, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        served.generate([[5]], max_new_tokens=1, **{name: 3})
    if name in KNOWN | KNOWN_FIELDS:
        served.generate([[5]], max_new_tokens=1, **{name: None})


VALUES: dict[str, Any] = {
    "inputs": [[5, 6]],
    "logits_processor": [lambda ids, scores: scores],
    "stopping_criteria": [lambda ids, scores: torch.zeros(1, dtype=torch.bool)],
    "prefix_allowed_tokens_fn": lambda batch_id, ids: [3],
    "generation_config": GenerationConfig(),
    "bad_words_ids": [[4]],
    "begin_suppress_tokens": [4],
    "suppress_tokens": [4],
    "exponential_decay_length_penalty": (1, 1.5),
    "sequence_bias": {(4,): 1.0},
    "stop_strings": ["x"],
    "cache_implementation": "static",
    "watermarking_config": None,
    "compile_config": None,
    "assistant_model": None,
    "use_mtp": None,
    "streamer": None,
    "early_stopping": True,
    "do_sample": True,
}
"""Values for arguments that do not take 0.5 or 1."""


@pytest.mark.parametrize("name", [name for name in {**ARGUMENTS, **FIELDS} if name not in REFUSED])
def test_what_is_not_listed_as_refused_is_served(served: HPUDuoModel, name: str) -> None:
    if name not in KNOWN | KNOWN_FIELDS and name in ("top_h", "use_mtp"):
        pytest.skip(f"the installed transformers has no {name}")
    takes_share = name.endswith("_p") or name in ("epsilon_cutoff", "eta_cutoff", "top_h", "temperature")
    value = VALUES.get(name, 0.5 if takes_share else 4 if name == "max_length" else 1)
    kwargs = {"max_new_tokens": 2, "min_new_tokens": 0, "eos_token_id": 9, name: value}
    if name == "max_length":
        del kwargs["max_new_tokens"]
    output = served.generate(**{"inputs": [[5, 6]], "do_sample": True, "seed": 1, **kwargs})
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    assert sequences.shape[0] == 1
    assert 2 < sequences.shape[1] <= 4


def test_fields_that_are_not_refused_are_those_of_our_class() -> None:
    ours = {field.name for field in dataclasses.fields(SamplingParams)}
    beside = {"forced_token_ids", "decoded_prompt_tokens", "stop_like_transformers", "host_sampler"}
    beside |= {"cache_salt", "priority", "user", "expected_tokens", "speculate", "prediction_token_ids"}
    assert {name for name, verdict in PARAMS.items() if verdict != "refused"} == ours - beside
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in beside)


@pytest.mark.parametrize("name", [name for name, verdict in PARAMS.items() if verdict == "refused"])
def test_fields_that_are_refused_are_named(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: 1})


def test_caches_of_transformers_are_taken_and_no_others(served: HPUDuoModel) -> None:
    taken = []
    for name in CACHES:
        try:
            served.generate([[5]], max_new_tokens=1, cache_implementation=name)
        except ValueError:
            continue
        taken.append(name)
    assert taken == [name for name in CACHES if takes(name)]
    assert {"static", "foo"} & set(taken) == {"static"}


CACHES = ("static", "dynamic", "hybrid", "offloaded_hybrid_chunked", "quantized", "paged", "mamba", "foo")
"""Names of caches; which of them transformers takes depends on its version."""


def takes(name: str) -> bool:
    """Whether the installed transformers takes the name of a cache."""
    try:
        GenerationConfig(cache_implementation=name)
    except ValueError:
        return False
    return True
