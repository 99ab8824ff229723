"""C kernels: when they run, and their calls. What each pointer must point to is said once, and every call is checked
against it. Without a compiler there is no native backend, and the torch backend runs instead.

A tensor is declared as `name[B L D]`, by letters of its sizes; the first tensor that has a letter says how many it
stands for. `name?` may be None. A size may be a number, a multiple (`3R`), or a letter and a number (`K-1`). What a
dimension `B*` counts may be strided; its stride is passed to C. Without a star, tensors are contiguous. The dtype
follows, float32 if none does; `held` is float32 or bfloat16, the same in all tensors of a call.
"""

import ctypes
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from hf_hybrid_ssm.ops.core.native_build import compile_and_load, missing_compiler

DTYPES = {
    "float32": (torch.float32,),
    "float64": (torch.float64,),
    "int64": (torch.int64,),
    "bool": (torch.bool,),
    "int8": (torch.int8,),
    "held": (torch.float32, torch.bfloat16),
}
_TENSOR = re.compile(r"(\w+)(\??)\[([^\]]*)\](?: (\w+))?$")
_SIZE = re.compile(r"(\d*)([A-Z]?)([+-]\d+)?(\*?)$")
_KNOWN = 64  # layouts of arguments that a function remembers
_NOTHING = ctypes.create_string_buffer(64)  # what an empty tensor points to: C takes null for None

RUNS_IN = (torch.float32, torch.bfloat16, torch.float16)
Size = tuple[int, str, int]
"""factor, letter ("" for none) and summand: factor * size of the letter + summand."""
MaybeTensor = TypeVar("MaybeTensor", torch.Tensor, torch.Tensor | None)


