import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_duo.sampling import SamplingBatch, SamplingParams, SamplingRow, sample
from hpu_duo.sampling.batch import uniform
from hpu_duo.sampling.rows import FORBIDDEN
from hpu_duo.sampling.sampler import draw, most_likely
from tests.sampling.reference import Case, distribution, edited_scores, sample_cases
from tests.tiers import further

torch.set_num_threads(1)
V = 24

# Steps of 1/4 make ties frequent, also after rounding to bfloat16.
LOGITS = st.lists(st.integers(-24, 24).map(lambda x: x / 4), min_size=V, max_size=V)
TOKENS = st.lists(st.integers(0, V - 1), max_size=12)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 20, V, 90]),
    top_p=st.sampled_from([0.05, 0.33, 0.77, 1.0, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.07, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.6]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.35]),
    logit_bias=st.one_of(st.none(), st.dictionaries(st.integers(0, V - 1), st.integers(-100, 100))),
    logprobs=st.sampled_from([None, None, 0, 1, 3, V]),
    min_tokens=st.sampled_from([0, 0, 6]),
    stop_token_ids=st.lists(st.integers(0, 3), max_size=2),
)
CASES = st.builds(
    Case,
    logits=LOGITS,
    params=PARAMS,
    seed=st.integers(0, 2**64 - 1),
    prompt_ids=TOKENS,
    output_ids=TOKENS,
    eos_token_ids=st.sampled_from([(), (2,), (1, 5)]),
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(st.none(), CASES), min_size=1, max_size=6).filter(any),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_row_gives_the_same_bits_alone_and_in_any_batch(
    cases: list[Case | None], dtype: torch.dtype
) -> None:
    together = sample_cases(cases, dtype)
    for index, case in enumerate(cases):
        if case is None:
            assert 0 <= together.token_ids[index] < V
            continue
        alone = sample_cases([case], dtype)
        assert together.token_ids[index] == alone.token_ids[0]
        if case.params.logprobs is None:
            continue
        k = case.params.logprobs
        assert together.logprobs.sampled[index] == alone.logprobs.sampled[0]
        assert together.logprobs.rank[index] == alone.logprobs.rank[0]
        assert together.logprobs.top_ids[index, :k].tolist() == alone.logprobs.top_ids[0, :k].tolist()
        assert together.logprobs.top[index, :k].tolist() == alone.logprobs.top[0, :k].tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.lists(PARAMS, min_size=2, max_size=4), st.integers(200, 3000))
def test_batch_mates_change_nothing_in_a_realistic_vocabulary(
    seed: int, all_params: list[SamplingParams], vocab_size: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(all_params), vocab_size, generator=generator) * 4
    histories = torch.randint(0, vocab_size, (len(all_params), 8), generator=generator).tolist()
    cases = [
        Case(row, params, seed + i, (), history, (3,))
        for i, (row, params, history) in enumerate(zip(logits.tolist(), all_params, histories))
    ]
    together = sample_cases(cases).token_ids.tolist()
    assert together == [int(sample_cases([case]).token_ids) for case in cases]


@settings(max_examples=300, deadline=None)
@given(CASES)
def test_the_token_is_where_the_reference_distribution_crosses_the_uniform(case: Case) -> None:
    got = int(sample_cases([case]).token_ids)
    scores = edited_scores(case)
    if case.params.is_greedy:
        # Different arithmetic may round a near-tie either way.
        assert scores[got] == pytest.approx(max(scores), abs=1e-5)
        return
    # The two arithmetics may disagree on the edge of a filter; such cases say nothing.
    nudged = [
        dataclasses.replace(
            case.params, top_p=min(1.0, case.params.top_p + d), min_p=max(0.0, case.params.min_p - d)
        )
        for d in (-1e-5, 1e-5)
    ]
    kept = [distribution(dataclasses.replace(case, params=params)) > 0 for params in nudged]
    if (kept[0] != kept[1]).any():
        return
    upper = distribution(case).cumsum()
    u = float(uniform(np.array([case.seed], np.uint64), np.array([len(case.output_ids)]))[0])
    lower = upper[got - 1] if got else 0.0
    assert lower - 1e-5 <= u <= upper[got] + 1e-5


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=2.0, top_k=7),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.05),
        SamplingParams(temperature=1.3, top_k=15, top_p=0.9, min_p=0.02),
        SamplingParams(repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3),
        SamplingParams(logit_bias={0: 2.0, 5: -100.0}),
        SamplingParams(min_tokens=9, stop_token_ids=[0, 1]),
    ],
    ids=repr,
)
@pytest.mark.parametrize("vary", ["seed", *further("counter")])
def test_draws_follow_the_target_distribution_by_chi_square(params: SamplingParams, vary: str) -> None:
    num = 20_000
    logits = torch.randn(V, generator=torch.Generator().manual_seed(5)) * 1.5
    case = Case(logits.tolist(), params, 0, (1, 2), (3, 3, 4), (6,))
    row = case.row()
    if vary == "seed":
        rows = [row._replace(seed=seed) for seed in range(num)]
    else:
        params = dataclasses.replace(params, min_tokens=0)
        case = dataclasses.replace(case, params=params)
        rows = [row._replace(params=params, num_output_tokens=i) for i in range(num)]
    tokens = sample(logits.expand(num, V), SamplingBatch.build(rows, V)).token_ids
    counts = np.bincount(tokens.numpy(), minlength=V)
    expected = distribution(case) * num
    assert not counts[expected == 0].any()
    drawn = expected > 0
    chi_square = ((counts[drawn] - expected[drawn]) ** 2 / expected[drawn]).sum()
    dof = max(int(drawn.sum()) - 1, 1)
    assert chi_square < dof + 5 * np.sqrt(2 * dof)


