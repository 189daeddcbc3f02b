"""The engine: which requests run in a step, and how a step is built, run and committed."""
