"""Tables and pictures of what fits on a Gaudi."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from hpu_duo.cli.planning.hardware import ACCEPTANCE, BreakEven
from hpu_duo.cli.planning.offload import Tier
from hpu_duo.cli.terminal import show_bytes

if TYPE_CHECKING:
    from hpu_duo.planning import Capacity, CapacityPoint, Hardware, ModelSize, Serving, WarmUp
    from hpu_duo.planning.model import TableMemory


def hardware_table(hardware: Hardware) -> Table:
    """Return the public figures of one device."""
    table = _facts()
    table.add_row(
        "matrix operations",
        f"{hardware.nominal_bf16 / 1e12:,.0f} TFLOP/s bf16, {hardware.nominal_fp8 / 1e12:,.0f} fp8; "
        f"reached {hardware.reached_bf16 / 1e12:,.0f} and {hardware.reached_fp8 / 1e12:,.0f}",
    )
    table.add_row("vector operations", f"{hardware.vector_ops / 1e12:g} TFLOP/s bf16")
    table.add_row(
        "memory",
        f"{show_bytes(hardware.memory_bytes)} usable, {hardware.memory_bytes_per_s / 1e12:.2f} TB/s",
    )
    table.add_row("links", f"{hardware.pair_bytes_per_s / 1e9:g} GB/s to each of the others in a box")
    return table


def print_report(
    model: ModelSize,
    serving: Serving,
    found: Sequence[Capacity],
    console: Console | None = None,
    *,
    memories: Sequence[TableMemory | None] = (),
    evens: Sequence[BreakEven] = (),
    tiers: Sequence[Tier] = (),
) -> None:
    """Print hardware, memory, requests that fit, predicted speeds, warm-up, and how certain they are.

    Args:
        memories: of graphs, of each choice; empty = not printed.
        evens: when drafts pay; empty = not printed.
        tiers: behind the devices.
    """
    console = console or Console()
    _print(console, serving.hardware.title, hardware_table(serving.hardware))
    devices = f"{serving.num_devices} x {serving.hardware.title}"
    if serving.deals_blocks:
        devices += ", which share the tokens of retrieval heads"
    _print(console, f"{model.name} on {devices}", _memory_table(model, serving))
    for title, cell in (
        ("Requests that fit at once", _fits),
        (f"Decode tokens/s of all, at most {serving.max_num_seqs} requests: prediction (range)", _all),
        ("One request alone: decode tokens/s", _alone),
        ("One request alone: seconds to the first token", _first),
        *(each for tier in tiers for each in tier.cells()),
    ):
        _print(console, title, _by_context(found, cell))
    _print(console, "Warm-up of a bucket table within its budget of graphs", _warm_up_table(found))
    if memories:
        title = "Memory of the default table's graphs on each device, if each has intermediates of its own"
        _print(console, title, _graph_memory_table(found, memories))
    if evens:
        _print(console, "Tokens a step from which drafts pay, by tokens of a verified row", _evens(evens))
        for one in filter(BreakEven.loses, evens):
            console.print(
                f"warning: with {one.num_rows:,} requests of {one.context:,} tokens and {one.sparsity:.0%} "
                f"streaming, drafts are predicted to lose if {ACCEPTANCE:.0%} of them are accepted",
                highlight=False,
            )
    for line in caveats(serving, found):
        console.print(line, style="dim", highlight=False)


def _evens(evens: Sequence[BreakEven]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("streaming", "KV", "context", "requests", *map(str, evens[0].tokens)):
        table.add_column(name, justify="left" if name in ("streaming", "KV") else "right")
    for one in evens:
        name = one.fields()["kv_format"]
        choice = f"{one.sparsity:.0%}", name, f"{one.context:,}", f"{one.num_rows:,}"
        table.add_row(*choice, *(f"{tokens:.2f}" for tokens in one.tokens.values()))
    return table


def _memory_table(model: ModelSize, serving: Serving) -> Table:
    table = _facts()
    stored = model.stored_bytes is not None and serving.weights.value == "bf16" and "as stored"
    table.add_row(
        "weights",
        f"{model.num_params / 1e9:.2f}G parameters, {show_bytes(model.weight_bytes(serving.weights))} "
        f"({stored or serving.weights.value})",
    )
    if serving.offloaded is not None:
        places = serving.weights_by_place(model).items()
        table.add_row("weights on", ", ".join(f"{name} {show_bytes(size)}" for name, size in places))
    table.add_row("KV cache", show_bytes(serving.kv_budget_bytes(model)))
    kept = f"keep {serving.sink} first and {serving.recent} newest tokens of each request"
    if serving.kept is None:
        table.add_row("streaming heads", kept)
    else:
        table.add_row("all heads" if serving.kept.is_plan else "streaming heads", f"keep {serving.kept.name}")
    return table


def _by_context(found: Sequence[Capacity], cell: Callable[[CapacityPoint], str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("streaming", style="dim")
    table.add_column("KV", style="dim")
    for point in found[0].points:
        table.add_column(f"{point.context:,}", justify="right")
    for each in found:
        table.add_row(*_name(each), *map(cell, each.points))
    return table


def _warm_up_table(found: Sequence[Capacity]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("streaming", "KV"):
        table.add_column(name, style="dim")
    for name in (
        "graphs",
        "kinds",
        "recipes",
        "operators",
        "tracing",
        "minutes",
        "promoted",
    ):
        table.add_column(name, justify="right", no_wrap=name == "graphs")
    for each in found:
        warm_up = each.warm_up
        cells = ("-",) * 6 if warm_up is None else _warm_up_cells(warm_up)
        table.add_row(*_name(each), *cells, f"{each.num_promoted:,}")
    return table


def _graph_memory_table(found: Sequence[Capacity], memories: Sequence[TableMemory | None]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("streaming", "KV"):
        table.add_column(name, style="dim")
    for name in ("graphs", "fused", "KV blocks", "portable", "KV blocks", "reserved"):
        table.add_column(name, justify="right")
    for each, memory in zip(found, memories):
        cells = ("-",) * 6 if memory is None else _graph_memory_cells(memory)
        table.add_row(*_name(each), *cells)
    return table


def _graph_memory_cells(memory: TableMemory) -> tuple[str, ...]:
    return (
        str(memory.num_graphs),
        show_bytes(memory.fused_bytes),
        f"{memory.fused_blocks:,}",
        show_bytes(memory.kept_bytes),
        f"{memory.kept_blocks:,}",
        show_bytes(memory.reserved_bytes),
    )


def _warm_up_cells(warm_up: WarmUp) -> tuple[str, ...]:
    fewest, most = warm_up.operators
    return (
        _graphs(warm_up),
        str(warm_up.num_layer_kinds),
        _recipes(warm_up),
        f"{fewest:,} to {most:,}",
        f"{_minutes(warm_up.trace_s[0])} to {_minutes(warm_up.trace_s[1])}",
        f"{_minutes(warm_up.low_s)} to {_minutes(warm_up.high_s)}",
    )


def _recipes(warm_up: WarmUp) -> str:
    fewest, most = warm_up.recipes
    return f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"


def _graphs(warm_up: WarmUp) -> str:
    return f"at most {warm_up.num_graphs}" if warm_up.is_bound else str(warm_up.num_graphs)


def caveats(serving: Serving, found: Sequence[Capacity]) -> list[str]:
    """Say how sure the figures are, and which of them the engine cannot reach yet."""
    from hpu_duo.planning import FITTED, Format, published_rows, split_rows
    from hpu_duo.planning.engine_work import UNKNOWN
    from hpu_duo.planning.fit import median_error

    rows = published_rows()
    held_out = split_rows(rows)[1]
    longest = max(row.input_len + row.output_len for row in held_out)
    num_fp8 = sum(row.format is Format.FP8 for row in rows)
    factors = " and ".join(sorted({f"{each.error_factor:.2g}" for each in found}))
    lines = list(_sharing(found))
    lines += [
        "Computed from public sources; this project has not measured any Gaudi. The model of speed is off by "
        f"{median_error(held_out, FITTED):.0%} in the median of {len(held_out)} published figures it was not "
        f"fitted to, of up to {longest:,} tokens; longer contexts and streaming heads are extrapolated.",
        f"{num_fp8} of the {len(rows)} published figures are of fp8, and the one of bf16 is among those that "
        f"were fitted. Ranges are wide by a factor {factors} either way: in bf16 the worst error on models "
        "that no fit has seen, in fp8 the worst of the figures held out. Their slow end also takes nothing "
        "to be fused.",
        f"Attention kernels: {serving.attention}. {UNKNOWN}.",
    ]
    if serving.kept is not None and serving.kept.rule is not None:
        lines.append("Memory under an attention rule is the engine's. Speed is that of full attention.")
    elif serving.kept is not None:
        lines.append(
            "Memory of heads with a KV budget is the engine's. Their speed is that of rings of as many "
            "tokens: what policies do to score tokens and to choose among them is not in it, nor is the "
            "attention over all before a chunk where prompts are read whole."
        )
    not_served = sorted({what for each in found for what in each.not_served})
    if not_served:
        lines.append(f"* priced only: this version does not run {', '.join(not_served)}.")
    return lines


def _sharing(found: Sequence[Capacity]) -> Iterator[str]:
    """Lines on the sharing of retrieval heads, and on the bytes of promoted ones."""
    for each in found:
        name = each.describe()
        if each.latent_ratio > 1:
            by = "once over all devices" if each.retrieval_parallel == "context" else "by each device"
            yield (
                f"{name}: latents are stored, 1/{each.latent_ratio:.1f} of the keys and values of all heads, "
                f"{by}."
            )
        if each.choice:
            yield f"{name}: {each.choice}"
        if each.promoted_bytes:
            longest = max(point.context for point in each.points)
            yield (
                f"Warning: {name}: {each.num_promoted:,} promoted heads take "
                f"{show_bytes(each.promoted_bytes)} of each request of {longest:,} tokens beyond their rings."
            )


def _print(console: Console, title: str, table: Table) -> None:
    # A title of the table itself would be wrapped to its width.
    console.print(title, style="bold", highlight=False)
    console.print(table)
    console.print()


def _facts() -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    return table


def _name(each: Capacity) -> tuple[str, str]:
    mark = " *" if each.not_served else ""
    from hpu_duo.planning.kv_formats import name_of

    share = f"{each.sparsity:.0%}" if each.sparsity else "plan" if each.kept else "none"
    return share, f"{name_of(each.kv_format)}{mark}"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f}" if seconds < 600 else f"{seconds / 60:.0f}"


def _fits(point: CapacityPoint) -> str:
    return f"{point.num_requests:,}" if point.num_requests else "-"


def _all(point: CapacityPoint) -> str:
    return _with_range(point.tokens_per_s, point.tokens_per_s_range, ",.0f")


def _alone(point: CapacityPoint) -> str:
    return _with_range(point.tokens_per_s_alone, point.tokens_per_s_alone_range, ",.0f")


def _first(point: CapacityPoint) -> str:
    return _with_range(point.first_token_s, point.first_token_s_range, ",.2f")


def _with_range(value: float | None, bounds: tuple[float, float] | None, form: str) -> str:
    if value is None or bounds is None:
        return "-"
    return f"{value:{form}} ({bounds[0]:{form}} to {bounds[1]:{form}})"


_COLOURS = ("#4d4d4d", "#1b6ca8", "#d1495b", "#2e8b57", "#8e5ea2", "#c58b00")
_LINES = ("-", "--", ":", "-.")


def draw(model: ModelSize, serving: Serving, found: Sequence[Capacity], png: Path) -> None:
    """Write the picture: colours are sparsities, line styles are KV formats.

    Raises:
        ValueError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    # Nothing is drawn where no request fits: a logarithmic axis has no zero.
    _panel(left, "Requests that fit at once", found, lambda point: point.num_requests or None)
    title = f"Decode tokens/s of all requests (at most {serving.max_num_seqs})"
    _panel(right, title, found, lambda point: point.tokens_per_s)
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9)
    figure.suptitle(
        f"{model.name}, {serving.weights.value} weights, {serving.num_devices} x {serving.hardware.title}"
    )
    figure.supxlabel(
        "tokens of context per request\n"
        "predicted from public sources; this project has not measured any Gaudi",
        fontsize=9,
    )
    try:
        figure.savefig(png, dpi=120)
    except OSError as error:
        raise ValueError(f"cannot write {png}: {error.strerror}") from error


def _panel(
    axes: Any, title: str, found: Sequence[Capacity], value: Callable[[CapacityPoint], float | None]
) -> None:
    from matplotlib.ticker import LogLocator

    from hpu_duo.planning.kv_formats import name_of

    sparsities = list(dict.fromkeys(each.sparsity for each in found))
    formats = list(dict.fromkeys(each.kv_format for each in found))
    for each in found:
        drawn = [(point.context, y) for point in each.points if (y := value(point)) is not None]
        what = "full attention" if each.sparsity == 0 else f"{each.sparsity:.0%} of heads stream"
        axes.plot(
            [x for x, _ in drawn],
            [y for _, y in drawn],
            color=_COLOURS[sparsities.index(each.sparsity) % len(_COLOURS)],
            linestyle=_LINES[formats.index(each.kv_format) % len(_LINES)],
            marker="o",
            markersize=4,
            label=f"{what}, {name_of(each.kv_format)} KV",
        )
    contexts = sorted({point.context for each in found for point in each.points})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [_short(context) for context in contexts])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}" if y >= 1 else "")
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.3)


def _short(context: int) -> str:
    return f"{context // 1024}K" if context % 1024 == 0 else f"{context:,}"