@settings(deadline=None)
@given(CASES)
def test_one_candidate_and_vanishing_temperature_are_greedy(case: Case) -> None:
    greedy = dataclasses.replace(case, params=dataclasses.replace(case.params, temperature=0.0))
    one = dataclasses.replace(case, params=dataclasses.replace(case.params, temperature=1.0, top_k=1))
    cold = dataclasses.replace(case, params=dataclasses.replace(case.params, temperature=1e-4, top_k=0))
    got = sample_cases([greedy, one, cold]).token_ids.tolist()
    assert got[0] == got[1]
    scores = edited_scores(case)
    best = [t for t, score in enumerate(scores) if score > max(scores) - 1e-3]
    assert got[2] in best


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    rows = [SamplingRow(SamplingParams(temperature=0)), SamplingRow(SamplingParams())]
    logits = torch.zeros(2, 1000)
    logits[0, [300, 20, 999]] = 1.0
    assert sample(logits, SamplingBatch.build(rows, 1000)).token_ids[0] == 20
    assert sample(logits[:1], SamplingBatch.build(rows[:1], 1000)).token_ids[0] == 20


def test_even_an_extreme_temperature_never_draws_a_forbidden_token() -> None:
    params = SamplingParams(temperature=1e6, min_tokens=1, stop_token_ids=[0, 2], repetition_penalty=1e-3)
    cases = [Case([50.0, 0.0, 50.0, 1.0], params, seed, prompt_ids=(0, 2)) for seed in range(200)]
    assert set(sample_cases(cases).token_ids.tolist()) == {1, 3}


@pytest.mark.parametrize(
    ("probs", "u", "token"),
    [
        ([0.5, 0.5], 0.5, 1),
        ([0.5, 0.5], 0.49, 0),
        ([0.0, 0.0, 1.0], 2.0**-24, 2),
        ([1.0, 0.0, 0.0], 1 - 2.0**-24, 0),
        ([0.25, 0.0, 0.75], 0.25, 2),
        ([1.0], 0.3, 0),
    ],
)
def test_a_draw_is_the_first_token_whose_cumulative_probability_exceeds_the_uniform(
    probs: list[float], u: float, token: int
) -> None:
    scores = torch.log(torch.tensor([probs])).clamp(min=FORBIDDEN)
    assert draw(scores, torch.tensor([u])).tolist() == [token]


def test_nan_logits_still_give_an_id_of_the_vocabulary() -> None:
    batch = SamplingBatch.build([SamplingRow(SamplingParams(top_p=0.5))], 10)
    token = sample(torch.full((1, 10), float("nan")), batch).token_ids
    assert 0 <= int(token) < 10


def test_logits_of_another_shape_are_refused() -> None:
    batch = SamplingBatch.build([None, None], 10)
    with pytest.raises(ValueError, match=r"expected shape \(2, 10\), got \(2, 11\)"):
        sample(torch.zeros(2, 11), batch)


def test_sampling_leaves_the_logits_as_they_were() -> None:
    logits = torch.randn(1, V)
    before = logits.clone()
    params = SamplingParams(logit_bias={1: 5.0}, top_p=0.5, repetition_penalty=2.0, logprobs=3)
    batch = SamplingBatch.build([Case(logits[0].tolist(), params, 0, (1, 2)).row()], V)
    sample(logits, batch)
    assert torch.equal(logits, before)


@settings(deadline=None, max_examples=60)
@given(
    vocab_size=st.one_of(st.integers(1, 40), st.integers(500, 1300)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_the_lowest_id_wins_among_equals(vocab_size: int, dtype: torch.dtype, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    # Few distinct values, so that nearly every row has ties.
    scores = torch.randint(-3, 3, (5, vocab_size), generator=gen).to(dtype)
    expected = [row.index(max(row)) for row in scores.tolist()]
    assert most_likely(scores).tolist() == expected
