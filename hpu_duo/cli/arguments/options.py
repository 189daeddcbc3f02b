"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from hpu_duo.cli.arguments.values import model_option
from hpu_duo.config.limits import HPU_LAYER_KINDS, CacheConfig, SchedulerConfig


@dataclass(frozen=True)
class Only:
    """The fields of a group that a command offers, in ``Annotated[Group, Only("a", "b")]``.

    The others keep their defaults.
    """

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)


@dataclass(frozen=True)
class _Group:
    kind: type[Any]
    options: tuple[Parameter, ...]

    def take(self, values: dict[str, Any]) -> Any:
        """Make the group of its options' values, which are taken out of ``values``."""
        return self.kind(**{option.name: values.pop(option.name) for option in self.options})


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command in typer's form: parameters that are groups of options are spread into their fields.

    A group is a dataclass whose fields are annotated as options, as parameters of a command are; the defaults
    of the fields are those of the options. The options take the place of the group.

    Raises:
        TypeError: a group has no such field, or a field has no option or no default.
    """
    groups: dict[str, _Group] = {}
    spread: list[Parameter] = []
    for parameter in signature(command, eval_str=True).parameters.values():
        group = _group_of(parameter.annotation)
        if group is None:
            spread.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
        else:
            groups[parameter.name] = group
            spread += group.options

    @wraps(command)
    def run(**values: Any) -> None:
        made = {name: group.take(values) for name, group in groups.items()}
        command(**values, **made)

    # What typer reads a command from.
    run.__signature__ = Signature(spread)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in spread}
    return run


def _group_of(annotation: Any) -> _Group | None:
    kind, *notes = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return None
    known = {field.name: field for field in fields(kind)}
    names = next((note.names for note in notes if isinstance(note, Only)), tuple(known))
    hints = get_type_hints(kind, include_extras=True)
    options = []
    for name in names:
        if name not in known or known[name].default is MISSING or get_origin(hints[name]) is not Annotated:
            raise TypeError(f"{kind.__name__}.{name}: expected a field that is an option and has a default")
        options.append(
            Parameter(name, Parameter.KEYWORD_ONLY, default=known[name].default, annotation=hints[name])
        )
    return _Group(kind, tuple(options))


HEADS = "Heads"
ENGINE = "Engine"
LIMITS = "Limits"

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

Model = Annotated[
    Path | None,
    model_option("Directory of a transformers checkpoint.", show_default="the built-in model"),
]
Dtype = Annotated[
    str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.", rich_help_panel=ENGINE)
]
Buckets = Annotated[
    Path | None,
    typer.Option(
        help="File with the shapes to capture, as hpu-duo plan writes it.",
        show_default="made from the limits",
        rich_help_panel=ENGINE,
    ),
]
DeviceMemoryUtilization = Annotated[
    float,
    typer.Option(
        "--device-memory-utilization",
        "--gpu-memory-utilization",
        help="Share of the device's memory for weights, graphs and KV cache together.",
        rich_help_panel=LIMITS,
    ),
]
EnablePrefixCaching = Annotated[
    bool,
    typer.Option(
        help="Keep the KV blocks of ended requests for later ones that begin alike.", rich_help_panel=LIMITS
    ),
]
NumPrefixSnapshots = Annotated[
    int | None,
    typer.Option(
        help="States of streaming heads to keep with them.",
        show_default="as many as requests run, in an eighth of the memory",
        rich_help_panel=LIMITS,
    ),
]
Seed = Annotated[int, typer.Option(help="Fixes everything that is drawn at random.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text and tables.")]


@dataclass(frozen=True)
class HeadOptions:
    """Options that say which heads stream."""

    pattern: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a head pattern in DuoAttention's published format.",
            show_default="all heads retrieve",
            rich_help_panel=HEADS,
        ),
    ] = None
    sparsity: Annotated[
        float | None, typer.Option(help="Share of KV heads that stream, 0 to 1.", rich_help_panel=HEADS)
    ] = None
    threshold: Annotated[
        float | None, typer.Option(help="KV heads with a higher score retrieve.", rich_help_panel=HEADS)
    ] = None
    sink: Annotated[
        int | None,
        typer.Option(
            help="First tokens that streaming heads keep.",
            show_default="the pattern's",
            rich_help_panel=HEADS,
        ),
    ] = None
    recent: Annotated[
        int | None,
        typer.Option(
            help="Newest tokens that streaming heads keep.",
            show_default="the pattern's",
            rich_help_panel=HEADS,
        ),
    ] = None

    max_layer_kinds: Annotated[
        int | None,
        typer.Option(
            help="Most kinds of layers, each compiled for every bucket; the fewest heads that a pattern lets "
            "stream retrieve to keep to it.",
            show_default=f"{HPU_LAYER_KINDS} on HPU, else no bound",
            rich_help_panel=HEADS,
        ),
    ] = None

    @property
    def is_cut(self) -> bool:
        """Whether sparsity or threshold are given, so that the pattern's scores are cut anew."""
        return self.sparsity is not None or self.threshold is not None


