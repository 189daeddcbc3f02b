"""Engines as replicas of Ray Serve, behind the routers of ``hpu_duo.routing``.

``serve run`` and configurations of Ray Serve name ``hpu_duo.ray_serve.app:build_app``; see docs/replicas.md.
"""
