"""Floor 3: the model families, one folder each, in transformers' own form."""
