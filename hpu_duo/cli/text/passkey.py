"""``hpu-duo passkey``: find passkeys in a long document, with most of the cache left out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hpu_duo.cli import options as opt
from hpu_duo.cli.options import Only, encode, grouped, load_model, tokenizer_of
from hpu_duo.cli.terminal import INTERRUPTED, mark, user_errors
from hpu_duo.cli.text.run import LiveView, Run, RunReport, run_fields, run_table
from hpu_duo.config.overrides import EngineOverrides
from hpu_duo.lab.tasks.passkeys import Passkey, PasskeyDocument, document, question, token_counter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpu_duo.sampling import SamplingParams

# A wrong answer may take more tokens than the right one before it comes to its full stop.
_SPARE_TOKENS = 4
_Offered = Annotated[
    EngineOverrides,
    Only(
        *(*opt.CUT, *opt.STEP, *opt.KEPT, *opt.STORED, "max_num_batched_tokens", "block_size"),
        *("device_memory_utilization", "fail_on_recompile", "record_steps"),
        max_num_seqs=None,
    ),
]


@dataclass(frozen=True)
class Answer:
    """The answer of the model about one passkey."""

    passkey: Passkey
    answered: str

    @property
    def expected(self) -> str:
        """The hidden words."""
        return " ".join(self.passkey.words)

    @property
    def is_right(self) -> bool:
        """Whether the words are the hidden ones, in order."""
        return self.answered == self.expected


@grouped
def passkey(
    *,
    num_tokens: Annotated[int, typer.Option(help="Length of the document.")] = 3000,
    num_passkeys: Annotated[int, typer.Option(help="Passkeys to hide, with one question each.")] = 8,
    passkey_words: Annotated[int, typer.Option(help="Words of each passkey.")] = 3,
    model: opt.Model = None,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
    engine: _Offered,
) -> None:
    """Hide passkeys in a long document and ask for all of them in one batch.

    Without --model it runs the built-in model, with half of its KV heads streaming unless --pattern,
    --kv-policy or --kv-plan says what heads keep.
    """
    chosen = [engine.get("pattern"), engine.get("kv_policy"), engine.get("kv_plan")]
    if model is None and chosen == [None] * 3 and not opt.is_cut(engine):
        engine = {**engine, "sparsity": 0.5}
    with user_errors():
        if num_passkeys < 1:
            raise ValueError(f"expected --num-passkeys of at least 1, got {num_passkeys}")
        loaded = load_model(model, engine, num_passkeys, seed)
        tokenizer = tokenizer_of(loaded)
        # First by the length alone: a text that is far too long takes minutes to write.
        most = loaded.engine.limits.max_model_len
        if num_tokens >= most:
            raise ValueError(
                f"expected --num-tokens below {most}, the tokens that the model holds with a question and "
                f"its answer, got {num_tokens}"
            )
        written = document(token_counter(tokenizer), num_tokens, num_passkeys, passkey_words, seed)
        prompts = [encode(tokenizer, written.text + question(one)) for one in written.passkeys]
        run = Run(loaded.engine, prompts, [_params(tokenizer, one) for one in written.passkeys])
    console = Console()
    if not as_json:
        _show_task(console, written, len(prompts[0]))
    from graphs import GraphMissError, RecompileError

    with user_errors((RecompileError, GraphMissError)):
        report = run.finish(LiveView(Console(stderr=True), None))
    answers = [
        Answer(one, completion.text.strip()) for one, completion in zip(written.passkeys, report.completions)
    ]
    if as_json:
        typer.echo(json.dumps(_fields(prompts, answers, report), indent=2))
    else:
        _show_answers(console, answers, report)
    if report.is_interrupted:
        raise typer.Exit(INTERRUPTED)


def _params(tokenizer: PreTrainedTokenizerBase, one: Passkey) -> SamplingParams:
    from hpu_duo.sampling import SamplingParams

    max_tokens = token_counter(tokenizer)(one.answer) + _SPARE_TOKENS
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, stop=(".",))


def _show_task(console: Console, written: PasskeyDocument, num_prompt_tokens: int) -> None:
    first = written.passkeys[0]
    place = written.text.index(first.needle)
    before = written.text[:place].split(" ")
    excerpt = " ".join(before[-12:]) + f"[bold]{first.needle}[/bold]" + " ..."
    console.print(
        f"A document of {len(written.text.split()):,} words hides {len(written.passkeys)} passkeys:"
    )
    console.print(f"  ... {excerpt}", highlight=False)
    console.print(f"Each question follows the whole document: {num_prompt_tokens:,} tokens, for example")
    console.print(f"  {escape(question(first).strip())}", highlight=False)
    console.print()


def _show_answers(console: Console, answers: list[Answer], report: RunReport) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("whose")
    table.add_column("depth", justify="right")
    table.add_column("expected")
    table.add_column("answered")
    for answer in answers:
        one = answer.passkey
        table.add_row(
            mark(answer.is_right, console),
            one.name,
            f"{one.depth:.0%}",
            answer.expected,
            escape(answer.answered),
        )
    console.print(table)
    low, high = (_interval(answers)[name] for name in ("accuracy_low", "accuracy_high"))
    found = f"{_num_right(answers)} of {len(answers)} passkeys found"
    console.print(f"\n{found} (95 % interval {low:.0%} to {high:.0%})\n", highlight=False)
    console.print(run_table(report))


def _interval(answers: list[Answer]) -> dict[str, float]:
    from hpu_duo.lab.eval.interval import interval_fields

    return interval_fields("accuracy", _num_right(answers) / len(answers), len(answers))


def _num_right(answers: list[Answer]) -> int:
    return sum(answer.is_right for answer in answers)


def _fields(prompts: list[list[int]], answers: list[Answer], report: RunReport) -> dict[str, Any]:
    return {
        "num_right": _num_right(answers),
        "num_answers": len(answers),
        **_interval(answers),
        "answers": [
            {
                "name": answer.passkey.name,
                "depth": answer.passkey.depth,
                "num_prompt_tokens": len(prompt),
                "expected": answer.expected,
                "answered": answer.answered,
                "is_right": answer.is_right,
            }
            for prompt, answer in zip(prompts, answers)
        ],
        "run": run_fields(report),
    }
