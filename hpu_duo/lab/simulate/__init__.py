"""Simulated runs of a server: requests, forecasts, replicas behind a router, and their reports."""
