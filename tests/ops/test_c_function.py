"""What C functions are given is what was declared, and what was declared is what C takes."""

import ctypes
import importlib
import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_hybrid_ssm.ops.core.native_library import CFunction, Declared, with_dense_rows

OPS = Path(importlib.import_module("hf_hybrid_ssm.ops").__file__).parent
BINDINGS = sorted(path for path in OPS.glob("*/native*.py") if path.with_suffix(".c").exists())
C_TYPES = {"float32": "float", "float64": "double", "int64": "int64_t", "int8": "int8_t", "bool": "char"}
C_TYPES["held"] = "char"  # of either width


def no_library():
    raise AssertionError("nothing is called")


FUNCTION = CFunction(
    no_library, "anything", "x[B L D], weight?[K D], held[B K-1 3D], rows[B* D], n?[B] int64", "B, L, D, K"
)


def tensors(**changed):
    given = {
        "x": torch.empty(2, 3, 5),
        "weight": torch.empty(4, 5),
        "held": torch.empty(2, 3, 15),
        "rows": torch.empty(4, 5)[::2],
        "n": torch.empty(2, dtype=torch.int64),
    }
    return list((given | changed).values())


def fake(*shape):
    with FakeTensorMode():
        return torch.empty(shape)


def test_what_is_declared_is_taken():
    at, numbers = FUNCTION.check(tensors())
    assert at == [tensor.data_ptr() for tensor in tensors()] or all(at)
    assert numbers == [2, 3, 5, 4]
    at, numbers = FUNCTION.check(tensors(weight=None, n=None))
    assert at[1] is at[4] is None and numbers == [2, 3, 5, 4]
    assert FUNCTION.check(tensors())[1] == FUNCTION.check(tensors())[1]  # known by now
    with pytest.raises(TypeError):
        FUNCTION.check([x.to("meta") for x in tensors()])


def test_an_empty_tensor_is_not_null():
    """Null says that there is none."""
    at, _ = FUNCTION.check(tensors(weight=torch.empty(1, 5), held=torch.empty(2, 0, 15)))
    assert all(at)


WRONG = {
    "missing": {"x": None},
    "meta": {"x": torch.empty(2, 3, 5, device="meta")},
    "fake": {"x": fake(2, 3, 5)},
    "bfloat16": {"weight": torch.empty(4, 5, dtype=torch.bfloat16)},
    "float64": {"weight": torch.empty(4, 5, dtype=torch.float64)},
    "int32": {"n": torch.empty(2, dtype=torch.int32)},
    "float for int64": {"n": torch.empty(2)},
    "transposed": {"weight": torch.empty(5, 4).t()},
    "rank": {"weight": torch.empty(4, 1, 5)},
    "another size": {"weight": torch.empty(4, 6)},
    "one for all": {"rows": torch.empty(1, 5)},
    "not one less": {"held": torch.empty(2, 4, 15)},
    "not three times": {"held": torch.empty(2, 3, 10)},
    "entries apart": {"rows": torch.empty(2, 10)[:, ::2]},
}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("name", WRONG)
def test_c_gets_no_tensor_that_it_would_misread(name):
    """A weight left on the meta device would be a null pointer, a narrow one would be read beyond its end."""
    with pytest.raises(TypeError, match=f"anything: {next(iter(WRONG[name]))} must be"):
        FUNCTION(tensors(**WRONG[name]))


def test_what_is_held_is_of_one_dtype():
    step = CFunction(no_library, "step", "keys[B* M* E] held, values[B* M* V] held", "B, M, E, V")
    narrow = torch.empty(1, 2, 3, dtype=torch.bfloat16)
    assert all(step.check([narrow, narrow])[0]) and all(step.check([narrow.float(), narrow.float()])[0])
    with pytest.raises(TypeError, match="values must be rows of held"):
        step.check([narrow, narrow.float()])
    with pytest.raises(TypeError, match="keys must be rows of held"):
        step.check([narrow.half(), narrow.half()])


@pytest.mark.parametrize("path", BINDINGS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_declarations_are_the_prototypes_of_c(path):
    """Names, pointers and their types, and the numbers after them."""
    module = importlib.import_module(f"hf_hybrid_ssm.ops.{path.parent.name}.{path.stem}")
    functions = [value for value in vars(module).values() if isinstance(value, CFunction)]
    code = "".join(file.read_text(encoding="utf-8") for file in (path.with_suffix(".c"), *path.parent.glob("*.h")))
    prototypes = dict(re.findall(r"^int (\w+)\(([^)]*)\)", code, re.MULTILINE))
    assert functions and {function.name for function in functions} <= prototypes.keys()
    for function in functions:
        parameters = [
            re.match(r"(?:const )?(\w+) (\*?)(\w+)$", part.strip()) for part in prototypes[function.name].split(",")
        ]
        pointers = [(found[3], found[1]) for found in parameters if found[2]]
        numbers = [(found[3], found[1]) for found in parameters if not found[2]]
        declared = [(tensor.name, C_TYPES[tensor.kind]) for tensor in function.tensors]
        assert [kind for _, kind in declared] == [kind for _, kind in pointers], function.name
        assert [name for name, _ in declared] == [name for name, _ in pointers], function.name
        assert numbers[-1][0] == "threads" and len(numbers) == len(function.numbers) + 1, function.name
        for number, (name, kind) in zip(function.numbers, numbers):
            assert kind == ("double" if number.endswith(":float") else "int64_t"), (function.name, number)
            if re.fullmatch("[A-Z]", number):
                assert name in (number, number.lower()), function.name


def test_numbers_follow_from_tensors():
    seen = []

    class Library:
        @staticmethod
        def anything(*arguments):
            seen.extend(arguments)
            return 0

    Library.anything.argtypes = None
    function = CFunction(
        lambda: Library, "anything", "x[B* L* D], y?[T D]", "scale:float, x.0, y.0, flag, B, T-L, B*D"
    )
    function([torch.empty(2, 6, 5)[:, ::2], torch.empty(4, 5)], 0.5, True)
    assert seen[2:-1] == [0.5, 30, 5, True, 2, 1, 10] and seen[-1] == torch.get_num_threads()
    assert Library.anything.argtypes[2:4] == [ctypes.c_double, ctypes.c_int64]


def test_a_conversion_comes_before_the_look_at_strides():
    """`.float()` of windows that overlap puts their numbers in another order."""
    windows = torch.randn(2, 40, 18).bfloat16().unfold(2, 16, 1).transpose(1, 2)
    assert windows.stride(-1) == 1 and windows.float().stride(-1) != 1
    (rows,) = with_dense_rows(windows)
    assert rows.stride(-1) == 1 and torch.equal(rows, windows.float())


def test_declarations_are_read_whole():
    with pytest.raises(AssertionError):
        Declared("x[B L")
