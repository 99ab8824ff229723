"""Modules built from ops. They know shapes and parameters, nothing of transformers' models."""
