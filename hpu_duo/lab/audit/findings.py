"""Findings of an audit: broken rules and notes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hpu_duo.lab.rules import Rule


class Severity(str, Enum):
    """Severity of a finding.

    ``FORBIDDEN``: an HPU does it badly, wrongly or not at all. ``NOTE``: it breaks a rule of this project,
    but public sources show that an HPU does it.
    """

    FORBIDDEN = "forbidden"
    NOTE = "note"


FindingKey = tuple[Severity, Rule, str, str]


@dataclass(frozen=True)
class Finding:
    """A broken rule, or a note about an operator of a step.

    Attributes:
        rule: the rule of an HPU that it breaks.
        operator: the torch operator.
        source: file, line and function that called it.
        detail: description.
        severity: of the finding.
        shown_by: for a note, keys of ``native_sources()`` that show it on an HPU.
    """

    rule: Rule
    operator: str
    source: str
    detail: str
    severity: Severity = Severity.FORBIDDEN
    shown_by: tuple[str, ...] = ()

    @property
    def key(self) -> FindingKey:
        """Return a key that tells it apart from findings of the same line in other steps."""
        return self.severity, self.rule, self.operator, self.source

    def __str__(self) -> str:
        return f"{self.rule.value}: {self.operator} at {self.source}: {self.detail}"


class TraceEnded(RuntimeError):
    """A step ran an operator after which its shapes are unknown; the last finding names it."""
