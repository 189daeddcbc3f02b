"""Start-up: from a checkpoint and a configuration to an engine."""
