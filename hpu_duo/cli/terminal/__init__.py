"""Output to a terminal: errors, sizes, drawings, streams."""
