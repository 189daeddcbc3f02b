"""Drafts of the model itself: decodes that read the first and newest tokens only, before a step verifies."""
