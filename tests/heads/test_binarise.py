"""The rules that turn scores into classes."""

from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.heads import Balance, HeadPattern

PUBLISHED = sorted((Path(__file__).parents[1] / "data" / "attn_patterns").iterdir())
# Few distinct values, so that ties are common.
TIED = st.sampled_from([-0.25, 0.0, 0.125, 0.5, 1.0])
SPARSITY = st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 0.75, 0.9, 1.0]) | st.floats(0, 1)
BALANCE = st.sampled_from(["global", "per_layer", "per_rank"])


@st.composite
def patterns(draw: st.DrawFn) -> HeadPattern:
    num_layers, num_kv_heads = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 4, 6, 8]))
    row = st.lists(TIED, min_size=num_kv_heads, max_size=num_kv_heads)
    scores = draw(st.lists(row, min_size=num_layers, max_size=num_layers))
    return HeadPattern(scores=np.array(scores), sink=1, recent=1)


def ranks_of(pattern: HeadPattern, balance: Balance) -> int:
    return 2 if balance == "per_rank" and pattern.num_kv_heads % 2 == 0 else 1


def wanted_heads(num_heads: int, sparsity: float, unit: int = 1) -> int:
    units = Decimal(num_heads) * (1 - Decimal(str(sparsity))) / unit
    return unit * int(units.quantize(Decimal(1), rounding=ROUND_HALF_UP))


@given(pattern=patterns(), sparsity=SPARSITY)
def test_stable_keeps_the_wanted_number_of_the_strongest_heads(pattern: HeadPattern, sparsity: float) -> None:
    mask = pattern.binarise(sparsity=sparsity).mask
    ranked = sorted((score, layer, head) for (layer, head), score in np.ndenumerate(pattern.scores))
    num_kept = wanted_heads(len(ranked), sparsity)
    kept = {(layer, head) for _, layer, head in ranked[len(ranked) - num_kept :]}

    assert {(int(layer), int(head)) for layer, head in np.argwhere(mask)} == kept


@pytest.mark.parametrize(("sparsity", "kept"), [(0.1, 5), (0.3, 4), (0.5, 3), (0.7, 2), (0.9, 1)])
def test_one_half_rounds_towards_more_retrieval_heads(sparsity: float, kept: int) -> None:
    assert HeadPattern.random(1, 5, seed=0).binarise(sparsity=sparsity).mask.sum() == kept


@given(pattern=patterns(), balance=BALANCE, pair=st.tuples(SPARSITY, SPARSITY))
def test_a_head_that_streams_also_streams_at_a_higher_sparsity(
    pattern: HeadPattern, balance: Balance, pair: tuple[float, float]
) -> None:
    low, high = sorted(pair)
    num_ranks = ranks_of(pattern, balance)
    denser = pattern.binarise(sparsity=low, balance=balance, num_ranks=num_ranks).mask
    sparser = pattern.binarise(sparsity=high, balance=balance, num_ranks=num_ranks).mask

    assert not (sparser & ~denser).any()


@given(pattern=patterns(), balance=BALANCE)
def test_sparsity_zero_keeps_all_heads_and_one_keeps_none(pattern: HeadPattern, balance: Balance) -> None:
    num_ranks = ranks_of(pattern, balance)

    assert pattern.binarise(sparsity=0, balance=balance, num_ranks=num_ranks).sparsity == 0
    assert pattern.binarise(sparsity=1, balance=balance, num_ranks=num_ranks).sparsity == 1


@given(pattern=patterns(), sparsity=SPARSITY)
def test_per_layer_spreads_the_same_total_evenly_over_layers(pattern: HeadPattern, sparsity: float) -> None:
    balanced = pattern.binarise(sparsity=sparsity, balance="per_layer")
    counts = [kept for kept, _ in balanced.head_counts]

    assert sum(counts) == wanted_heads(pattern.scores.size, sparsity)
    assert max(counts) - min(counts) <= 1
    for scores, mask in zip(pattern.scores, balanced.mask):
        assert mask.all() or not mask.any() or scores[mask].min() >= scores[~mask].max()


def test_per_layer_gives_the_odd_head_to_the_layer_whose_next_best_head_is_strongest() -> None:
    scores = np.array([[0.9, 0.1], [0.8, 0.7], [0.6, 0.2]])
    mask = HeadPattern(scores=scores, sink=1, recent=1).binarise(sparsity=1 / 3, balance="per_layer").mask

    assert mask.tolist() == [[True, False], [True, True], [True, False]]


@given(pattern=patterns(), sparsity=SPARSITY, num_ranks=st.sampled_from([1, 2, 4]))
def test_per_rank_keeps_equally_many_heads_in_every_slice_of_a_layer(
    pattern: HeadPattern, sparsity: float, num_ranks: int
) -> None:
    if pattern.num_kv_heads % num_ranks:
        with pytest.raises(ValueError, match=f"num_ranks to divide num_kv_heads={pattern.num_kv_heads}"):
            pattern.binarise(sparsity=sparsity, balance="per_rank", num_ranks=num_ranks)
        return
    balanced = pattern.binarise(sparsity=sparsity, balance="per_rank", num_ranks=num_ranks)
    shards = [balanced.shard(rank, num_ranks) for rank in range(num_ranks)]

    assert len({shard.head_counts for shard in shards}) == 1
    assert balanced.mask.sum() == wanted_heads(pattern.scores.size, sparsity, num_ranks)
    for shard in shards:
        for scores, mask in zip(shard.scores, shard.mask):
            assert mask.all() or not mask.any() or scores[mask].min() >= scores[~mask].max()


