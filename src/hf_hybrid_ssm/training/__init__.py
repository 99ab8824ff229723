"""Helpers for training: optimizer groups, memory, resuming, warm starts, segments, sequence parallelism."""
