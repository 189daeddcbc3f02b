"""``hpu-duo identify`` and ``calibrate``: which KV heads need the whole context, and what each is to keep."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hpu_duo.builtin import MODEL_DIR
from hpu_duo.cli.heads.identify_options import (
    DocumentOptions,
    RunOptions,
    TrainingOptions,
    WindowOptions,
    choice,
    request_of,
)
from hpu_duo.cli.heads.views import heads_table, latent_savings, pattern_fields
from hpu_duo.cli.options import Json, Model, Only, grouped, option_in
from hpu_duo.cli.terminal import INTERRUPTED, user_errors
from hpu_duo.extras import install_command
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    from hpu_duo.heads import HeadPattern
    from hpu_duo.lab.identify import IdentifyRequest
    from hpu_duo.lab.kv_calibration import (
        CalibratedPlan,
        Calibration,
        CalibrationMethod,
        CalibrationRequest,
        Documents,
        PlannedHead,
        PromptFile,
        ScaleCalibration,
    )


@grouped
def identify(
    *,
    output: Annotated[Path, typer.Option(help="Directory for the pattern; nothing in it is overwritten.")],
    model: Model = None,
    method: Annotated[
        str, typer.Option(help="optimise, or one of the cheaper profile, retrieval-score and mean-qk.")
    ] = "optimise",
    documents: DocumentOptions,
    window: WindowOptions,
    training: TrainingOptions,
    run: RunOptions,
    as_json: Json = False,
) -> None:
    """Score the KV heads of a model, and write its head pattern and a heat map.

    Runs alone, or in several processes that share each batch: --num-processes on one machine, or torchrun
    --nproc-per-node 2 -m hpu_duo.cli identify ... The built-in model takes one to three minutes of
    a CPU core.
    """
    with user_errors():
        run.check()
        # torch is slow to import: what can be refused without it comes first.
        from hpu_duo.cli.heads.run import ToldInterruptError, identifier
        from hpu_duo.device import Refused, WorkerError

        request = request_of(model, output, method, documents, window, training, run)
        start = identifier(request, run.threads, run.num_processes)
    with user_errors(Refused):
        try:
            pattern = start()
        except WorkerError as error:
            typer.echo(f"hpu-duo: {error}", err=True)
            raise typer.Exit(1) from None
        except ToldInterruptError:
            raise typer.Exit(INTERRUPTED) from None
    if pattern is not None:
        _show(request, pattern, as_json)


def _show(request: IdentifyRequest, pattern: HeadPattern, as_json: bool) -> None:
    from hpu_duo.lab.identify.identification import PICTURE_FILE
    from hpu_duo.modeling.loading import read_config

    cuts = {"> 0.5": pattern.binarise(threshold=0.5), "at 0.5": pattern.binarise(sparsity=0.5)}
    picture = None
    if find_spec("matplotlib") is not None:
        from hpu_duo.cli.heads.views import draw_heads

        picture = request.output / PICTURE_FILE
        title = f"{pattern.config['model_name']}, {request.method.value}, framed: score > 0.5"
        draw_heads([(title, cuts["> 0.5"])], picture)
    else:
        typer.echo(f"no heat map: matplotlib is not installed ({install_command('plot')})", err=True)
    has_latents = bool(getattr(read_config(request.model).get_text_config(), "kv_lora_rank", None))
    if as_json:
        output, drawn = str(request.output), picture and str(picture)
        fields = {"output": output, "picture": drawn, "has_latents": has_latents}
        typer.echo(json.dumps({**fields, **pattern_fields(pattern, cuts)}, indent=2))
        return
    console = Console()
    console.print("retrieval heads: scores above 0.5, and the better half of all", highlight=False)
    console.print(heads_table(pattern, cuts, console))
    if has_latents:
        console.print(
            "where latents are stored, not expanded:", *latent_savings(cuts), sep="\n", highlight=False
        )
    names = "full_attention_heads.tsv, config.json" + (f", {PICTURE_FILE}" if picture else "")
    console.print(f"\n{request.output}: {names}", highlight=False)


_method_option = option_in("Method")
_prompts_option = option_in("Prompts")


class MethodName(str, Enum):
    """Methods by name."""

    ADA_KV = "ada-kv"
    FASTGEN = "fastgen"


@dataclass(frozen=True)
class MethodOptions:
    """Choice of what heads keep, and of what it is chosen by."""

    budget: Annotated[
        float | None,
        _method_option(
            "ada-kv: tokens that a head stores on average; up to 1, a share of the longest prompt.",
            show_default="0.2",
        ),
    ] = None
    kv_policy: Annotated[
        str | None,
        _method_option(
            "ada-kv: eviction policy: snapkv, h2o, tova or expected-attention.",
            metavar="NAME[:OPTION=VALUE,...]",
            show_default="snapkv",
        ),
    ] = None
    safeguard: Annotated[
        float | None,
        _method_option("ada-kv: share of a layer's budget that its heads share equally.", show_default="0.2"),
    ] = None
    threshold: Annotated[
        float | None,
        _method_option(
            "fastgen: share of a head's attention that its set has to recover.", show_default="0.95"
        ),
    ] = None
    window: Annotated[
        float | None,
        _method_option("fastgen: share of a prompt's tokens that the window is.", show_default="0.3"),
    ] = None
    heavy: Annotated[
        float | None,
        _method_option("fastgen: share of a prompt's tokens that are heavy hitters.", show_default="0.3"),
    ] = None
    num_queries: Annotated[
        int | None,
        _method_option(
            "Last tokens of a prompt whose attention is measured.",
            show_default="all, or with ada-kv the window of snapkv, or 32",
        ),
    ] = None
    num_sizes: Annotated[
        int, _method_option("Most different budgets; others are rounded up to one of them.")
    ] = 4

    def method(self, name: MethodName) -> CalibrationMethod:
        """The method with its settings; ValueError for one of the other method, or out of range."""
        from hpu_duo.lab.kv_calibration import AdaKV, FastGen

        ada_kv: dict[str, Any] = {
            "budget": self.budget,
            "policy": self.kv_policy,
            "safeguard": self.safeguard,
        }
        fastgen: dict[str, Any] = {"threshold": self.threshold, "window": self.window, "heavy": self.heavy}
        match name:
            case MethodName.ADA_KV:
                _refuse(fastgen, MethodName.FASTGEN)
                return AdaKV(**_given(ada_kv), queries=self.num_queries)
            case MethodName.FASTGEN:
                ada_kv["kv_policy"] = ada_kv.pop("policy")
                _refuse(ada_kv, MethodName.ADA_KV)
                return FastGen(**_given(fastgen), queries=self.num_queries)


@dataclass(frozen=True)
class PromptOptions:
    """Prompts whose attention is measured."""

    prompts: Annotated[
        Path | None,
        _prompts_option(
            'Prompts, a line {"prompt": TEXT} for each.',
            metavar="FILE.jsonl",
            show_default="documents that hide passkeys",
        ),
    ] = None
    chat: Annotated[
        bool, _prompts_option("Wrap those of --prompts in the model's chat template.", "--chat")
    ] = False
    num_prompts: Annotated[
        int | None,
        _prompts_option(
            "Documents, or first prompts of the file.",
            show_default="16 documents, or all prompts of the file",
        ),
    ] = None
    haystack: Annotated[
        Path | None, _prompts_option("UTF-8 text for the documents.", show_default="built-in text")
    ] = None
    num_tokens: Annotated[
        int | None,
        _prompts_option(
            "Tokens of a document, without the questions at its end.",
            show_default="4000, or 1000 with the built-in model",
        ),
    ] = None
    num_passkeys: Annotated[
        int | None,
        _prompts_option(
            "Passkeys that a document hides and asks for at its end; 0 for plain text.",
            show_default="10, or 8",
        ),
    ] = None
    passkey_words: Annotated[int | None, _prompts_option("Words of a passkey.", show_default="32, or 8")] = (
        None
    )
    form: Annotated[
        str | None,
        _prompts_option(
            "How passkeys are worded: ordinals, or names, which the built-in model knows.",
            show_default="ordinals, or names with the built-in model",
        ),
    ] = None

    def source(self, is_builtin: bool, seed: int) -> PromptFile | Documents:
        """The prompts; ValueError for options that do not go together, or out of range."""
        from hpu_duo.lab.identify import Form
        from hpu_duo.lab.kv_calibration import Documents, PromptFile

        of_documents: dict[str, Any] = {
            "haystack": self.haystack,
            "num_tokens": self.num_tokens,
            "num_passkeys": self.num_passkeys,
            "passkey_words": self.passkey_words,
            "form": self.form if self.form is None else choice(Form, "--form", self.form),
            "num_prompts": self.num_prompts,
        }
        if self.prompts is None:
            if self.chat:
                raise ValueError("expected --chat with --prompts only, since documents are no messages")
            for_builtin: dict[str, Any] = {
                "num_tokens": 1000,
                "num_passkeys": 8,
                "passkey_words": 8,
                "form": Form.NAMES,
            }
            return Documents(**{**(for_builtin if is_builtin else {}), **_given(of_documents)}, seed=seed)
        del of_documents["num_prompts"]
        if surplus := _given(of_documents):
            raise ValueError(f"expected --prompts or documents, got --prompts and {_options(surplus)}")
        return PromptFile(self.prompts, self.num_prompts, self.chat)


def calibration_of(
    model: Path | None, method: str, settings: MethodOptions, prompts: PromptOptions, run: RunOptions
) -> CalibrationRequest:
    """The request that the options describe.

    Args:
        model: None is the built-in one.

    Raises:
        ValueError: a value that is unknown or out of range, or options that do not go together.
    """
    from hpu_duo.lab.kv_calibration import CalibrationRequest

    return CalibrationRequest(
        model=MODEL_DIR if model is None else model,
        method=settings.method(choice(MethodName, "--method", method)),
        prompts=prompts.source(model is None, run.seed),
        num_sizes=settings.num_sizes,
        dtype=run.dtype or ("float32" if model is None else "auto"),
        device=run.device,
    )


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _refuse(values: dict[str, Any], method: MethodName) -> None:
    if surplus := _given(values):
        raise ValueError(f"expected {_options(surplus)} with --method {method.value} only")


def _options(values: dict[str, Any]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in values)


@grouped
def calibrate(
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.yaml",
            help="The plan; no file is overwritten.",
            show_default="none, with --kv-scales",
        ),
    ] = None,
    kv_scales: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="New directory for scales of keys and values in fp8, for --kv-scales of other commands; "
            "instead of a plan.",
        ),
    ] = None,
    model: Model = None,
    method: Annotated[
        str,
        typer.Option(
            help="ada-kv: one policy, each layer's budget shared by its heads; fastgen: for each head the "
            "cheapest set that recovers enough of its attention."
        ),
    ] = "ada-kv",
    settings: MethodOptions,
    prompts: PromptOptions,
    run: Annotated[RunOptions, Only("seed", "device", "dtype", "threads")],
    as_json: Json = False,
) -> None:
    """Choose what each KV head keeps by its attention on prompts, and write the KV plan for --kv-plan.

    Or measure keys and values, and write their scales for --kv-scales. The built-in model takes some seconds.
    """
    with user_errors():
        run.check()
        if (output is None) is (kv_scales is None):
            raise ValueError("expected --output or --kv-scales, got neither or both")
        for name, written in (("--output", output), ("--kv-scales", kv_scales)):
            if written is not None and written.exists():
                raise ValueError(f"{written} exists already: choose another file for {name}")
            if written is not None:
                check_file(name, written)
        request = calibration_of(model, method, settings, prompts, run)
        # What torch prints would stand between the table and its reader.
        from hpu_duo.cli.heads.run import cpu_set_up, quiet

        quiet()
        from hpu_duo.lab.kv_calibration import Calibration

    if output is None:
        assert kv_scales is not None, "it was checked"
        _calibrate_scales(request, kv_scales, run, as_json)
        return
    with cpu_set_up(run.threads):
        with user_errors():
            calibration = Calibration(request)
        with user_errors(()):
            _measure(calibration)
    found = calibration.result()
    with user_errors(OSError):
        found.plan.save(output, ("hpu-duo calibrate", *calibration.origin))
    if as_json:
        typer.echo(json.dumps(_fields(output, calibration, found), indent=2))
    else:
        _calibrate_show(output, calibration, found)


def _calibrate_scales(request: CalibrationRequest, directory: Path, run: RunOptions, as_json: bool) -> None:
    from hpu_duo.cli.heads.run import cpu_set_up
    from hpu_duo.lab.kv_calibration import ScaleCalibration

    with cpu_set_up(run.threads):
        with user_errors():
            calibration = ScaleCalibration(request)
        with user_errors(()):
            _measure(calibration)
    with user_errors((OSError, ValueError)):
        calibration.save(directory)
    if as_json:
        typer.echo((directory / "kv_scales.json").read_text(encoding="utf-8"))
        return
    console, table = Console(), Table(box=None, padding=(0, 2, 0, 0))
    for name in ("layer", "largest key", "largest value"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, largest in enumerate(calibration.largest.tolist()):
        table.add_row(str(number), *(f"{each:.4g}" for each in largest))
    console.print(table)
    console.print(f"{directory}: for --kv-scales, with --kv-cache-dtype fp8", highlight=False, markup=False)


def _measure(calibration: Calibration | ScaleCalibration) -> None:
    from hpu_duo.cli.heads.views import IdentifyView

    view = IdentifyView(Console(stderr=True), calibration.total, is_silent=False)
    try:
        for progress in calibration.run():
            view.moved(progress)
    finally:
        view.ended()


def _fields(output: Path, calibration: Calibration, found: CalibratedPlan) -> dict[str, Any]:
    return {
        "output": str(output),
        "origin": list(calibration.origin),
        "prompt_tokens": list(calibration.lengths),
        "num_asked": found.num_asked,
        "num_kept": found.num_kept,
        "heads_by_size": {str(size): count for size, count in found.heads_by_size.items()},
        "layers": [
            [
                {
                    "kind": head.kind,
                    "keep": head.keep.what,
                    "num_asked": head.num_asked,
                    "num_kept": None if head.keep.budget is None else int(head.keep.budget),
                    "recovered": head.recovered,
                }
                for head in heads
            ]
            for heads in found.layers
        ],
    }


def _calibrate_show(output: Path, calibration: Calibration, found: CalibratedPlan) -> None:
    console = Console()
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("layer", "head", "kind", "asked", "tokens", "recovered"):
        table.add_column(name, justify="left" if name == "kind" else "right", no_wrap=True)
    for layer, heads in enumerate(found.layers):
        for number, head in enumerate(heads):
            table.add_row(str(layer) if number == 0 else "", str(number), *_cells(head))
    console.print(table)
    shortest, longest = (f"{each:,}" for each in (min(calibration.lengths), max(calibration.lengths)))
    console.print(
        f"\nprompts: {calibration.total}, of {shortest} to {longest} tokens; shares are means over them",
        highlight=False,
    )
    if found.heads_by_size:
        sizes = ", ".join(f"{count} of {size:,}" for size, count in found.heads_by_size.items())
        added = found.num_kept - found.num_asked
        console.print(
            f"heads with a budget: {sizes} tokens\n{found.num_asked:,} tokens asked for in all, "
            f"{added:,} added by rounding up ({added / found.num_asked:.1%})",
            highlight=False,
        )
    console.print(f"{output}: for --kv-plan", highlight=False, markup=False)


def _cells(head: PlannedHead) -> tuple[str, str, str, str]:
    has_window = head.recovered is None
    tokens = "" if has_window else "all" if head.keep.budget is None else f"{int(head.keep.budget):,}"
    asked = "" if head.num_asked is None else f"{head.num_asked:,}"
    return head.kind, asked, tokens, "" if head.recovered is None else f"{head.recovered:.3f}"
