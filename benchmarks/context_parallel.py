"""Predicted speed of retrieval heads that ranks share by head and by context, on Gaudi 2 and 3.

    python benchmarks/context_parallel.py --out benchmarks/results/context-parallel.md

Asks the cost model for decodes and prompts of Llama-3.1-70B. Takes seconds, needs no accelerator, and
measures none.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from hpu_duo.cost import (
    FITTED,
    GAUDI2,
    GAUDI3,
    Deployment,
    Format,
    Hardware,
    ModelSize,
    Seconds,
    Serving,
    Step,
    predict_seconds,
    published_rows,
)

CONTEXTS = (8192, 32768, 131072)
CARDS = (2, 4, 8)
CHOICES = (("full", 0.0, "heads"), ("50 % by head", 0.5, "heads"), ("50 % by context", 0.5, "context"))


def llama() -> ModelSize:
    """Llama-3.1-70B, with all of its positions."""
    found = next(row.model for row in published_rows() if row.model.name == "Llama-3.1-70B")
    return replace(found, max_positions=max(CONTEXTS))


class Point:
    """One number of cards and one length, by all choices.

    Attributes:
        by_choice: the deployments, in the order of ``CHOICES``.
        fits: requests that fit.
        num_requests: those that decode together: as many as fit with full attention, or by head if none does.
    """

    def __init__(self, hardware: Hardware, cards: int, context: int) -> None:
        self.cards, self.context = cards, context
        self.by_choice = [
            Deployment(
                llama(), Serving(hardware, cards, retrieval_parallel=parallel), sparsity, Format.BF16, context
            )
            for _, sparsity, parallel in CHOICES
        ]
        self.fits = [one.count_requests(context) for one in self.by_choice]
        self.num_requests = min(self.fits[0] or self.fits[1], self.by_choice[0].serving.max_num_seqs)

    def decode(self, one: Deployment) -> Seconds:
        """Predict one step of all requests, in parts."""
        work = one.engine_work.of(one.shape_of(Step(self.num_requests, self.context - 1)))
        return predict_seconds(work.fused, one.serving.hardware, self.cards, FITTED)

    def line(self) -> str:
        """Return the row of the table."""
        decodes = [self.decode(one) for one in self.by_choice]
        whole = [each.total - each.launch for each in decodes]
        spared = 1e6 * (whole[1] - whole[2]) / (2 * len(self.by_choice[0].model.layers))
        cells = [
            f"{self.cards}",
            f"{self.context:,}",
            f"{self.num_requests}",
            *(
                _if(fit >= self.num_requests, f"{1e3 * first:.1f} + {1e3 * each.launch:.1f}")
                for fit, first, each in zip(self.fits, whole, decodes)
            ),
            _if(spared > 0, f"{spared:.0f}"),
            *(
                _if(bool(fit), f"{one.first_token_s(self.context).value:.2f}")
                for fit, one in zip(self.fits, self.by_choice)
            ),
            *map(str, self.fits),
        ]
        return f"| {' | '.join(cells)} |"

    def parts(self) -> list[str]:
        """Return a row for each choice, with the parts of its decode."""
        lines = []
        for (name, _, _), one in zip(CHOICES, self.by_choice):
            found = self.decode(one)
            parts = found.compute, found.memory, found.link, found.launch, found.total
            lines.append(f"| {name} | {' | '.join(f'{1e3 * each:.1f}' for each in parts)} |")
        return lines


def _if(is_there: bool, text: str) -> str:
    return text if is_there else "-"


def tables(hardware: Hardware) -> list[str]:
    """Rows of all numbers of cards and lengths, and the parts of one decode."""
    names = [name for name, _, _ in CHOICES]
    titles = [f"{what}, {name}" for what in ("decode ms", "prompt s", "fit") for name in names]
    titles.insert(len(names), "break-even µs")
    points = [Point(hardware, cards, context) for cards in CARDS for context in CONTEXTS]
    last = points[-1]
    return [
        f"| cards | context | requests | {' | '.join(titles)} |",
        f"| ---: | ---: | ---: |{' ---: |' * len(titles)}",
        *(point.line() for point in points),
        "",
        f"The last decode, of {last.num_requests} requests on {last.cards} cards, in parts, in milliseconds:",
        "",
        "| | compute | memory | link | launches | in all |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        *last.parts(),
    ]


def published() -> list[str]:
    """Published full-attention figures of models of this size, and the prediction of each run."""
    lines = [
        "| hardware | cards | model | format | input | output | batch | published | predicted |",
        "| --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in published_rows():
        if not row.model.name.endswith("70B"):
            continue
        seconds = predict_seconds(row.work(), row.hardware, row.num_devices, FITTED).total
        if row.latency_ms is None:
            rate = row.batch * row.output_len / seconds
            figures = f"{row.tokens_per_s:,.0f} tokens/s", f"{rate:,.0f} tokens/s"
        else:
            figures = f"{row.latency_ms:.1f} ms", f"{1e3 * seconds:.1f} ms"
        sizes = f"{row.input_len} | {row.output_len} | {row.batch}"
        cells = f"{row.hardware.title} | {row.num_devices} | {row.model.name} | {row.format.value} | {sizes}"
        lines.append(f"| {cells} | {' | '.join(figures)} |")
    return lines


def report() -> str:
    """The whole report, as markdown."""
    factor = Deployment(llama(), Serving(GAUDI3, 8), 0.0, Format.BF16, CONTEXTS[0]).error_factor
    lines = [
        "# Retrieval heads by head and by context: Llama-3.1-70B on Gaudi",
        "",
        "Made by `python benchmarks/context_parallel.py --out benchmarks/results/context-parallel.md`.",
        "**Predicted by the cost model (`docs/cost-model.md`), measured by nobody.** No Gaudi has run this",
        "project, and no published figure has streaming heads, contexts this long, or blocks dealt over",
        f"cards. In bf16 a prediction may be off by a factor of {factor:g} either way: compare columns.",
        "",
        "Weights, keys and values in bf16, fused kernels, blocks of 128 tokens on each card, streaming heads",
        "with 128 sinks and 256 recent tokens, prefixes cached, prompts in chunks of 8,192. Half of the 8 KV",
        "heads of each layer stream. *Decode* is one step of as many requests at that context as fit with",
        "full attention (256 at most; by head where none does): what follows from operations and bytes, plus",
        "launches. *Prompt* is the time to the first token of one prompt alone, *fit* the requests that fit.",
        "",
        "By head the engine promotes streaming heads until cards have equally many retrieval heads: on 8",
        "cards a layer retrieves with all 8 heads, which is full attention. On 2 and 4 cards the four",
        "retrieval heads are shared evenly as they are, and both ways read equally many bytes.",
        "",
        "Most launches are those of loops over the context, whose rounds are bounded in slots where a card",
        "has few heads (`kernels_ref/chunks.py`): by context a card meets more heads over fewer blocks, in",
        "fewer rounds. That gain follows from these bounds, and other bounds would shrink it; the first",
        "summand is what dealing blocks changes by itself.",
        "",
        "Exchanges: 2 a layer by head, 4 by context (3 where no context is met), priced by their bytes and",
        "by 12 operators around each. The latency of an exchange itself is in no column, as no public source",
        "states it for these sizes. *Break-even* is that latency: launches left aside, decodes by context",
        "are faster than by head as long as each of the two further exchanges of a layer takes less; `-`",
        "where they are not even at 0.",
    ]
    for hardware in (GAUDI2, GAUDI3):
        lines += ["", f"## {hardware.title}", "", *tables(hardware)]
    lines += [
        "",
        "## Published figures of full attention",
        "",
        "Intel's, for models of this size, all in fp8 and short; sources in `hpu_duo/cost/published.json`.",
        "The constants of the model are fitted to half of all published rows",
        "(`benchmarks/results/cost-model.md`).",
        "",
        *published(),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Write the report, or print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file to write to instead of the terminal")
    out = parser.parse_args().out
    if out is None:
        print(report())
    else:
        out.write_text(report(), encoding="utf-8")


if __name__ == "__main__":
    main()
