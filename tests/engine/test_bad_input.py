"""Bad input: a ``ValueError`` that says what was expected and what came, and the others are served on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TextStreamer

from graphs.backends.compile import CompileBackend
from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import PATTERN, Tiny, assert_holds_nothing
from tests.modeling.families import VOCAB, greedy, prompts_of

SCORES = np.array([[0.1, 0.9], [0.4, 0.3]], np.float32)
RAW = HeadPattern(SCORES, sink=2, recent=6)


class NamedStreamer(TextStreamer):
    """Prints as its name, so that test ids are the same in every process."""

    def __repr__(self) -> str:
        return "streamer"


class HalfBackend:
    """A capture backend that lacks ``num_first_runs``, which warm-up reads."""

    name = "half"
    problem = capture = region = staticmethod(lambda *_: None)

    def __repr__(self) -> str:
        return "half"


STREAMER = NamedStreamer(None)
THREE = torch.tensor([[5, 6, 7]])
TOO_LONG = list(range(5, 90)) * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": RAW}, "sparsity or threshold"),
        ({"pattern": RAW, "sparsity": 0.5, "threshold": 0.5}, "both"),
        ({"pattern": RAW, "sparsity": -0.1}, r"\[0, 1\].*-0.1"),
        ({"pattern": RAW, "sparsity": 1.5}, r"\[0, 1\].*1.5"),
        ({"pattern": RAW, "sparsity": float("nan")}, "nan"),
        ({"pattern": RAW, "sparsity": 0.5, "recent": 0}, "recent"),
        ({"pattern": RAW, "sparsity": 0.5, "sink": -1}, "sink"),
        ({"pattern": HeadPattern(np.ones((3, 2)), 2, 6), "sparsity": 0.5}, "3.*2|2.*3"),
        ({"pattern": HeadPattern(np.ones((2, 4)), 2, 6), "sparsity": 0.5}, "4.*2|2.*4"),
        ({"pattern": "/nowhere/at/all", "sparsity": 0.5}, "nowhere"),
        ({"sparsity": 0.5}, "pattern"),
        ({"device": "tpu"}, "tpu"),
        ({"device": "hpu"}, "habana"),
        ({"dtype": "int8"}, "int8"),
        ({"dtype": torch.int32}, "int32"),
        ({"attention": "flash"}, "flash"),
        ({"softmax": "quick"}, "softmax.*exact, fast.*'quick'"),
        ({"softmax": "fast", "attention": "sdpa"}, "attention 'sdpa' computes scores in float32"),
        ({"graphs": "magic"}, "magic"),
        ({"on_miss": "shrug"}, "shrug"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 2.5}, "block_size"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_blocks": 10, "kv_cache_bytes": 10}, "both"),
        ({"kv_cache_bytes": 100}, "bytes"),
        ({"num_blocks": 2}, "max_model_len"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"max_model_len": 100000}, "max_model_len.*100000"),
        ({"max_chunk_rows": 0}, "max_chunk_rows"),
        ({"trim_chunks": "yes"}, "trim_chunks.*True or False, got 'yes'"),
        ({"pack_weights": "yes"}, "pack_weights.*True, False or None, got 'yes'"),
        ({"pattern": RAW, "sparsity": "half"}, r"sparsity.*number.*'half'"),
        ({"pattern": RAW, "sparsity": True}, r"sparsity.*number.*True"),
        ({"pattern": RAW, "threshold": "x"}, "threshold.*number.*'x'"),
        ({"pattern": RAW, "threshold": float("nan")}, "threshold.*number.*nan"),
        ({"pattern": 5}, "pattern.*HeadPattern or a directory.*int"),
        ({"pattern": SCORES}, "pattern.*HeadPattern or a directory.*ndarray"),
        ({"recent": 4}, "recent needs a head pattern"),
        ({"sink": 1, "recent": 4}, "sink and recent need a head pattern"),
        ({"tie_break": "nonsense"}, "tie_break.*stable, reference.*'nonsense'"),
        ({"pattern": PATTERN, "tie_break": "nonsense"}, "tie_break.*stable, reference.*'nonsense'"),
        ({"balance": "nonsense"}, "balance.*global, per_layer.*'nonsense'"),
        ({"pattern": PATTERN, "balance": "nonsense"}, "balance.*global, per_layer.*'nonsense'"),
        ({"pattern": RAW, "sparsity": 0.5, "balance": "per_rank"}, "per_rank.*which ranks do not hold"),
        ({"graphs": None}, "graphs.*eager.*None"),
        ({"graphs": 5}, "graphs.*eager.*5"),
        ({"graphs": HalfBackend()}, "capture backend, got half, which lacks num_first_runs"),
        ({"buckets": 5}, "buckets.*BucketTable.*int"),
        ({"seed": None}, "seed.*integer.*None"),
        ({"seed": "x"}, "seed.*integer.*'x'"),
    ],
    ids=str,
)
def test_bad_options_are_refused_at_load(tiny: Tiny, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.load(**options)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"inputs": [[]]}, "at least one prompt token"),
        ({"inputs": []}, "at least one prompt"),
        ({"inputs": torch.zeros(2, 0, dtype=torch.long)}, "at least one prompt token"),
        ({"inputs": torch.zeros(0, 3, dtype=torch.long)}, "at least one prompt"),
        ({"inputs": torch.zeros(3, dtype=torch.long)}, r"\[B, L\]"),
        ({"inputs": torch.zeros(2, 3)}, "float32"),
        ({"inputs": [5, 6, 7]}, "list of lists"),
        ({"inputs": "hello"}, "list of lists"),
        ({"inputs": [[5.5]]}, "5.5"),
        ({}, "neither"),
        ({"inputs": [[5]], "input_ids": [[5]]}, "both"),
        ({"inputs": [[5, VOCAB]]}, f"{VOCAB}.*0 to {VOCAB - 1}"),
        ({"inputs": [[5, -1]]}, "-1"),
        ({"inputs": [TOO_LONG]}, "max_model_len"),
        ({"inputs": [[5], TOO_LONG]}, "max_model_len"),
        ({"inputs": [[5]], "attention_mask": torch.ones(1, 1)}, "attention_mask"),
        (
            {"inputs": THREE, "attention_mask": torch.ones(1, 2)},
            "attention_mask",
        ),
        (
            {"inputs": THREE, "attention_mask": torch.tensor([[1, 0, 1]])},
            "left padding",
        ),
        (
            {"inputs": THREE, "attention_mask": torch.zeros(1, 3)},
            "at least one prompt token",
        ),
        ({"inputs": [[5]], "top_p": 0.0}, "top_p"),
        ({"inputs": [[5]], "do_sample": True, "top_p": 0.0}, "top_p"),
        ({"inputs": [[5]], "do_sample": True, "top_p": 1.5}, "top_p"),
        ({"inputs": [[5]], "temperature": -1.0}, "temperature"),
        ({"inputs": [[5]], "do_sample": True, "temperature": 0.0}, "temperature"),
        ({"inputs": [[5]], "do_sample": True, "top_k": -3}, "top_k"),
        ({"inputs": [[5]], "do_sample": True, "min_p": 2.0}, "min_p"),
        ({"inputs": [[5]], "num_return_sequences": 0}, "num_return_sequences"),
        ({"inputs": [[5]], "num_return_sequences": -2}, "num_return_sequences"),
        ({"inputs": [[5]], "max_new_tokens": 0}, "max_new_tokens"),
        ({"inputs": [[5]], "max_new_tokens": -3}, "max_new_tokens"),
        ({"inputs": [[5]], "max_new_tokens": 2.5}, "max_new_tokens"),
        ({"inputs": [[5, 6, 7]], "max_length": 3}, "max_length"),
        ({"inputs": [[5]], "repetition_penalty": 0.0}, "repetition_penalty"),
        ({"inputs": [[5]], "logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"inputs": [[5]], "stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"inputs": [[5]], "eos_token_id": VOCAB}, str(VOCAB)),
        ({"inputs": [[5]], "stop_strings": [""]}, "stop"),
        ({"inputs": [[5], [6]], "streamer": STREAMER}, "streamer takes one sequence.*2 prompts"),
        ({"inputs": [[5]], "streamer": "x"}, "streamer.*put and end.*str"),
        ({"inputs": THREE, "attention_mask": [[1, 1, 1]]}, "attention_mask.*tensor.*list"),
        ({"inputs": [[5]], "min_new_tokens": "a"}, "min_new_tokens.*integer >= 0.*'a'"),
        ({"inputs": [[5]], "min_length": "x"}, "min_length.*integer >= 0.*'x'"),
        ({"inputs": [[5]], "min_length": -3}, "min_length.*integer >= 0.*-3"),
        ({"inputs": [[5]], "stop_strings": 5}, "stop_strings.*strings.*5"),
        ({"inputs": [[5]], "stop_strings": [5]}, "stop_strings.*strings.*5"),
        ({"inputs": [[5]], "stop_token_ids": 5.5}, "stop_token_ids.*token id.*5.5"),
        ({"inputs": [[5]], "stop_token_ids": ["x"]}, "stop_token_ids.*token id.*'x'"),
        ({"inputs": [[5]], "logit_bias": [1]}, r"logit_bias.*token ids to.*\[1\]"),
        ({"inputs": [[5]], "eos_token_id": [[1]]}, r"eos_token_id.*token id.*\[1\]"),
        ({"inputs": [[5]], "eos_token_id": "x"}, "eos_token_id.*token id.*'x'"),
        ({"inputs": [[5]], "eos_token_id": 2.7}, "eos_token_id.*token id.*2.7"),
        ({"inputs": [[5]], "pad_token_id": [0]}, r"pad_token_id.*token id.*\[0\]"),
        ({"inputs": [[5]], "pad_token_id": -1}, "pad_token_id.*token id.*-1"),
        (
            {"inputs": [[5]], "cache_implementation": "foo"},
            "cache_implementation.*'foo'.*Choose one of.*'static'",
        ),
        ({"inputs": [[5]], "generation_config": {}}, "generation_config.*GenerationConfig.*dict"),
    ],
    ids=str,
)
def test_bad_calls_are_refused_while_another_request_goes_on(
    expected: list[int], busy: HPUDuoModel, kwargs: dict[str, Any], message: str
) -> None:
    engine = busy.engine
    prompt = prompts_of([13])[0]
    name = engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=6))
    tokens = [token for output in engine.step() for token in output.token_ids]
    with pytest.raises(ValueError, match=message):
        busy.generate(**kwargs)
    while engine.has_unfinished:
        for output in engine.step():
            assert output.request_id == name
            tokens += output.token_ids
    assert tokens == expected
    assert_holds_nothing(busy)


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> list[int]:
    return greedy(tiny.model, prompts_of([13])[0], 6)


@pytest.fixture(scope="module")
def busy(tiny: Tiny) -> HPUDuoModel:
    return tiny.load()


@pytest.mark.parametrize("params", [{}, {"temperature": 0}, 5, "x"], ids=str)
def test_parameters_of_another_type_are_refused(busy: HPUDuoModel, params: Any) -> None:
    with pytest.raises(ValueError, match=f"SamplingParams.*{type(params).__name__}"):
        busy.engine.add_request([5], params)
    assert_holds_nothing(busy)


def test_one_stop_token_may_be_given_bare(tiny: Tiny, busy: HPUDuoModel) -> None:
    prompt = prompts_of([13])[0]
    new = greedy(tiny.model, prompt, 6)
    stop = next(token for token in new[1:] if token != new[0])
    expected = new[: new.index(stop) + 1]
    assert busy.generate([prompt], max_new_tokens=6, stop_token_ids=stop)[0, 13:].tolist() == expected


def test_a_request_id_in_use_is_refused_and_then_free_again(busy: HPUDuoModel) -> None:
    engine = busy.engine
    engine.add_request([5, 6], SamplingParams(max_tokens=2), request_id="mine")
    with pytest.raises(ValueError, match="mine"):
        engine.add_request([7], request_id="mine")
    while engine.has_unfinished:
        engine.step()
    engine.add_request([7], SamplingParams(max_tokens=1), request_id="mine")
    while engine.has_unfinished:
        engine.step()
    assert_holds_nothing(busy)


def test_a_name_taken_by_a_caller_is_not_given_out_again(busy: HPUDuoModel) -> None:
    engine = busy.engine
    start = engine.add_request([5], SamplingParams(max_tokens=1))
    taken = f"request-{int(start.rpartition('-')[2]) + 2}"
    engine.add_request([5], SamplingParams(max_tokens=1), request_id=taken)
    assert engine.add_request([5], SamplingParams(max_tokens=1)) not in (start, taken)
    while engine.has_unfinished:
        engine.step()
    assert_holds_nothing(busy)


def test_a_prompt_that_the_blocks_can_never_hold_is_refused(tiny: Tiny) -> None:
    served = tiny.load(num_blocks=3, max_model_len=None)
    assert served.engine.limits.max_model_len == 3 * 8 + 1
    with pytest.raises(ValueError, match="max_model_len"):
        served.generate(prompts_of([25]))
    assert served.generate(prompts_of([24])).shape == (1, 25)


def test_a_pattern_table_that_is_not_text_is_refused_by_name(tmp_path: Path) -> None:
    RAW.save(tmp_path)
    (tmp_path / "full_attention_heads.tsv").write_bytes(b"0.5\t\xff\xfe\n")
    with pytest.raises(ValueError, match=r"expected UTF-8 text in .*full_attention_heads.tsv, got"):
        HeadPattern.load(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    (tmp_path / "full_attention_heads.tsv").write_text("0.5\t0.5\n")
    with pytest.raises(ValueError, match=r"config\.json, got"):
        HeadPattern.load(tmp_path)


def test_compiling_without_a_compiler_is_refused_at_load(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"graphs='compile'.*no C\+\+ compiler"):
        tiny.load(graphs="compile")
    # This one only traces.
    assert tiny.load(graphs=CompileBackend(compiler="eager")).stats().num_running == 0


def test_a_binarised_pattern_goes_without_sparsity(tiny: Tiny) -> None:
    assert tiny.load(pattern=PATTERN).generate(prompts_of([5]), max_new_tokens=3).shape == (1, 8)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "prompt 2 needs at least one prompt token"),
        ([5.5], "prompt 2 needs integer prompt tokens"),
        ([5, [6, 7]], r"prompt 2: expected a flat list of token ids, got \[5, \[6, 7\]\]"),
        ([5, VOCAB], f"prompt 2 has prompt tokens from 5 to {VOCAB}"),
        (TOO_LONG, "prompt 2 has .* prompt tokens, at most"),
    ],
)
def test_a_bad_prompt_is_named_by_its_place_in_the_call(
    busy: HPUDuoModel, bad: list[Any], message: str
) -> None:
    params = SamplingParams(n=2, max_tokens=3)
    busy.engine.generate([[5], [6]], params)  # names of requests count on
    with pytest.raises(ValueError, match=f"^{message}"):
        busy.engine.generate([[5], [6], bad, [7]], params)
    with pytest.raises(ValueError, match=f"^{message}"):
        busy.score([[5], [6], bad, [7]], [[[1]]] * 4)
    if all(isinstance(token, int) for token in bad):
        with pytest.raises(ValueError, match=f"^{message}"):
            busy.generate([[5], [6], bad, [7]], max_new_tokens=3)
    with pytest.raises(ValueError, match=f"^{message.replace('prompt 2', 'request .x.')}"):
        busy.engine.add_request(bad, params, request_id="x")
    assert_holds_nothing(busy)
