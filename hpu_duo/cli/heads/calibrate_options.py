"""Options of ``hpu-duo calibrate``, in groups, and the request that they describe."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpu_duo.builtin import MODEL_DIR
from hpu_duo.cli.heads.identify_options import RunOptions, choice

if TYPE_CHECKING:
    from hpu_duo.kv_calibration import CalibrationMethod, CalibrationRequest, Documents, PromptFile

_METHOD = "Method"
_PROMPTS = "Prompts"


class MethodName(str, Enum):
    """Methods by name."""

    ADA_KV = "ada-kv"
    FASTGEN = "fastgen"


@dataclass(frozen=True)
class MethodOptions:
    """Choice of what heads keep, and of what it is chosen by."""

    budget: Annotated[
        float | None,
        typer.Option(
            help="ada-kv: tokens that a head keeps on average; up to 1, a share of the longest prompt.",
            show_default="0.2",
            rich_help_panel=_METHOD,
        ),
    ] = None
    kv_policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:OPTION=VALUE,...]",
            help="ada-kv: which tokens heads keep: snapkv, h2o, tova or expected-attention.",
            show_default="snapkv",
            rich_help_panel=_METHOD,
        ),
    ] = None
    safeguard: Annotated[
        float | None,
        typer.Option(
            help="ada-kv: share of a layer's budget that its heads share equally.",
            show_default="0.2",
            rich_help_panel=_METHOD,
        ),
    ] = None
    threshold: Annotated[
        float | None,
        typer.Option(
            help="fastgen: share of a head's attention that its set has to recover.",
            show_default="0.95",
            rich_help_panel=_METHOD,
        ),
    ] = None
    window: Annotated[
        float | None,
        typer.Option(
            help="fastgen: share of a prompt's tokens that the window is.",
            show_default="0.3",
            rich_help_panel=_METHOD,
        ),
    ] = None
    heavy: Annotated[
        float | None,
        typer.Option(
            help="fastgen: share of a prompt's tokens that are heavy hitters.",
            show_default="0.3",
            rich_help_panel=_METHOD,
        ),
    ] = None
    num_queries: Annotated[
        int | None,
        typer.Option(
            help="Last tokens of a prompt whose attention is measured.",
            show_default="all, or with ada-kv the window of snapkv, or 32",
            rich_help_panel=_METHOD,
        ),
    ] = None
    num_sizes: Annotated[
        int,
        typer.Option(
            help="Most different budgets; others are rounded up to one of them.", rich_help_panel=_METHOD
        ),
    ] = 4

    def method(self, name: MethodName) -> CalibrationMethod:
        """The method with its settings; ValueError for one of the other method, or out of range."""
        from hpu_duo.kv_calibration import AdaKV, FastGen

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
        typer.Option(
            metavar="FILE.jsonl",
            help='Prompts, a line {"prompt": TEXT} for each.',
            show_default="documents that hide passkeys",
            rich_help_panel=_PROMPTS,
        ),
    ] = None
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Wrap those of --prompts in the model's chat template.", rich_help_panel=_PROMPTS
        ),
    ] = False
    num_prompts: Annotated[
        int | None,
        typer.Option(
            help="Documents, or first prompts of the file.",
            show_default="16 documents, or all prompts of the file",
            rich_help_panel=_PROMPTS,
        ),
    ] = None
    haystack: Annotated[
        Path | None,
        typer.Option(
            help="UTF-8 text that documents are made of.",
            show_default="built-in text",
            rich_help_panel=_PROMPTS,
        ),
    ] = None
    num_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a document, without the questions at its end.",
            show_default="4000, or 1000 with the built-in model",
            rich_help_panel=_PROMPTS,
        ),
    ] = None
    num_passkeys: Annotated[
        int | None,
        typer.Option(
            help="Passkeys that a document hides and asks for at its end; 0 for plain text.",
            show_default="10, or 8",
            rich_help_panel=_PROMPTS,
        ),
    ] = None
    passkey_words: Annotated[
        int | None,
        typer.Option(help="Words of a passkey.", show_default="32, or 8", rich_help_panel=_PROMPTS),
    ] = None
    form: Annotated[
        str | None,
        typer.Option(
            help="How passkeys are worded: ordinals, or names as the built-in model knows it.",
            show_default="ordinals, or names with the built-in model",
            rich_help_panel=_PROMPTS,
        ),
    ] = None

    def source(self, is_builtin: bool, seed: int) -> PromptFile | Documents:
        """The prompts; ValueError for options that do not go together, or out of range."""
        from hpu_duo.identify import Form
        from hpu_duo.kv_calibration import Documents, PromptFile

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


def request_of(
    model: Path | None, method: str, settings: MethodOptions, prompts: PromptOptions, run: RunOptions
) -> CalibrationRequest:
    """The request that the options describe.

    Args:
        model: None is the built-in one.

    Raises:
        ValueError: a value that is unknown or out of range, or options that do not go together.
    """
    from hpu_duo.kv_calibration import CalibrationRequest

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
