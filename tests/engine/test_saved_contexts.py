"""Contexts in files: what is loaded is what was saved, and what does not fit is refused by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.context import PrefixContext, saved
from hpu_duo.context.record_file import open_context
from hpu_duo.kv.store import block_tensors
from hpu_duo.kv.tiers.segments import (
    PAGE,
    RECORD_START,
    StoredRecord,
    file_start,
    parse_record,
    write_record,
)
from hpu_duo.sampling import SamplingParams
from tests.engine.tensor_contexts import save_tensors
from tests.engine.tiny import PATTERN, Tiny, assert_holds_nothing, make_tiny, text_of, tokens_of
from tests.modeling.families import (
    BASE,
    BLOCK,
    IS_5,
    LENGTH_DEPENDENT,
    Zoo,
    make_config,
    prompts_of,
    save_random,
)
from tests.tiers import further

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
DOCUMENT = prompts_of((5 * BLOCK + 3,), seed=9)[0]
QUESTIONS = [[5, 6, 7], [8], [9, 10, 11, 12]]
STREAMING = HeadPattern(PATTERN.scores, sink=2, recent=6, retrieval=PATTERN.mask & False)
PATTERNS = pytest.mark.parametrize("pattern", [None, PATTERN, STREAMING], ids=["full", "duo", "streaming"])


def asked(served: HPUDuoModel, context: PrefixContext) -> Any:
    prompts = [context.prompt(question) for question in QUESTIONS]
    done = served.engine.generate(prompts, GREEDY, context=context.hold())
    assert min(sample.num_cached_tokens for [sample] in done) >= context.num_held_tokens
    return tokens_of(done)


def records_of(path: Path) -> list[tuple[StoredRecord, bytes]]:
    data, offset, found = path.read_bytes(), PAGE, []
    while (stored := parse_record(data[offset:], "context", offset)) is not None:
        begin = offset + RECORD_START
        found.append((stored, data[begin : begin + stored.num_bytes]))
        offset = stored.end
    assert offset == len(data)
    return found


def rewrite(path: Path, changes: dict[str, Any]) -> None:
    """Change metadata; checksums are right."""
    start, [(_, metadata), *units] = path.read_bytes()[:PAGE], records_of(path)
    first = records_of(path)[0][0]
    text = json.dumps(json.loads(metadata) | changes).encode()
    with path.open("wb") as file:
        file.write(start)
        file.flush()
        offset = PAGE
        for stored, data in [(first, text), *units]:
            own = stored.num_own_tokens
            offset = write_record(
                file.fileno(), "context", offset, stored.key, stored.parent, own, [data]
            ).end
        file.truncate(offset)


def contents_of(path: Path, served: HPUDuoModel) -> dict[str, torch.Tensor]:
    """Tensors of a file by name."""
    source, store, found = open_context(path, served), served.engine.runner.store, {}
    for each, begin, data in source.chunks(tuple(block_tensors(store)), 0):
        assert begin == 0
        found[each.name] = data
    for state in store.row_states:
        found |= source.row(state)
    return found


def expected_of(tiny: Tiny, **options: Any) -> Any:
    cold = tiny.load(enable_prefix_caching=False, **options)
    return tokens_of(cold.engine.generate([[*DOCUMENT, *question] for question in QUESTIONS], GREEDY))


@PATTERNS
@pytest.mark.parametrize("chunk_bytes", [1, pytest.param(1 << 25, marks=pytest.mark.slow)])
def test_a_loaded_context_answers_like_whole_prompts(
    tiny: Tiny,
    pattern: HeadPattern | None,
    tmp_path: Path,
    chunk_bytes: int,
) -> None:
    expected = expected_of(tiny, pattern=pattern)
    saving = tiny.load(pattern=pattern)
    saving.engine.contexts.copies.chunk_bytes = chunk_bytes
    with saving.prefill(DOCUMENT) as context:
        context.save(tmp_path / "document")  # before any further step
    served = tiny.load(pattern=pattern, max_num_seqs=3, num_blocks=20, max_model_len=80)
    served.engine.contexts.copies.chunk_bytes = chunk_bytes
    with served.load_context(tmp_path / "document") as context:
        assert served.stats().num_prompt_tokens == 0
        assert context.token_ids == tuple(DOCUMENT)
        assert asked(served, context) == expected
    assert_holds_nothing(served)


@pytest.mark.parametrize(
    "pattern", [*further(None), PATTERN, *further(STREAMING)], ids=["full", "duo", "streaming"]
)
def test_what_was_moved_and_shared_is_saved_and_loaded_under_pressure(
    tiny: Tiny, pattern: HeadPattern | None, tmp_path: Path
) -> None:
    """Blocks move, other requests run and are preempted, and parts of the text are there already."""
    expected = expected_of(tiny, pattern=pattern)
    busy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    tight = {"num_blocks": 15, "max_model_len": 64, "num_prefix_snapshots": 3 if pattern else None}
    served = tiny.load(pattern=pattern, attention="auto", **tight)
    served.engine.generate([prompts_of((40,), seed=4)[0]], busy)
    with served.prefill(DOCUMENT) as context:
        holds = served.engine.scheduler.allocations.prefixes
        assert holds is not None
        for prompt in prompts_of((30, 22, 17, 9), seed=1):
            served.engine.add_request(prompt, busy)
        for _ in range(7):
            served.engine.step()
        context.save(tmp_path / "document")
        while served.engine.has_unfinished:
            served.engine.step()
    other = tiny.load(pattern=pattern, **tight)
    other.engine.generate([DOCUMENT[: 2 * BLOCK + 2]], SamplingParams(max_tokens=2, temperature=0))
    for prompt in prompts_of((12, 9), seed=2):
        other.engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=8))
    for _ in range(3):
        other.engine.step()
    with other.load_context(tmp_path / "document") as context:
        assert asked(other, context) == expected
        other.engine.generate(prompts_of((30, 22, 17, 9), seed=3), busy)
        assert asked(other, context) == expected
        if pattern is not STREAMING:
            assert other.stats().num_preemptions > 0
        with context.fork([3] * BLOCK) as longer, other.load_context(tmp_path / "document") as again:
            assert longer.num_held_tokens == 6 * BLOCK
            assert again.hold().node is context.hold().node
    assert_holds_nothing(other)


SLOW_FAMILIES = [pytest.param(name, marks=pytest.mark.slow) for name in ("mistral_sliding", "gpt_oss")]


@pytest.mark.parametrize("family", ["gemma3", "mixtral", *SLOW_FAMILIES])
def test_families_are_saved_and_loaded(zoo: Zoo, family: str, tmp_path: Path) -> None:
    path = zoo.load(family)[1]
    options: dict[str, Any] = {
        **{"dtype": "float32", "block_size": BLOCK, "max_num_seqs": 3, "max_model_len": 96},
        "attention": "reference",
    }
    cold = HPUDuoModel.from_pretrained(path, enable_prefix_caching=False, **options)
    expected = tokens_of(cold.engine.generate([[*DOCUMENT, *question] for question in QUESTIONS], GREEDY))
    one, other = (HPUDuoModel.from_pretrained(path, num_prefix_snapshots=4, **options) for _ in range(2))
    with one.prefill(DOCUMENT) as context:
        context.save(tmp_path / "document")
        assert asked(one, context) == expected
    with other.load_context(tmp_path / "document") as context:
        assert asked(other, context) == expected


def test_text_and_salt_are_saved(tiny: Tiny, tmp_path: Path) -> None:
    document = text_of(DOCUMENT)
    with tiny.load().prefill(document, cache_salt="a") as context:
        context.save(tmp_path / "document")
        prompt = context.prompt("ab")
    with tiny.load().load_context(tmp_path / "document") as context:
        assert (context.text, context.cache_salt) == (document, "a")
        assert context.prompt("ab") == prompt


def test_a_short_document_is_saved_without_keys(tiny: Tiny, tmp_path: Path) -> None:
    with tiny.load().prefill([5, 6]) as context:
        context.save(tmp_path / "document")
    [(_, metadata)] = records_of(tmp_path / "document")
    assert json.loads(metadata)["tensors"] == {}
    with tiny.load().load_context(tmp_path / "document") as context:
        assert (context.token_ids, context.num_held_tokens) == ((5, 6), 0)


def test_nothing_of_others_is_in_the_file(tiny: Tiny, tmp_path: Path) -> None:
    """Slots of rings that the document does not fill hold what was there before."""
    short = DOCUMENT[:BLOCK]
    files = []
    for number, before in enumerate([[], prompts_of((60,), seed=3)]):
        served = tiny.load(pattern=PATTERN)
        served.engine.generate([*before], GREEDY)
        with served.prefill(short) as context:
            served.engine.generate([context.prompt([7, 7, 7])], GREEDY, context=context.hold())
            context.save(tmp_path / str(number))
        files.append(contents_of(tmp_path / str(number), served))
    for name, data in files[0].items():
        assert torch.allclose(data, files[1][name], atol=1e-6), name


@pytest.fixture(scope="module")
def document(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "document"
    with tiny.load(pattern=PATTERN).prefill(DOCUMENT) as context:
        context.save(path)
    return path


OTHERS: dict[str, dict[str, Any]] = {
    "block_size 4": {"block_size": 4},
    "dtype bfloat16": {"dtype": "bfloat16"},
    "head pattern none": {"pattern": None},
    r"head pattern \[2, 5": {"pattern": HeadPattern(PATTERN.scores, 2, 5, "given", PATTERN.mask)},
    r"head pattern \[2, 6, \[\[0, 1\]": {
        "pattern": HeadPattern(PATTERN.scores, 2, 6, "given", ~PATTERN.mask)
    },
    "layers.0.groups.1.keys rings": {"decode_len": 3},
}


@pytest.mark.parametrize("difference", OTHERS)
def test_contexts_of_other_engines_are_refused_by_name(tiny: Tiny, document: Path, difference: str) -> None:
    served = tiny.load(**{"pattern": PATTERN, **OTHERS[difference]})
    with pytest.raises(ValueError, match=f"of a model like this one, with {difference}"):
        served.load_context(document)
    assert_holds_nothing(served)


def test_contexts_of_other_weights_are_refused(document: Path, tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other").path
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 500.0}))
    served = HPUDuoModel.from_pretrained(
        other, dtype="float32", block_size=BLOCK, max_model_len=96, pattern=PATTERN
    )
    with pytest.raises(ValueError, match="of a model like this one, with model"):
        served.load_context(document)


def test_contexts_with_other_rotary_frequencies_are_refused(tmp_path: Path) -> None:
    rope = {"rope_parameters" if IS_5 else "rope_scaling": LENGTH_DEPENDENT[0], "num_hidden_layers": 1}
    config = make_config("LlamaConfig", **{**BASE, **rope, "max_position_embeddings": 64})
    save_random(config, tmp_path / "model")
    short, long = (
        HPUDuoModel.from_pretrained(
            tmp_path / "model", block_size=BLOCK, max_model_len=longest, max_num_seqs=2
        )
        for longest in (96, 128)
    )
    with short.prefill(DOCUMENT) as context:
        context.save(tmp_path / "document")
    with pytest.raises(ValueError, match="with rotary frequencies of texts of 128 tokens, got one with 96"):
        long.load_context(tmp_path / "document")


@pytest.fixture(scope="module")
def tensors(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A context of version 2."""
    path = tmp_path_factory.mktemp("tensors") / "document"
    with tiny.load(pattern=PATTERN).prefill(DOCUMENT) as context:
        save_tensors(context, path)
    return path


