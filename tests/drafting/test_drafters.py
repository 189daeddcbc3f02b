"""Proposals of drafters, and the requests that get them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from hpu_duo.config.speculation import SpeculativeConfig
from hpu_duo.drafting import (
    Drafter,
    NgramDrafter,
    PredictedOutput,
    SuffixDrafter,
    SuffixOptions,
    make_drafter,
)
from hpu_duo.drafting.suffix import EarlierOutputs, likeliest
from hpu_duo.drafting.text_index import TextIndex
from hpu_duo.request import Request, TokenLimits
from hpu_duo.sampling import SamplingParams


def begun(drafter: Drafter, tokens: list[int], salt: str | None = None, num_output: int = 0) -> Request:
    """A request that the drafter knows; its last tokens are output."""
    params = SamplingParams(max_tokens=num_output + 20, cache_salt=salt)
    cut = len(tokens) - num_output
    request = Request("r", tokens[:cut], params, TokenLimits(1 << 12))
    for token in tokens[cut:]:
        request.append(token)
    drafter.begin(request)
    drafter.extend(request, request.tokens[: request.num_tokens])
    return request


def proposed(drafter: Drafter, request: Request, most: int = 8) -> list[int]:
    return list(map(int, drafter.propose(request, most)))


def test_the_first_occurrence_of_the_longest_ngram_is_continued() -> None:
    text = [1, 2, 3, 4, 9, 2, 3, 5, 8, 2, 3, 6, 1, 2, 3]
    drafter = NgramDrafter(2, 3, 4)
    assert proposed(drafter, begun(drafter, text)) == [4, 9, 2, 3]
    assert proposed(drafter, begun(drafter, text), 1) == [4]
    shorter = NgramDrafter(2, 2, 4)
    assert proposed(shorter, begun(shorter, [7, *text[5:]])) == [5, 8, 2, 3]
    assert proposed(drafter, begun(drafter, [1, 2, 3, 4])) == []


def test_ngrams_of_several_sizes_are_found_by_one_or_two_indices() -> None:
    prompt = list(range(2000))
    for sizes, num_indices in (((1, 4), 2), ((2, 5), 1), ((5, 5), 1), ((1, 1), 1)):
        drafter = NgramDrafter(*sizes, 8)
        begun(drafter, prompt)
        assert drafter.num_bytes <= num_indices * 12.5 * len(prompt)
    drafter = NgramDrafter(1, 4, 3)
    assert proposed(drafter, begun(drafter, [7, 1, 9, 2, 7, 3])) == []
    assert proposed(drafter, begun(drafter, [7, 1, 9, 2, 7])) == [1, 9, 2]


def test_few_occurrences_of_common_tokens_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at, find = list[int](), TextIndex.find
    monkeypatch.setattr(TextIndex, "find", lambda *given: looked_at.append(given[2]) or find(*given))
    drafter = NgramDrafter(1, 4, 3)
    assert proposed(drafter, begun(drafter, [7] * 1000)) == [7, 7, 7]
    assert sum(looked_at) <= 128


def test_the_likeliest_continuation_of_the_longest_match_is_proposed() -> None:
    drafter = SuffixDrafter(SuffixOptions(), 8)
    # The last three tokens were followed by 7 once, the last two by 8 more often.
    request = begun(drafter, [5, 1, 2, 7, 7, 7, 3, 1, 2, 8, 8, 4, 1, 2, 8, 8, 5, 1, 2])
    assert proposed(drafter, request) == [7, 7, 7]
    # Two of three times 1 followed, though 3 was the last time.
    text = [1, 2, 8, 8, 1, 2, 8, 8, 1, 9, 2, 8, 8, 3, 6, 2, 8, 8]
    assert proposed(drafter, begun(drafter, text))[0] == 1


def test_unlikely_tokens_end_a_draft() -> None:
    rows = [[1, 2, 3, -1], [1, 2, 4, 4], [1, 5, 4, 4]]
    assert likeliest(rows, 4, 0.5) == ([1, 2], 1 + 2 / 3)
    assert likeliest(rows, 4, 0.1) == ([1, 2, 3], pytest.approx(1 + 2 / 3 + 1 / 3))
    assert likeliest(rows, 1, 0.1) == ([1], 1.0)


def test_earlier_outputs_are_drafts_of_their_own_namespace_only() -> None:
    drafter = SuffixDrafter(SuffixOptions(), 8)
    drafter.end(begun(drafter, [1, 50, 51, 52, 53, 54, 55, 56], "a", num_output=7))
    text = [9, 51, 52, 53]
    assert proposed(drafter, begun(drafter, text, "a")) == [54, 55, 56]
    assert proposed(drafter, begun(drafter, text, "b")) == []
    assert proposed(drafter, begun(drafter, text)) == []


def test_prompts_of_others_are_no_drafts() -> None:
    drafter = SuffixDrafter(SuffixOptions(), 8)
    drafter.end(begun(drafter, [50, 51, 52, 53, 54, 1], num_output=1))
    assert proposed(drafter, begun(drafter, [9, 51, 52])) == []


def test_no_outputs_are_stored_without_room_for_them() -> None:
    drafter = SuffixDrafter(SuffixOptions(max_cached_requests=0), 8)
    drafter.end(begun(drafter, [1, 50, 51, 52, 53], num_output=4))
    assert proposed(drafter, begun(drafter, [9, 50, 51])) == []
    assert drafter.num_bytes < 1 << 14


def test_the_oldest_outputs_and_namespaces_are_dropped_first() -> None:
    few = EarlierOutputs(most_outputs=2, most_tokens=1 << 12)
    for begin in (10, 20, 30):
        few.add(np.arange(begin, begin + 6, dtype=np.int32))
    assert few.index.find(np.array([11, 12], np.int32), 4) is None
    assert few.index.find(np.array([21, 22], np.int32), 4) is not None
    drafter = SuffixDrafter(SuffixOptions(), 8, most_bytes=1 << 17)
    for salt in range(200):
        drafter.end(begun(drafter, [1, *range(10, 200)], str(salt), num_output=190))
        assert drafter.num_bytes <= 1 << 17
    text = [9, 11, 12, 13, 14, 15, 16]
    assert proposed(drafter, begun(drafter, text, "199"), 3) == [17, 18, 19]
    assert proposed(drafter, begun(drafter, text, "0"), 3) == []


def test_the_end_of_a_request_takes_as_long_with_many_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, read = SuffixDrafter(SuffixOptions(), 8), list[EarlierOutputs]()
    for salt in range(100):
        drafter.end(begun(drafter, [1, *range(2000)], str(salt), num_output=20 * salt))
    num_bytes = EarlierOutputs.num_bytes
    assert drafter.num_bytes == sum(map(num_bytes.__get__, drafter._earlier.values()))

    def counted(self: EarlierOutputs) -> int:
        read.append(self)
        return num_bytes.__get__(self)

    monkeypatch.setattr(EarlierOutputs, "num_bytes", property(counted))
    drafter.end(begun(drafter, [1, 50, 51, 52], "7", num_output=3))
    assert len(read) < 5


def test_many_outputs_stay_within_their_window() -> None:
    outputs, rng = EarlierOutputs(most_outputs=10_000, most_tokens=1 << 12), np.random.default_rng(1)
    for _ in range(300):
        last = rng.integers(0, 1000, int(rng.integers(1, 3000))).astype(np.int32)
        outputs.add(last)
        found = outputs.index.find(last[:2], 4) if 3 < len(last) < 2000 else None
        assert found is not None or not 3 < len(last) < 2000
    assert outputs.num_bytes <= 16 << 12


def test_a_prediction_is_followed_and_found_again_behind_a_difference() -> None:
    predicted = PredictedOutput([1, 2, 3, 4, 5, 6, 7, 8])
    output = np.array([1, 2, 3, 99, 98, 5, 6], np.int32)
    assert predicted.propose(output[:0], 3) == [1, 2, 3]
    assert predicted.propose(output[:3], 2) == [4, 5]
    assert predicted.propose(output[:4], 2) == []
    assert predicted.propose(output[:5], 2) == []
    assert predicted.propose(output, 4) == [7, 8]


def test_a_long_prediction_is_indexed_by_several_steps() -> None:
    predicted = PredictedOutput(range(10_000))
    indexed = [predicted._index.num_indexed]
    for number in range(4):
        # The output begins late in the prediction.
        drafts = predicted.propose(np.arange(9000, 9002 + number, dtype=np.int32), 2)
        indexed.append(predicted._index.num_indexed)
    assert indexed == [0, 4096, 8192, 10_000, 10_000]
    assert drafts == [9005, 9006]


def test_the_configuration_says_which_drafter_there_is() -> None:
    assert isinstance(make_drafter(SpeculativeConfig()), SuffixDrafter)
    assert isinstance(make_drafter(SpeculativeConfig.of('{"method": "ngram"}')), NgramDrafter)
    config = SpeculativeConfig.of({"num_speculative_tokens": 8})
    assert (config.method, config.lens) == ("suffix", (1, 4, 9))
    assert SpeculativeConfig.of(config.text) == config
    assert SpeculativeConfig(method="ngram", prompt_lookup_max=4).ngram_sizes == (4, 4)
    assert SpeculativeConfig(num_speculative_tokens=2).lens == (1, 3)
    assert SpeculativeConfig(num_speculative_tokens=4, draft_lens=(1, 2, 5)).lens == (1, 2, 5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("[1]", r"expected speculative_config to be an object with keys, got \[1\]"),
        ("{", "expected speculative_config to be a JSON object, got '{'"),
        (
            {"method": "duo", "draft_budget": 64},
            "draft_budget is not served: heads that store all tokens have no scores of them",
        ),
        ({"num_tokens": 3}, "no key 'num_tokens'; did you mean 'num_speculative_tokens'"),
        (
            {"method": "eagle3"},
            "method to be suffix or ngram or duo or draft_model or mtp, which are served, got 'eagle3'",
        ),
        (
            {"method": "draft_model"},
            "model to be a checkpoint's directory or name, for method 'draft_model', got None",
        ),
        ({"method": 3}, "method to be suffix or ngram or duo or draft_model or mtp, got 3"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens to be an integer >= 1 and <= 31, got 0"),
        ({"num_speculative_tokens": 32}, "num_speculative_tokens to be an integer >= 1 and <= 31, got 32"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens to be an integer.*got True"),
        (
            {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2},
            "prompt_lookup_min to be at most prompt_lookup_max=2, got 4",
        ),
        ({"prompt_lookup_max": 2}, "prompt_lookup_max=2 needs method 'ngram', got 'suffix'"),
        (
            {"method": "ngram", "suffix_decoding_max_tree_depth": 9},
            "suffix_decoding_max_tree_depth=9 needs method 'suffix' or 'duo', got 'ngram'",
        ),
        ({"suffix_decoding_max_spec_factor": 0}, "max_spec_factor to be a number above 0, got 0"),
        ({"suffix_decoding_min_token_prob": "x"}, "min_token_prob to be a number from 0 to 1, got 'x'"),
        (
            {"num_speculative_tokens_per_batch_size": [[1, 4, 9]]},
            r"ascending ranges of rows and most from 0 to num_speculative_tokens=8, got \[\[1, 4, 9\]\]",
        ),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, 3], [4, 9, 1]]}, "ascending ranges of rows"),
        ({"num_speculative_tokens_per_batch_size": 4}, "a list of .*, got 4"),
        ({"method": "duo", "draft_sample_method": "gumbel"}, "'shared' or 'greedy', got 'gumbel'"),
        ({"method": "duo", "draft_sparsity": 1.5}, "draft_sparsity to be a number from 0 to 1, got 1.5"),
        ({"draft_sparsity": 0.5}, "draft_sparsity=0.5 needs method 'duo', got 'suffix'"),
        ({"draft_lens": [1, 4]}, "draft_lens to be ascending integers from 1 to .* = 9, got"),
    ],
)
def test_bad_configurations_are_refused_with_key_value_and_expectation(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.of(given if isinstance(given, str) else json.loads(json.dumps(given)))
