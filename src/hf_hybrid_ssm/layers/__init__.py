"""Floor 2: modules built from ops. They know shapes and parameters, nothing of transformers' models."""
