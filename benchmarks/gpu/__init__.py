"""The first hour on a card: checks and benchmarks in parts, resumable, with results as JSON and one table."""
