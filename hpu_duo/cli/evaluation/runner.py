"""One way to run an evaluation: prepare and check, measure what is missing, print a table or JSON, write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpu_duo.cli.evaluation.report import NOTE, REPORT, RESULTS, check_outputs, finish, show
from hpu_duo.cli.terminal import user_errors

Records = list[dict[str, Any]]
Measure = Callable[[Any], Iterable[dict[str, Any]]]
"""From a ``ResultFile``, or None, to records."""


@dataclass(frozen=True)
class Report:
    """Results of an evaluation, to be shown.

    Attributes:
        rows: lines of the table.
        columns: of the table.
        fields: the report as JSON.
        note: below the table.
    """

    rows: Sequence[Mapping[str, Any]]
    columns: Sequence[str]
    fields: Mapping[str, Any]
    note: str = NOTE


@dataclass(frozen=True)
class Evaluation:
    """A measurement.

    Attributes:
        kind: of results, for the first line of their file.
        settings: returns what the results depend on; called only where they are written.
        prepare: checks everything and loads the model, and returns what measures, record by record, those
            that are in the file left out. All that is refused is refused here.
        report: turns records into a table; the model is no longer in memory.
        files: that ``report`` writes, besides the report itself.
    """

    kind: str
    settings: Callable[[], dict[str, Any]]
    prepare: Callable[[], Measure]
    report: Callable[[Records], Report]
    files: tuple[str, ...] = ()

    def run(self, out: Path | None, as_json: bool) -> None:
        """Run it.

        Args:
            out: directory of the results; None writes nothing.
            as_json: print one JSON object in place of a table.
        """
        with user_errors():
            from hpu_duo.lab.eval import ResultFile, ResultsNotWrittenError

            results = None
            if out is not None:
                check_outputs(out / RESULTS, [out / name for name in (*self.files, REPORT)])
                results = ResultFile(out / RESULTS, self.kind, self.settings())
            measure = self.prepare()
        with user_errors(ResultsNotWrittenError):
            records = list(measure(results))
            # One model at a time in memory, where the report needs another one.
            del measure
            found = self.report(records)
            if not as_json:
                show(found.rows, found.columns, found.note)
            finish(found.fields, out, as_json)