@dataclass(frozen=True)
class SizeOptions:
    """Limits of a step, except the number of requests."""

    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens of prompt and output together.",
            show_default="what the model serves",
            rich_help_panel=LIMITS,
        ),
    ] = SchedulerConfig.max_model_len
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(help="Tokens of one step; longer prompts are cut into chunks.", rich_help_panel=LIMITS),
    ] = SchedulerConfig.max_num_batched_tokens
    max_chunk_rows: Annotated[
        int, typer.Option(help="Prompts that may continue in the same step.", rich_help_panel=LIMITS)
    ] = SchedulerConfig.max_chunk_rows
    block_size: Annotated[int, typer.Option(help="Tokens of one KV block.", rich_help_panel=LIMITS)] = (
        CacheConfig.block_size
    )


@dataclass(frozen=True)
class LimitOptions(SizeOptions):
    """Limits of a step, for commands that need no weights."""

    max_num_seqs: Annotated[
        int, typer.Option(help="Requests that run at the same time.", rich_help_panel=LIMITS)
    ] = SchedulerConfig.max_num_seqs


@dataclass(frozen=True)
class EngineOptions(SizeOptions):
    """Options of an engine; see ``HPUDuoModel.from_pretrained``."""

    device: Annotated[str, typer.Option(help="auto, cpu, cuda, hpu or hpu-sim.", rich_help_panel=ENGINE)] = (
        "auto"
    )
    dtype: Dtype = "auto"
    graphs: Annotated[
        str,
        typer.Option(
            help="How steps are captured: auto, eager, replay, compile, cuda, hpu-compile or hpu-graph; "
            "default is auto on HPU, else eager.",
            rich_help_panel=ENGINE,
        ),
    ] = "default"
    attention: Annotated[
        str,
        typer.Option(help="Attention kernels: auto, reference, sdpa, triton or hpu.", rich_help_panel=ENGINE),
    ] = "auto"
    softmax: Annotated[
        str,
        typer.Option(
            help="Scores and exponentials: exact (float32) or fast (bfloat16).", rich_help_panel=ENGINE
        ),
    ] = "exact"
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            help="Requests that run at the same time.",
            show_default=f"as many as there are, at most {SchedulerConfig.max_num_seqs}",
            rich_help_panel=LIMITS,
        ),
    ] = None
    decode_len: Annotated[
        int,
        typer.Option(
            help="Tokens of a request that are decoded together where they are known beforehand.",
            rich_help_panel=ENGINE,
        ),
    ] = SchedulerConfig.decode_len
    scheduling_policy: Annotated[
        str,
        typer.Option(
            metavar="NAME[:OPTION=VALUE,...]",
            help="Who runs first where not everybody can run; see docs/scheduling.md.",
            rich_help_panel=ENGINE,
        ),
    ] = SchedulerConfig.scheduling_policy
    ranker: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="What hpu-duo train-ranker wrote, for --scheduling-policy ltr.",
            show_default="none",
            rich_help_panel=ENGINE,
        ),
    ] = None
    num_blocks: Annotated[
        int | None,
        typer.Option(
            help="KV blocks to hold.", show_default="what the requests need", rich_help_panel=LIMITS
        ),
    ] = None
    kv_cache_bytes: Annotated[
        str | None,
        typer.Option(
            "--kv-cache-bytes",
            "--kv-cache-memory-bytes",
            metavar="SIZE",
            help="Memory of the KV cache instead of a number of blocks, such as 4GiB.",
            rich_help_panel=LIMITS,
        ),
    ] = None
    device_memory_utilization: DeviceMemoryUtilization = CacheConfig.device_memory_utilization
    enable_prefix_caching: EnablePrefixCaching = CacheConfig.enable_prefix_caching
    num_prefix_snapshots: NumPrefixSnapshots = None
    kv_policy: KVPolicyName = None
    kv_budget: KVBudget = None
    kv_plan: KVPlanFile = None
    kv_prompt: KVPrompt = CacheConfig.kv_prompt
    kv_chunk: KVChunk = None
    attention_rule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:OPTION=VALUE,...]",
            help="Sparse attention of the same heads: sink_band, strided, ...; see docs/attention-rules.md.",
            show_default="all",
            rich_help_panel=HEADS,
        ),
    ] = None
    max_ring_window: Annotated[
        int | None,
        typer.Option(
            help="Longest sliding window of a layer that is kept in rings; longer ones are kept in blocks.",
            show_default="any",
            rich_help_panel=HEADS,
        ),
    ] = None
    tensor_parallel_size: Annotated[
        int,
        typer.Option(
            help="Devices that share the model, each driven by a process of its own.",
            rich_help_panel=ENGINE,
        ),
    ] = 1
    expert_parallel: Annotated[
        bool,
        typer.Option(
            help="Give each device some experts of a mixture whole, and not a part of the width of each.",
            rich_help_panel=ENGINE,
        ),
    ] = False
    retrieval_parallel: Annotated[
        str,
        typer.Option(
            help="What devices share of retrieval heads: heads, or the tokens of each of them (context).",
            metavar="heads|context|auto",
            rich_help_panel=ENGINE,
        ),
    ] = "heads"
    retrieval_parallel_context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a request for which auto predicts the faster of both.",
            show_default="the longest request",
            rich_help_panel=ENGINE,
        ),
    ] = None
    rank_timeout_s: Annotated[
        float,
        typer.Option(
            "--rank-timeout-seconds",
            help="Seconds of a step, or without a sign of life of a device's process, before all end.",
            rich_help_panel=ENGINE,
        ),
    ] = 300.0
    rank_launcher: Annotated[
        str,
        typer.Option(
            help="Who starts the processes of the devices: this command, or torchrun, on several machines.",
            metavar="own|torchrun",
            rich_help_panel=ENGINE,
        ),
    ] = "own"
    buckets: Buckets = None
    max_captured_tokens: Annotated[
        int | None,
        typer.Option(
            help="Steps of more tokens, long prefills, run uncaptured.",
            show_default="all are captured",
            rich_help_panel=ENGINE,
        ),
    ] = None
    graph_memory_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Device memory to leave free for captured steps, such as 2GiB.",
            show_default="as estimated",
            rich_help_panel=ENGINE,
        ),
    ] = None
    trim_chunks: Annotated[
        bool,
        typer.Option(
            "--trim-chunks",
            help="End a prompt at the border of a bucket, and go on in the next step, where that pads less.",
            rich_help_panel=ENGINE,
        ),
    ] = False
    fail_on_recompile: Annotated[
        bool,
        typer.Option(
            "--fail-on-recompile",
            help="Warm up first, and end with an error if a step compiles anything afterwards.",
            rich_help_panel=ENGINE,
        ),
    ] = False
    record_shapes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Append the exact shape of every step to this file, to plan from.",
            show_default="not recorded",
            rich_help_panel=ENGINE,
        ),
    ] = None
    record_steps: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write every step to this file, for hpu-duo replay: a debugging tool.",
            show_default="not recorded",
            rich_help_panel=ENGINE,
        ),
    ] = None


class ManyValues(TyperCommand):
    """A command whose repeatable options also take their values in a row.

    ``--context 8192 32768`` becomes ``--context 8192 --context 32768``. For commands without positional
    arguments, where a word that belongs to no option could only be a mistake.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Spread the rows of values, then parse as usual."""
        normalize = ctx.token_normalize_func or str
        names = {
            name
            for parameter in self.get_params(ctx)
            if getattr(parameter, "multiple", False)
            for name in parameter.opts
        }
        spread: list[str] = []
        current: str | None = None
        has_value = False
        for word in args:
            if word.startswith("-"):
                name = "--" + normalize(word.partition("=")[0].removeprefix("--"))
                current = word.partition("=")[0] if name in names else None
                has_value = "=" in word
            elif current is not None:
                if has_value:
                    spread.append(current)
                has_value = True
            spread.append(word)
        return super().parse_args(ctx, spread)
