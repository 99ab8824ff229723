"""Random configurations and random damage to files; `tests.reliability.fuzz` draws them and reports."""
