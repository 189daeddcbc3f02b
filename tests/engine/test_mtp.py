"""Drafts of the checkpoint's own layer of multi-token prediction: the tokens are those without."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from graphs.backends.compile import CompileBackend
from hpu_duo import HPUDuoModel
from hpu_duo.config.kv_plan import Keep, KVPlan
from hpu_duo.lab import sim
from hpu_duo.modeling import mtp
from hpu_duo.sampling import SamplingParams
from kernels_ref.x86 import library
from tests.engine.tiny import PATTERN, Tiny, serve, tokens_of
from tests.modeling.families import BASE, VERSION, make_config, prompts_of, randomise, save_random
from tests.quantised.writers import KINDS, write_twins
from tests.tiers import EXHAUSTIVE, further

pytestmark = pytest.mark.skipif(VERSION < (5, 24), reason="MtpModel needs transformers 5.24")

ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8, "num_hidden_layers": 2}
FULL = {"mtp_layer_types": ["full_attention"], "num_mtp_layers": 1}
PLAN = KVPlan.of_mask(PATTERN.mask, Keep("h2o", 8))
PROMPTS = prompts_of([17, 1, 33], seed=4)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.7, top_p=0.95, seed=5, max_tokens=24, ignore_eos=True)


@dataclass(frozen=True)
class Predicting(Tiny):
    """A checkpoint whose layer is often right, and that layer as transformers has it."""

    layer: Any

    def drafting(self, **options: Any) -> HPUDuoModel:
        """Serve it with drafts of the layer."""
        config = {"method": "mtp", "num_speculative_tokens": 3, **options.pop("config", {})}
        config.setdefault("num_speculative_tokens_per_batch_size", [[1, 4, 3]])
        return self.load(**{"max_num_batched_tokens": 24, **options}, speculative_config=config)

    @torch.inference_mode()
    def accepted(self, prompt: Sequence[int], output: Sequence[int], most: int) -> list[int]:
        """Accepted drafts of each verified step of a greedy request, computed text by text."""
        tokens, num_known, found = [*prompt, *output], len(prompt) + 1, []
        hidden = self.model.model(torch.tensor([tokens])).last_hidden_state
        while (room := min(most, len(tokens) - num_known - 1)) > 0:
            states, text = hidden[:, : num_known - 1], tokens[1:num_known]
            right, goes_on = 0, True
            for _ in range(room):
                ids, places = torch.tensor([text]), torch.arange(1, len(text) + 1)[None]
                after = self.layer.forward_layer(0, states, places, None, input_ids=ids)[:, -1:]
                token = int(self.layer.shared_head(after).argmax())
                goes_on &= token == tokens[len(text) + 1]
                right += goes_on
                states, text = torch.cat([states, after], dim=1), [*text, token]
            found.append(right)
            num_known += 1 + right
        return found


def save_predicting(
    directory: Path, name: str, names: Callable[[str], str], weight: float = 0.3, **fields: Any
) -> Predicting:
    """Save a model whose texts depend on their last tokens mostly, with a layer that does as well.

    Args:
        names: from the names of transformers' layer to those of checkpoints.
        weight: factor of what attention and experts add.
    """
    from transformers.modeling_layers import MtpModel

    model = save_random(make_config(name, **{**BASE, **ROUTED, **fields}), directory)
    layer = MtpModel(model, 1).float().eval()
    layer.set_attn_implementation("eager")
    randomise(layer.layers, seed=1)
    block, size = layer.layers[0], model.config.hidden_size
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(8)
        for key, parameter in [*model.model.layers.named_parameters(), *block.named_parameters()]:
            if "o_proj" in key or "down_proj" in key:
                parameter.mul_(weight)
        block.post_norm.weight.copy_(model.model.norm.weight)
        block.enorm.weight.fill_(1)
        block.eh_proj.weight[:, :size] = 4 * torch.eye(size)
        block.eh_proj.weight[:, size:] *= 0.2
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    own = {names(key): weight.contiguous().clone() for key, weight in block.state_dict().items()}
    save_file({**load_file(file), **own}, file, metadata={"format": "pt"})
    return Predicting(directory, model, layer)


def mellum_name(key: str) -> str:
    """The name of a weight in checkpoints of Mellum."""
    renamed = {
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "eh_proj": "fc",
        "post_norm": "norm",
    }
    first, _, rest = key.partition(".")
    return f"mtp.{renamed[first]}.{rest}" if first in renamed else f"mtp.layers.0.{rest}"


def name_behind(key: str) -> str:
    """The name of a weight in checkpoints whose layer is behind the last one, of two."""
    return f"model.layers.2.{key.removeprefix('mtp_block.').replace('post_norm.', 'shared_head.norm.')}"


@pytest.fixture(scope="module")
def mellum(tmp_path_factory: pytest.TempPathFactory) -> Predicting:
    path = tmp_path_factory.mktemp("mellum")
    return save_predicting(path, "MellumConfig", mellum_name, num_experts=4, sliding_window=11, **FULL)


@pytest.mark.parametrize(
    ("most", "options"), [*further((1, {"graphs": "replay", "attention": "sdpa"})), (3, {})]
)
def test_drafts_are_those_of_transformers_layer(
    mellum: Predicting, most: int, options: dict[str, Any]
) -> None:
    """Behind prompts in chunks and cached prefixes, and behind rejected drafts."""
    config = {"num_speculative_tokens": most, "num_speculative_tokens_per_batch_size": [[1, 4, most]]}
    drafting = mellum.drafting(config=config, max_num_batched_tokens=16, **options)
    found = [0] * most
    num_drafts = 0
    for prompt in [*PROMPTS, PROMPTS[0]]:
        ((output,),) = tokens_of(serve(drafting, [prompt], GREEDY))
        accepted = mellum.accepted(prompt, output, most)
        num_drafts += len(accepted)
        found = [num + sum(each > place for each in accepted) for place, num in enumerate(found)]
    stats = drafting.stats().speculation
    assert stats is not None
    assert 0.2 * num_drafts < found[0] < 0.95 * num_drafts
    assert (stats.num_drafts, *stats.num_accepted_tokens_per_pos) == (num_drafts, *found)


@pytest.mark.parametrize(
    ("params", "options"),
    [
        *further((replace(SEEDED, n=2, logprobs=2), {"num_blocks": 12, "max_model_len": 64})),
        (replace(SEEDED, n=2, logprobs=2), {"graphs": "replay", "attention": "sdpa", "pattern": PATTERN}),
        pytest.param(GREEDY, {"graphs": CompileBackend("eager")}, marks=EXHAUSTIVE),
        pytest.param(GREEDY, {"graphs": "compile"}, marks=EXHAUSTIVE),
        pytest.param(
            GREEDY, {"kv_cache_dtype": "fp8", "pack_weights": bool(library.lanes())}, marks=pytest.mark.slow
        ),
    ],
)
def test_tokens_are_those_without_drafts(
    mellum: Predicting, params: SamplingParams, options: dict[str, Any]
) -> None:
    """With forks, preemption, cached prefixes, and drafts that are often right."""
    plain = mellum.load(**{**options, "graphs": "eager", "attention": "reference"})
    drafting = mellum.drafting(**options)
    expected = tokens_of(serve(plain, PROMPTS, params))
    for _ in range(2):  # the second time from the prefix cache
        assert tokens_of(serve(drafting, PROMPTS, params)) == expected
    stats = drafting.stats()
    assert stats.speculation is not None
    assert 0.2 < stats.speculation.num_accepted_tokens / stats.speculation.num_drafts < 3
    assert stats.num_graph_misses == 0
    assert (stats.num_preemptions > 0) is ("num_blocks" in options)


@pytest.mark.parametrize(
    ("params", "more"),
    [
        (GREEDY, {}),
        pytest.param(
            replace(SEEDED, n=2),
            {"kv_prompt": "whole", "graphs": "replay", "enable_prefix_caching": False},
            marks=pytest.mark.slow,
        ),
        pytest.param(SEEDED, {"kv_policy": "expected-attention", "num_blocks": 12}, marks=EXHAUSTIVE),
        pytest.param(
            GREEDY, {"pattern": None, "kv_policy": None, "kv_budget": None, "kv_plan": PLAN}, marks=EXHAUSTIVE
        ),
    ],
)
def test_a_layer_drafts_for_heads_with_a_budget(
    mellum: Predicting, params: SamplingParams, more: dict[str, Any]
) -> None:
    """Those that the pattern lets stream; the layer stores all tokens in the blocks of the other heads."""
    options = {"pattern": PATTERN, "kv_policy": "h2o", "kv_budget": 8, "max_num_batched_tokens": 96, **more}
    plain, drafting = mellum.load(**options), mellum.drafting(**options)
    expected = tokens_of(serve(plain, PROMPTS, params))
    for _ in range(2):
        assert tokens_of(serve(drafting, PROMPTS, params)) == expected
    stats = drafting.stats().speculation
    assert stats is not None
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_a_request_with_the_id_of_an_ended_one_has_drafts_of_its_own(mellum: Predicting) -> None:
    engine, ends = mellum.drafting().engine, []
    for prompt in (PROMPTS[2], [5]):
        engine.add_request(prompt, GREEDY, "a")
        while engine.has_unfinished:
            ends += [output.finish_reason for output in engine.step() if output.finish_reason]
    assert ends == ["length", "length"]


def test_stores_of_the_layer_are_within_the_planned_memory(mellum: Predicting) -> None:
    """A block of one layer takes half of what a block of two layers takes."""
    alone, beside = mellum.load(kv_cache_bytes=60_000), mellum.drafting(kv_cache_bytes=60_000)
    blocks, fewer = (each.engine.scheduler.limits.num_blocks for each in (alone, beside))
    assert 0.6 * blocks < fewer < 0.7 * blocks
    stats = beside.stats()
    assert beside.engine.runner.store.num_bytes < stats.kv_bytes == stats.resolved.kv_bytes <= 60_000


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Glm4Moe", {}),
        (
            "DeepseekV3",
            {
                "weight": 0.05,
                **{"num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "head_dim": 4},
                **{"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8},
            },
        ),
    ],
)
def test_a_layer_behind_the_last_one_drafts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, fields: dict[str, Any]
) -> None:
    """As in checkpoints of GLM, and of DeepSeek, whose layers store latents."""
    # transformers knows the layer by the number of layers of the published checkpoints.
    monkeypatch.setattr(
        getattr(transformers, f"{name}ForCausalLM"),
        "_keys_to_ignore_on_load_unexpected",
        [r"model\.layers\.2\..*"],
    )

    sizes = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_mtp_layers": 1}
    saved = save_predicting(
        tmp_path, f"{name}Config", name_behind, n_group=1, topk_group=1, **sizes, **fields
    )
    drafting = saved.drafting()
    ((output,),) = tokens_of(serve(drafting, PROMPTS[:1], GREEDY))
    assert [[output]] == tokens_of(serve(saved.load(), PROMPTS[:1], GREEDY))
    accepted, stats = saved.accepted(PROMPTS[0], output, 3), drafting.stats().speculation
    assert stats is not None
    assert (stats.num_drafts, stats.num_accepted_tokens) == (len(accepted), sum(accepted))
    assert sum(accepted) > 0


@pytest.mark.slow
def test_a_layer_of_codes_drafts_as_the_weights_that_they_stand_for(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    saved = save_predicting(plain, "MellumConfig", mellum_name, num_experts=4, sliding_window=11, **FULL)
    codes = write_twins(plain, tmp_path / "codes", KINDS["int8"], names=r".*self_attn\.\w_proj\.weight")
    assert "mtp.layers.0.self_attn.o_proj.weight_scale" in load_file(codes / "model.safetensors")
    answers, counts = [], []
    for path in (plain, codes):
        drafting = replace(saved, path=path).drafting()
        answers.append(tokens_of(serve(drafting, PROMPTS, GREEDY)))
        counts.append(drafting.stats().speculation)
    assert "int8" in drafting.stats().resolved.weights
    assert answers[0] == answers[1]
    assert counts[0] == counts[1]
    assert 0 < counts[0].num_accepted_tokens < counts[0].num_draft_tokens


def test_a_norm_that_layers_share_is_placed_with_them() -> None:
    config = make_config(
        "MellumConfig", **{**BASE, **ROUTED, **FULL, "num_experts": 4, "chain_hidden_post_norm": True}
    )
    with torch.device("meta"):
        layer = mtp.layer_class()(transformers.AutoModelForCausalLM.from_config(config), 1)
    assert "shared_post_norm.weight" in layer.own_modules.state_dict()


def test_generate_drafts_by_the_layer_where_it_is_asked_to(mellum: Predicting) -> None:
    call: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    drafting, plain = mellum.drafting(), mellum.load()
    expected = mellum.model.generate(torch.tensor(PROMPTS[:1]), **call)
    for more, most in (({}, 3), ({"num_assistant_tokens": 1}, 1)):
        before = drafting.stats().speculation
        assert expected.equal(drafting.generate(PROMPTS[:1], **call, use_mtp=True, **more))
        after = drafting.stats().speculation
        assert before is not None
        assert after is not None
        num_drafts = after.num_drafts - before.num_drafts
        assert 0 < after.num_draft_tokens - before.num_draft_tokens <= most * num_drafts
    with pytest.raises(ValueError, match=r"use_mtp: expected .*'method': 'mtp'.* got method None"):
        plain.generate(PROMPTS[:1], use_mtp=True)
    with pytest.raises(ValueError, match="expected use_mtp or prompt_lookup_num_tokens, got both"):
        drafting.generate(PROMPTS[:1], use_mtp=True, prompt_lookup_num_tokens=2)


def test_of_several_layers_the_first_one_drafts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = [rf"model\.layers\.{number}\..*" for number in (2, 3)]
    monkeypatch.setattr(transformers.Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", known)
    sizes = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_mtp_layers": 1}
    one = save_predicting(tmp_path / "one", "Glm4MoeConfig", name_behind, n_group=1, topk_group=1, **sizes)
    shutil.copytree(one.path, tmp_path / "two")
    config = one.model.config
    config.num_mtp_layers = 2
    config.save_pretrained(tmp_path / "two")
    weights = load_file(one.path / "model.safetensors")
    first = {name: each for name, each in weights.items() if name.startswith("model.layers.2.")}
    second = {name.replace("layers.2", "layers.3"): -each for name, each in first.items()}
    save_file({**weights, **second}, tmp_path / "two" / "model.safetensors", {"format": "pt"})
    found = []
    for saved in (one, replace(one, path=tmp_path / "two")):
        drafting = saved.drafting()
        found.append((tokens_of(serve(drafting, PROMPTS[:1], GREEDY)), drafting.stats().speculation))
    assert found[0] == found[1]
    assert found[0][1].num_accepted_tokens > 0


def test_models_without_a_layer_that_can_draft_are_refused(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mellum: Predicting
) -> None:
    config = {"method": "mtp", "num_speculative_tokens": 3}
    with pytest.raises(
        ValueError, match=r"a layer of multi-token prediction \(num_mtp_layers\), got none in "
    ):
        tiny.load(speculative_config=config)
    with pytest.raises(ValueError, match="method 'mtp' needs retrieval_parallel=heads, got 'context'"):
        tiny.load(speculative_config=config, tensor_parallel_size=2, retrieval_parallel="context")
    save_random(make_config("MellumConfig", **{**BASE, **ROUTED, **FULL, "num_experts": 4}), tmp_path)
    with pytest.raises(ValueError, match=r"method 'mtp': the layer in .* cannot be loaded: .* are missing"):
        Tiny(tmp_path, None).load(speculative_config=config)
    weights = load_file(mellum.path / "model.safetensors")
    name = next(name for name in weights if "mtp" in name and "o_proj" in name)
    shutil.copytree(mellum.path, tmp_path, dirs_exist_ok=True)
    weights[name] = weights[name][:-2].clone()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"cannot be loaded: expected .*o_proj.* of shape \[32, 32\], got \[30"
    ):
        Tiny(tmp_path, None).load(speculative_config=config)
    monkeypatch.setattr(mtp.transformers, "__version__", "5.23.1")
    with pytest.raises(ValueError, match=r"method 'mtp' needs transformers 5\.24 or newer, got 5\.23\.1"):
        mellum.drafting()


@pytest.mark.slow
@pytest.mark.usefixtures("simulated_hpu", "default_buckets")
def test_a_simulated_hpu_compiles_nothing_and_reads_once_a_step(mellum: Predicting) -> None:
    expected = serve(mellum.load(), PROMPTS, SEEDED)
    drafting = mellum.drafting(device="hpu-sim", num_blocks=30)
    drafting.warmup()
    with sim.watch() as seen:
        assert tokens_of(serve(drafting, PROMPTS, SEEDED)) == tokens_of(expected)
    report = seen.report()
    assert not report.excused
    assert (report.new_graphs, report.new_recipes, report.max_reads) == (0, 0, 1)
    assert drafting.stats().speculation.num_accepted_tokens > 0
