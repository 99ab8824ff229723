"""Triton's interpreter up to 3.6 reads the bound of a loop as NumPy before 2.4 allowed: what has one element, but axes."""

import triton
from triton.runtime import interpreter

if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7):
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, *scope):
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = patch_tensor_and_index
