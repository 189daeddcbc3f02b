"""The dated report: tables of everything measured, and what is missing, in markdown."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from benchmarks.gpu_suite import format_cases, host_tier
from benchmarks.gpu_suite.budget_cases import BASELINES
from benchmarks.gpu_suite.machine import COPY, PRODUCT, bandwidth, matrix_rate
from benchmarks.gpu_suite.memory import DUO, FULL
from benchmarks.gpu_suite.results import Key, Point, Results
from benchmarks.gpu_suite.shapes import ModelShape, Sizes

MISSING = "not measured"


def write_report(
    results: Results, sizes: Sizes, day: str, command: Sequence[str], figures: Sequence[str]
) -> str:
    """The whole report.

    Args:
        day: when the results were measured.
        command: what was run.
        figures: names of the figure files beside it.
    """
    lines = [
        f"# GPU benchmarks, {day}",
        "",
        f"`{shlex.join(command)}`",
        "",
        *_toy_warning(results),
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in results.environment.items()),
        *_machine(results),
        *_offload(results),
        *_kernels(results),
        *_formats(results),
        *_budget(results),
        *_curve(results, sizes, "decode", "at", "context"),
        *_curve(results, sizes, "prefill", "in chunks of", "chunk size"),
        *_balance(results),
        *_memory(results, sizes),
        *_published(results, sizes),
        *(f"\n![{name}]({name})" for name in figures),
        "",
    ]
    return "\n".join(lines)


def _toy_warning(results: Results) -> list[str]:
    if results.environment.get("sizes") != "toy":
        return []
    return ["**Toy sizes: this shows that the script runs. The figures say nothing about speed.**", ""]


def _machine(results: Results) -> list[str]:
    rows = []
    for key, unit in ((COPY, "bytes_per_s"), (PRODUCT, "flops_per_s")):
        point = results.get(key)
        if point is not None:
            scale, name = (1e9, "GB/s") if unit == "bytes_per_s" else (1e12, "TFLOP/s")
            rows.append(f"| {key.case} | {point.values[unit] / scale:,.4g} {name} | {_spread(point)} |")
    return _table("## The machine", ("measured", "rate", "time"), rows)


def _offload(results: Results) -> list[str]:
    """Blocks of a context each way, beside one large copy the same way."""
    rows = []
    for point in results.of(host_tier.SECTION):
        copy = results.get(Key(host_tier.SECTION, host_tier.COPY, point.key.system))
        share = "" if copy is None else f"{host_tier.rate(point) / host_tier.rate(copy):.1%}"
        queueing = ""
        if "queueing_s" in point.values:
            queueing = _seconds(point.values["queueing_s"] / point.values["steps"])
        cells = (
            f"{point.key.case}, {point.key.system}",
            _size(point.values["bytes"]),
            _spread(point),
            f"{host_tier.rate(point) / 1e9:,.4g} GB/s",
            share,
            queueing,
        )
        rows.append(f"| {' | '.join(cells)} |")
    heading = ("what", "bytes", "time", "rate", "of one copy", "to queue a step's")
    return _table("## Host memory", heading, rows)


def _kernels(results: Results) -> list[str]:
    lines: list[str] = []
    points = results.of("kernels")
    for case in dict.fromkeys(point.key.case for point in points):
        rows = [_kernel_row(point, results) for point in points if point.key.case == case]
        heading = ("implementation", "time", "of copy bandwidth", "of matrix rate")
        lines += _table(f"### {case}", heading, rows)
    if not lines:
        return []
    note = (
        "Shares are of the machine's figures above; arithmetic counts visible pairs only. "
        "* marks what the engine takes at this shape, where it has a choice."
    )
    return ["", "## Kernels", "", note, *lines]


def _kernel_row(point: Point, results: Results) -> str:
    if not point.is_measured:
        return f"| {point.key.system} | {MISSING}: {point.note} | | |"
    values = point.values
    mark = " *" if values.get("chosen") else ""
    shares = [
        f"{values[amount] / values['median_s'] / rate:.1%}" if rate else ""
        for amount, rate in (("bytes", bandwidth(results)), ("flops", matrix_rate(results)))
    ]
    return f"| {point.key.system}{mark} | {_spread(point)} | {' | '.join(shares)} |"


def _formats(results: Results) -> list[str]:
    """Tables of decodes by batch: each time beside that of the same kernel on plain floats."""
    points = results.of(format_cases.SECTION)
    batches = dict.fromkeys(point.key.case.rpartition(", ")[0] for point in points)
    lines: list[str] = []
    for batch in batches:
        rows = []
        for point in points:
            of, _, name = point.key.case.rpartition(", ")
            if of != batch:
                continue
            plain = results.get(Key(format_cases.SECTION, f"{batch}, {format_cases.PLAIN}", point.key.system))
            system, share = point.key.system, ""
            if point.is_measured and (rate := bandwidth(results)):
                share = f"{point.values['bytes'] / point.values['median_s'] / rate:.1%}"
                system += " *" if point.values.get("chosen") else ""
            cells = (name, system, _spread(point), share, _times(plain, point, time_of))
            rows.append(f"| {' | '.join(cells)} |")
        heading = ("format", "implementation", "time", "of copy bandwidth", "times faster than floats")
        lines += _table(f"### {batch} tokens", heading, rows)
    return ["", "## Formats of keys and values, unique part", *lines] if lines else []


def _budget(results: Results) -> list[str]:
    """Tables of heads with a budget, each time beside that of the case's baseline."""
    lines: list[str] = []
    points = results.of("budget")
    for case in dict.fromkeys(point.key.case for point in points):
        base = next((each for name in BASELINES if (each := results.get(Key("budget", case, name)))), None)
        rows = [
            f"| {point.key.system} | {_spread(point)} | {_times(base, point, time_of)} |"
            for point in points
            if point.key.case == case
        ]
        name = "the first that is no portable torch" if base is None else base.key.system
        lines += _table(f"### {case}", ("what", "time", f"times faster than {name}"), rows)
    if not lines:
        return []
    return ["", "## Heads with a budget", *lines]


