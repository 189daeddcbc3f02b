"""HTTP: routes, keys, limits and streams."""
