"""Commands that size a deployment: capacity, tables of buckets, warm-up, simulation."""
