"""``hpu-duo eval kvpress``: the same questions and budgets in kvpress, beside ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hpu_duo.builtin import MODEL_DIR
from hpu_duo.cli.arguments import options as opt
from hpu_duo.cli.arguments.loading import load_model
from hpu_duo.cli.arguments.options import grouped
from hpu_duo.cli.evaluation import options as eopt
from hpu_duo.cli.evaluation.curve import RulerChoice, task_settings
from hpu_duo.cli.evaluation.report import REPORT, RESULTS, check_outputs, finish, show, write_text
from hpu_duo.cli.terminal.errors import user_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpu_duo.lab.eval import ModelUnderTest, ResultFile
    from hpu_duo.lab.eval.kvpress_peer import KVPressProcess
    from hpu_duo.lab.eval.policy_curve import PolicyPoint, PolicyTask

TABLE = "table.md"
_ANSWER_TOKENS = 1024
"""More than questions and answers take behind a text."""
_COLUMNS = (
    *("task", "policy", "budget", "system", "value", "kv_ratio", "cpu_s"),
    *("kvpress_value", "kvpress_kv_ratio", "kvpress_cpu_s", "difference"),
)
_NOTE = (
    "In brackets: 95 % intervals. KV ratio: bytes kept at the end of an answer / bytes of full attention. "
    "difference: ours less kvpress's, of perplexity in nats a token; above 0 ours is better."
)


@grouped
def kvpress(
    *,
    out: eopt.Directory,
    kvpress_python: Annotated[
        Path, typer.Option(metavar="PYTHON", help="Program of an environment that has kvpress.")
    ],
    policies: Annotated[list[str], typer.Option(help="Policies to compare, each a --kv-policy.")] = [  # noqa: B006
        "h2o",
        "tova",
        "streaming-llm",
        "snapkv",
        "expected-attention",
    ],
    budgets: Annotated[list[float], typer.Option(help="Shares of a text's tokens that policies keep.")] = [  # noqa: B006
        0.05,
        0.1,
        0.2,
        0.5,
    ],
    tasks: Annotated[
        list[str], typer.Option(help="What is asked: passkey, rehearsed, perplexity, ruler.")
    ] = ["passkey", "rehearsed"],  # noqa: B006
    prompts: Annotated[
        list[str],
        typer.Option(help="How the engine's heads read a prompt (--kv-prompt): chunks, whole or both."),
    ] = ["chunks"],  # noqa: B006
    num_tokens: Annotated[int, typer.Option(help="Length of a document.")] = 2000,
    num_documents: eopt.NumDocuments = 4,
    num_passkeys: eopt.NumPasskeys = 4,
    passkey_words: eopt.PasskeyWords = 8,
    rehearsals: eopt.NumRehearsals = None,
    ruler: RulerChoice,
    text: eopt.TextOptions,
    model: opt.Model = None,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
    engine: eopt.Compared,
) -> None:
    """The same model, questions and budgets in kvpress, which runs in its own environment, beside ours."""
    with user_errors():
        from hpu_duo.lab.eval.policy_curve import REHEARSALS, PolicyTask, policy_points

        task = PolicyTask(
            tuple(tasks),
            num_tokens,
            num_documents,
            num_passkeys,
            passkey_words,
            seed,
            eopt.rehearsed(rehearsals) or REHEARSALS,
            text=text.read(model),
            **ruler.fields,
        )
        points = policy_points(["full", *policies], budgets)
        choice = eopt.Choice(model, {**engine, "decode_len": eopt.SCORED_LEN})
        comparison = _Comparison(points, task, tuple(prompts), choice)
        comparison.check()
        check_outputs(out / RESULTS, [out / TABLE, out / REPORT])
    comparison.run(kvpress_python, out, as_json)


@dataclass(frozen=True)
class _Comparison:
    points: list[PolicyPoint]
    task: PolicyTask
    prompts: tuple[str, ...]
    choice: eopt.Choice

    @property
    def directory(self) -> Path:
        """That of the model."""
        return self.choice.model or MODEL_DIR

    def check(self) -> None:
        """Refuse policies and ways to read prompts that there are not.

        Raises:
            ValueError: there is no such one.
        """
        from hpu_duo.lab.eval.kvpress_peer import press_of

        for way in self.prompts:
            if way not in ("chunks", "whole"):
                raise ValueError(f"expected --prompts chunks, whole or both, got {way!r}")
        for policy in dict.fromkeys(point.policy for point in self.points[1:]):
            if press_of(policy) is None:
                typer.echo(f"hpu-duo: note: kvpress has no counterpart of {policy}", err=True)

    def run(self, python: Path, out: Path, as_json: bool) -> None:
        """Ask kvpress, then the engine, what the file of results does not have yet; write the tables."""
        with user_errors():
            from hpu_duo.lab.eval import ResultFile, ResultsNotWrittenError
            from hpu_duo.lab.eval.kvpress_peer import KVPressError, KVPressProcess, beside, comparison_table

            settings = {**self.choice.settings(), **task_settings(self.task)}
            tokenizer = self._tokenizer()
            device, dtype = str(self.choice.engine.get("device")), str(self.choice.engine.get("dtype"))
            with user_errors(KVPressError):
                process = KVPressProcess(python, self.directory, dtype, device)
        records: list[dict[str, Any]] = []
        notes = Console(stderr=True)
        try:
            with user_errors():
                results = ResultFile(out / RESULTS, "kvpress", {**settings, "kvpress": process.versions})
            with user_errors((ResultsNotWrittenError, KVPressError)):
                for record in self._theirs(process, tokenizer, results):
                    _tell(notes, record)
                    records.append(record)
        finally:
            process.close()
        with user_errors(ResultsNotWrittenError):
            for record in self._ours(results):
                _tell(notes, record)
                records.append(record)
            rows = beside(records)
            write_text(out / TABLE, comparison_table(rows))
            if not as_json:
                show(rows, _COLUMNS, _NOTE)
            finish({"kvpress": process.versions, "rows": rows}, out, as_json)

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        from hpu_duo.modeling.loading import load_tokenizer

        found = load_tokenizer(self.directory)
        if found is None:
            raise ValueError(f"expected a tokenizer beside the model in {self.directory}, found none")
        return found

    def _theirs(
        self, process: KVPressProcess, tokenizer: PreTrainedTokenizerBase, results: ResultFile
    ) -> Iterator[dict[str, Any]]:
        from hpu_duo.generation import as_eos_ids
        from hpu_duo.lab.eval.kvpress_peer import KVPressModel, press_of
        from hpu_duo.lab.eval.policy_curve import FULL, measured_points
        from hpu_duo.modeling.loading import read_config, read_generation_config

        config = read_config(self.directory)
        eos = as_eos_ids(read_generation_config(self.directory, config).eos_token_id)

        def load(point: PolicyPoint) -> ModelUnderTest:
            press = None if point.policy == FULL else press_of(point.policy)
            kept = point.num_kept(self.task.num_tokens)
            with user_errors():
                model = KVPressModel(process, tokenizer, self._max_len(), eos, press, kept)
                self.task.check(model)
            return model

        points = [one for one in self.points if one.policy == FULL or press_of(one.policy) is not None]
        yield from measured_points(points, self.task, load, results, {"system": "kvpress"})

    def _ours(self, results: ResultFile) -> Iterator[dict[str, Any]]:
        from hpu_duo.lab.eval.policy_curve import measured_points

        full, others = self.points[:1], self.points[1:]
        for way in (None, *self.prompts):
            points = full if way is None else others
            system = "hpu-duo" if way is None else f"hpu-duo, {way}"
            load = partial(self._load, way)
            yield from measured_points(points, self.task, load, results, {"system": system})

    def _load(self, prompts: str | None, point: PolicyPoint) -> ModelUnderTest:
        from hpu_duo.lab.eval import Subject

        engine = self.choice.engine
        if prompts is not None:
            budget = float(point.num_kept(self.task.num_tokens))
            # Heads with a budget decode one token at a time.
            engine = {
                **engine,
                "kv_policy": point.policy,
                "kv_budget": budget,
                "decode_len": 1,
                "kv_prompt": prompts,
            }
        if prompts == "whole":
            # A step holds the longest prompt and a token of each other request.
            longest = min(self._max_len(), self.task.num_tokens + _ANSWER_TOKENS)
            width = engine.get("max_num_seqs", eopt.MAX_NUM_SEQS)
            engine = {**engine, "max_model_len": longest, "max_num_batched_tokens": longest + width}
        with user_errors():
            subject = Subject(load_model(self.choice.model, engine, eopt.MAX_NUM_SEQS))
            self.task.check(subject)
            return subject

    def _max_len(self) -> int:
        from hpu_duo.modeling.loading import read_config
        from hpu_duo.modeling.rope import served_len

        return served_len(read_config(self.directory).get_text_config(), None)


def _tell(notes: Console, record: dict[str, Any]) -> None:
    point = f"{record['system']}: {record['policy']} {record['budget']:g} {record['task']}"
    notes.print(f"{point}: {record['value']:.4g}, {record['cpu_s']:.1f} CPU s", highlight=False)
