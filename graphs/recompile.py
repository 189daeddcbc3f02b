"""The error for a graph that is compiled or captured when everything should have been before."""

from collections.abc import Iterable


class RecompileError(RuntimeError):
    """Something was compiled where nothing may be.

    Args:
        findings: what was compiled, one short text each.
    Attributes:
        findings: the same, as a tuple.
    """

    def __init__(self, findings: Iterable[str]) -> None:
        self.findings = tuple(findings)
        super().__init__(f"expected nothing new to compile after warm-up, got {'; '.join(self.findings)}")
