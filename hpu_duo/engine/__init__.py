"""The engine: schedules requests into steps, and builds, runs and commits each step."""
