"""Helpers for training: optimizer groups, resuming, warm starts, sequence parallelism."""