@pytest.mark.parametrize("version", ["1", *further("2")])
@PATTERNS
def test_contexts_of_earlier_versions_load(
    tiny: Tiny, pattern: HeadPattern | None, version: str, tmp_path: Path
) -> None:
    with tiny.load(pattern=pattern).prefill(text_of(DOCUMENT), cache_salt="a") as context:
        save_tensors(context, tmp_path / "document", version)
    served = tiny.load(pattern=pattern)
    with served.load_context(tmp_path / "document") as context:
        assert (context.text, context.cache_salt) == (text_of(DOCUMENT), "a")
        assert served.stats().num_prompt_tokens == 0
        context.save(tmp_path / "again")
        prompt = context.prompt([5, 6, 7])
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, cache_salt="a")
        [[done]] = served.engine.generate([prompt], params, context=context.hold())
    cold = tiny.load(enable_prefix_caching=False, pattern=pattern)
    assert tokens_of([[done]]) == tokens_of(cold.engine.generate([prompt], GREEDY))
    assert json.loads(records_of(tmp_path / "again")[0][1])["version"] == "3"


def _cut(path: Path, to: int) -> None:
    path.write_bytes(path.read_bytes()[:to])


def _metadata(path: Path, **changes: str) -> None:
    data = path.read_bytes()
    [size] = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] |= changes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def _flip(path: Path, number: int | None, at: int = 0) -> None:
    """Flip a bit of a record, or of the header of the file."""
    data, offset = bytearray(path.read_bytes()), 0
    if number is not None:
        offset = records_of(path)[number][0].offset
    data[offset + at] ^= 1
    path.write_bytes(data)


