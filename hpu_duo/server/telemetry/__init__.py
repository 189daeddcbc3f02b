"""What is told about calls and steps: metrics, one line per call, traces."""
