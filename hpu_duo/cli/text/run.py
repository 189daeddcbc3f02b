"""Run prompts on an engine step by step, and report prefill and decode apart."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hpu_duo.cli.terminal import Waiting, show_bytes

if TYPE_CHECKING:
    from hpu_duo.engine.drafts import SpeculationStats
    from hpu_duo.engine.engine import Engine
    from hpu_duo.engine.outputs import Completion, RequestOutput
    from hpu_duo.engine.stats import EngineStats, PrefixStats
    from hpu_duo.request import PrefixHold
    from hpu_duo.sampling import SamplingParams


class View(Protocol):
    """A watcher of a run; text that is streamed is written as it comes."""

    is_streamed: bool

    def prefilled(self, done: int, total: int) -> None:
        """Prompt tokens computed so far, and all of them."""

    def received(self, index: int, output: RequestOutput) -> None:
        """Something was added to prompt number ``index``."""

    def ended(self) -> None:
        """Nothing more will come, whatever the reason."""


@dataclass
class Pace:
    """Tokens and seconds of one kind of step."""

    num_tokens: int = 0
    seconds: float = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Account for a step."""
        self.num_tokens += num_tokens
        self.seconds += seconds

    @property
    def tokens_per_s(self) -> float | None:
        """None when no such step has run."""
        return self.num_tokens / self.seconds if self.seconds > 0 else None


@dataclass(frozen=True)
class RunReport:
    """Results of a run.

    Attributes:
        completions: one per prompt, in order; unfinished ones without a finish reason if interrupted.
        prefill: prompt tokens, and the seconds of steps that computed any.
        decode: tokens sampled in the other steps, and their seconds.
        stats: the engine's counters at the end.
        is_interrupted: the user stopped the run.
    """

    completions: tuple[Completion, ...]
    prefill: Pace
    decode: Pace
    stats: EngineStats
    is_interrupted: bool