def _repeat(path: Path) -> None:
    """Write the first block where the second one is, as a whole record."""
    [(first, data), (second, _)] = records_of(path)[1:3]
    with path.open("r+b") as file:
        write_record(file.fileno(), "context", second.offset, first.key, first.parent, BLOCK, [data])


def _end_of(path: Path, number: int) -> int:
    return records_of(path)[number][0].end


KEYS = "layers.0.groups.0.keys"
DAMAGED = "at [0-9,]+ is damaged: expected checksum [0-9a-f]{8}, got [0-9a-f]{8}"
DAMAGES = {
    "a flipped bit in the text": (lambda path: _flip(path, 0, 500), f"document: record 0 {DAMAGED}"),
    "a flipped bit in a block": (
        lambda path: _flip(path, 2, 200),
        f"document: record 2 {DAMAGED}",
    ),
    "a flipped bit in the row": (
        lambda path: _flip(path, 6, 200),
        f"document: record 6 {DAMAGED}",
    ),
    "a flipped bit in a header": (lambda path: _flip(path, 3, 50), "expected record 3 at .*, got no header"),
    "a flipped bit in the file's header": (lambda path: _flip(path, None, 20), "expected the header"),
    "a block twice": (_repeat, "expected record 2 at .* to be .*, got "),
    "cut between records": (
        lambda path: _cut(path, _end_of(path, 3)),
        "expected record 4 at .*, got the end of the file",
    ),
    "cut in a record": (
        lambda path: _cut(path, _end_of(path, 2) + RECORD_START + 9),
        "record 3 at .* is damaged: expected [0-9,]+ bytes, got 9$",
    ),
    "cut in its padding": (lambda path: _cut(path, -1), "expected [0-9,]+ bytes in records, got"),
    "cut in its header": (lambda path: _cut(path, 30), "expected the header"),
    "empty": (lambda path: _cut(path, 0), "cannot read the context"),
    "a text": (lambda path: path.write_text("Once upon a time"), "cannot read the context"),
    "not there": (lambda path: path.unlink(), "cannot read the context"),
    "a checkpoint": (lambda path: save_file({"a": torch.zeros(3)}, path), "another file of tensors"),
    "a segment": (
        lambda path: path.write_bytes(file_start(bytes(32)) + bytes(2 * PAGE)),
        "expected record 0 at 4,096, got no header of one",
    ),
    "of a later version": (
        lambda path: rewrite(path, {"version": "4"}),
        "expected version 1, 2 or 3 of saved contexts, got 4",
    ),
    "without a fingerprint": (lambda path: rewrite(path, {"fingerprint": None}), "expected the fingerprint"),
    "with a strange salt": (lambda path: rewrite(path, {"cache_salt": [1]}), "expected cache_salt"),
    "without tokens": (lambda path: rewrite(path, {"token_ids": []}), "expected token_ids to be a list"),
    "with a strange text": (lambda path: rewrite(path, {"text": 3}), "expected text to be"),
    "with other tokens": (
        lambda path: rewrite(path, {"token_ids": [500] * 43}),
        "expected record 1 at .* to be .*, got ",
    ),
    "without tensors": (lambda path: rewrite(path, {"tensors": {}}), f"expected a tensor {KEYS}"),
    "with keys of another shape": (
        lambda path: rewrite(path, {"tensors": {KEYS: ["F32", [4, 1, BLOCK, 8]]}}),
        f"expected {KEYS} to be .*, got ",
    ),
}
TENSOR_DAMAGES = {
    "cut": (lambda path: _cut(path, -100), "cannot read the context"),
    "cut in its header": (lambda path: _cut(path, 60), "cannot read the context"),
    "of a later version": (lambda path: _metadata(path, version="3"), "expected version 1, 2 or 3 .*, got 3"),
    "without a fingerprint": (lambda path: _metadata(path, fingerprint="{"), "expected fingerprint"),
    "with another fingerprint": (lambda path: _metadata(path, fingerprint="[]"), "expected the fingerprint"),
    "with a strange salt": (lambda path: _metadata(path, cache_salt="[1]"), "expected cache_salt"),
}


