from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from hpu_duo.sampling import IncrementalDetokenizer, special_token_ids
from hpu_duo.sampling.detokenizer import REPLACEMENT

FIXTURES = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60
)
TEXTS = st.text(st.sampled_from("aeStop 日本€😀é\n▁\u200d,."), max_size=60) | st.text(max_size=40)


def _pieces(tokenizer: Any, token_ids: list[int], **kwargs: Any) -> tuple[list[str], str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **kwargs)
    return [detokenizer.push(token_id) for token_id in token_ids], detokenizer.flush()


def _decode(tokenizer: PreTrainedTokenizerFast, token_ids: list[int], skip: bool = True) -> str:
    return str(tokenizer.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))


def _id_of(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    token_id = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(token_id, int)
    return token_id


@pytest.fixture(params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return request.getfixturevalue(f"{request.param}_tokenizer")


@FIXTURES
@given(text=TEXTS, inserted=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 2))), skip=st.booleans())
@example(text="  a  b", inserted=[(1, 0)], skip=True)
@example(text="a" + " " * 40 + "b", inserted=[], skip=True)
@example(text="foo 😀 bar", inserted=[(4, 1), (5, 1), (6, 2)], skip=True)
def test_the_pieces_join_to_the_decoding_of_the_whole(
    tokenizer: PreTrainedTokenizerFast, text: str, inserted: list[tuple[int, int]], skip: bool
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    special = sorted(special_token_ids(tokenizer))
    for at, which in inserted:
        ids.insert(at, special[which])
    pieces, rest = _pieces(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(pieces) + rest == _decode(tokenizer, ids, skip)


@FIXTURES
@given(ids=st.lists(st.integers(0, 339), max_size=80))
def test_any_bytes_at_all_join_to_the_decoding_of_the_whole(
    byte_level_tokenizer: PreTrainedTokenizerFast, ids: list[int]
) -> None:
    pieces, rest = _pieces(byte_level_tokenizer, ids)
    assert "".join(pieces) + rest == _decode(byte_level_tokenizer, ids)


BYTES = st.sampled_from([f"<0x{byte:02X}>" for byte in b"\xe2\x82\xac\xf0\x9f\x98\x80\xc3\xa9a \xff"])


@FIXTURES
@given(data=st.lists(BYTES | st.integers(0, 330), max_size=60), skip=st.booleans())
@example(data=[f"<0x{byte:02X}>" for byte in b"\xe2\x82\xac\xe2a"], skip=True)
@example(data=["<0x80>"] * 40 + ["<0xC3>", "<0xA9>", 300, "<0xC3>", "<0xA9>"], skip=True)
def test_any_bytes_of_a_fallback_join_to_the_decoding_of_the_whole(
    byte_fallback_tokenizer: PreTrainedTokenizerFast, data: list[str | int], skip: bool
) -> None:
    last = len(byte_fallback_tokenizer) - 1
    ids = [
        _id_of(byte_fallback_tokenizer, each) if isinstance(each, str) else min(each, last) for each in data
    ]
    pieces, rest = _pieces(byte_fallback_tokenizer, ids, skip_special_tokens=skip)
    assert "".join(pieces) + rest == _decode(byte_fallback_tokenizer, ids, skip)


@FIXTURES
@given(data=st.lists(st.sampled_from([0x80, 0x98, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x61]), max_size=90))
def test_long_garbage_is_released_exactly_by_a_byte_level_tokenizer(
    byte_level_tokenizer: PreTrainedTokenizerFast, data: list[int]
) -> None:
    _check_bytes(byte_level_tokenizer, bytes(data))


@pytest.mark.parametrize("num_garbage", range(40))
def test_a_character_after_long_garbage_is_found_wherever_it_begins(
    byte_level_tokenizer: PreTrainedTokenizerFast, num_garbage: int
) -> None:
    _check_bytes(byte_level_tokenizer, b"\x80" * num_garbage + "😀a😀".encode())


def _check_bytes(byte_level_tokenizer: PreTrainedTokenizerFast, data: bytes) -> None:
    alphabet = _byte_alphabet()
    ids = [_id_of(byte_level_tokenizer, alphabet[byte]) for byte in data]
    pieces, rest = _pieces(byte_level_tokenizer, ids)
    assert "".join(pieces) + rest == data.decode("utf-8", errors="replace")


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-ins for bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def test_a_split_character_comes_with_its_last_token(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.encode("a龍b", add_special_tokens=False)
    pieces, rest = _pieces(tokenizer, ids)
    assert len(ids) >= 5
    assert "".join(pieces) == "a龍b"
    assert rest == ""


def test_a_split_character_comes_with_the_token_behind_its_run_of_byte_tokens(
    byte_fallback_tokenizer: PreTrainedTokenizerFast,
) -> None:
    detokenizer = IncrementalDetokenizer(byte_fallback_tokenizer)
    ids = byte_fallback_tokenizer.encode("a龍", add_special_tokens=False)
    assert [(detokenizer.push(token_id), detokenizer.coming) for token_id in ids[-3:]] == [
        ("", ""),
        ("", ""),
        ("", "龍"),
    ]
    assert detokenizer.flush() == "龍"


def test_an_unfinished_character_comes_with_the_flush(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.encode("a龍", add_special_tokens=False)
    pieces, rest = _pieces(tokenizer, ids[:-1])
    assert "".join(pieces) == "a"
    assert set(rest) == {REPLACEMENT}


def test_a_skipped_token_does_not_cost_the_next_word_its_space(
    byte_fallback_tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = byte_fallback_tokenizer.encode("the dog", add_special_tokens=False)
    tokens = byte_fallback_tokenizer.convert_ids_to_tokens(ids)
    at = next(i for i, t in enumerate(tokens) if i and t[0] == "▁")
    tool = _id_of(byte_fallback_tokenizer, "<tool>")
    pieces, rest = _pieces(byte_fallback_tokenizer, [*ids[:at], tool, *ids[at:]])
    assert "".join(pieces) + rest == "the dog"


def test_a_character_begun_by_the_prompt_is_finished_by_the_output(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    text = "a龍龍b" + "龍" * 9
    ids = tokenizer.encode(text, add_special_tokens=False)
    for split in range(1, len(ids) + 1):
        prompts = (_decode(tokenizer, ids[:end]) for end in range(split, -1, -1))
        complete = next(prompt for prompt in prompts if REPLACEMENT not in prompt)
        pieces, rest = _pieces(tokenizer, ids[split:], context_ids=ids[:split])
        assert complete + "".join(pieces) + rest == text


def test_the_context_decides_whether_the_first_word_has_a_space(
    byte_fallback_tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = byte_fallback_tokenizer.encode("dog", add_special_tokens=False)
    context = byte_fallback_tokenizer.encode("the lazy", add_special_tokens=False)
    assert "".join(_pieces(byte_fallback_tokenizer, ids)[0]) == "dog"
    assert "".join(_pieces(byte_fallback_tokenizer, ids, context_ids=context)[0]) == " dog"


@FIXTURES
@given(text=TEXTS, context=TEXTS)
def test_pieces_after_a_context_are_what_the_whole_has_more(
    tokenizer: PreTrainedTokenizerFast, text: str, context: str
) -> None:
    context_ids = tokenizer.encode("x" + context, add_special_tokens=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces, rest = _pieces(tokenizer, ids, context_ids=context_ids)
    assert _decode(tokenizer, context_ids) + "".join(pieces) + rest == _decode(tokenizer, context_ids + ids)


class CountingTokenizer:
    """Passes through and remembers the longest decoding."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self.all_special_ids = tokenizer.all_special_ids
        self.longest = self.calls = 0

    def decode(self, token_ids: list[int], **kwargs: bool) -> Any:
        self.calls += 1
        self.longest = max(self.longest, len(token_ids))
        return self._tokenizer.decode(token_ids, **kwargs)


@pytest.mark.parametrize("unit", ["the dog ", "😀", " ", REPLACEMENT, "龍a"])
def test_the_cost_of_a_token_does_not_grow_with_the_text(
    tokenizer: PreTrainedTokenizerFast, unit: str
) -> None:
    counting = CountingTokenizer(tokenizer)
    ids = tokenizer.encode(unit * 400, add_special_tokens=False)
    pieces, rest = _pieces(counting, ids)
    text = "".join(pieces) + rest
    assert text.replace(REPLACEMENT, "") == _decode(tokenizer, ids).replace(REPLACEMENT, "")
    # A run of byte tokens is decoded once, when it ends.
    assert counting.longest <= (64 if counting.calls > 4 else len(ids))
    assert counting.calls <= 2 * len(ids) + 4


def test_special_tokens_are_text_on_request(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = [_id_of(tokenizer, "<tool>")]
    assert "".join(_pieces(tokenizer, ids, skip_special_tokens=False)[0]) == "<tool>"
    assert _pieces(tokenizer, ids) == ([""], "")
