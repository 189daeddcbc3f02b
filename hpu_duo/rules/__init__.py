"""Rules of an HPU: operations that a step may not do there, and the torch operators that each rule concerns.

The simulated HPU raises an error for a broken rule (``hpu_duo.sim``); the audit lists broken rules
(``hpu_duo.audit``).
"""

from hpu_duo.rules.limits import REGION_NODES, STEP_OPERATORS
from hpu_duo.rules.native import Engine, NativeOperator, native_operators, native_sources
from hpu_duo.rules.operators import Operator, OpOverload, Transfer, base_name, describe
from hpu_duo.rules.rule import HpuRuleViolation, Rule, calling_line
from hpu_duo.rules.store_copies import StoreCopy, store_copies
from hpu_duo.rules.store_use import StoreOperand, StoreUse
from hpu_duo.rules.trash import mark_trash

__all__ = [
    "REGION_NODES",
    "STEP_OPERATORS",
    "Engine",
    "HpuRuleViolation",
    "NativeOperator",
    "OpOverload",
    "Operator",
    "Rule",
    "StoreCopy",
    "StoreOperand",
    "StoreUse",
    "Transfer",
    "base_name",
    "calling_line",
    "describe",
    "mark_trash",
    "native_operators",
    "native_sources",
    "store_copies",
]