def test_damaged_files_and_others_are_refused(
    tiny: Tiny, document: Path, tensors: Path, tmp_path: Path
) -> None:
    served, path = tiny.load(pattern=PATTERN), tmp_path / "document"
    for source, damages in ((document, DAMAGES), (tensors, TENSOR_DAMAGES)):
        for change, message in damages.values():
            path.write_bytes(source.read_bytes())
            change(path)
            with pytest.raises(ValueError, match=message):
                served.load_context(path)
    assert_holds_nothing(served)


def _tensors(document: Path) -> Iterator[tuple[str, dict[str, torch.Tensor], str]]:
    for name, changes, message in (
        ("no tokens", {"token_ids": None}, "expected a tensor token_ids"),
        (
            "other tokens",
            {"token_ids": torch.tensor([500] * 43, dtype=torch.int32)},
            "prompt tokens from 500",
        ),
        ("no keys", {KEYS: None}, f"expected a tensor {KEYS}"),
        ("keys of another shape", {KEYS: torch.zeros(4, 1, BLOCK, 8)}, f"expected {KEYS} to be"),
        ("tokens of floats", {"token_ids": torch.zeros(43)}, "expected token_ids to be a list"),
    ):
        tensors = {**load_file(document), **changes}
        yield name, {key: value for key, value in tensors.items() if value is not None}, message


