"""The fifteen minutes on a card: checks and benchmarks in parts, resumable, with results as JSON and one page."""
