"""Measure what a head pattern costs in accuracy and saves in bytes, through the decode path.

All evaluations ask the engine to *decode*: prompts are prefilled but for their last token, and answers, given
ones too, are decoded from the cache. So tokens that a pattern leaves out of the cache are really missing.
Scoring a text inside its own prefill would let every pattern look lossless.
"""

from hpu_duo.lab.eval.curve import CurvePoint, CurveTask, binarised, curve_points
from hpu_duo.lab.eval.kv_bytes import KVBytes
from hpu_duo.lab.eval.longbench import LongBenchItem, read_longbench
from hpu_duo.lab.eval.model_under_test import ModelUnderTest, Subject
from hpu_duo.lab.eval.passkey import (
    NeedleGrid,
    PasskeyQuestions,
    PasskeyResult,
    PasskeyTask,
    PasskeyText,
    WordSource,
    passkey_accuracy,
)
from hpu_duo.lab.eval.perplexity import PerplexityResult, check_stream, stream_perplexity
from hpu_duo.lab.eval.result_file import ResultFile, ResultsNotWrittenError
from hpu_duo.lab.eval.ruler import RULER_TASKS, RulerSample, RulerTask, ruler_sample

__all__ = [
    "RULER_TASKS",
    "CurvePoint",
    "CurveTask",
    "KVBytes",
    "LongBenchItem",
    "ModelUnderTest",
    "NeedleGrid",
    "PasskeyQuestions",
    "PasskeyResult",
    "PasskeyTask",
    "PasskeyText",
    "PerplexityResult",
    "ResultFile",
    "ResultsNotWrittenError",
    "RulerSample",
    "RulerTask",
    "Subject",
    "WordSource",
    "binarised",
    "check_stream",
    "curve_points",
    "passkey_accuracy",
    "read_longbench",
    "ruler_sample",
    "stream_perplexity",
]
