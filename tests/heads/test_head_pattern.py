"""The pattern as a value, and its files."""

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from hpu_duo.heads import HeadPattern

PUBLISHED = sorted((Path(__file__).parents[1] / "data" / "attn_patterns").iterdir())


def names(directory: Path) -> str:
    return directory.name


@pytest.mark.parametrize("directory", PUBLISHED, ids=names)
def test_a_published_pattern_comes_back_byte_for_byte(directory: Path, tmp_path: Path) -> None:
    HeadPattern.load(directory).save(tmp_path / "copy")

    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == [
        "config.json",
        "full_attention_heads.tsv",
    ]
    for name in ("full_attention_heads.tsv", "config.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (directory / name).read_bytes()


@pytest.mark.parametrize("directory", PUBLISHED, ids=names)
def test_a_published_pattern_has_the_sizes_of_its_files(directory: Path) -> None:
    pattern = HeadPattern.load(directory)

    assert (pattern.num_layers, pattern.num_kv_heads) == (32, 32 if "Llama-2" in directory.name else 8)
    assert (pattern.sink, pattern.recent) == (128, 256)
    assert pattern.config["num_passkeys"] == 10
    assert not pattern.is_binarised
    assert pattern.source == str(directory)


def test_scores_are_loaded_unclipped() -> None:
    pattern = HeadPattern.load(next(path for path in PUBLISHED if "Llama-2" in path.name))

    assert pattern.scores.min() < 0
    assert pattern.scores.max() == 1


scores_of_any_size = npst.arrays(
    np.float32, st.tuples(st.integers(1, 4), st.integers(1, 5)), elements=st.floats(-1e6, 1e6, width=32)
)


@settings(max_examples=50)
@given(scores=scores_of_any_size, sparsity=st.none() | st.floats(0, 1))
def test_save_then_load_gives_the_same_pattern(
    tmp_path_factory: pytest.TempPathFactory, scores: np.ndarray, sparsity: float | None
) -> None:
    directory = tmp_path_factory.mktemp("pattern")
    pattern = HeadPattern(scores=scores, sink=3, recent=5, config={"another_key": [1, None]})
    if sparsity is not None:
        pattern = pattern.binarise(sparsity=sparsity)
    pattern.save(directory)
    loaded = HeadPattern.load(directory)

    assert replace(loaded, source=pattern.source, config=pattern.config) == pattern
    assert loaded.config == {"another_key": [1, None], "sink_size": 3, "recent_size": 5}


def test_saving_a_raw_pattern_forgets_the_mask_of_an_earlier_one(tmp_path: Path) -> None:
    pattern = HeadPattern.random(2, 4, seed=0)
    pattern.binarise(sparsity=0.5).save(tmp_path)
    pattern.save(tmp_path)

    assert not HeadPattern.load(tmp_path).is_binarised


def test_sizes_changed_after_loading_are_the_ones_saved(tmp_path: Path) -> None:
    replace(HeadPattern.load(PUBLISHED[0]), sink=64).save(tmp_path)

    assert json.loads((tmp_path / "config.json").read_text())["sink_size"] == 64
    assert HeadPattern.load(tmp_path).sink == 64


@pytest.mark.parametrize("shape", [(1, 8), (8, 1), (1, 1)])
def test_files_with_a_single_layer_or_head_keep_their_shape(shape: tuple[int, int], tmp_path: Path) -> None:
    HeadPattern.random(*shape, seed=1).save(tmp_path)

    assert HeadPattern.load(tmp_path).scores.shape == shape


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("full_attention_heads.tsv", None, "got no full_attention_heads.tsv"),
        ("config.json", None, "got no config.json"),
        ("full_attention_heads.tsv", "", "got 0 lines"),
        ("full_attention_heads.tsv", "0.5\t0.5\n0.5\n", r"lengths \[1, 2\]"),
        ("full_attention_heads.tsv", "0.5\tmany\n", "tab-separated numbers"),
        ("full_attention_heads.tsv", "0.5\tnan\n", "nan at layer 0, head 1"),
        ("retrieval_heads.tsv", "1\t0\n", r"shape \[32, 8\].*got \[1, 2\]"),
        ("config.json", "{", "expected JSON"),
        ("config.json", "[]", "expected an object"),
        ("config.json", '{"sink_size": 4}', "got no recent_size"),
        ("config.json", '{"sink_size": 4, "recent_size": 2.5}', "recent to be an integer"),
        ("config.json", '{"sink_size": -4, "recent_size": 2}', "sink to be an integer >= 0, got -4"),
    ],
)
def test_load_names_what_is_wrong_with_a_file(
    name: str, text: str | None, complaint: str, tmp_path: Path
) -> None:
    directory = tmp_path / "broken"
    shutil.copytree(PUBLISHED[1], directory)
    if text is None:
        (directory / name).unlink()
    else:
        (directory / name).write_text(text)

    with pytest.raises(ValueError, match=complaint):
        HeadPattern.load(directory)


