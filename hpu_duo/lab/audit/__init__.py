"""Trace the operators and memory of every step on an HPU, from a ``config.json`` alone.

Steps are traced with tensors that have shapes and no data, without weights, memory or a device. An audit says
nothing about compilers or speed; see docs/audit.md.
"""

from hpu_duo.lab.audit.allocations import peak_allocated_bytes
from hpu_duo.lab.audit.audit import Progress, audit, audit_bucket
from hpu_duo.lab.audit.findings import Finding, Severity
from hpu_duo.lab.audit.lowering import LoweredGraph, Lowering, lower_bucket, lower_step
from hpu_duo.lab.audit.report import AuditReport, LayerRecipe, OperatorUse, StepAudit
from hpu_duo.lab.audit.structure import Structure, build_structure
from hpu_duo.lab.audit.tracer import StepTracer
from hpu_duo.lab.audit.work import OperatorWork, operator_work
from hpu_duo.lab.rules import Engine, NativeOperator, native_operators, native_sources

__all__ = [
    "AuditReport",
    "Engine",
    "Finding",
    "LayerRecipe",
    "LoweredGraph",
    "Lowering",
    "NativeOperator",
    "OperatorUse",
    "OperatorWork",
    "Progress",
    "Severity",
    "StepAudit",
    "StepTracer",
    "Structure",
    "audit",
    "audit_bucket",
    "build_structure",
    "lower_bucket",
    "lower_step",
    "native_operators",
    "native_sources",
    "operator_work",
    "peak_allocated_bytes",
]
