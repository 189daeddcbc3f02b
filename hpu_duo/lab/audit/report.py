"""The report of an audit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bias_builders import Window
from hpu_duo.lab.audit.findings import Finding, FindingKey, Severity
from hpu_duo.lab.audit.tracer import Tally
from hpu_duo.lab.audit.work import OperatorWork
from hpu_duo.lab.rules import Engine, NativeOperator, native_operators
from hpu_duo.planning import Work
from hpu_duo.planning.work import OPERATIONS_PER_SCORE
from kernels_ref import Budget, HeadGroup, Rings

_NO_WORK = OperatorWork()


@dataclass(frozen=True)
class StepAudit:
    """One step: a bucket, or the sampling that follows it.

    Attributes:
        name: the bucket as it is printed, or the sampling.
        work: work by engine; engines without work are missing.
        operators: calls by operator.
        peak_transient_bytes: peak size of the tensors that the step makes, running operator by operator, with
            its results and without weights, stores and staged inputs.
        input_bytes: staged inputs, copied from the host.
        findings: rules of the HPU that it breaks, and notes; a step that cannot be traced further after one
            has the counts of the operators before.
        num_region_calls: compiled regions that the host calls with ``hpu-compile`` beyond one for each layer:
            rounds of loops that are cut out of layers, and pieces of layers after them.
    """

    name: str
    work: Mapping[Engine, OperatorWork]
    operators: Mapping[str, int]
    peak_transient_bytes: int
    input_bytes: int
    findings: tuple[Finding, ...]
    num_region_calls: int = 0

    @classmethod
    def of(
        cls,
        name: str,
        tally: Tally,
        peak_transient_bytes: int,
        input_bytes: int,
        num_region_calls: int = 0,
    ) -> StepAudit:
        """Make the audit of a step from its counts."""
        return cls(
            name,
            dict(tally.work),
            dict(sorted(tally.operators.items())),
            peak_transient_bytes,
            input_bytes,
            tuple(tally.findings.values()),
            num_region_calls,
        )

    @property
    def is_forbidden(self) -> bool:
        """Whether a rule is broken that is more than a note."""
        return any(each.severity is Severity.FORBIDDEN for each in self.findings)

    def with_findings(self, findings: tuple[Finding, ...]) -> StepAudit:
        """Return the same step with more findings."""
        return replace(self, findings=(*self.findings, *findings))

    @property
    def total(self) -> Work:
        """The work of all engines, as the cost model has it; weights and cache are among what is moved."""
        engines = self.work.values()
        scores = sum(each.num_scores for each in engines)
        return Work(
            bf16_ops=self.on(Engine.MATRIX).num_operations,
            vector_ops=self.on(Engine.VECTOR).num_operations + OPERATIONS_PER_SCORE * scores,
            moved_bytes=sum(each.num_bytes for each in engines),
            num_launches=sum(each.num_launches for each in engines),
            num_region_calls=self.num_region_calls,
        )

    def on(self, engine: Engine) -> OperatorWork:
        """The work of one engine."""
        return self.work.get(engine, _NO_WORK)


@dataclass(frozen=True)
class OperatorUse:
    """An operator, its calls over all steps, and its entry in public sources; None = not shown."""

    name: str
    num_calls: int
    native: NativeOperator | None


@dataclass(frozen=True)
class LayerRecipe:
    """Layers that a region-wise compiler compiles once for each bucket.

    Attributes:
        groups: groups of their KV heads.
        num_layers: number of these layers.
    """

    groups: tuple[HeadGroup, ...]
    num_layers: int

    @property
    def num_retrieval(self) -> int:
        """KV heads that see the whole text (Kr)."""
        return sum(group.num_heads for group in self.groups if group.kind.reach is None)

    @property
    def num_streaming(self) -> int:
        """The other ones (Ks)."""
        return sum(group.num_heads for group in self.groups) - self.num_retrieval

    @property
    def window(self) -> Window | None:
        """Sink and recent tokens of the streaming heads, None without any."""
        kinds = (group.kind for group in self.groups)
        return next((kind.window for kind in kinds if isinstance(kind, Rings)), None)

    @property
    def budgets(self) -> tuple[HeadGroup, ...]:
        """Those of the streaming heads that have a KV budget."""
        return tuple(group for group in self.groups if isinstance(group.kind, Budget))


@dataclass(frozen=True)
class AuditReport:
    """The whole report of an audit.

    Attributes:
        model: name of the model.
        weight_bytes, store_bytes: bytes of weights and stores.
        num_blocks: KV blocks of the stores.
        recipes: distinct layers, most frequent first.
        num_layer_kinds: distinct layers by everything that their code could branch on; each is a compiled
            region of each bucket.
        buckets, sampling: the steps, cheapest first, and the sampling from their logits.
    """

    model: str
    weight_bytes: int
    store_bytes: int
    num_blocks: int
    recipes: tuple[LayerRecipe, ...]
    num_layer_kinds: int
    buckets: tuple[StepAudit, ...]
    sampling: tuple[StepAudit, ...]

    @property
    def steps(self) -> tuple[StepAudit, ...]:
        """Buckets and sampling."""
        return (*self.buckets, *self.sampling)

    @property
    def operators(self) -> tuple[OperatorUse, ...]:
        """All operators, the most frequent first."""
        calls: Counter[str] = Counter()
        for step in self.steps:
            calls.update(step.operators)
        native = native_operators()
        return tuple(OperatorUse(name, count, native.get(name)) for name, count in calls.most_common())

    @property
    def unknown(self) -> tuple[str, ...]:
        """Operators that public sources do not show on HPU, sorted."""
        return tuple(sorted(use.name for use in self.operators if use.native is None))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Rules broken in any step, and notes: each line once, in the order of the steps."""
        first: dict[FindingKey, Finding] = {}
        for step in self.steps:
            for finding in step.findings:
                first.setdefault(finding.key, finding)
        return tuple(first.values())

    @property
    def violations(self) -> tuple[Finding, ...]:
        """The findings that are forbidden."""
        return tuple(each for each in self.findings if each.severity is Severity.FORBIDDEN)

    @property
    def notes(self) -> tuple[Finding, ...]:
        """The other ones."""
        return tuple(each for each in self.findings if each.severity is Severity.NOTE)

    @property
    def peak_transient_bytes(self) -> int:
        """The largest of any step."""
        return max((step.peak_transient_bytes for step in self.steps), default=0)
