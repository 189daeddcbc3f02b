"""``hpu-duo train-ranker``: learn from recorded traffic whose outputs will be short."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from hpu_duo.cli.options import Json, Seed, grouped, option_in
from hpu_duo.cli.terminal import user_errors

if TYPE_CHECKING:
    from hpu_duo.lab.ranker_training import Examples, TrainingReport
    from hpu_duo.scheduling.ranker import Ranker


_traffic_option = option_in("Traffic")
_model_option = option_in("Model")
_training_option = option_in("Training")
_LINEAR_RATE, _ENCODER_RATE = 0.01, 2e-5


@dataclass(frozen=True)
class TrafficOptions:
    """Options of what is learned from."""

    trace_format: Annotated[
        str | None, _traffic_option("burstgpt, azure, mooncake or sharegpt.", show_default="found out")
    ] = None
    tokenizer: Annotated[
        Path | None,
        _traffic_option(
            "tokenizer.json or its directory, of the model that will be served; for traces with texts.",
            show_default="none",
        ),
    ] = None
    num_requests: Annotated[
        int | None, _traffic_option("Most requests to read.", show_default="the whole trace")
    ] = None

    def examples(self, trace: Path) -> Examples:
        """Read the trace.

        Raises:
            ValueError: it cannot be read, or has texts and there is no tokenizer.
        """
        from hpu_duo.lab.load.texts import Texts
        from hpu_duo.lab.ranker_training import Examples
        from hpu_duo.lab.traces import TraceFormat, read_trace

        texts = None if self.tokenizer is None else Texts(self.tokenizer)
        kind = None if self.trace_format is None else TraceFormat.parse(self.trace_format)
        count = None if texts is None else texts.count
        found = read_trace(trace, kind, limit=self.num_requests, count_tokens=count)
        return Examples.of(found.arrivals, None if texts is None else texts.encode)


@dataclass(frozen=True)
class ModelOptions:
    """Options of what learns."""

    model: Annotated[
        Path | None,
        _model_option(
            "Directory with the config.json of an encoder or a decoder such as OPT, and its weights, if "
            "there are any.",
            metavar="DIR",
            show_default="a linear model",
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        _model_option("Tokens of a prompt to use.", show_default="512 for a linear model, else 2048"),
    ] = None

    def ranker(self, seed: int) -> Ranker:
        """Make the model, with random weights unless it has some.

        Raises:
            ValueError: there is no configuration of a model.
        """
        import torch

        from hpu_duo.scheduling.ranker import EncoderRanker, LinearRanker

        torch.manual_seed(seed)
        limit = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return LinearRanker(**limit) if self.model is None else EncoderRanker.of(self.model, **limit)


@dataclass(frozen=True)
class TrainingOptions:
    """Options of how it learns."""

    epochs: Annotated[int, _training_option("Times that every request is seen.")] = 5
    list_len: Annotated[int, _training_option("Requests that are ranked together.")] = 32
    learning_rate: Annotated[
        float | None,
        _training_option(
            "Learning rate of Adam.",
            show_default=f"{_LINEAR_RATE:g} for a linear model, else {_ENCODER_RATE:g}",
        ),
    ] = None
    held_out: Annotated[float, _training_option("Share of held-out requests, for the evaluation.")] = 0.1


@grouped
def train_ranker(
    *,
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Recorded requests and their lengths.")],
    output: Annotated[Path, typer.Option(help="Directory for the ranker; nothing in it is overwritten.")],
    traffic: TrafficOptions,
    model: ModelOptions,
    training: TrainingOptions,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Train a ranker for --scheduling-policy ltr: which outputs will be short, by their prompts.

    Traces are those of hpu-duo bench serve. Of a trace without texts only the lengths of prompts and the
    blocks that they share can be learned from.
    """
    with user_errors():
        from hpu_duo.lab.ranker_training import TrainingPlan, train
        from hpu_duo.scheduling.ranker import check_free, save_ranker

        check_free(output)
        rate = training.learning_rate
        if rate is None:
            rate = _LINEAR_RATE if model.model is None else _ENCODER_RATE
        plan = TrainingPlan(training.epochs, training.list_len, rate, training.held_out, seed)
        examples, ranker = traffic.examples(trace), model.ranker(seed)
        _check_vocabulary(examples, ranker, traffic)
        err = Console(stderr=True)
        report = train(
            ranker,
            examples,
            plan,
            lambda epoch, loss: err.print(f"epoch {epoch} of {plan.epochs}: loss {loss:.4f}"),
        )
        save_ranker(ranker, output)
    typer.echo(json.dumps(asdict(report), indent=2) if as_json else _told(report, output))


def _check_vocabulary(examples: Examples, ranker: Ranker, traffic: TrafficOptions) -> None:
    size, largest = ranker.vocab_size, max(int(prompt.max()) for prompt in examples.prompts)
    if size is not None and largest >= size:
        advice = (
            "tokens of a trace without texts are drawn from 1,000: leave --model out"
            if traffic.tokenizer is None
            else "give the --tokenizer of the --model"
        )
        raise ValueError(f"expected a model that knows token {largest}, got one of {size} tokens; {advice}")


def _told(report: TrainingReport, output: Path) -> str:
    return (
        f"Kendall's tau of scores and lengths: {report.held_out_tau:.3f} on {report.num_held_out} requests "
        f"held out, {report.tau:.3f} on {report.num_examples} learned from\n"
        f"written to {output}: --scheduling-policy ltr --ranker {output}"
    )
