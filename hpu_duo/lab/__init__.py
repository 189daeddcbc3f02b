"""Measurements, which never serve: evaluation, identification, calibration, load, traces, audit."""
