"""Engines as replicas of Ray Serve, behind the routers of ``hpu_duo.fleet.routing``.

``serve run`` and configurations of Ray Serve name ``hpu_duo.fleet.ray_serve.app:build_app``.
"""
