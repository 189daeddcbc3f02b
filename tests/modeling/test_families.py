"""Every family against transformers' own generation, in float32."""

from typing import Any

import pytest
import torch

from hpu_duo import HPUDuoModel
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import serve, tokens_of
from tests.modeling.driving import greedy_logits, teacher_forced
from tests.modeling.families import BLOCK, FAMILIES, LENGTHS, VOCAB, Zoo, prompts_of
from tests.tiers import crossed

NUM_NEW = 10
MIXTURES = {"gpt_oss", "mixtral", "qwen3_moe"}
# One for each way in which families differ: grouped queries, windows and soft caps, sink logits and experts,
# fused projections, shared norms, a part of the heads turned, learnt positions, layers without arguments.
FEW = ("llama", "gemma2", "gpt_oss", "phi3_sliding", "cohere", "phi", "gpt2", "gptj", "smollm3", "qwen3_moe")
ALL = pytest.mark.parametrize("name", crossed(list(FAMILIES), fast=FEW))


def load(
    zoo: Zoo,
    name: str,
    num_batched_tokens: int,
    attention: str = "reference",
    graphs: str = "eager",
    **options: Any,
) -> HPUDuoModel:
    return HPUDuoModel.from_pretrained(
        zoo.load(name)[1],
        attention=attention,
        graphs=graphs,
        block_size=BLOCK,
        max_num_seqs=len(LENGTHS),
        max_num_batched_tokens=num_batched_tokens,
        max_model_len=80,
        **options,
    )


@ALL
def test_random_checkpoints_follow_their_context(zoo: Zoo, name: str) -> None:
    """Shows that equal tokens below mean something: no constant answers and no near ties."""
    model, _ = zoo.load(name)
    outputs = zoo.greedy(name, NUM_NEW)
    assert len({tuple(output[:3]) for output in outputs}) >= len(LENGTHS) - 1
    for prompt, output in zip(prompts_of(), outputs):
        best = teacher_forced(model, prompt, output).topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-3


@pytest.mark.parametrize(("name", "num_batched_tokens"), crossed(list(FAMILIES), [13, 256], fast=FEW[::2]))
def test_greedy_tokens_of_a_mixed_batch_equal_those_of_transformers(
    zoo: Zoo, name: str, num_batched_tokens: int
) -> None:
    served = load(zoo, name, num_batched_tokens)
    output = served.generate(prompts_of(), max_new_tokens=NUM_NEW)
    for row, prompt, expected in zip(output, prompts_of(), zoo.greedy(name, NUM_NEW)):
        assert row[: len(prompt) + NUM_NEW].tolist() == prompt + expected


@pytest.mark.parametrize(
    ("name", "attention"), crossed(list(FAMILIES), ["reference", "auto"], fast=FEW[1::2])
)
def test_logits_of_chunked_prompts_are_those_of_one_dense_forward(
    zoo: Zoo, name: str, attention: str
) -> None:
    model, _ = zoo.load(name)
    served = load(zoo, name, 13, attention)
    for prompt, (new, logits) in zip(prompts_of(), greedy_logits(served.engine, prompts_of(), NUM_NEW)):
        torch.testing.assert_close(logits, teacher_forced(model, prompt, new), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", crossed(list(FAMILIES), fast=FEW[1:3]))
def test_drafts_that_are_partly_right_change_no_greedy_token(zoo: Zoo, name: str) -> None:
    drafts = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 8, 3]]}
    served = load(zoo, name, 32, speculative_config=drafts)
    expected = zoo.greedy(name, NUM_NEW)
    predicted = [[*tokens[:4], (tokens[4] + 1) % VOCAB, *tokens[5:]] for tokens in expected]
    params = [
        SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, prediction_token_ids=each)
        for each in predicted
    ]
    assert tokens_of(serve(served, prompts_of(), params)) == [[tokens] for tokens in expected]
    stats = served.stats().speculation
    assert stats is not None
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@ALL
def test_replayed_steps_have_the_logits_of_one_dense_forward(zoo: Zoo, name: str) -> None:
    model, _ = zoo.load(name)
    served = load(zoo, name, 13, "auto", "replay")
    for _ in range(2):  # Steps are traced in the second run of their bucket.
        found = greedy_logits(served.engine, prompts_of(), NUM_NEW)
        for prompt, (new, logits) in zip(prompts_of(), found):
            torch.testing.assert_close(logits, teacher_forced(model, prompt, new), atol=1e-4, rtol=0)
    steps = served.engine.runner.graphs._executables.values()
    # Which experts are chosen decides about the operators of a step.
    assert any(step.is_replayed for step in steps) != (name in MIXTURES)
