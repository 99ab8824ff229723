"""Checks and benchmarks on a card: in parts, resumable, with results as JSON and one page."""