class Declared:
    """One tensor that a C function takes."""

    def __init__(self, text: str):
        match = _TENSOR.match(text)
        assert match is not None, text
        self.name, optional, sizes, self.kind = match[1], match[2], match[3].split(), match[4] or "float32"
        self.optional, self.dtypes = bool(optional), DTYPES[self.kind]
        parts = [found.groups() for found in map(_SIZE.match, sizes) if found]
        assert len(parts) == len(sizes), text
        self.sizes = [(int(factor or 1), letter, int(more or 0)) for factor, letter, more, _ in parts]
        self.strided = tuple(bool(star) for *_, star in parts)
        self.is_contiguous = not any(self.strided)
        self.form = f"{'' if self.is_contiguous else 'rows of '}{self.kind} ({', '.join(sizes)})".replace("*", "")

    def check(self, function: str, tensor: torch.Tensor, bound: dict[str, Any]) -> int:
        """Where C finds its numbers; letters that are met for the first time are bound to their sizes.

        Raises:
            TypeError: it is not as declared, or not in the memory of the CPU (a meta or fake tensor has none).
        """
        at = tensor.data_ptr() if tensor.is_cpu else 0
        fits = tensor.dtype in self.dtypes and tensor.dim() == len(self.sizes)
        if fits:  # here, not in a function of its own: decoding without a window comes here for every token
            fits = tensor.is_contiguous() if self.is_contiguous else self._is_dense(tensor)
            for (factor, letter, more), size in zip(self.sizes, tensor.shape):
                unit = bound.setdefault(letter, (size - more) // factor) if letter else 1
                fits = fits and unit * factor + more == size
            if len(self.dtypes) > 1:
                fits = fits and bound.setdefault(self.kind, tensor.dtype) is tensor.dtype
        if not fits or not tensor.is_cpu or (at == 0 and tensor.numel()):
            known = {letter: size for letter, size in bound.items() if letter}
            raise TypeError(
                f"{function}: {self.name} must be {self.form} in the memory of the CPU where {known}; "
                f"got {tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}."
            )
        return at or ctypes.addressof(_NOTHING)

    def _is_dense(self, tensor: torch.Tensor) -> bool:
        """Whether the dimensions that may not be strided are not."""
        if tensor.numel() == 0:
            return True
        expected = 1
        for size, stride, strided in zip(reversed(tensor.shape), reversed(tensor.stride()), reversed(self.strided)):
            if not strided and size > 1 and stride != expected:
                return False
            expected *= size
        return True


class CFunction:
    """A function of a C library, with the tensors and numbers that it takes.

    Args:
        library: gives the library, when the function is first called.
        name: in C, where it returns 0, or 1 if memory ran out, or 2 for values that it refuses, with nothing written.
        tensors: what its pointers point to, as the module says, with commas in between.
        numbers: what follows them in C, with commas in between: an `option` of the call, "scale:float" for one that is
            no integer, a letter, the difference of two "T-L" or the product "F*D", or "x.0" for the first stride of x.
            The number of threads comes last, and is not named.
        refuses: what the message of a ValueError says of values that C refuses.
    """

    def __init__(
        self, library: Callable[[], ctypes.CDLL], name: str, tensors: str, numbers: str, *, refuses: str = ""
    ):
        self.library, self.name, self.refuses = library, name, refuses
        self.tensors = [Declared(" ".join(text.split())) for text in tensors.split(",")]
        self.numbers = ["".join(text.split()) for text in numbers.split(",")]
        places = {tensor.name: place for place, tensor in enumerate(self.tensors)}
        self._sources = [_source(number, places) for number in self.numbers]
        self._options = [place for place, source in enumerate(self._sources) if source is None]
        self._function: Callable[..., int] | None = None
        self._known: dict[tuple, list] = {}

    def check(self, tensors: Sequence[torch.Tensor | None]) -> tuple[list[int | None], list]:
        """Addresses of the tensors (null for None), and the numbers that follow from them (None for an option).

        Decoding asks with the same layouts again and again: each is looked at once.

        Raises:
            TypeError: a tensor is not as declared.
        """
        layouts = tuple([None if x is None else (x.dtype, x.shape, x.stride()) for x in tensors])
        numbers = self._known.get(layouts)
        if numbers is not None:
            at = [None if x is None else x.data_ptr() if x.is_cpu else 0 for x in tensors]
            if 0 not in at:
                return at, numbers
        at, bound = self._check_each(tensors)
        numbers = [None if source is None else source(tensors, bound) for source in self._sources]
        if len(self._known) >= _KNOWN:
            self._known.clear()
        self._known[layouts] = numbers
        return at, numbers

    def _check_each(self, tensors: Sequence[torch.Tensor | None]) -> tuple[list[int | None], dict[str, Any]]:
        bound: dict[str, Any] = {}
        at: list[int | None] = []
        for declared, tensor in zip(self.tensors, tensors, strict=True):
            if tensor is not None:
                at.append(declared.check(self.name, tensor, bound))
            elif declared.optional:
                at.append(None)
            else:
                raise TypeError(f"{self.name}: {declared.name} must be {declared.form}, got None.")
        return at, bound

    def __call__(self, tensors: Sequence[torch.Tensor | None], *options: float) -> None:
        """Run it on these tensors; `options` are its numbers that say nothing of a tensor.

        Raises:
            MemoryError: it had not enough for its temporary sums.
            TypeError: a tensor is not as declared.
            ValueError: C refuses the values of one.
        """
        at, found = self.check(tensors)
        numbers = found.copy()
        for place, option in zip(self._options, options, strict=True):
            numbers[place] = option
        function = self._function or self._prepared()
        code = function(*at, *numbers, torch.get_num_threads())
        if code == 1:
            raise MemoryError(f"{self.name} ran out of memory for its temporary sums.")
        if code:
            raise ValueError(self.refuses or f"{self.name} refuses these values.")

    def _prepared(self) -> Callable[..., int]:
        function = getattr(self.library(), self.name)
        kinds = [ctypes.c_double if number.endswith(":float") else ctypes.c_int64 for number in self.numbers]
        function.argtypes = [*[ctypes.c_void_p] * len(self.tensors), *kinds, ctypes.c_int64]
        self._function = function
        return function


def _source(number: str, places: dict[str, Any]) -> Callable[[Sequence, dict[str, Any]], int] | None:
    """What gives a number from tensors and letters; None for an option."""
    name, dot, dimension = number.partition(".")
    if dot:
        place, axis = places[name], int(dimension)
        return lambda tensors, bound: 0 if tensors[place] is None else tensors[place].stride(axis)
    if match := re.fullmatch(r"([A-Z])([-*])([A-Z])", number):
        one, sign, other = match.groups()
        if sign == "*":
            return lambda tensors, bound: bound[one] * bound[other]
        return lambda tensors, bound: bound[one] - bound[other]
    return (lambda tensors, bound: bound.get(number, 0)) if re.fullmatch("[A-Z]", number) else None


# -- what the bindings of the kernels share ---------------------------------------------------------------------------


def supports(device_type: str, dtype: torch.dtype) -> str | None:
    """None if a C kernel of this package can run on such tensors, else the reason it cannot."""
    if device_type != "cpu":
        return f"it runs on the CPU, not on {device_type}"
    if dtype not in RUNS_IN:
        return f"it computes in float32, which is too coarse for {dtype}"
    return missing_compiler()


def contiguous(tensor: MaybeTensor, dtype: torch.dtype) -> MaybeTensor:
    """Contiguous, in that dtype."""
    if tensor is None or (tensor.dtype == dtype and tensor.is_contiguous()):
        return tensor
    return tensor.to(dtype).contiguous()


def prepared(tensor: MaybeTensor) -> MaybeTensor:
    """In the form that C takes: contiguous float32."""
    if tensor is None or (tensor.dtype == torch.float32 and tensor.is_contiguous()):  # each decoded token comes here
        return tensor
    return contiguous(tensor, torch.float32)


def with_dense_rows(*tensors: torch.Tensor | None) -> list[Any]:
    """Each in float32 with a dense last dimension; the others may lie apart."""
    return [
        x if x is None or (x.dtype == torch.float32 and x.stride(-1) == 1) else _with_dense_rows(x) for x in tensors
    ]


def _with_dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.float()  # first: a conversion may order the numbers anew
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def library_beside(module: str) -> Callable[[], ctypes.CDLL]:
    """What gives the library of the C file beside a module (its `__file__`), compiled when first asked for."""
    return cache(lambda: compile_and_load(Path(module).with_suffix(".c")))
