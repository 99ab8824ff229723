"""Marks that several tests share."""

import pytest
import torch

compiles = pytest.mark.skipif(
    torch.__version__.startswith("2.6"),
    reason="the compiler of torch 2.6 does not trace transformers' or these layers",
)