def test_files_with_other_tensors_are_refused(tiny: Tiny, tensors: Path, tmp_path: Path) -> None:
    data = tensors.read_bytes()
    metadata = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])["__metadata__"]
    served = tiny.load(pattern=PATTERN)
    for name, others, message in _tensors(tensors):
        save_file(others, tmp_path / name, metadata)
        with pytest.raises(ValueError, match=message):
            served.load_context(tmp_path / name)
    assert_holds_nothing(served)


def test_a_load_that_fails_leaves_nothing(
    tiny: Tiny, document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = tiny.load(pattern=PATTERN)
    chunks = saved.SavedContext.chunks

    def failing(self: Any, tensors: Any, first: int) -> Any:
        for each, begin, data in chunks(self, tensors, first):
            if each.name.startswith("layers.1"):
                raise ValueError("the disk is gone")
            yield each, begin, data

    monkeypatch.setattr(saved.SavedContext, "chunks", failing)
    with pytest.raises(ValueError, match="the disk is gone"):
        served.load_context(document)
    prefixes = served.stats().prefixes
    assert prefixes is not None
    assert (prefixes.num_idle_blocks, prefixes.num_snapshots, prefixes.num_held_blocks) == (0, 0, 0)
    assert_holds_nothing(served)


def test_there_must_be_room(tiny: Tiny, document: Path, tmp_path: Path) -> None:
    served = tiny.load(pattern=PATTERN, num_blocks=8, max_model_len=64, num_prefix_snapshots=2)
    other = served.prefill(prompts_of((4 * BLOCK,), seed=2)[0])
    with other, pytest.raises(ValueError, match="at most 4 further blocks in contexts, got 5"):
        served.load_context(document)
    served.engine.add_request(prompts_of((30,), seed=2)[0], SamplingParams(max_tokens=2), "busy")
    while (busy := served.engine.scheduler.get("busy#0")) is None or busy.num_blocks < 4:
        served.engine.step()
    with pytest.raises(ValueError, match="beside a request that may need 4 of its own, got 5"):
        served.load_context(document)
    served.engine.abort("busy")
    with pytest.raises(ValueError, match="without record_steps"):
        tiny.load(pattern=PATTERN, record_steps=tmp_path / "steps").load_context(document)
    context = served.load_context(document)
    with context, pytest.raises(ValueError, match="cannot write the context to"):
        context.save(tmp_path / "nowhere" / "document")
    with pytest.raises(ValueError, match="got a closed one"):
        context.save(tmp_path / "document")
    assert list(tmp_path.glob("*document*")) == []


def test_the_file_has_records_as_the_disk_tier_does(tiny: Tiny, tmp_path: Path) -> None:
    served = tiny.load(pattern=PATTERN)
    with served.prefill(text_of(DOCUMENT), cache_salt="a") as context:
        context.save(tmp_path / "document")
        nodes = [*context.hold().node.path][::-1]
    [(first, metadata), *blocks, (row, _)] = records_of(tmp_path / "document")
    about = json.loads(metadata)
    assert (about["token_ids"], about["text"], about["cache_salt"]) == (DOCUMENT, text_of(DOCUMENT), "a")
    assert about["tensors"][KEYS] == ["F32", [5, 1, BLOCK, 8]]
    assert about["tensors"]["layers.0.groups.1.values"] == ["F32", [1, 1, 2 + 6, 8]]
    assert first.key.digest == nodes[0].parent.digest
    assert [stored.key for stored, _ in blocks] == [(node.digest, False) for node in nodes]
    assert (row.key, row.parent) == ((nodes[-1].digest, True), nodes[-2].digest)
    plan = served.engine.runner.store.plan
    assert ({len(data) for _, data in blocks}, row.num_bytes) == ({plan.block_bytes}, plan.row_bytes)
    found = contents_of(tmp_path / "document", served)
    assert found[KEYS].shape == (5, 1, BLOCK, 8)
    assert np.isfinite(found[KEYS].numpy()).all()
    assert blocks[1][1].startswith(found[KEYS][1].numpy().tobytes())
