"""Settings are written once, as fields: what Python, type checkers and commands have follows from them."""

from dataclasses import FrozenInstanceError, fields, replace
from inspect import signature

import pytest

from hpu_duo import EngineConfig, HPUDuoModel
from hpu_duo.config.engine import SETTINGS
from hpu_duo.config.overrides import EngineOverrides
from kernels_ref.chunks import ChunkBounds


def written(annotation: object) -> str:
    return str(getattr(annotation, "__forward_arg__", annotation))


def test_type_checkers_see_the_names_and_types_of_the_fields() -> None:
    # A policy for misses is a member of an enumeration in the field, and its name in calls.
    of_fields = {name: str(setting.field.type) for name, setting in SETTINGS.items()} | {"on_miss": "str"}
    assert {name: written(kind) for name, kind in EngineOverrides.__annotations__.items()} == of_fields


def test_every_field_is_a_setting_except_derived_ones() -> None:
    sections = EngineConfig.of()
    known = {setting.field for setting in SETTINGS.values()}
    others = {
        field.name
        for section in fields(sections)
        for field in fields(getattr(sections, section.name))
        if field not in known
    }
    assert others == {"path", "own_cost"}


def test_help_of_from_pretrained_has_every_setting_with_its_default_and_text() -> None:
    shown, text = signature(HPUDuoModel.from_pretrained).parameters, HPUDuoModel.from_pretrained.__doc__ or ""
    for name, setting in SETTINGS.items():
        assert shown[name].default == setting.default
        assert f"    {name}: {setting.option.help}" in text


def test_a_configuration_is_made_of_flat_names_and_changed_only_as_a_copy() -> None:
    config = EngineConfig.of("model", graphs="eager", rank_timeout_s=9, on_miss="eager", seed=3)
    assert (config.model.path, config.graph.backend, config.parallel.timeout_s) == ("model", "eager", 9)
    assert config.graph.on_miss.value == "eager"
    assert config.override(seed=4) == replace(config, run=replace(config.run, seed=4))
    assert EngineConfig.of() == EngineConfig.of(**{name: each.default for name, each in SETTINGS.items()})
    with pytest.raises(FrozenInstanceError):
        config.model = EngineConfig.of().model  # type: ignore[misc]


def test_wrong_names_and_values_are_refused_with_what_was_expected() -> None:
    with pytest.raises(TypeError, match="no setting 'max_seqs'; did you mean 'max_num_seqs'"):
        EngineConfig.of(max_seqs=4)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="rank_launcher to be one of own, torchrun, got 'ssh'"):
        EngineConfig.of(rank_launcher="ssh")
    with pytest.raises(ValueError, match="rank_timeout_s above 0, got -1"):
        EngineConfig.of(rank_timeout_s=-1)
    with pytest.raises(TypeError, match="model to be a ModelConfig, got str"):
        EngineConfig(model="path")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="decode_len of at most block_size=4, got 5"):
        EngineConfig.of(block_size=4).override(decode_len=5)


def test_the_length_of_rows_goes_with_the_drafts_that_it_was_for() -> None:
    drafting = EngineConfig.of(speculative_config={"num_speculative_tokens": 8})
    assert drafting.scheduler.decode_len == 9
    for num_drafts, lens in ((None, ()), (3, (1, 4))):
        config = None if num_drafts is None else {"num_speculative_tokens": num_drafts}
        scheduler = drafting.override(speculative_config=config).scheduler
        assert (scheduler.decode_len, scheduler.draft_lens) == (max(lens, default=1), lens)
    assert drafting.override(speculative_config=None, decode_len=5).scheduler.decode_len == 5
    assert drafting.override(max_num_seqs=2).scheduler.draft_lens == (1, 4, 9)


def test_the_default_of_chunks_is_that_of_the_kernels() -> None:
    assert SETTINGS["score_bytes"].default == ChunkBounds().score_bytes