class Run:
    """Prompts that an engine has accepted, all or none of them.

    Args:
        context: what all of them begin with, kept by the engine.

    Raises:
        ValueError: the engine refuses a prompt, which the message calls by its place, counted from 1, or its
            parameters.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        context: PrefixHold | None = None,
    ) -> None:
        from hpu_duo.engine.outputs import Completion

        self._engine, self._params = engine, params
        self._num_prompt_tokens = sum(map(len, prompts))
        self._index: dict[str, int] = {}
        try:
            for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
                name = engine.add_request(prompt, one, name=f"prompt {index + 1}", context=context)
                self._index[name] = index
        except ValueError:
            self._abort()
            raise
        self._completions = tuple(Completion(name, 0) for name in self._index)

    def finish(self, view: View) -> RunReport:
        """Step until every prompt is answered or the user interrupts."""
        from hpu_duo.engine.intake import warn_of_cuts

        prefill, decode = Pace(), Pace()
        is_interrupted = False
        try:
            # A step that captures a graph may take half a minute.
            with Waiting("running a step, which may capture a graph") as wait:
                while self._engine.has_unfinished:
                    self._step(view, prefill, decode, wait)
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            view.ended()
            stats = self._engine.stats()
            self._abort()
        warn_of_cuts([[one] for one in self._completions], self._params, self._engine.limits.max_model_len)
        return RunReport(self._completions, prefill, decode, stats, is_interrupted)

    def _step(self, view: View, prefill: Pace, decode: Pace, wait: Waiting) -> None:
        before = self._engine.stats().num_prompt_tokens
        began = time.perf_counter()
        outputs = self._engine.step()
        wait.progressed()
        seconds = time.perf_counter() - began
        num_prefilled = self._engine.stats().num_prompt_tokens - before
        if num_prefilled:
            prefill.add(num_prefilled, seconds)
        else:
            decode.add(sum(len(output.token_ids) for output in outputs), seconds)
        # A preempted prompt is computed again, which is no progress.
        view.prefilled(min(prefill.num_tokens, self._num_prompt_tokens), self._num_prompt_tokens)
        for output in outputs:
            index = self._index[output.request_id]
            if output.error is not None:
                raise output.error
            self._completions[index].add(output)
            if view.is_streamed and output.text:
                wait.end()  # it would write over the text, on the same line of a terminal
            view.received(index, output)

    def _abort(self) -> None:
        for request_id in self._index:
            self._engine.abort(request_id)


_MOST_RATIO = 1.1
"""Most of full attention that is shown as a percentage: beyond it, blocks and rings are mostly empty."""


def run_table(report: RunReport) -> Table:
    """Speed, steps, padding, and KV bytes against full attention."""
    stats = report.stats
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("prefill", _speed(report.prefill))
    num_mixed = stats.num_output_tokens - report.decode.num_tokens
    table.add_row("decode", f"{_speed(report.decode)} ({num_mixed:,} more came with prefills)")
    steps = "  ".join(f"{phase} x {count}" for phase, count in sorted(stats.steps.items()))
    table.add_row("steps", steps or "none")
    table.add_row("padding", f"{stats.padding:.1%} of the query tokens")
    table.add_row("KV at peak", kv_text(stats))
    for budget in stats.budgets:
        table.add_row(
            "KV budget",
            f"{budget.policy}: {budget.num_slots} tokens of a request in {budget.num_heads} heads, "
            f"{budget.num_evictions} evicted",
        )
    for ruled in stats.attention_rules:
        share = f"{ruled.tiles.num_tiles:,} of {ruled.tiles.num_dense_tiles:,} tiles"
        table.add_row("attention rule", f"{ruled.rule} in {ruled.num_heads} heads: {share} of each")
    if stats.prefixes is not None:
        table.add_row("prefix cache", _prefixes(stats.prefixes))
    if stats.speculation is not None:
        table.add_row("drafts", _drafts(stats.speculation))
    if stats.num_preemptions:
        table.add_row("preempted", f"{stats.num_preemptions} times, for lack of blocks")
    if stats.num_graph_misses or stats.num_late_captures:
        missed = f"{stats.num_graph_misses} shapes outside the table, {stats.num_late_captures} captured late"
        table.add_row("graphs", missed)
    if stats.num_uncaptured_steps:
        table.add_row("uncaptured", f"{stats.num_uncaptured_steps} steps, too long to be captured")
    for note in stats.notes:
        table.add_row("note", note)
    return table


def run_fields(report: RunReport) -> dict[str, Any]:
    """The same for programs: seconds, bytes, counts."""
    stats = report.stats
    return {
        "is_interrupted": report.is_interrupted,
        "prefill": _pace_fields(report.prefill),
        "decode": _pace_fields(report.decode),
        "kv_ratio": _ratio(stats.peak_unshared_bytes, stats.peak_full_attention_bytes),
        "stats": {**asdict(stats), "num_steps": stats.num_steps, "padding": stats.padding},
    }


def _speed(pace: Pace) -> str:
    if pace.tokens_per_s is None:
        return "none"
    return f"{pace.num_tokens:,} tokens, {pace.tokens_per_s:,.1f} tokens/s"


def _pace_fields(pace: Pace) -> dict[str, Any]:
    return {**asdict(pace), "tokens_per_s": pace.tokens_per_s}


def _prefixes(prefixes: PrefixStats) -> str:
    text = f"{prefixes.hit_rate:.1%} of the tokens were there, {show_bytes(prefixes.idle_bytes)} idle"
    if prefixes.context_bytes:
        text += f", {show_bytes(prefixes.context_bytes)} in contexts"
    return f"{text}, {show_bytes(prefixes.snapshot_bytes)} in snapshots"


def _drafts(stats: SpeculationStats) -> str:
    accepted = f"{stats.num_accepted_tokens:,} of {stats.num_draft_tokens:,} tokens accepted"
    return f"{accepted} in {stats.num_steps:,} steps, {stats.mean_acceptance_length:.2f} tokens each"


def kv_text(stats: EngineStats) -> str:
    """Bytes that requests held, against full attention for the same tokens when none of them shares a block.

    Whole blocks and rings of short texts are more than their tokens, and no share of them.
    """
    held, unshared, full = stats.peak_held_bytes, stats.peak_unshared_bytes, stats.peak_full_attention_bytes
    ratio = _ratio(unshared, full)
    if ratio is None:
        return "nothing held"
    text = f"{show_bytes(held)} held"
    if held != unshared:
        text += f"; {show_bytes(unshared)} without sharing"
    if ratio > _MOST_RATIO:
        return f"{text}, in whole blocks and rings (texts too short to compare with full attention)"
    return f"{text}, {ratio:.1%} of the {show_bytes(full)} of full attention"


def _ratio(held: int, full: int) -> float | None:
    return held / full if full else None


class LiveView:
    """A progress bar while prompts are prefilled, then text as it comes.

    Args:
        console: where the bar is drawn, if it is a terminal; the bar goes away when it is full.
        text: where the output of the only prompt goes; None to write nothing.

    Attributes:
        is_streamed: whether text is written as it comes.
    """

    def __init__(self, console: Console, text: TextIO | None) -> None:
        self._console = console
        self._text = text
        self.is_streamed = text is not None
        self._bar: Progress | None = None
        self._wrote = False

    def prefilled(self, done: int, total: int) -> None:
        """Draw the bar, from the first step that leaves something to prefill to the last."""
        if done >= total:
            self._close_bar()
        elif self._console.is_terminal:
            self._draw(done, total)

    def received(self, index: int, output: RequestOutput) -> None:
        """Write new text at once."""
        if self._text is not None and output.text:
            self._close_bar()
            # First, for an interrupt may come at any moment after the text has been seen.
            self._wrote = True
            self._text.write(output.text)
            self._text.flush()

    def ended(self) -> None:
        """Leave the cursor at the start of a line."""
        self._close_bar()
        if self._text is not None and self._wrote:
            self._text.write("\n")
            self._text.flush()

    def _draw(self, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = Progress(
                TextColumn("prefill"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("tokens"),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.add_task("prefill", total=total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
