"""Metrics, one line per call, traces."""
