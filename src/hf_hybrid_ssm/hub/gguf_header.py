"""The head of a GGUF file: its keys, and where its tensors lie. Reads no tensor, and imports nothing that takes long.

The format is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_hybrid_ssm.extras import install_command

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes, unless general.alignment says otherwise
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""A type of value → its code in `struct`."""
STRING, ARRAY = 8, 9
MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies.

    Attributes:
        shape: as torch writes it, the last dimension contiguous.
        kind: the number of its type in ggml, of floats or of blocks.
        offset: in the file, in bytes.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """What stands before the tensors of a GGUF file.

    Attributes:
        path: of the file.
        fields: its keys and their values; an array is a list.
        tensors: by name.
    """

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return self.fields["general.architecture"]

    def bytes_of(self, name: str) -> int:
        """How many bytes a tensor takes in the file.

        Raises:
            ImportError: the package `gguf` is missing, which knows the sizes of blocks.
            ValueError: its type is none of ggml's, or its rows are no whole blocks.
        """
        try:
            from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        except ImportError as error:
            raise ImportError(f"reading {self.path.name} needs gguf: {install_command('gguf')}") from error
        tensor = self.tensors[name]
        if tensor.kind not in {kind.value for kind in GGMLQuantizationType}:
            raise ValueError(
                f"{str(self.path)!r}: {name} is of the type {tensor.kind}, which this gguf does not know."
            )
        count, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
        if tensor.shape and tensor.shape[-1] % count:
            raise ValueError(
                f"{str(self.path)!r}: rows of {name} have {tensor.shape[-1]} numbers, in blocks of {count}."
            )
        return math.prod(tensor.shape) // count * size

    def check_complete(self) -> None:
        """Every tensor lies in the file; the errors of `bytes_of`."""
        size = self.path.stat().st_size
        for name, tensor in self.tensors.items():
            if tensor.offset + self.bytes_of(name) > size:
                raise ValueError(f"{str(self.path)!r} is not a complete GGUF file: it ends before {name} does.")


def read_header(path: str | os.PathLike) -> GgufHeader:
    """The head of a GGUF file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no GGUF file, of another version, part of a model, or cut off in its head.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r}: there is no such file.")
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise ValueError(f"{str(path)!r} is a file, but no GGUF file; a folder, a name or GGUF is expected.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _header(path, _Reader(data))
            except (struct.error, UnicodeDecodeError, OverflowError) as error:
                raise ValueError(f"{str(path)!r} is not a complete GGUF file: {error}.") from error


def _header(path: Path, reader: "_Reader") -> GgufHeader:
    (version,) = reader.numbers("I", 1)
    if version not in VERSIONS:
        known = " and ".join(map(str, VERSIONS))
        is_swapped = version and not version % 2**16
        told = "big-endian, and little-endian files" if is_swapped else f"of version {version} of GGUF, and {known}"
        raise ValueError(f"{str(path)!r} is {told} are read.")
    tensor_count, key_count = reader.numbers("Q", 2)
    fields: dict[str, Any] = {}
    for _ in range(key_count):
        key = reader.string()
        if key in fields:
            raise ValueError(f"{str(path)!r} has the key {key!r} twice.")
        fields[key] = reader.value()
    if (parts := fields.get("split.count", 0)) > 1:
        raise ValueError(
            f"{str(path)!r} is part {fields.get('split.no', 0) + 1} of {parts} of a model: merge them into one file "
            "first (llama-gguf-split --merge FIRST_PART OUT)."
        )
    if not isinstance(fields.get("general.architecture"), str):
        raise ValueError(f"{str(path)!r} has no general.architecture, which says what model it is.")
    places = [(reader.string(), reader.place()) for _ in range(tensor_count)]
    alignment = fields.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"{str(path)!r} has general.alignment={alignment!r}, which must be a number of bytes.")
    start = -(-reader.at // alignment) * alignment
    tensors = {name: GgufTensor(shape, kind, start + offset) for name, (shape, kind, offset) in places}
    if len(tensors) < len(places):
        raise ValueError(f"{str(path)!r} has two tensors of one name.")
    return GgufHeader(path, fields, tensors)


class _Reader:
    """Reads on from the fourth byte of a file."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, len(MAGIC)

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        form = f"<{count}{code}"
        if struct.calcsize(form) > len(self.data) - self.at:
            raise struct.error(f"{count:,} numbers at byte {self.at:,} end beyond it")
        found = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return found

    def string(self) -> str:
        (length,) = self.numbers("Q", 1)
        begin, self.at = self.at, self.at + length
        if self.at > len(self.data):
            raise struct.error(f"a string of {length:,} bytes at byte {begin:,} ends beyond it")
        return self.data[begin : self.at].decode("utf-8")

    def value(self) -> Any:
        (kind,) = self.numbers("I", 1)
        if kind != ARRAY:
            return self._values(kind, 1)[0]
        kind, count = self.numbers("I", 1)[0], self.numbers("Q", 1)[0]
        return list(self._values(kind, count))

    def _values(self, kind: int, count: int) -> Any:
        if kind in NUMBERS:
            return self.numbers(NUMBERS[kind], count)
        if kind != STRING:
            raise struct.error(f"a value at byte {self.at:,} is of the unknown type {kind}")
        return [self.string() for _ in range(count)]

    def place(self) -> tuple[tuple[int, ...], int, int]:
        """Shape, kind, and offset from where the tensors begin."""
        (dimensions,) = self.numbers("I", 1)
        if dimensions > MOST_DIMENSIONS:
            raise struct.error(f"a tensor of {dimensions:,} dimensions at byte {self.at:,}")
        shape = self.numbers("Q", dimensions)
        kind, offset = self.numbers("I", 1)[0], self.numbers("Q", 1)[0]
        return tuple(reversed(shape)), kind, offset
