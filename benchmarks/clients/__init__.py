"""Clients that others wrote, each in an environment of its own, against a running ``hpu-duo serve``.

python -m benchmarks.clients --environments DIR --out benchmarks/results/server-clients.md
"""
