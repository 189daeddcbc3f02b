"""``hpu-duo identify`` and ``hpu-duo pattern show``: files, resuming, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from typer.testing import Result

from hpu_duo.builtin import MODEL_DIR, PATTERN_DIR
from hpu_duo.heads import HeadPattern
from hpu_duo.lab.identify import Identification, LossForm, Method
from tests.identify.induction import save_induction_model
from tests.modeling.test_value_sizes import saved
from tests.tiers import crossed

Run = Callable[..., Result]
PUBLISHED = Path(__file__).parents[1] / "data" / "attn_patterns"
FILES = {"full_attention_heads.tsv", "config.json", "heads.png"}
STEPS = ("--steps", "4", "--save-every", "2")


@pytest.fixture(scope="module")
def copier_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("induction")
    save_induction_model(directory)
    return directory


@pytest.fixture
def identify(hpu_duo: Run, copier_dir: Path) -> Run:
    def run(output: Path, *arguments: str | Path, model: Path = copier_dir) -> Result:
        return hpu_duo(
            *("identify", "--model", model, "--output", output, "--form", "names", "--device", "cpu"),
            *("--min-length", "120", "--max-length", "160", "--num-passkeys", "2", "--passkey-words", "3"),
            *("--sink", "4", "--recent", "24", *arguments),
        )

    return run


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_pattern_is_in_the_published_format_with_a_heat_map(identify: Run, tmp_path: Path) -> None:
    result = identify(tmp_path / "out", *STEPS, "--json")
    assert result.exit_code == 0, result.stderr
    assert set(contents(tmp_path / "out")) == FILES | {"losses.tsv", "identify_state.json"}
    table = np.loadtxt(tmp_path / "out" / "full_attention_heads.tsv", delimiter="\t")
    assert table.shape == (2, 4)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["sink_size"], config["recent_size"], config["num_passkeys"]) == (4, 24, 2)
    told = json.loads(result.stdout)
    assert told["has_latents"] is False
    assert told["scores"] == HeadPattern.load(tmp_path / "out").scores.tolist()
    assert (tmp_path / "out" / "heads.png").read_bytes().startswith(b"\x89PNG")
    losses = (tmp_path / "out" / "losses.tsv").read_text().splitlines()
    assert losses[0].split("\t") == ["step", "distillation", "penalty", "total"]
    assert len(losses) == 5
    assert "4 of 4  loss" in result.stderr


def test_streaming_heads_and_layers_are_counted_where_heads_share_latents(
    identify: Run, tmp_path: Path
) -> None:
    model, output = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    saved(model, "deepseek_v3", vocab_size=1152)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_DIR / name, model / name)
    result = identify(output, "--method", "profile", "--samples", "1", model=model)
    assert result.exit_code == 0, result.stderr
    pattern = HeadPattern.load(output)
    told = " ".join(result.stdout.split())
    assert "where latents are stored, not expanded:" in told
    for name, cut in (("> 0.5", pattern.binarise(threshold=0.5)), ("at 0.5", pattern.binarise(sparsity=0.5))):
        streams = ~cut.mask
        assert (
            f"{name}: {streams.sum()} of 16 heads stream and read less; "
            f"{streams.all(axis=1).sum()} of 4 layers have no other heads and store less" in told
        )


# A model that says no passkey has no head that copies one.
@pytest.mark.parametrize(
    "method",
    crossed({each.name: each for each in Method if each is not Method.RETRIEVAL_SCORE}, fast=("OPTIMISE",)),
)
def test_the_same_seed_gives_the_same_files_and_another_seed_others(
    identify: Run, tmp_path: Path, method: Method
) -> None:
    arguments = ("--method", method.value, "--samples", "2", *STEPS)
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        result = identify(tmp_path / name, *arguments, "--seed", seed)
        assert result.exit_code == 0, result.stderr
    first, again, other = (contents(tmp_path / name) for name in "abc")
    assert first == again
    assert set(first) >= FILES
    assert first["full_attention_heads.tsv"] != other["full_attention_heads.tsv"]


def test_retrieval_scores_find_the_heads_that_the_builtin_model_was_trained_with(
    hpu_duo: Run, tmp_path: Path
) -> None:
    small = ("--samples", "1", "--max-length", "512")
    result = hpu_duo("identify", "--method", "retrieval-score", "--output", tmp_path / "out", *small)
    assert result.exit_code == 0, result.stderr
    found = HeadPattern.load(tmp_path / "out").scores > 0.5
    np.testing.assert_array_equal(found, HeadPattern.load(PATTERN_DIR).scores > 0.5)


def test_an_interrupted_run_goes_on_to_the_same_files(
    identify: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert identify(tmp_path / "straight", *STEPS).exit_code == 0
    whole = Identification.run

    def interrupted(self: Identification) -> object:
        for progress in whole(self):
            yield progress
            if progress.done == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(Identification, "run", interrupted)
    result = identify(tmp_path / "cut", *STEPS)
    assert result.exit_code == 130
    assert "interrupted after 3 of 4 steps; the same command with --resume goes on" in result.stderr
    assert set(contents(tmp_path / "cut")) == {"identify_state.json"}
    monkeypatch.undo()

    refused = identify(tmp_path / "cut", *STEPS)
    assert refused.exit_code == 2
    assert "holds a run already: go on with --resume" in refused.stderr
    before = contents(tmp_path / "cut")
    foreign = identify(tmp_path / "cut", *STEPS, "--resume", "--lr", "0.1")
    assert foreign.exit_code == 2
    assert "belongs to another run: lr differ; expected lr=0.1, got 0.02" in foreign.stderr
    assert contents(tmp_path / "cut") == before

    assert identify(tmp_path / "cut", *STEPS, "--resume").exit_code == 0
    assert contents(tmp_path / "cut") == contents(tmp_path / "straight")


def test_a_loss_that_is_not_finite_ends_the_run_with_a_sentence(
    identify: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        LossForm, "distillation", lambda self, student, teacher: (student - teacher).sum() / 0
    )
    result = identify(tmp_path / "out", *STEPS)
    assert result.exit_code == 2
    assert "the loss of document 0 or its gradient is not finite" in result.stderr
    assert not (tmp_path / "out" / "full_attention_heads.tsv").exists()


def test_a_half_written_state_is_refused_and_nothing_is_overwritten(identify: Run, tmp_path: Path) -> None:
    (tmp_path / "identify_state.json").write_text('{"format": "hpu-duo ident')
    before = contents(tmp_path)
    result = identify(tmp_path, *STEPS, "--resume")
    assert result.exit_code == 2
    assert "is damaged or half-written" in result.stderr
    assert contents(tmp_path) == before


def test_a_pattern_of_another_model_is_never_overwritten(identify: Run, tmp_path: Path) -> None:
    shutil.copytree(PUBLISHED / "Llama-2-7B-32K-Instruct", tmp_path / "out")
    before = contents(tmp_path / "out")
    for arguments in ((), ("--resume",), ("--method", "profile")):
        result = identify(tmp_path / "out", *STEPS, *arguments)
        assert result.exit_code == 2
        assert "holds a head pattern already: choose another directory" in result.stderr
    assert contents(tmp_path / "out") == before


def test_a_place_that_cannot_be_written_to_is_refused_before_the_run(identify: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    result = identify(tmp_path / "file" / "out", *STEPS)
    assert result.exit_code == 2
    assert "to be a directory that can be written to" in result.stderr
    assert contents(tmp_path) == {"file": b"mine"}


def test_the_directory_of_a_checkpoint_is_no_place_for_a_pattern(
    identify: Run, tmp_path: Path, copier_dir: Path
) -> None:
    shutil.copytree(copier_dir, tmp_path / "model")
    before = contents(tmp_path / "model")
    result = identify(tmp_path / "model", *STEPS)
    assert result.exit_code == 2
    assert "holds config.json already: choose another directory" in result.stderr
    assert contents(tmp_path / "model") == before


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--max-length", "5000"), "at most 1024 tokens, the positions of the model, got one of"),
        (("--passkey-words", "70"), "cannot hold 2 passkeys of 70 words"),
        (
            ("--method", "guess"),
            "expected --method to be one of optimise, profile, retrieval-score, mean-qk",
        ),
        (("--loss", "l3"), "expected --loss to be one of mean, sum, got 'l3'"),
        (("--haystack", "none.txt"), "cannot read the haystack 'none.txt'"),
        (("--method", "profile", "--resume"), "--resume with the method 'optimise' only"),
        (("--device", "tpu"), "got 'tpu'"),
        (("--device", "hpu-sim"), "auto, cpu, cuda or hpu to run a whole model on, got 'hpu-sim'"),
        (("--recent", "0"), "recent >= 1"),
        (("--steps", "0"), "num_steps >= 1"),
        (("--threads", "0"), "expected --threads of at least 1, got 0"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_written(
    identify: Run, tmp_path: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    result = identify(tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_haystack_too_short_for_mean_qk_is_refused(identify: Run, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("It rained.")
    result = identify(tmp_path / "out", "--method", "mean-qk", "--haystack", str(tmp_path / "short.txt"))
    assert result.exit_code == 2
    assert "expected a haystack of at least 500 tokens, got one of" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_cannot_encode_the_passkeys_is_refused(
    identify: Run, tmp_path: Path, copier_dir: Path
) -> None:
    broken = tmp_path / "model"
    shutil.copytree(copier_dir, broken)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(broken)
    result = identify(tmp_path / "out", model=broken)
    assert result.exit_code == 2
    assert "expected a tokenizer that can encode the passkeys, got none for 'badger'" in result.stderr
    (broken / "tokenizer.json").unlink()
    assert "expected a tokenizer beside the model" in identify(tmp_path / "out", model=broken).stderr


# --- hpu-duo pattern show ---


@pytest.mark.parametrize("directory", sorted(PUBLISHED.iterdir()), ids=lambda directory: directory.name)
def test_published_patterns_are_shown_with_the_counts_of_each_layer(hpu_duo: Run, directory: Path) -> None:
    result = hpu_duo("pattern", "show", directory, "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    pattern = HeadPattern.load(directory)
    for cut, sparsity in zip(told["cuts"], (0.25, 0.5, 0.75), strict=True):
        mask = pattern.binarise(sparsity=sparsity).mask
        assert cut["retrieval_per_layer"] == mask.sum(axis=1).tolist()
        assert cut["num_retrieval"] == round(mask.size * (1 - sparsity))
    rows = hpu_duo("pattern", "show", directory).stdout.splitlines()
    assert len(rows) >= 1 + 1 + 32 + 1
    assert f"{told['cuts'][1]['num_retrieval']}/{pattern.scores.size}" in rows[-2]
    streaming = [kept for kept in told["cuts"][2]["retrieval_per_layer"] if kept == 0]
    assert told["cuts"][2]["num_streaming_layers"] == len(streaming)
    assert rows[-1].split()[-1] == f"{len(streaming)}/{pattern.num_layers}"


def test_the_published_rule_can_be_asked_for_by_its_seed(hpu_duo: Run) -> None:
    directory = PUBLISHED / "Mistral-7B-Instruct-v0.2"
    arguments = ("pattern", "show", directory, "--sparsity", "0.75", "--tie-break", "reference", "--json")
    shown = [json.loads(hpu_duo(*arguments, "--tie-seed", seed).stdout)["cuts"][0] for seed in ["77", "8"]]
    table = np.clip(np.loadtxt(directory / "full_attention_heads.tsv"), 0, 1)
    table += np.random.RandomState(77).uniform(0, 1e-6, table.shape)
    expected = (table >= np.quantile(table, 0.75)).sum(axis=1).tolist()
    assert shown[0]["retrieval_per_layer"] == expected != shown[1]["retrieval_per_layer"]


def test_thresholds_and_pictures(hpu_duo: Run, tmp_path: Path) -> None:
    directory, png = PUBLISHED / "Meta-Llama-3.1-8B-Instruct", tmp_path / "heads.png"
    result = hpu_duo("pattern", "show", directory, "--threshold", "0.9", "--png", png)
    assert result.exit_code == 0, result.stderr
    assert "> 0.9" in result.stdout
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_pattern_of_another_model_is_refused(hpu_duo: Run, copier_dir: Path) -> None:
    for arguments, complaint in (
        (
            (PUBLISHED / "Llama-2-7B-32K-Instruct", "--model", copier_dir),
            "2 layers x 4 KV heads, got 32 x 32",
        ),
        ((copier_dir,), "got no full_attention_heads.tsv"),
        ((PUBLISHED / "Llama-2-7B-32K-Instruct", "--sparsity", "2"), r"sparsity in [0, 1], got 2"),
        (
            (PUBLISHED / "Llama-2-7B-32K-Instruct", "--sparsity", "0.5", "--threshold", "0.5"),
            "--sparsity or --threshold, got both",
        ),
    ):
        result = hpu_duo("pattern", "show", *arguments)
        assert result.exit_code == 2
        assert complaint in result.stderr


def test_processes_that_cannot_share_the_work_are_refused_before_any_is_started(
    identify: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, told in (
        (("--num-processes", "2"), "a batch that 2 processes divide, got 1 texts"),
        (
            ("--num-processes", "3", "--method", "profile", "--samples", "4"),
            "3 processes divide, got 4 texts",
        ),
        (("--num-processes", "0"), "at least 1 process, got 0"),
    ):
        result = identify(tmp_path / "out", *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert told in result.stderr
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    result = identify(tmp_path / "out", "--num-processes", "2", "--batch-size", "2")
    assert result.exit_code == 2
    assert "torchrun has started the processes already: expected no --num-processes" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_what_a_started_process_finds_wrong_is_told_once(identify: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    result = identify(tmp_path, "--num-processes", "1")
    assert result.exit_code == 2
    assert (
        result.stderr == f"hpu-duo: error: {tmp_path} holds config.json already: choose another directory\n"
    )
