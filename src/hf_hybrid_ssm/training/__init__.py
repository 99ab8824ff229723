"""Helpers for training: optimizer groups, memory, resuming, warm starts, sequence parallelism."""
