"""The efficiencies that the cost model uses."""

from __future__ import annotations

from hpu_duo.cost.hardware import Format
from hpu_duo.cost.roofline import Efficiency

FITTED = Efficiency(compute=0.748, memory=0.865, link=0.749, launch_s=0.68e-6)
"""``fit`` of the first half of ``split_rows(published_rows())``, rounded to three digits.

The second half had no part in it. One set serves both Gaudis: the roofs of ``Hardware`` carry the difference.
"""

ERROR_FACTORS = {Format.FP8: 1.37, Format.BF16: 1.9}
"""The most that a predicted time is off by, either way, by format, rounded up.

fp8: the worst of the held-out rows. bf16: no row of it is held out, so it is treated as what no fit has seen:
the worst of all rows when the other models alone were fitted (``worst_unseen``).
"""
