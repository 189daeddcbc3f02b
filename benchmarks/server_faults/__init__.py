"""Faults that a server meets: each part harms a running ``hpu-duo serve`` and asserts that it serves on.

python -m benchmarks.server_faults --out benchmarks/results/server-faults.md
"""
