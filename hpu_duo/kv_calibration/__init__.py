"""Calibration of what each head keeps, from attention weights on prompts: budgets by head, kinds by head."""

from hpu_duo.kv_calibration.fastgen import FastGenChoice, Kind, TokenClasses, choose_kinds, fastgen_plan
from hpu_duo.kv_calibration.head_budgets import head_budgets, plan_of_budgets
from hpu_duo.kv_calibration.sizes import Quantised, quantised

__all__ = [
    "FastGenChoice",
    "Kind",
    "Quantised",
    "TokenClasses",
    "choose_kinds",
    "fastgen_plan",
    "head_budgets",
    "plan_of_budgets",
    "quantised",
]
