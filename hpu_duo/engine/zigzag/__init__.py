"""Steps in groups of rows that take turns, layer by layer."""
