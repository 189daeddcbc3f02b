"""Calibration of what each head keeps, from attention weights on prompts: budgets by head, kinds by head."""

from hpu_duo.heads.eviction.fastgen import TokenClasses, TokenClassifier
from hpu_duo.lab.kv_calibration.ada_kv import AdaKV
from hpu_duo.lab.kv_calibration.calibrated import CalibratedPlan, PlannedHead
from hpu_duo.lab.kv_calibration.calibration import Calibration, CalibrationRequest
from hpu_duo.lab.kv_calibration.fastgen import FastGen, FastGenChoice, Kind, choose_kinds, fastgen_plan
from hpu_duo.lab.kv_calibration.head_budgets import head_budgets, plan_of_budgets
from hpu_duo.lab.kv_calibration.kv_scales import ScaleCalibration
from hpu_duo.lab.kv_calibration.methods import CalibrationMethod
from hpu_duo.lab.kv_calibration.prompts import Documents, PromptFile
from hpu_duo.lab.kv_calibration.sizes import Quantised, quantised

__all__ = [
    "AdaKV",
    "CalibratedPlan",
    "Calibration",
    "CalibrationMethod",
    "CalibrationRequest",
    "Documents",
    "FastGen",
    "FastGenChoice",
    "Kind",
    "PlannedHead",
    "PromptFile",
    "Quantised",
    "ScaleCalibration",
    "TokenClasses",
    "TokenClassifier",
    "choose_kinds",
    "fastgen_plan",
    "head_budgets",
    "plan_of_budgets",
    "quantised",
]
