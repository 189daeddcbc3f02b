"""The efficiencies that the cost model uses."""

from __future__ import annotations

from hpu_duo.cost.roofline import Efficiency

FITTED = Efficiency(compute=0.748, memory=0.865, link=0.749, launch_s=75.5e-6)
"""``fit`` of the first half of ``split_rows(published_rows())``, rounded to three digits.

The second half had no part in it. One set serves both Gaudis: the roofs of ``Hardware`` carry the difference.
"""
