"""Checkpoints that the official code of a family wrote, converted: a module for each family, with `convert`."""
