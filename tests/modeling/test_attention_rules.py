"""Models under an attention rule compute what transformers computes under the dense mask of that rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bias_builders import Rule, Window, describe_rule
from graphs import BucketTable
from graphs.backends.compile import CompileBackend
from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.config.attention_rules import make_attention_rule, make_attention_rules
from kernels_ref import Blocks
from tests.bias_builders.plain_rules import plain
from tests.modeling.dense_oracle import masked_logits
from tests.modeling.driving import greedy_logits
from tests.modeling.families import BLOCK, LENGTHS, WINDOW, Zoo, prompts_of
from tests.tiers import EXHAUSTIVE, crossed, further

RULES = [
    "band:width=9",
    "sink_band:sink=3,band=7",
    "dilated:width=5,dilation=3",
    "strided:stride=6",
    "fixed:stride=8,summary=2",
    "sink_band:sink=2,band=3|dilated:width=9,dilation=4",
    "strided:stride=5&band:width=17",
]
NUM_NEW = 12
MASK = np.array([[1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1], [1, 0, 0, 0]], np.bool_)
PATTERN = HeadPattern(MASK.astype(np.float32), 2, 3, retrieval=MASK)
TABLE = BucketTable.from_strings(["csu/q24/s24/u16/l6"])


def load(zoo: Zoo, name: str, rule: str, **options: Any) -> HPUDuoModel:
    defaults = {
        "max_num_seqs": len(LENGTHS),
        "max_num_batched_tokens": 23,
        "max_model_len": 80,
        "attention_rule": rule,
        "attention": "reference",
    }
    return HPUDuoModel.from_pretrained(zoo.load(name)[1], block_size=BLOCK, **{**defaults, **options})


def dense(rule: Rule | None, length: int) -> torch.Tensor:
    pairs = [[plain(rule, i, j) if rule else j <= i for j in range(length)] for i in range(length)]
    return torch.tensor(pairs)


def expected_logits(
    zoo: Zoo, name: str, text: str, tokens: list[int], num_new: int, pattern: HeadPattern | None = None
) -> torch.Tensor:
    model, _ = zoo.load(name)
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    if name == "mistral_sliding":
        types = ["sliding_attention"] * config.num_hidden_layers
    rules = make_attention_rules(text)
    by_rule, full = [dense(rule, len(tokens)) for rule in rules], dense(None, len(tokens))
    masks = []
    for layer, kind in enumerate(types):
        heads = by_rule * (config.num_attention_heads if len(by_rule) == 1 else 1)
        if kind == "sliding_attention":
            heads = [dense(Window(0, config.sliding_window), len(tokens))] * len(heads)
        elif pattern is not None:
            heads = [full if keeps else own for keeps, own in zip(pattern.mask[layer], heads)]
        masks.append(torch.stack(heads))
    return masked_logits(model, masks, tokens)[-num_new - 1 : -1]


def assert_served(zoo: Zoo, name: str, rule: str, **options: Any) -> HPUDuoModel:
    served, prompts = load(zoo, name, rule, **options), prompts_of()
    for prompt, (new, logits) in zip(prompts, greedy_logits(served.engine, prompts, NUM_NEW)):
        expected = expected_logits(zoo, name, rule, [*prompt, *new], NUM_NEW, options.get("pattern"))
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    return served


@pytest.mark.parametrize(("rule", "attention"), crossed(RULES, ["reference", "sdpa"]))
def test_logits_equal_those_under_the_dense_mask(zoo: Zoo, rule: str, attention: str) -> None:
    assert_served(zoo, "llama", rule, attention=attention)


@pytest.mark.parametrize(
    ("name", "attention"),
    crossed(
        ["llama_mha", "llama_mqa", "qwen2", "qwen3", "gpt_neox", "olmo2"],
        ["reference", "sdpa"],
        fast=("llama_mha", "llama_mqa", "gpt_neox"),
    ),
)
def test_families_with_any_number_of_queries_per_key_follow_the_rule(
    zoo: Zoo, name: str, attention: str
) -> None:
    assert_served(zoo, name, RULES[5], attention=attention)


@pytest.mark.parametrize("name", ["gemma2", *further("gemma3"), "gpt_oss", *further("mistral_sliding")])
def test_layers_with_a_window_keep_it_beside_soft_caps_and_sink_logits(zoo: Zoo, name: str) -> None:
    assert WINDOW < 80
    assert_served(zoo, name, "dilated:width=6,dilation=2")


@pytest.mark.parametrize(("rule", "attention"), crossed([RULES[1], RULES[4]], ["reference", "sdpa"]))
def test_heads_that_stream_under_a_pattern_have_the_rule_and_others_see_all(
    zoo: Zoo, rule: str, attention: str
) -> None:
    served = assert_served(zoo, "llama_mha", rule, attention=attention, pattern=PATTERN)
    groups = {group.kind: group.num_heads for group in served.engine.runner.model.specs[2].groups}
    assert groups == {Blocks(): 2, Blocks(make_attention_rule(rule)): 2}


@pytest.mark.parametrize("name", [*further("llama"), pytest.param("llama_mqa", marks=pytest.mark.slow)])
def test_triton_kernels_follow_the_rule(zoo: Zoo, name: str) -> None:
    pytest.importorskip("triton")
    served = load(zoo, name, RULES[5], attention="triton")
    prompts = prompts_of([3, 2 * BLOCK + 3])
    for prompt, (new, logits) in zip(prompts, greedy_logits(served.engine, prompts, 3)):
        expected = expected_logits(zoo, name, RULES[5], [*prompt, *new], 3)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("graphs", "attention", "rule"),
    # What compiles has rules in test_each_head_may_have_a_table_of_blocks, too.
    crossed(
        ["replay", CompileBackend("eager")],
        ["reference", "sdpa"],
        [RULES[1], RULES[3], RULES[5]],
        fast=("replay",),
    ),
)
def test_captured_steps_follow_the_rule(
    zoo: Zoo, graphs: str | CompileBackend, rule: str, attention: str
) -> None:
    assert_served(zoo, "llama", rule, graphs=graphs, buckets=TABLE, attention=attention)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("attention", ["sdpa", "reference"])
def test_compiled_steps_follow_the_rule(zoo: Zoo, attention: str) -> None:
    assert_served(zoo, "llama", RULES[5], graphs="compile", buckets=TABLE, attention=attention)


@pytest.mark.parametrize("tokens", [6, 64])
def test_chunks_do_not_change_what_is_seen(zoo: Zoo, tokens: int) -> None:
    assert_served(zoo, "llama", RULES[5], max_num_batched_tokens=tokens)


@pytest.mark.parametrize(("decode_len", "attention"), crossed([2, BLOCK], ["reference", "sdpa"]))
def test_tokens_that_are_decoded_together_see_what_each_of_them_sees(
    zoo: Zoo, decode_len: int, attention: str
) -> None:
    served = load(
        zoo, "llama", RULES[5], attention=attention, decode_len=decode_len, max_num_batched_tokens=64
    )
    prompts = prompts_of([3, 2 * BLOCK, 30])
    texts = [prompts_of([length])[0] for length in (11, 7, 9)]
    for prompt, text, (score,) in zip(prompts, texts, served.score(prompts, [[text] for text in texts])):
        logits = expected_logits(zoo, "llama", RULES[5], [*prompt, *text], len(text))
        expected = torch.log_softmax(logits, dim=-1)[range(len(text)), text]
        assert score.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_prompts_that_share_a_cached_prefix_follow_the_rule(zoo: Zoo, attention: str) -> None:
    served = load(zoo, "llama", RULES[5], attention=attention)
    prefix = prompts_of([3 * BLOCK + 2])[0]
    prompts = [[*prefix, *more] for more in prompts_of([2, 9, 1])]
    greedy_logits(served.engine, [prefix], 2)
    for prompt, (new, logits) in zip(prompts, greedy_logits(served.engine, prompts, NUM_NEW)):
        expected = expected_logits(zoo, "llama", RULES[5], [*prompt, *new], NUM_NEW)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    stats = served.stats().prefixes
    assert stats is not None
    assert stats.num_hit_tokens >= 3 * 3 * BLOCK


def test_a_preempted_request_goes_on_under_the_rule(zoo: Zoo) -> None:
    served = load(zoo, "llama", RULES[1], num_blocks=9, max_num_seqs=3, max_model_len=60)
    prompts = prompts_of([19, 13, 22])
    for prompt, (new, logits) in zip(prompts, greedy_logits(served.engine, prompts, 16)):
        expected = expected_logits(zoo, "llama", RULES[1], [*prompt, *new], 16)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("heads", "attention"),
    crossed(
        {"llama": ("llama", None), "llama_mha": ("llama_mha", None), "pattern": ("llama_mha", PATTERN)},
        ["reference", "sdpa"],
    ),
)
def test_each_head_may_have_a_rule_of_its_own(
    zoo: Zoo, heads: tuple[str, HeadPattern | None], attention: str
) -> None:
    name, pattern = heads
    rule = (
        "strided:stride=5;full"
        if name == "llama"
        else "band:width=6;full;fixed:stride=8,summary=2;band:width=6"
    )
    served = assert_served(zoo, name, rule, attention=attention, pattern=pattern)
    if pattern is None and name == "llama_mha":
        kinds = [Blocks(), Blocks(Window(0, 6)), Blocks(make_attention_rule("fixed:stride=8,summary=2"))]
        (groups,) = {spec.groups for spec in served.engine.runner.model.specs}
        assert [group.kind for group in groups] == kinds
        assert [group.num_heads for group in groups] == [1, 2, 1]
        assert [each.num_heads for each in served.stats().attention_rules] == [8, 4]


def tables(path: Path) -> str:
    """Random tables of blocks of 5 tokens for two heads, in a file; texts are longer than they reach."""
    np.save(path / "tables.npy", np.random.default_rng(3).random((2, 9, 9)) < 0.4)
    file = f"block_table:file={path / 'tables.npy'},block=5"
    return f"{file};{file},head=1"


@pytest.mark.parametrize(
    ("attention", "graphs"),
    [("reference", "eager"), ("reference", "replay"), ("sdpa", "eager"), ("sdpa", CompileBackend("eager"))],
)
def test_each_head_may_have_a_table_of_blocks(
    zoo: Zoo, tmp_path: Path, attention: str, graphs: str | CompileBackend
) -> None:
    buckets = None if graphs == "eager" else TABLE
    served = assert_served(
        zoo, "llama", tables(tmp_path), attention=attention, graphs=graphs, buckets=buckets
    )
    first, second = served.stats().attention_rules
    assert first.rule != second.rule


def test_tables_of_blocks_are_refused_where_kernels_do_not_read_them(zoo: Zoo, tmp_path: Path) -> None:
    for options in ({"attention": "triton"}, {"graphs": "compile", "buckets": TABLE}):
        with pytest.raises(ValueError, match="'sdpa', or without a compiler 'reference', on a CPU only"):
            load(zoo, "llama", tables(tmp_path) + "|band:width=3", **options)
    np.save(tmp_path / "floats.npy", np.zeros((3, 3)))
    for file, head, message in (
        ("floats", 0, "expected booleans"),
        ("tables", 2, "expected head of 0 to 1, got 2"),
        ("none", 0, "to be an array of numpy"),
    ):
        with pytest.raises(ValueError, match=message):
            load(zoo, "llama", f"block_table:file={tmp_path}/{file}.npy,head={head}")


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_described_as_it_is_written(rule: str) -> None:
    assert describe_rule(make_attention_rule(rule)) == rule


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "bands"}, "expected attention_rule to be one of band, block_table, dilated"),
        ({"rule": "band:window=3"}, "expected options of attention_rule 'band'"),
        ({"rule": "band:width=0"}, "recent >= 1"),
        ({"rule": "fixed:stride=4,summary=8"}, "summary of at most stride=4, got 8"),
        ({"rule": "band;full;band"}, "for all KV heads of a layer or for each of 2, got 3"),
        ({"rule": "band|full"}, "expected attention_rule to be one of"),
        ({"rule": "band|"}, "expected attention_rule to be one of"),
        ({"rule": "band", "kv_policy": "local", "kv_budget": 8}, "kv_policy=None only"),
    ],
)
def test_what_is_no_rule_or_does_not_go_with_one_is_refused(
    zoo: Zoo, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(zoo, "llama", **options)


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *crossed(["mistral_sliding", "gemma3", "gpt_oss"], ["reference", "sdpa"]),
        pytest.param("gemma2", "reference", marks=EXHAUSTIVE),
    ],
)
def test_long_windows_may_be_kept_in_blocks(zoo: Zoo, name: str, attention: str) -> None:
    model, path = zoo.load(name)
    served = HPUDuoModel.from_pretrained(
        path,
        max_num_seqs=len(LENGTHS),
        max_num_batched_tokens=23,
        max_model_len=80,
        block_size=BLOCK,
        max_ring_window=WINDOW - 1,
        attention=attention,
    )
    kinds = {group.kind for spec in served.engine.runner.model.specs for group in spec.groups}
    assert kinds <= {Blocks(), Blocks(Window(0, WINDOW))}
    assert Blocks(Window(0, WINDOW)) in kinds
    for _ in range(2):  # computed, then taken up
        prompts = prompts_of()
        for prompt, (new, logits) in zip(prompts, greedy_logits(served.engine, prompts, NUM_NEW)):
            with torch.inference_mode():
                expected = model(torch.tensor([[*prompt, *new]])).logits[0, -NUM_NEW - 1 : -1]
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert served.stats().prefixes.num_hit_tokens > 0
    assert served.stats().prefixes.num_lost_to_snapshots == 0