def _curve(results: Results, sizes: Sizes, section: str, joint: str, axis: str) -> list[str]:
    if not results.of(section):
        return []
    heading = (axis, FULL, DUO, "faster", "memory, full", "memory, duo", "less memory")
    lines = ["", f"## {section.capitalize()} latency and memory against {axis}", ""]
    lines += ["Wall time of the whole engine, host included. Memory is weights, stores and the rest that"]
    lines += ["torch had allocated at most; without CUDA, weights and stores."]
    for model in sizes.models:
        rows = _pairs(results, section, f"{model.name} {joint} ")
        lines += _table(f"### {model.name}, {model.retrieval_share:.0%} retrieval heads", heading, rows)
    return lines


def _pairs(results: Results, section: str, prefix: str) -> list[str]:
    """One row for each size that either system has a point for, in order of size."""
    cases = {point.key.case for point in results.of(section) if point.key.case.startswith(prefix)}
    rows = []
    for size in sorted(int(case.removeprefix(prefix)) for case in cases):
        full, duo = (results.get(Key(section, f"{prefix}{size}", system)) for system in (FULL, DUO))
        cells = (
            f"{size:,}",
            *map(_spread, (full, duo)),
            _times(full, duo, time_of),
            *map(_bytes, (full, duo)),
            _times(full, duo, bytes_of),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _balance(results: Results) -> list[str]:
    points = results.of("balance")
    rows = []
    for point in points:
        values = point.values
        mark = " *" if values["chosen"] else ""
        cells = (
            point.key.case,
            f"{point.key.system}{mark}",
            *(f"{values[name]:,.0f}" for name in ("programs", "busiest")),
            f"{values['evenness']:.0%}",
            f"{values['triples']:,.0f}",
        )
        rows.append(f"| {' | '.join(cells)} |")
    heading = ("unique part", "cut", "programs", "blocks of the busiest", "busy", "triples to merge")
    note = [
        "",
        "Counted from the plans for an H200's 132 multiprocessors, and not measured: *busy* is the share of",
        "the time of all resident programs that is work, if all are equally fast. * is the choice.",
    ]
    return [*_table("## Balance of the unique part, counted", heading, rows), *note] if rows else []


def _memory(results: Results, sizes: Sizes) -> list[str]:
    if not results.of("memory"):
        return []
    lines = [
        "",
        "## Memory, computed",
        "",
        "Exact bytes of weights and stores of one request; nothing here is",
    ]
    lines += ["measured. The total has the weights on both sides, as the published figures do."]
    heading = ("context", "weights", "cache, full", "cache, duo", "cache ratio", "total ratio")
    for model in sizes.models:
        rows = []
        for context in sizes.decode_contexts:
            case = f"{model.name} at {context}"
            full, duo = (results.get(Key("memory", case, system)) for system in (FULL, DUO))
            if full is None or duo is None:
                continue
            stores = [point.values["kv_bytes"] for point in (full, duo)]
            weights = _size(full.values["weights_bytes"])
            caches = " | ".join(map(_size, stores))
            ratio = f"{stores[0] / stores[1]:.3f}"
            rows.append(f"| {context:,} | {weights} | {caches} | {ratio} | {_times(full, duo, bytes_of)} |")
        lines += _table(f"### {model.name}", heading, rows)
        published = model.published.memory
        point = results.get(Key("memory", f"{model.name}: {published}x less is reached", DUO))
        if point is not None and point.is_measured:
            lines += ["", f"{published}x less in total is reached at {point.values['context']:,.0f} tokens."]
    return lines


def _published(results: Results, sizes: Sizes) -> list[str]:
    if results.environment.get("sizes") == "toy":
        return []
    rows = []
    for model in sizes.models:
        published = model.published
        for name, section, figure, of in (
            ("decode, times faster", "decode", published.decode, time_of),
            ("decode, times less memory", "decode", published.memory, bytes_of),
            ("prefill, times faster", "prefill", published.prefill, time_of),
            ("prefill, times less memory", "prefill", published.prefill_memory, bytes_of),
        ):
            best = best_ratio(results, section, model, of)
            here = MISSING if best is None else f"{best[0]:.2f} ({best[1]})"
            rows.append(f"| {model.name} | {name} | {figure:.2f} | {here} |")
    title = "## Against the published figures"
    return _table(title, ("model", "gain over full attention", "published, at most", "here, at most"), rows)


def best_ratio(
    results: Results, section: str, model: ModelShape, of: Callable[[Point], float]
) -> tuple[float, str] | None:
    """The largest ratio of full attention over DuoAttention among points where both were measured.

    Returns:
        the ratio and its case; None when there is no such pair.
    """
    found = []
    for point in results.of(section):
        other = results.get(Key(section, point.key.case, DUO))
        is_mine = point.key.case.startswith(model.name) and point.key.system == FULL
        if is_mine and point.is_measured and other is not None and other.is_measured:
            found.append((of(point) / of(other), point.key.case.removeprefix(model.name).strip()))
    return max(found) if found else None


def time_of(point: Point) -> float:
    """Median seconds."""
    return point.values["median_s"]


def bytes_of(point: Point) -> float:
    """Bytes in use: measured where there is such a figure, else weights and stores."""
    values = point.values
    return values.get("peak_bytes", values.get("weights_bytes", 0.0) + values.get("kv_bytes", 0.0))


def _times(full: Point | None, duo: Point | None, of: Callable[[Point], float]) -> str:
    if full is None or duo is None or not full.is_measured or not duo.is_measured:
        return ""
    return f"{of(full) / of(duo):.2f}"


def _bytes(point: Point | None) -> str:
    return "" if point is None or not point.is_measured else _size(bytes_of(point))


def _size(num_bytes: float) -> str:
    for scale, unit in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes / 1024:.2f} KiB"


def _spread(point: Point | None) -> str:
    if point is None:
        return MISSING
    if not point.is_measured:
        return f"{MISSING}: {point.note}"
    median, low, high = (point.values[name] for name in ("median_s", "low_s", "high_s"))
    if point.values["rounds"] == 1:
        return _seconds(median)
    return f"{_seconds(median)} ({_seconds(low)} to {_seconds(high)})"


def _seconds(value: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value * 1e6:.4g} µs"


def _table(title: str, heading: Sequence[str], rows: Sequence[str]) -> list[str]:
    if not rows:
        return []
    return ["", title, "", f"| {' | '.join(heading)} |", "| --- " * len(heading) + "|", *rows]
