"""Rules of an HPU: operations that a step may not do there, and the torch operators that each rule concerns.

The simulated HPU raises an error for a broken rule (``hpu_duo.sim``); the audit lists broken rules
(``hpu_duo.audit``).
"""

from hpu_duo.rules.operators import Operator, OpOverload, Transfer, base_name, describe
from hpu_duo.rules.rule import HpuRuleViolation, Rule, calling_line

__all__ = [
    "HpuRuleViolation",
    "OpOverload",
    "Operator",
    "Rule",
    "Transfer",
    "base_name",
    "calling_line",
    "describe",
]
