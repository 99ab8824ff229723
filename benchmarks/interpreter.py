"""Triton up to 3.6 interprets bounds of loops by a conversion of one-element arrays, which NumPy 2.4 has ended."""

import triton
from triton.runtime import interpreter

if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7):
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, *scope):
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = patch_tensor_and_index
