"""Limits of the graphs of a step."""

from graphs.backends.whole_step import MOST_OPERATORS

REGION_NODES = 600
"""Nodes of a graph that is compiled by itself, such as a layer: some seconds to trace and to compile."""

STEP_OPERATORS = MOST_OPERATORS
"""Operators of a step that is captured whole."""
