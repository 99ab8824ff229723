"""Tile sizes of the Triton scan: a table by N, and what `triton_tune` measured on this machine.

They depend on the length in no way that compiles a kernel anew: only the number of splits does.
"""

import functools
import json
import math
from pathlib import Path
from typing import Any

from hf_hybrid_ssm.ops.core.cache_folder import cache_folder

BLOCK = 64  # tokens between checkpoints, unless `triton_tune` measured that fewer are faster
BLOCKS = (64, 32, 16)  # fewer make the backward's scratch smaller, which may then stay in a card's cache
SCHEDULERS = 4  # of a multiprocessor, each of which issues from one warp at a time
WIDTH = 16  # channels that lie together in a checkpoint
NAMES = ("BD", "T", "S", "num_warps", "STAGES")
# by N up to: where compilers make the fewest instructions
FORWARD = {
    16: {"BD": 32, "T": 8, "S": 16, "num_warps": 1, "STAGES": 3},
    32: {"BD": 32, "T": 8, "S": 16, "num_warps": 2, "STAGES": 3},
    64: {"BD": 32, "T": 8, "S": 16, "num_warps": 4, "STAGES": 3},
    math.inf: {"BD": 16, "T": 4, "S": 16, "num_warps": 4, "STAGES": 2},
}
BACKWARD = {
    16: {"BD": 32, "T": 2, "S": 16, "num_warps": 1, "STAGES": 2},
    32: {"BD": 32, "T": 2, "S": 8, "num_warps": 4, "STAGES": 3},
    64: {"BD": 32, "T": 2, "S": 8, "num_warps": 8, "STAGES": 3},
    math.inf: {"BD": 16, "T": 2, "S": 8, "num_warps": 8, "STAGES": 2},
}
# of what goes in chunks, from so many states on: fewer instructions, by the same reports
CHUNKS_FROM = 32
CHUNKS = {
    32: {"BD": 64, "num_warps": 4, "STAGES": 2},
    64: {"BD": 64, "num_warps": 4, "STAGES": 2},
    math.inf: {"BD": 32, "num_warps": 8, "STAGES": 2},
}
MEASURING: dict[str, dict[str, int]] = {}  # what `triton_tune` is trying, by shape class


def tile_sizes(
    num_states: int, *, backward: bool, rows: int = 1, length: int = 1, dtype: str = "", device: str = ""
) -> dict[str, Any]:
    """Constants of the kernels for rows = B · D; measured ones if `device` was tuned for this class."""
    states = max(16 if backward else 2, _power_of_two(num_states))
    table = BACKWARD if backward else FORWARD
    constants = next(sizes for largest, sizes in table.items() if states <= largest)
    name = shape_class(rows, length, num_states, dtype, backward=backward)
    constants = constants | (MEASURING.get(name) or tuned(device).get(name, {}))
    lanes, block = min(constants["S"], states), block_tokens(num_states, dtype, device)
    return constants | {"S": lanes, "P": states // lanes, "BLOCK": block, "enable_fp_fusion": True}


def _power_of_two(number: int) -> int:
    """The least that is not below it; Triton's own would need Triton to read what is on record of the kernels."""
    return 1 << (number - 1).bit_length()


def block_tokens(num_states: int, dtype: str, device: str = "") -> int:
    """Tokens between checkpoints, the same forward and backward."""
    name = block_class(num_states, dtype)
    return (MEASURING.get(name) or tuned(device).get(name) or {"BLOCK": BLOCK})["BLOCK"]


def chunk_sizes(num_states: int, dtype: str, device: str = "") -> dict | None:
    """Constants of what goes in chunks, the backward and first passes over a row that is cut, or None where all goes
    token by token.

    That is so for few states, which take fewer instructions, and for float32, which would take three products each.
    """
    states = max(16, _power_of_two(num_states))
    largest = next(largest for largest in CHUNKS if states <= largest)
    if num_states < CHUNKS_FROM or dtype == "torch.float32":
        return None
    block = block_tokens(num_states, dtype, device)
    return {**CHUNKS[largest], "N": states, "BLOCK": block, "enable_fp_fusion": True}


def by_shared_memory(sizes: dict, chunks: dict | None, *, backward: bool) -> list[tuple[dict, dict | None]]:
    """Sizes of a direction beside those of its chunks or None, those that share the least memory last: programs of
    fewer channels, then token by token, then fewer tiles of tokens under way at a time.

    Forward only the first pass over a row that is cut goes in chunks, so its tiles are its own.
    """
    tried: list[tuple[dict, dict | None]] = []
    while chunks is not None and chunks["BD"] >= WIDTH:
        tried.append((sizes | ({"BD": chunks["BD"]} if backward else {}), chunks))
        chunks = chunks | {"BD": chunks["BD"] // 2}
    return tried + [(sizes | {"STAGES": stages}, None) for stages in range(sizes["STAGES"], 0, -1)]


def shape_class(rows: int, length: int, num_states: int, dtype: str, *, backward: bool) -> str:
    """The key of a measured entry: powers of two of B · D, L and N."""
    exponents = (max(1, size).bit_length() for size in (rows, length, max(1, num_states - 1)))
    return " ".join(["backward" if backward else "forward", *map(str, exponents), dtype])


def block_class(num_states: int, dtype: str) -> str:
    """The key of a measured block; not by the length, which is no number while a model is traced."""
    return f"block {max(1, num_states - 1).bit_length()} {dtype}"


def time_splits(lanes: int, length: int, multiprocessors: int, backward: bool = False) -> int:
    """In how many programs to cut a row, where a row's programs need `lanes` threads.

    A second pass over few states costs most of a first one forward, so there a row is cut only where less than half of
    the schedulers would have a warp. Backward it costs a quarter, and a row is cut where any would have none. Then it
    is cut so often that each has two, of which one runs while the other waits. A split has at least four blocks.
    """
    warps, schedulers = lanes / 32, multiprocessors * SCHEDULERS
    if warps >= (schedulers if backward else schedulers / 2):
        return 1
    return max(1, min(int(2 * schedulers / warps), length // (4 * BLOCK)))


def tuned_path(device: str) -> Path:
    """Where the measured sizes of a device are kept: in the folder of compiled kernels.

    Raises:
        OSError: there is no such folder, see `cache_folder`.
    """
    return cache_folder() / f"longhorn_scan_{'_'.join(device.split())}.json"


@functools.cache
def tuned(device: str) -> dict[str, dict[str, int]]:
    """Measured sizes by shape class, and blocks; none where nobody tuned, or the file is not of this form."""
    if not device:
        return {}
    try:
        entries = json.loads(tuned_path(device).read_text(encoding="utf-8"))["sizes"]
        return {name: {key: int(sizes[key]) for key in _names_in(name)} for name, sizes in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _names_in(name: str) -> tuple[str, ...]:
    return ("BLOCK",) if name.startswith("block ") else NAMES
