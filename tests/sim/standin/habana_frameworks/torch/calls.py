"""Counts of calls of the stand-in; the only module that the vendor's package does not have."""

from collections import Counter

CALLS: Counter[str] = Counter()