@pytest.mark.parametrize(
    ("scores", "complaint"),
    [
        (np.zeros(4), r"\[num_layers, num_kv_heads\], got \[4\]"),
        (np.zeros((0, 4)), r"got \[0, 4\]"),
        (np.array([[0.0, np.nan]]), "nan at layer 0, head 1"),
        (np.array([[0.0], [np.inf]]), "inf at layer 1, head 0"),
    ],
)
def test_scores_that_cannot_rank_heads_are_refused(scores: np.ndarray, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        HeadPattern(scores=scores, sink=1, recent=1)


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({"sink": -1, "recent": 1}, "sink to be an integer >= 0, got -1"),
        ({"sink": 0, "recent": 0}, "recent to be an integer >= 1, got 0"),
        ({"sink": 1.0, "recent": 1}, "sink to be an integer >= 0, got 1.0"),
    ],
)
def test_sizes_that_no_streaming_head_can_have_are_refused(sizes: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        HeadPattern(scores=np.zeros((1, 1)), **sizes)


def test_a_mask_of_another_shape_or_other_values_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \[2, 2\] like scores, got \[2\]"):
        HeadPattern(scores=np.zeros((2, 2)), sink=1, recent=1, retrieval=np.ones(2, dtype=bool))
    with pytest.raises(ValueError, match="True or False"):
        HeadPattern(scores=np.zeros((1, 2)), sink=1, recent=1, retrieval=np.array([[0.5, 1]]))


def test_a_pattern_does_not_change_with_the_arrays_it_was_made_of() -> None:
    scores = np.ones((2, 2), dtype=np.float32)
    pattern = HeadPattern(scores=scores, sink=1, recent=1)
    scores[:] = 0

    assert pattern.scores.min() == 1
    with pytest.raises(ValueError, match="read-only"):
        pattern.scores[0, 0] = 0


def test_patterns_are_equal_by_value_and_survive_pickling() -> None:
    pattern = HeadPattern.random(3, 4, seed=2).binarise(sparsity=0.5)
    copy = pickle.loads(pickle.dumps(pattern))

    assert copy == pattern
    assert hash(copy) == hash(pattern)
    assert HeadPattern.random(3, 4, seed=3) != HeadPattern.random(3, 4, seed=2)
    assert replace(pattern, retrieval=~pattern.mask) != pattern
    assert replace(pattern, scores=pattern.scores * 0) == replace(pattern, scores=-pattern.scores * 0)


def test_random_scores_depend_on_the_seed_only() -> None:
    np.random.seed(0)
    first = HeadPattern.random(2, 3, seed=7)
    np.random.seed(1)

    assert HeadPattern.random(2, 3, seed=7) == first


def test_the_two_extreme_patterns_have_one_class_of_heads() -> None:
    assert HeadPattern.all_retrieval(2, 3).head_counts == ((3, 0), (3, 0))
    assert HeadPattern.all_retrieval(2, 3).sparsity == 0
    assert HeadPattern.all_streaming(2, 3, sink=4, recent=8).head_counts == ((0, 3), (0, 3))
    assert HeadPattern.all_streaming(2, 3, sink=4, recent=8).sparsity == 1


def test_a_raw_pattern_says_that_nothing_is_decided() -> None:
    with pytest.raises(ValueError, match="expected a binarised pattern"):
        _ = HeadPattern.random(1, 2, seed=0).sparsity


def test_a_pattern_made_for_another_model_is_refused() -> None:
    pattern = HeadPattern.random(2, 4, seed=0)
    pattern.check_shape(2, 4)

    with pytest.raises(ValueError, match="expected a head pattern of 2 layers x 8 KV heads, got 2 x 4"):
        pattern.check_shape(2, 8)


def test_shards_put_side_by_side_are_the_pattern() -> None:
    pattern = HeadPattern.random(3, 8, seed=0).binarise(sparsity=0.5)
    shards = [pattern.shard(rank, 4) for rank in range(4)]

    assert np.array_equal(np.hstack([shard.scores for shard in shards]), pattern.scores)
    assert np.array_equal(np.hstack([shard.mask for shard in shards]), pattern.mask)
    assert not HeadPattern.random(3, 8, seed=0).shard(1, 2).is_binarised
    with pytest.raises(ValueError, match="num_ranks to divide num_kv_heads=8, got 3"):
        pattern.shard(0, 3)
    with pytest.raises(ValueError, match=r"rank in \[0, 2\), got 2"):
        pattern.shard(2, 2)
