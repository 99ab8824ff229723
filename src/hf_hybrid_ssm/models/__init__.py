"""The model families, one folder each, organised as in transformers."""
