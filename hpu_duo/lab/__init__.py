"""Measurements, which never serve: evaluation, identification, calibration, load, audit, simulated runs."""
