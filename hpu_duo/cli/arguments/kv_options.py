"""Options for heads with a KV budget."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hpu_duo.cli.arguments.panels import HEADS
from hpu_duo.limit_config import CacheConfig

KVPolicyName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[:OPTION=VALUE,...]",
        help="Which tokens heads keep that have a budget: h2o, tova, snapkv, expected-attention, fastgen, "
        "streaming-llm, local, fixed or strided; those that stream under --pattern, else all. See "
        "docs/kv-budget.md.",
        show_default="all tokens",
        rich_help_panel=HEADS,
    ),
]
KVBudget = Annotated[
    float | None,
    typer.Option(
        help="Tokens that each of these heads keeps of a request; up to 1, a share of --max-model-len.",
        show_default="none",
        rich_help_panel=HEADS,
    ),
]
KVPlanFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="What each head keeps, instead of --pattern and --kv-policy; see docs/kv-budget.md.",
        show_default="none",
        rich_help_panel=HEADS,
    ),
]
KVPrompt = Annotated[
    str,
    typer.Option(
        help="chunks: they choose at the end of each chunk of a prompt; whole: a prompt is read with full "
        "attention, and they choose at its end.",
        rich_help_panel=HEADS,
    ),
]
KVChunk = Annotated[
    int | None,
    typer.Option(
        help="Tokens of a prompt that a step reads, between the places at which they choose.",
        show_default="512, or what a step holds; whole: all that a step holds",
        rich_help_panel=HEADS,
    ),
]


@dataclass(frozen=True)
class KVOptions:
    """Options that say what heads keep that have a KV budget, for commands that need no weights."""

    kv_policy: KVPolicyName = None
    kv_budget: KVBudget = None
    kv_plan: KVPlanFile = None
    kv_prompt: KVPrompt = CacheConfig.kv_prompt
    kv_chunk: KVChunk = None

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the options that are not as they would be anyway."""
        usual = vars(NO_BUDGET)
        names = (name for name, value in vars(self).items() if value != usual[name])
        return tuple(f"--{name.replace('_', '-')}" for name in names)


NO_BUDGET = KVOptions()
"""No heads with a budget."""
