"""Limits of the graphs of a step."""

REGION_NODES = 600
"""Nodes of a graph that is compiled by itself, such as a layer: some seconds to trace and to compile."""

STEP_OPERATORS = 50_000
"""Operators of a step that is captured whole: 80 layers of ``REGION_NODES``, and what is around them."""
