"""Drafts of the checkpoint's own layer of multi-token prediction: the tokens are those without."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from graphs.backends.compile import CompileBackend
from hpu_duo import HPUDuoModel
from hpu_duo.config.kv_plan import Keep, KVPlan
from hpu_duo.engine.model_drafts.tables import drafts_of
from hpu_duo.engine.stepper import StepHandle, StepResult
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
EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENTS = {
    **{"num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "head_dim": 4},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8, "weight": 0.05},
}
FULL = {"mtp_layer_types": ["full_attention"], "num_mtp_layers": 1}
PLAN = KVPlan.of_mask(PATTERN.mask, Keep("h2o", 8))
PROMPTS = prompts_of([17, 1, 33], seed=4)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.7, top_p=0.95, seed=5, max_tokens=24, ignore_eos=True)


@dataclass(frozen=True)
class Predicting(Tiny):
    """A checkpoint whose layers are often right, and these as transformers has them."""

    layer: Any

    def drafting(self, **options: Any) -> HPUDuoModel:
        """Serve it with drafts of the layers."""
        config = {"method": "mtp", "num_speculative_tokens": 3, **options.pop("config", {})}
        config.setdefault("num_speculative_tokens_per_batch_size", [[1, 4, 3]])
        return self.load(**{"max_num_batched_tokens": 24, **options}, speculative_config=config)

    def hidden_of(self, tokens: Sequence[int]) -> torch.Tensor:
        """Last hidden states of a text, ``[1, tokens, D]``."""
        return self.model.model(torch.tensor([[*tokens]])).last_hidden_state

    def drafts(self, hidden: torch.Tensor, known: Sequence[int], most: int) -> list[int]:
        """Greedy drafts of layer after layer, and more of the last one.

        Args:
            hidden: of all known tokens but the last one.
        """
        below, text, first, found = hidden, [*known[1:]], 1, list[int]()
        for number in range(most):
            places, layer = torch.arange(first, first + len(text)), min(number, len(self.layer.layers) - 1)
            after = self.layer.forward_layer(layer, below, places[None], None, input_ids=torch.tensor([text]))
            found.append(int(self.layer.shared_head(after[:, -1]).argmax()))
            if layer < len(self.layer.layers) - 1:
                below, text, first = after, [*text[1:], found[-1]], first + 1
            else:
                below, text = torch.cat([below, after[:, -1:]], dim=1), [*text, found[-1]]
        return found

    @torch.inference_mode()
    def accepted(self, prompt: Sequence[int], output: Sequence[int], most: int) -> list[int]:
        """Accepted drafts of each verified step of a greedy request, computed text by text."""
        tokens, num_known, found = [*prompt, *output], len(prompt) + 1, []
        hidden = self.hidden_of(tokens)
        while (room := min(most, len(tokens) - num_known - 1)) > 0:
            drafts = self.drafts(hidden[:, : num_known - 1], tokens[:num_known], room)
            pairs = zip(drafts, tokens[num_known:])
            right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            found.append(right)
            num_known += 1 + right
        return found


def save_predicting(
    directory: Path, name: str, names: Callable[[str], str], weight: float = 0.3, **fields: Any
) -> Predicting:
    """Save a model whose texts depend on their last tokens mostly, with layers that do as well.

    Args:
        names: from the names of transformers' layer to those of checkpoints.
        weight: factor of what attention and experts add.
    """
    from transformers.modeling_layers import MtpModel

    model = save_random(make_config(name, **{**BASE, **ROUTED, **fields}), directory)
    layer = MtpModel(model, model.config.num_mtp_layers).float().eval()
    layer.set_attn_implementation("eager")
    randomise(layer.layers, seed=1)
    size = model.config.hidden_size
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(8)
        for key, parameter in [*model.model.layers.named_parameters(), *layer.layers.named_parameters()]:
            if "o_proj" in key or "down_proj" in key:
                parameter.mul_(weight)
        for block in layer.layers:
            block.post_norm.weight.copy_(model.model.norm.weight)
            block.enorm.weight.fill_(1)
            block.eh_proj.weight[:, :size] = 4 * torch.eye(size)
            block.eh_proj.weight[:, size:] *= 0.2
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    own = {names(key): weight.contiguous().clone() for key, weight in layer.layers.state_dict().items()}
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
    first, _, rest = key.removeprefix("0.").partition(".")
    return f"mtp.{renamed[first]}.{rest}" if first in renamed else f"mtp.layers.0.{rest}"


def name_behind(key: str) -> str:
    """The name of a weight in checkpoints whose layers are behind the last one, of two."""
    number, _, rest = key.partition(".")
    rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
    return f"model.layers.{2 + int(number)}.{rest}"


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


@pytest.mark.parametrize(("name", "fields"), [("Glm4Moe", {}), ("DeepseekV3", LATENTS)])
def test_a_layer_behind_the_last_one_drafts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, fields: dict[str, Any]
) -> None:
    """As in checkpoints of GLM, and of DeepSeek, whose layers store latents."""
    know_layers(monkeypatch, name)
    sizes = {**EXPERTS, "num_mtp_layers": 1, **fields}
    saved = save_predicting(tmp_path, f"{name}Config", name_behind, **sizes)
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


def know_layers(patch: pytest.MonkeyPatch, name: str = "Glm4Moe") -> None:
    """Let transformers know layers behind two, by their numbers, as those of published checkpoints."""
    known = [rf"model\.layers\.{number}\..*" for number in (2, 3, 4)]
    patch.setattr(getattr(transformers, f"{name}ForCausalLM"), "_keys_to_ignore_on_load_unexpected", known)


def save_several(
    monkeypatch: pytest.MonkeyPatch, path: Path, name: str = "Glm4Moe", **fields: Any
) -> Predicting:
    """Save a model with three such layers."""
    know_layers(monkeypatch, name)
    sizes = {**EXPERTS, "num_mtp_layers": 3, **fields}
    return save_predicting(path, f"{name}Config", name_behind, **sizes)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "most", "options"),
    [
        ("Glm4Moe", 4, {}),
        *further(
            ("Glm4Moe", 3, {"graphs": "replay", "attention": "sdpa"}),
            ("Glm4Moe", 2, {}),
            ("DeepseekV3", 3, {}),
        ),
    ],
)
def test_each_of_several_layers_makes_a_draft(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, most: int, options: dict[str, Any]
) -> None:
    """Behind prompts in chunks, cached prefixes and rejected drafts; the last layer makes further ones."""
    saved = save_several(monkeypatch, tmp_path, name, **(LATENTS if name == "DeepseekV3" else {}))
    config = {"num_speculative_tokens": most, "num_speculative_tokens_per_batch_size": [[1, 4, most]]}
    drafting = saved.drafting(config=config, max_num_batched_tokens=4 * (most + 1), **options)
    plain = saved.load()
    found, runner = list[tuple[list[int], list[int]]](), drafting.engine.runner
    finish = runner.finish

    def watched(handle: StepHandle) -> StepResult:
        result = finish(handle)
        for row in handle.plan.rows:
            if (num := drafts_of(row)) and result.drafted is not None:
                tokens = row.request.tokens[: row.start + 1].tolist()
                found.append((tokens, result.drafted[:num, row.ring_row].tolist()))
        return result

    runner.finish = watched  # type: ignore[method-assign]
    for prompts in (PROMPTS[:1], PROMPTS[1:], [*PROMPTS, [*PROMPTS[2], 5]]):
        assert tokens_of(serve(drafting, prompts, GREEDY)) == tokens_of(serve(plain, prompts, GREEDY))
    prefixes = drafting.stats().prefixes
    assert prefixes is not None
    assert prefixes.num_hit_tokens > 0
    assert len(found) > 40
    for tokens, drafts in found:
        assert drafts == saved.drafts(saved.hidden_of(tokens[:-1]), tokens, len(drafts))
    hidden, places = saved.hidden_of(tokens[:-1]), torch.arange(1, len(tokens))[None]
    of_transformers = saved.layer(torch.tensor([tokens[1:]]), hidden, None, places, None)[0][0]
    assert saved.drafts(hidden, tokens, 3) == of_transformers.tolist()


def test_models_without_a_layer_that_can_draft_are_refused(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mellum: Predicting
) -> None:
    config = {"method": "mtp", "num_speculative_tokens": 3}
    with pytest.raises(
        ValueError, match=r"a layer of multi-token prediction \(num_mtp_layers\), got none in "
    ):
        tiny.load(speculative_config=config)
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
@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_simulated_hpu_compiles_nothing_and_reads_once_a_step(
    mellum: Predicting, num_layers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved = mellum if num_layers == 1 else save_several(monkeypatch, tmp_path)
    expected = serve(saved.load(), PROMPTS, SEEDED)
    drafting = saved.drafting(device="hpu-sim", num_blocks=30)
    drafting.warmup()
    with sim.watch() as seen:
        assert tokens_of(serve(drafting, PROMPTS, SEEDED)) == tokens_of(expected)
    report = seen.report()
    assert not report.excused
    assert (report.new_graphs, report.new_recipes, report.max_reads) == (0, 0, 1)
    assert drafting.stats().speculation.num_accepted_tokens > 0
