"""Commands that look into an engine or a machine."""
