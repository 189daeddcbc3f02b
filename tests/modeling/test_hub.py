"""Checkpoints by the names that people write: hub ids, revisions, and arguments of transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants, file_download
from typer.testing import CliRunner

from hpu_duo import HPUDuoModel
from hpu_duo.cli.app import app
from hpu_duo.modeling.hub import find_checkpoint, model_name, split_revision
from tests.modeling.families import FAMILIES, save_random
from tests.modeling.hub_server import COMMIT, hub_of

NAME = "some-org/tiny.llama"
SMALL: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_random(FAMILIES["llama"](), tmp_path / "files")
    (tmp_path / "files" / "own.py").write_text("raise SystemExit", encoding="utf-8")
    (tmp_path / "files" / "consolidated.safetensors").write_bytes(b"the same weights again")
    return tmp_path / "files"


@pytest.fixture
def use_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Point the library at a hub, and at a cache of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    def use(address: str, *, offline: bool = False, token: str | None = None) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        # Before version 1 another module has a copy of its own.
        for module in (constants, file_download):
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)

    return use


def test_an_id_is_downloaded_once_and_found_offline_afterwards(
    checkpoint: Path, use_hub: Callable[..., None]
) -> None:
    with hub_of(NAME, checkpoint) as address:
        use_hub(address)
        served = HPUDuoModel.from_pretrained(NAME, **SMALL)
        found = Path(served.engine_config.model.path)
    assert found.name == COMMIT
    assert model_name(found) == NAME
    names = {path.name for path in found.iterdir()}
    assert {"config.json", "model.safetensors"} <= names
    assert not names & {"own.py", "consolidated.safetensors"}
    expected = HPUDuoModel.from_pretrained(checkpoint, **SMALL).generate([[5, 6, 7]], max_new_tokens=4)
    assert torch.equal(served.generate([[5, 6, 7]], max_new_tokens=4), expected)
    use_hub(address, offline=True)
    assert find_checkpoint(NAME) == found


def test_a_revision_is_a_branch_or_a_commit(checkpoint: Path, use_hub: Callable[..., None]) -> None:
    with hub_of(NAME, checkpoint, ("main", "v1.0")) as address:
        use_hub(address)
        for revision in ("v1.0", COMMIT):
            assert find_checkpoint(NAME, revision, needs_weights=False).name == COMMIT
        with pytest.raises(ValueError, match=r"expected a revision of 'some-org/tiny.llama' .* got 'v2'"):
            HPUDuoModel.from_pretrained(NAME, revision="v2")


def test_a_token_opens_what_the_hub_hides_from_others(checkpoint: Path, use_hub: Callable[..., None]) -> None:
    with hub_of(NAME, checkpoint, token="hf_secret") as address:
        use_hub(address)
        with pytest.raises(ValueError, match="no such model, or none that this user may access"):
            find_checkpoint(NAME)
        use_hub(address, token="hf_secret")
        assert find_checkpoint(NAME, needs_weights=False).name == COMMIT


def test_a_call_has_a_token_and_a_cache_of_its_own(
    checkpoint: Path, use_hub: Callable[..., None], tmp_path: Path
) -> None:
    given: dict[str, Any] = {"cache_dir": tmp_path / "own", **SMALL}
    with hub_of(NAME, checkpoint, token="hf_secret") as address:
        use_hub(address)
        with pytest.raises(ValueError, match=r"is no directory .*own\), and the hub may not be asked"):
            HPUDuoModel.from_pretrained(NAME, local_files_only=True, **given)
        served = HPUDuoModel.from_pretrained(NAME, token="hf_secret", **given)
    assert Path(served.engine_config.model.path).is_relative_to(tmp_path / "own")
    HPUDuoModel.from_pretrained(NAME, local_files_only=True, **given)


@pytest.mark.parametrize("offline", [True, False], ids=["offline mode", "no answer"])
def test_without_a_hub_a_sentence_says_what_to_do(use_hub: Callable[..., None], offline: bool) -> None:
    # Nothing listens on this port.
    use_hub("http://127.0.0.1:9", offline=offline)
    with pytest.raises(
        ValueError, match=r"'some-org/tiny.llama' is no directory .*cache.* cannot be reached: go onl"
    ):
        HPUDuoModel.from_pretrained(NAME)


def test_what_is_on_disk_goes_before_the_hub(
    checkpoint: Path, use_hub: Callable[..., None], tmp_path: Path
) -> None:
    use_hub("http://127.0.0.1:9")
    (tmp_path / "some-org").mkdir()
    checkpoint.rename(tmp_path / NAME)
    assert find_checkpoint(NAME) == Path(NAME)
    with pytest.raises(ValueError, match=r"got 'main' with the directory 'some-org/tiny.llama'"):
        find_checkpoint(NAME, "main")


@pytest.mark.parametrize("name", ["", "missing", "/no/such", "./a/b", "a/b/c", "a/", "~/model"])
def test_what_is_neither_a_directory_nor_an_id_is_refused_without_asking_the_hub(
    name: str, use_hub: Callable[..., None]
) -> None:
    use_hub("http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"expected a directory .* such as org/name, got"):
        find_checkpoint(name)


def test_commands_take_an_id_with_a_revision(checkpoint: Path, use_hub: Callable[..., None]) -> None:
    with hub_of(NAME, checkpoint, ("main", "v1.0")) as address:
        use_hub(address)
        shown = CliRunner().invoke(
            app, ["plan", "--model", f"{NAME}@v1.0", "--num-blocks", "64", "--strategy", "thinned"]
        )
        assert shown.exit_code == 0, shown.stderr
        wrong = CliRunner().invoke(app, ["generate", "--model", f"{NAME}@v2", "--prompt", "a"])
    assert wrong.exit_code == 2
    assert "expected a revision" in wrong.stderr


def test_an_empty_name_is_refused_by_commands_too(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint)
    result = CliRunner().invoke(app, ["generate", "--model", "", "--prompt", "a"])
    assert result.exit_code == 2
    assert "got ''" in result.stderr


def test_names_with_a_revision_are_split() -> None:
    assert split_revision("org/name@v1") == ("org/name", "v1")
    assert split_revision("org/name") == ("org/name", None)
    assert split_revision("/a/dir@home") == ("/a/dir@home", None)


def test_arguments_of_transformers_are_understood(checkpoint: Path) -> None:
    served = HPUDuoModel.from_pretrained(
        checkpoint, torch_dtype=torch.bfloat16, trust_remote_code=False, revision=None, **SMALL
    )
    assert next(served.engine.runner.model.model.parameters()).dtype == torch.bfloat16
    HPUDuoModel.from_pretrained(checkpoint, dtype="bfloat16", torch_dtype="bfloat16", **SMALL)
    with pytest.raises(ValueError, match=r"dtype or torch_dtype, got both: 'float32' and torch\.bfloat16"):
        HPUDuoModel.from_pretrained(checkpoint, dtype="float32", torch_dtype=torch.bfloat16)
    for value in (True, 1, "yes"):
        with pytest.raises(ValueError, match="expected trust_remote_code=False, got"):
            HPUDuoModel.from_pretrained(checkpoint, trust_remote_code=value)  # type: ignore[arg-type]