@given(pattern=patterns(), sparsity=SPARSITY)
def test_per_rank_with_one_rank_is_global(pattern: HeadPattern, sparsity: float) -> None:
    assert pattern.binarise(sparsity=sparsity, balance="per_rank") == pattern.binarise(sparsity=sparsity)


@given(pattern=patterns(), threshold=TIED | st.floats(-2, 2))
def test_threshold_keeps_the_heads_strictly_above_it(pattern: HeadPattern, threshold: float) -> None:
    mask = pattern.binarise(threshold=threshold).mask

    assert all(
        mask[index] == (score > np.float32(threshold)) for index, score in np.ndenumerate(pattern.scores)
    )


# The numbers of heads are those of 32 layers x 32 or 8 KV heads.
@pytest.mark.parametrize("directory", PUBLISHED, ids=lambda directory: directory.name)
@pytest.mark.parametrize(
    ("sparsity", "mha_heads", "gqa_heads"), [(0.25, 768, 192), (0.5, 512, 128), (0.75, 256, 64)]
)
@pytest.mark.parametrize("balance", ["global", "per_layer"])
def test_published_patterns_are_cut_to_exact_counts(
    directory: Path, sparsity: float, mha_heads: int, gqa_heads: int, balance: Balance
) -> None:
    cut = HeadPattern.load(directory).binarise(sparsity=sparsity, balance=balance)

    assert cut.mask.sum() == (mha_heads if "Llama-2" in directory.name else gqa_heads)
    assert cut.sparsity == sparsity
    if balance == "per_layer":
        assert len(set(cut.head_counts)) == 1


def test_published_patterns_have_layers_of_a_single_class() -> None:
    by_name = {path.name: HeadPattern.load(path).binarise(sparsity=0.5).head_counts for path in PUBLISHED}

    assert (0, 8) in by_name["Llama-3-8B-Instruct-Gradient-4194k"]
    assert (8, 0) in by_name["Meta-Llama-3.1-8B-Instruct"]


def published_rule(full_attention_heads: np.ndarray, sparsity: float) -> np.ndarray:
    """The repository's rule line by line, on numpy's global generator and a copy that it spoils."""
    heads = np.clip(full_attention_heads.copy(), 0, 1)
    heads += np.random.uniform(0, 1e-6, heads.shape)
    cut = np.quantile(heads, sparsity)
    if sparsity >= 1:
        cut = 2
    if sparsity <= 0:
        cut = -1
    return heads >= cut


@pytest.mark.parametrize("directory", PUBLISHED, ids=lambda directory: directory.name)
@pytest.mark.parametrize("sparsity", [0, 0.25, 0.5, 0.6, 0.75, 1])
@pytest.mark.parametrize("seed", [0, 1, 42])
def test_reference_repeats_the_published_rule_for_a_seeded_generator(
    directory: Path, sparsity: float, seed: int
) -> None:
    pattern = HeadPattern.load(directory)
    table = np.loadtxt(directory / "full_attention_heads.tsv", dtype=float, delimiter="\t")
    np.random.seed(seed)
    expected = published_rule(table, sparsity)
    following = np.random.RandomState()
    following.set_state(np.random.get_state())
    before = pattern.scores.copy()

    assert np.array_equal(
        pattern.binarise(sparsity=sparsity, tie_break="reference", seed=seed).mask, expected
    )
    assert np.array_equal(pattern.scores, before)
    assert np.random.random() == following.random_sample()


def test_reference_masks_depend_on_the_seed_where_scores_tie_and_stable_ones_do_not() -> None:
    pattern = HeadPattern.load(next(path for path in PUBLISHED if path.name == "Mistral-7B-Instruct-v0.2"))
    noisy = [pattern.binarise(sparsity=0.75, tie_break="reference", seed=seed) for seed in range(4)]
    stable = [pattern.binarise(sparsity=0.75, seed=seed) for seed in range(4)]

    assert len(set(noisy)) == 4
    assert len(set(stable)) == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({}, "either sparsity or threshold, got sparsity=None and threshold=None"),
        ({"sparsity": 0.5, "threshold": 0.5}, "either sparsity or threshold"),
        ({"sparsity": -0.1}, r"sparsity in \[0, 1\], got -0.1"),
        ({"sparsity": 1.1}, r"sparsity in \[0, 1\], got 1.1"),
        ({"sparsity": float("nan")}, r"sparsity in \[0, 1\], got nan"),
        ({"threshold": float("nan")}, "expected a threshold, got NaN"),
        ({"sparsity": 0.5, "tie_break": "noise"}, "'stable' or 'reference', got 'noise'"),
        ({"sparsity": 0.5, "balance": "per_head"}, "'per_rank', got 'per_head'"),
        ({"sparsity": 0.5, "num_ranks": 2}, "balance='per_rank' with num_ranks=2, got 'global'"),
        ({"sparsity": 0.5, "balance": "per_rank", "num_ranks": 3}, "divide num_kv_heads=4, got 3"),
        ({"sparsity": 0.5, "balance": "per_rank", "num_ranks": 0}, "divide num_kv_heads=4, got 0"),
        (
            {"sparsity": 0.5, "balance": "per_layer", "tie_break": "reference"},
            "'global' with tie_break='reference'",
        ),
        ({"threshold": 0.5, "balance": "per_layer"}, "balance='global' with threshold"),
        ({"threshold": 0.5, "tie_break": "reference"}, "a sparsity with tie_break='reference'"),
    ],
)
def test_contradicting_arguments_are_refused(arguments: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        HeadPattern.random(2, 4, seed=0).binarise(**arguments)
